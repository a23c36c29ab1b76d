// How much of a sequence a row sees, for kernels whose work it bounds, and which slots these are; and a
// state's values one by one.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// Slots that a row of the pass sees, itself included; called by whole warps, the same in every lane.
__device__ __forceinline__ int seen_by(const PassArrays& p, int mask_words, int row) {
  int extra = 0;
  for (int i = threadIdx.x % 32; i < mask_words; i += 32)
    extra += __popc(p.mask[static_cast<size_t>(row) * mask_words + i]);
#pragma unroll
  for (int m = 16; m > 0; m /= 2) extra += __shfl_xor_sync(kFull, extra, m);
  return p.prefix[row] + extra;
}

/// A row's slots in ascending order: a prefix, then the bits of its mask. For any thread by itself.
struct Seen {
  int n, prefix, base, words;
  const uint32_t* mask;  ///< of the row, from slot `base` on; none of its bits lie in the prefix

  __device__ __forceinline__ Seen(const PassArrays& p, const PassHeader& h, int row)
      : prefix(p.prefix[row]),
        base(h.mask_base),
        words(h.mask_words),
        mask(p.mask + static_cast<size_t>(row) * h.mask_words) {
    n = prefix;
    for (int w = 0; w < words; ++w) n += __popc(mask[w]);
  }
  /// The j-th slot, j < n.
  __device__ __forceinline__ int slot(int j) const {
    if (j < prefix) return j;
    int k = j - prefix;
    for (int w = 0; w < words; ++w) {
      uint32_t bits = mask[w];
      const int here = __popc(bits);
      if (k >= here) {
        k -= here;
        continue;
      }
      for (; k > 0; --k) bits &= bits - 1;
      return base + 32 * w + __ffs(static_cast<int>(bits)) - 1;
    }
    return -1;
  }
};

__device__ __forceinline__ float load_state(const void* state, bool f32, size_t at) {
  return f32 ? static_cast<const float*>(state)[at] : __half2float(static_cast<const __half*>(state)[at]);
}
__device__ __forceinline__ void store_state(void* state, bool f32, size_t at, float x) {
  if (f32)
    static_cast<float*>(state)[at] = x;
  else
    static_cast<__half*>(state)[at] = __float2half_rn(x);
}

}  // namespace reflex::cuda
