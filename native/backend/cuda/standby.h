// What a worker that waits for a model makes ready on its device meanwhile. Owns: which kernels those are,
// and the one device of the process that is ready. Refuses: to know of any model, and to do anything for a
// process that has one already.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "backend/cuda/device.h"

namespace reflex::cuda {

class Standby {
 public:
  /// The process's; it is never destroyed, because its threads may wait until the process ends.
  static Standby& of_process();

  /// Makes the device ready; returns early once somebody takes it. Throws what compile() would.
  void prepare(reflex_boot* boot, const ProgramOptions& options);
  /// The device that was made ready on this boot, waiting for it where it is under way; null: none was.
  std::shared_ptr<Device> take(reflex_boot* boot);

 private:
  std::mutex mutex_;  // held while device_ is made
  std::shared_ptr<Device> device_;
  std::atomic<int> takes_{0};
};

/// Kernels that plans of dense layers are made of, (image, name): the likeliest first.
std::vector<std::pair<const char*, std::string>> standby_kernels(bool exact);

}  // namespace reflex::cuda
