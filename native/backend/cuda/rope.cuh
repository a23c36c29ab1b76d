// One head of one row: norm, rotation, and its way out. Shared by `heads` and attention_one.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// The warp leaves norm(x), rotated as the row's table says (n_rot / 2 pairs, or null), in head
/// (head_dim), shared memory of its own.
__device__ __forceinline__ void prepare_head(const HeadItem& item, const float* x, const float2* rotation,
                                             float* head) {
  const int lane = threadIdx.x % 32, hd = item.head_dim, half = item.n_rot / 2;
  float squares = 0;
#pragma unroll 4
  for (int i = lane; i < hd; i += 32) {
    head[i] = x[i];
    squares += x[i] * x[i];
  }
  __syncwarp();
  if (item.norm_weight) {
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(hd) + item.eps);
#pragma unroll 4
    for (int i = lane; i < hd; i += 32) head[i] = head[i] * factor * item.norm_weight[i];
    __syncwarp();
  }
  if (!rotation) return;
#pragma unroll 2
  for (int i = lane; i < half; i += 32) {
    const float2 r = rotation[i];
    const int a = item.adjacent ? 2 * i : i, b = item.adjacent ? 2 * i + 1 : i + half;
    const float x0 = head[a], x1 = head[b];
    head[a] = x0 * r.x - x1 * r.y;
    head[b] = x1 * r.x + x0 * r.y;
  }
  __syncwarp();
}

/// The row's part of an item's rotation table.
__device__ __forceinline__ const float2* rotation_of(const HeadItem& item, int pass_row) {
  if (!item.rotation) return nullptr;
  return reinterpret_cast<const float2*>(item.rotation) + static_cast<size_t>(pass_row) * (item.n_rot / 2);
}

__device__ __forceinline__ void store_state(const HeadItem& item, int slot, int h, const float* head) {
  const size_t at = (static_cast<size_t>(slot) * item.n_heads + h) * item.head_dim;
  for (int i = threadIdx.x % 32; i < item.head_dim; i += 32) {
    if (item.state_f32)
      static_cast<float*>(item.state)[at + i] = head[i];
    else
      static_cast<__half*>(item.state)[at + i] = __float2half_rn(head[i]);
  }
}

}  // namespace reflex::cuda
