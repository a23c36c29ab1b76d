// Where the sums of a matrix product go: scale, bias, residual, swiglu. Shared by both kernels.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// Two neighbouring outputs of one row.
__device__ __forceinline__ void emit(const MatmulParams& p, const TiledPart& part, int row, int col, float s0,
                                     float s1, float up0, float up1) {
  if (row >= p.n_rows) return;
  float y[2] = {s0 * part.scale, s1 * part.scale};
  const float up[2] = {up0, up1};
  for (int i = 0; i < 2; ++i) {
    const int c = col + i;
    if (c >= part.n_out) continue;
    if (part.bias) y[i] += part.bias[c];
    const size_t at = static_cast<size_t>(row) * part.stride + c;
    if (p.epilogue == Epilogue::swiglu) {
      const TiledPart& second = p.part[1];
      y[i] = silu(y[i]) * (up[i] * second.scale + (second.bias ? second.bias[c] : 0.0f));
      if (!p.out_f16) part.out[at] = y[i];
    } else {
      part.out[at] = part.residual ? y[i] + part.residual[at] : y[i];
    }
  }
  if (p.epilogue == Epilogue::swiglu && p.out_f16 && col < part.n_out) {
    auto* out = static_cast<uint32_t*>(p.out_f16);  // col is even, so the pair is one word
    out[fragment_index(row, col, p.out_units) / 2] =
        activation_pair(y[0], col + 1 < part.n_out ? y[1] : 0.0f);
  }
}

}  // namespace reflex::cuda
