#include "backend/cuda/driver.h"

#include <dlfcn.h>

#include <cstring>

namespace reflex::cuda {

#define REFLEX_TEXT_(x) #x
#define REFLEX_TEXT(x) REFLEX_TEXT_(x)

void Driver::load(void* library) {
  const auto get = [library](const char* symbol, auto& slot) {
    void* p = dlsym(library, symbol);
    if (!p) fail(ErrorKind::cuda, "libcuda.so.1 is too old for this build: it lacks %s", symbol);
    std::memcpy(&slot, &p, sizeof p);
  };
// dlsym needs the versioned spelling, the member is named as the header has it after expansion.
#define REFLEX_CALL(name) get(REFLEX_TEXT(name), this->name);
  REFLEX_DRIVER_CALLS(REFLEX_CALL)
#undef REFLEX_CALL
}

void Driver::raise(CUresult result, const char* doing) const {
  const char *name = "CUDA error", *text = "";
  if (cuGetErrorName) cuGetErrorName(result, &name);
  if (cuGetErrorString) cuGetErrorString(result, &text);
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      fail(ErrorKind::out_of_memory, "%s: the GPU is out of memory", doing);
    // After these every call on the context fails: only a new process helps.
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_DEINITIALIZED:
      fail(ErrorKind::fatal, "%s: the GPU is lost to this process (%s: %s)", doing, name, text);
    default:
      fail(ErrorKind::cuda, "%s: %s (%s)", doing, name, text);
  }
}

}  // namespace reflex::cuda
