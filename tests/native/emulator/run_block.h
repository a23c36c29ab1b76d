// One block at a time of a launch, on fibers.
#pragma once
#include <cstdint>
#include <string>

#include "emulator/block.h"

namespace emulator {

struct LaunchShape {
  Dim grid;
  uint32_t threads = 0, shared = 0;  ///< dynamic shared memory, bytes
  bool overlaps = false;             ///< may start before the kernel ahead of it has ended
};

/// All blocks of the launch; what was wrong, or empty. `address` is set where it was a memory access.
std::string run_launch(const Kernel& kernel, const LaunchShape& shape, const void* params, bool& address);

/// The kernel of that name, or null.
const Kernel* find_kernel(const std::string& name);

}  // namespace emulator
