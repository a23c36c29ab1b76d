// What Gated DeltaNet's kernels share: heads, places, the convolution's input, the gates.
#pragma once
#include "backend/cuda/delta_params.h"
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

__device__ __forceinline__ int key_head_of(const DeltaParams& p, int h) {
  return p.grouped ? h / (p.n_value_heads / p.n_key_heads) : h % p.n_key_heads;
}
__device__ __forceinline__ int n_channels(const DeltaParams& p) {
  return 2 * p.n_key_heads * p.key_dim + p.n_value_heads * p.value_dim;
}
__device__ __forceinline__ int place_of(const DeltaParams& p, int row) {
  return row < p.n_chain ? row : p.fork_base + row - p.n_chain;
}
/// The row at a place, -1: none.
__device__ __forceinline__ int row_at(const DeltaParams& p, int place) {
  if (place < p.n_chain) return place;
  return place < p.fork_base ? -1 : p.n_chain + place - p.fork_base;
}
/// What the convolution reads of a channel at a row of the pass, or (below 0) before it.
__device__ __forceinline__ float input_at(const DeltaParams& p, int source, int channel) {
  const int n = n_channels(p);
  return source >= 0 ? p.qkv[static_cast<size_t>(source) * n + channel]
                     : p.history[static_cast<size_t>(p.n_taps - 1 + source) * n + channel];
}
/// silu of the convolution of one channel at one row: taps along the row's ancestors.
__device__ __forceinline__ float convolved(const DeltaParams& p, int row, int channel) {
  const float* taps = p.conv + static_cast<size_t>(channel) * p.n_taps;
  float sum = 0;
  for (int back = 0, source = row; back < p.n_taps; ++back) {
    sum += taps[p.n_taps - 1 - back] * input_at(p, source, channel);
    source = source >= 0 ? p.parents[source] : source - 1;
  }
  return silu(sum);
}
/// Log of the decay, and the write strength.
__device__ __forceinline__ float2 gates_of(const DeltaParams& p, int row, int h) {
  const size_t at = static_cast<size_t>(row) * p.n_value_heads + h;
  const float x = p.alpha[at] + p.dt_bias[h];
  const float softplus = x > 20.0f ? x : log1pf(expf(x));  // as torch: linear above 20
  return {p.decay[h] * softplus, 1.0f / (1.0f + expf(-p.beta[at]))};
}
/// The history's channel after the chain's rows: what its last row would look back on.
__device__ __forceinline__ void move_history(const DeltaParams& p, int channel) {
  const int n = n_channels(p);
  for (int i = 0; i < p.n_taps - 1; ++i)
    p.history[static_cast<size_t>(i) * n + channel] = input_at(p, p.n_chain - (p.n_taps - 1) + i, channel);
}

}  // namespace reflex::cuda
