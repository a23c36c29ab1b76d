// The device of the CUDA cases. Without one each says so and checks nothing: tests/gpu/check.sh has a card,
// `make test` an emulated one.
#pragma once
#include <cstdio>
#include <memory>

#include "backend/backend.h"

namespace cuda_test {

/// Whether there is a device; says on stderr that `name` is skipped where there is none.
inline bool have_gpu(const char* name) {
  static const int count = reflex::cuda_device_count();
  if (count == 0) std::fprintf(stderr, "%s: skipped, there is no CUDA device\n", name);
  return count > 0;
}

/// The first device's backend; one for all cases.
inline reflex::Backend& gpu() {
  static const std::unique_ptr<reflex::Backend> backend = reflex::make_cuda_backend(0);
  return *backend;
}

}  // namespace cuda_test

/// First in a case that needs a device.
#define NEED_GPU() \
  if (!cuda_test::have_gpu(__func__)) return
