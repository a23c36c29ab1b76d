// Where the sums of a product of several rows go: scale, bias, residual, swiglu; two neighbouring
// outputs of a row at a time.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// out = sum + bias + residual
__device__ __forceinline__ void emit(const TiledPart& part, int row, int col, float2 sum) {
  if (col >= part.n_out) return;
  const size_t at = static_cast<size_t>(row) * part.stride + col;
  float2 y = {sum.x * part.scale, sum.y * part.scale};
  const bool both = col + 1 < part.n_out;
  if (both && part.stride % 2 == 0) {  // then rows begin on 8 bytes
    if (part.bias) y.x += part.bias[col], y.y += part.bias[col + 1];
    if (part.residual) {
      const float2 r = *reinterpret_cast<const float2*>(part.residual + at);
      y.x += r.x, y.y += r.y;
    }
    *reinterpret_cast<float2*>(part.out + at) = y;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < (both ? 2 : 1); ++i)
    part.out[at + i] = (i ? y.y : y.x) + (part.bias ? part.bias[col + i] : 0.0f) +
                       (part.residual ? part.residual[at + i] : 0.0f);
}

/// out = silu(gate) * up, in f32 or as fragments
__device__ __forceinline__ void emit_pair(const MatmulParams& p, int row, int col, float2 gate, float2 up) {
  const TiledPart &g = p.part[0], &u = p.part[1];
  if (col >= g.n_out) return;
  const bool both = col + 1 < g.n_out;
  const float gates[2] = {gate.x * g.scale, gate.y * g.scale}, ups[2] = {up.x * u.scale, up.y * u.scale};
  float y[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i && !both) break;
    y[i] = silu(gates[i] + (g.bias ? g.bias[col + i] : 0.0f)) * (ups[i] + (u.bias ? u.bias[col + i] : 0.0f));
  }
  if (p.out_f16) {  // col is even, so the two are one word
    static_cast<uint32_t*>(p.out_f16)[fragment_index(row, col, p.out_units) / 2] =
        activation_pair(y[0], y[1]);
    return;
  }
  const size_t at = static_cast<size_t>(row) * g.stride + col;
  g.out[at] = y[0];
  if (both) g.out[at + 1] = y[1];
}

}  // namespace reflex::cuda
