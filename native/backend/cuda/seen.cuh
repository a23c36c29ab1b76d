// How much of a sequence a row sees, for kernels whose work it bounds.
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

}  // namespace reflex::cuda
