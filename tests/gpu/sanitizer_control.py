"""A fault for each of compute-sanitizer's tools, so that a clean run means something: a write beyond
an allocation (memcheck), a read of memory that nobody has written (initcheck), two warps that write one word
of shared memory (racecheck). None of them shows without a sanitizer.

usage: compute-sanitizer --tool TOOL --error-exitcode 9 python3 sanitizer_control.py TOOL    must end with 9
"""

from __future__ import annotations

import ctypes
import os
import sys

KERNELS = b"""
.version 7.0
.target sm_75
.address_size 64
.shared .align 4 .b32 cell;

.visible .entry memcheck(.param .u64 at) {
  .reg .b64 %a;
  .reg .b32 %v;
  ld.param.u64 %a, [at];
  cvta.to.global.u64 %a, %a;
  mov.u32 %v, 1;
  st.global.u32 [%a+8], %v;
  ret;
}

.visible .entry initcheck(.param .u64 at) {
  .reg .b64 %a;
  .reg .b32 %v;
  ld.param.u64 %a, [at];
  cvta.to.global.u64 %a, %a;
  ld.global.u32 %v, [%a];
  st.global.u32 [%a+4], %v;
  ret;
}

.visible .entry racecheck(.param .u64 at) {
  .reg .b64 %a, %c;
  .reg .b32 %v;
  ld.param.u64 %a, [at];
  cvta.to.global.u64 %a, %a;
  mov.u64 %c, cell;
  mov.u32 %v, %tid.x;
  st.shared.u32 [%c], %v;
  ld.shared.u32 %v, [%c];
  st.global.u32 [%a], %v;
  ret;
}
"""
BYTES = 8  # what the kernels are given
THREADS = {"memcheck": 1, "initcheck": 1, "racecheck": 64}


def main() -> int:
    tool = sys.argv[1]
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        if failed := getattr(cuda, name)(*args):
            raise RuntimeError(f"{name}: CUDA error {failed}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), KERNELS)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, tool.encode())
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(BYTES))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    call("cuLaunchKernel", kernel, 1, 1, 1, THREADS[tool], 1, 1, 0, None, arguments, None)
    ended = cuda.cuCtxSynchronize()
    print(f"{tool}: a fault was made, the driver says {ended}", flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main())
