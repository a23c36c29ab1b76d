// The driver's calls, looked up at run time in the library that boot opened: the core links against
// no CUDA library and runs where there is none. Owns: the function table and the one place where a
// CUresult becomes an Error.
#pragma once
#include <cuda.h>

#include "base/error.h"

namespace reflex::cuda {

// The names are macros in cuda.h (cuMemAlloc is cuMemAlloc_v2 ...), so both the type and the symbol
// follow the header's version.
// clang-format off
#define REFLEX_DRIVER_CALLS(M)                                                                              \
  M(cuGetErrorName)                                                                                         \
  M(cuGetErrorString)                                                                                       \
  M(cuDeviceGet)                                                                                            \
  M(cuDeviceGetName)                                                                                        \
  M(cuDeviceGetAttribute)                                                                                   \
  M(cuDeviceTotalMem)                                                                                       \
  M(cuDevicePrimaryCtxRetain)                                                                               \
  M(cuCtxSetCurrent) M(cuCtxGetCurrent) M(cuCtxSynchronize) M(cuMemAlloc) M(cuMemFree) M(cuMemGetInfo)      \
      M(cuMemHostRegister) M(cuMemHostUnregister) M(cuMemHostAlloc) M(cuMemFreeHost) M(cuMemcpyHtoDAsync)   \
          M(cuMemcpyDtoHAsync) M(cuMemcpyDtoDAsync) M(cuMemcpy2DAsync) M(cuMemsetD8Async) M(cuStreamCreate) \
              M(cuStreamDestroy) M(cuStreamSynchronize) M(cuStreamQuery) M(cuStreamWaitEvent)               \
                  M(cuStreamBeginCapture) M(cuStreamEndCapture) M(cuEventCreate) M(cuEventDestroy)          \
                      M(cuEventRecord) M(cuEventSynchronize) M(cuEventQuery) M(cuModuleLoadData)            \
                          M(cuModuleUnload) M(cuModuleGetFunction) M(cuFuncSetAttribute)                    \
                              M(cuFuncGetAttribute) M(cuLaunchKernelEx) M(cuGraphInstantiateWithFlags)      \
                                  M(cuGraphLaunch) M(cuGraphDestroy) M(cuGraphExecDestroy)
// clang-format on

struct Driver {
#define REFLEX_CALL(name) decltype(&::name) name = nullptr;
  REFLEX_DRIVER_CALLS(REFLEX_CALL)
#undef REFLEX_CALL

  /// Fills the table. Error(cuda) names a call that the library lacks.
  void load(void* library);

  /// Throws what `result` means: out_of_memory, fatal where the context is lost, else cuda.
  void check(CUresult result, const char* doing) const {
    if (result != CUDA_SUCCESS) [[unlikely]]
      raise(result, doing);
  }
  [[noreturn]] void raise(CUresult result, const char* doing) const;
};

}  // namespace reflex::cuda
