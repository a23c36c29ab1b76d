// How the emulator runs: from the environment, read once (tests of the emulator set it themselves).
//   REFLEX_EMULATOR_REVERSE=1  blocks, warps and lanes backwards: what depends on their order is a race
//   REFLEX_EMULATOR_EARLY=1    copies and streams at once, instead of as late as a wait allows
//   REFLEX_EMULATOR_TRACE=1    each launch to stderr
//   REFLEX_EMULATOR_SMS=n      multiprocessors (default 8): few, so that small tests fill them
//   REFLEX_EMULATOR_MEMORY=n   MiB of the card (default 8192); 0: not even a context fits
//   REFLEX_EMULATOR_CAPABILITY=n  the compute capability that the card says it has (times 10); below its
//                              kernels' own, no image has machine code for it
//   REFLEX_EMULATOR_OLD_DRIVER=1  the driver refuses images, as one older than their compiler does
#pragma once
#include <cstddef>

namespace emulator {

struct Settings {
  bool reverse, early, trace, old_driver;
  int multiprocessors;
  size_t memory_bytes;
  int capability;  ///< 0: that of the kernels
};
Settings& settings();

}  // namespace emulator
