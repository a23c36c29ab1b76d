// The ends of a Gated DeltaNet layer that know its gate, silu or sigmoid of z: the gated norm after the
// recurrence, and a whole layer for one row in one launch. gated_delta.cu and gated_delta_sigmoid.cu have
// the kernels, one gate each, so that a plan loads what it runs.
#pragma once
#include "backend/cuda/gated_delta.cuh"

namespace reflex::cuda {

inline constexpr int kDeltaWarps = 8;                               // of a block, where a warp has a head
inline constexpr int kOneRows = kDeltaOneMaxDim / kDeltaOneGroups;  // of the state, per thread of delta_one

template <bool kSigmoid>
__device__ __forceinline__ float delta_gate(float z) {
  if constexpr (kSigmoid)
    return 1.0f / (1.0f + expf(-z));
  else
    return silu(z);
}

/// out = rms_norm(o) * gate(z): a warp per head of one output row. grid (ceil(H / 8), rows of z)
template <bool kSigmoid>
__device__ __forceinline__ void gated_outputs(const DeltaParams& p) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, h = blockIdx.x * kDeltaWarps + threadIdx.x / 32, m = p.value_dim;
  if (h >= p.n_value_heads) return;
  const int row = p.outputs ? p.outputs[blockIdx.y] : blockIdx.y;
  const float* o = p.v + (static_cast<size_t>(h) * p.capacity + place_of(p, row)) * p.value_pad;
  float squares = 0;
  for (int i = lane; i < m; i += 32) squares += o[i] * o[i];
  const float factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(m) + p.norm_eps);
  const size_t at = (static_cast<size_t>(blockIdx.y) * p.n_value_heads + h) * m;
  for (int i = lane; i < m; i += 32)
    p.out[at + i] = o[i] * factor * p.norm[i] * delta_gate<kSigmoid>(p.z[at + i]);
}

/// One row that goes on with the sequence, from the convolution to the gated norm: a block per value head,
/// kDeltaOneGroups warps for every 32 columns, N and M at most kDeltaOneMaxDim. The state is read before
/// the wait: only the kernels of the pass before have written it. grid (H)
template <bool kSigmoid>
__device__ __forceinline__ void one_row(const DeltaParams& p) {
  __shared__ float qk[2][kDeltaOneMaxDim], v[kDeltaOneMaxDim], partial[kDeltaOneGroups][kDeltaOneMaxDim];
  __shared__ float sums[4], factors[2];
  __shared__ float2 gates;
  __shared__ bool last;
  const int n = p.key_dim, m = p.value_dim, h = blockIdx.x, keys = p.n_key_heads, kh = key_head_of(p, h);
  const int blocks = (m + 31) / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / blocks, column = warp % blocks * 32 + lane;
  float* state = p.state + static_cast<size_t>(h) * n * m;
  float s[kOneRows];
#pragma unroll
  for (int u = 0; u < kOneRows; ++u) {
    const int i = group + u * kDeltaOneGroups;
    s[u] = i < n && column < m ? state[static_cast<size_t>(i) * m + column] : 0.0f;
  }
  wait_for_inputs();
  let_next_start();

  for (int c = threadIdx.x; c < 2 * n + m; c += blockDim.x) {
    const int part = c < n ? 0 : c < 2 * n ? 1 : 2, i = c - part * n;
    const int channel = part < 2 ? (part * keys + kh) * n + i : 2 * keys * n + h * m + i;
    (part < 2 ? qk[part] : v)[i] = convolved(p, 0, channel);
  }
  __syncthreads();
  if (warp < 2) {
    float squares = 0;
    for (int i = lane; i < n; i += 32) squares += qk[warp][i] * qk[warp][i];
    squares = warp_sum(squares);
    if (lane == 0)
      factors[warp] = (warp ? 1.0f : 1.0f / sqrtf(static_cast<float>(n))) / sqrtf(squares + p.qk_eps);
  }
  if (threadIdx.x == 64) gates = gates_of(p, 0, h);
  if (threadIdx.x == 96) {  // the last of the key head's readers moves its history
    const uint32_t readers = static_cast<uint32_t>(p.n_value_heads / keys);
    __threadfence();
    last = atomicAdd(p.tickets + kh, 1u) + 1 == readers;
    if (last) p.tickets[kh] = 0;
  }
  __syncthreads();
  const float decay = expf(gates.x), key_factor = factors[1], query_factor = factors[0];
  float read = 0;
#pragma unroll
  for (int u = 0; u < kOneRows; ++u) {
    const int i = group + u * kDeltaOneGroups;
    if (i < n) read += qk[1][i] * key_factor * s[u];
  }
  partial[group][column] = read;
  __syncthreads();
  read = 0;
#pragma unroll
  for (int g = 0; g < kDeltaOneGroups; ++g) read += partial[g][column];
  const float d = column < m ? gates.y * (v[column] - decay * read) : 0.0f;
  float o = 0;
#pragma unroll
  for (int u = 0; u < kOneRows; ++u) {
    const int i = group + u * kDeltaOneGroups;
    if (i >= n) continue;
    s[u] = decay * s[u] + qk[1][i] * key_factor * d;
    o += qk[0][i] * query_factor * s[u];
    if (column < m) state[static_cast<size_t>(i) * m + column] = s[u];
  }
  __syncthreads();  // every thread has read the partial sums
  partial[group][column] = o;
  for (int i = threadIdx.x; i < m; i += blockDim.x) move_history(p, 2 * keys * n + h * m + i);
  if (last)
    for (int i = threadIdx.x; i < 2 * n; i += blockDim.x)
      move_history(p, (i < n ? kh * n : (keys + kh) * n - n) + i);
  __syncthreads();
  if (!p.z) return;
  o = 0;
  if (group == 0) {
#pragma unroll
    for (int g = 0; g < kDeltaOneGroups; ++g) o += partial[g][column];
    const float squares = warp_sum(column < m ? o * o : 0.0f);
    if (lane == 0) sums[warp] = squares;
  }
  __syncthreads();
  if (group != 0 || column >= m) return;
  float squares = 0;
  for (int b = 0; b < blocks; ++b) squares += sums[b];
  const float factor = 1.0f / sqrtf(squares / static_cast<float>(m) + p.norm_eps);
  const size_t at = static_cast<size_t>(h) * m + column;
  p.out[at] = o * factor * p.norm[column] * delta_gate<kSigmoid>(p.z[at]);
}

}  // namespace reflex::cuda
