// What all kernels share: the instructions (instructions.cuh), reductions in a fixed order, activations
// as f16, and which rows see which slots.
#pragma once
#include "backend/cuda/instructions.cuh"
#include "backend/cuda/params.h"
#include "backend/cuda/tile.h"

namespace reflex::cuda {

inline constexpr unsigned kFull = 0xFFFFFFFFu;

template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) v += __shfl_xor_sync(kFull, v, m);
  return v;
}

/// Sum over the block, the same in every thread; scratch (32) is free again after the next barrier.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float all = 0;
  for (int i = 0; i < warps; ++i) all += scratch[i];
  return all;
}

/// The larger; on a tie the lower id; NaN never wins.
__device__ __forceinline__ Best better(Best a, Best b) {
  if (b.id < 0) return a;
  if (a.id < 0 || b.value > a.value || (b.value == a.value && b.id < a.id)) return b;
  return a;
}

__device__ __forceinline__ Best consider(Best best, float value, int id) {
  return value > -INFINITY ? better(best, {value, id}) : best;
}

__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2)
    b = better(b, {__shfl_xor_sync(kFull, b.value, m), __shfl_xor_sync(kFull, b.id, m)});
  return b;
}

/// The block's best, in thread 0 alone.
__device__ __forceinline__ Best block_best(Best b, Best* scratch) {
  b = warp_best(b);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = b;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) b = better(b, scratch[i]);
  return b;
}

/// x as f16 activation: scaled, and kept finite where x is.
__device__ __forceinline__ h2 activation_pair(float a, float b) {
  constexpr float kMax = 65504.0f;
  // fmin/fmax would turn a NaN into a number; a comparison lets it through.
  a *= kXScale;
  b *= kXScale;
  a = a > kMax ? kMax : a < -kMax ? -kMax : a;
  b = b > kMax ? kMax : b < -kMax ? -kMax : b;
  return h2_of(a, b);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

/// Whether the row of this pass sees a slot.
__device__ __forceinline__ bool row_sees(const PassArrays& p, int mask_base, int mask_words, int row,
                                         int slot, int prefix) {
  if (slot < prefix) return true;
  if (!mask_words || slot < mask_base) return false;
  const int b = slot - mask_base;
  return b < mask_words * 32 && (p.mask[static_cast<size_t>(row) * mask_words + b / 32] >> (b % 32) & 1);
}

/// f(tile type's Tile<>) for a type known at run time.
template <class F>
__device__ __forceinline__ void with_tile(int32_t type, F&& f) {
  switch (static_cast<GgmlType>(type)) {
#define REFLEX_CASE(name)      \
  case GgmlType::name:         \
    f(Tile<GgmlType::name>{}); \
    break;
    REFLEX_TILED(REFLEX_CASE)
#undef REFLEX_CASE
    default:
      break;
  }
}

}  // namespace reflex::cuda
