// SwiGLU with limits (DeepSeek-V4).
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// silu(min(gate, limit)) * max(-limit, min(up, limit)); what is not a number stays so.
__device__ __forceinline__ float clamped_silu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return silu(gate) * up;
}

}  // namespace reflex::cuda
