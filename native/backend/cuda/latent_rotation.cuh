// The rotated part of a latent attention's query or key, value by value.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// Element i of the P values at x, turned by a row of the pass; rotation (R, P / 2, 2).
__device__ __forceinline__ float rotated(const float* rotation, int rope_dim, bool adjacent, const float* x,
                                         int pass_row, int i) {
  const int half = rope_dim / 2, pair = adjacent ? i / 2 : i % half;
  const bool second = adjacent ? i % 2 : i >= half;
  const float* r = rotation + (static_cast<size_t>(pass_row) * half + pair) * 2;
  const float a = x[adjacent ? 2 * pair : pair], b = x[adjacent ? 2 * pair + 1 : pair + half];
  return second ? b * r[0] + a * r[1] : a * r[0] - b * r[1];
}

}  // namespace reflex::cuda
