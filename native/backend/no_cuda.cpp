// Stands in for backend/cuda where the core is built without CUDA, so that callers need no #ifdef.
#include "backend/backend.h"

namespace reflex {

bool cuda_built() { return false; }
CudaImages cuda_images() { return {}; }
int cuda_device_count() { return 0; }
void stand_by_cuda(int, const ProgramOptions&) {}

std::unique_ptr<Backend> make_cuda_backend(int) {
  fail(ErrorKind::cuda, "this build has no CUDA kernels: it was built without nvcc (REFLEX_CUDA)");
}

}  // namespace reflex
