// Products of f32 values on tensor cores: m16n8k8 with operands as TF32 (10 bits of mantissa), or with each
// as the sum of two, which leaves an error of about 2^-21. Owns the fragments' layout:
//   a: (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4);  b: (t, g) (t + 4, g);
//   acc: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1), lane = 4 g + t.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

/// acc (16, 8) += A (16, 8) B (8, 8). kTerms 1: operands rounded to TF32; 3: split in two, all but the
/// product of the small parts summed, and added to acc by an addition of their own: tensor cores drop what
/// does not fit a sum's 24 bits, always towards zero, which over heads of 512 values was 1.7e-5 of a score.
/// Cards before 8.0 multiply in f32.
template <int kTerms>
__device__ __forceinline__ void mma_f32(float (&acc)[4], const float (&a)[4], const float (&b)[2]) {
  static_assert(kTerms == 1 || kTerms == 3);
  if constexpr (kArch >= 800) {
    uint32_t a_high[4], b_high[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a_high[i] = tf32_of(a[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) b_high[i] = tf32_of(b[i]);
    if constexpr (kTerms == 3) {
      uint32_t a_low[4], b_low[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) a_low[i] = tf32_of(a[i] - __uint_as_float(a_high[i]));
#pragma unroll
      for (int i = 0; i < 2; ++i) b_low[i] = tf32_of(b[i] - __uint_as_float(b_high[i]));
      float sum[4] = {};
      mma_tf32(sum, a_low, b_high);
      mma_tf32(sum, a_high, b_low);
      mma_tf32(sum, a_high, b_high);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] += sum[i];
    } else {
      mma_tf32(acc, a_high, b_high);
    }
  } else {
    const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll
    for (int high = 0; high < 2; ++high)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float x0 = __shfl_sync(kFull, a[2 * high], row + t);
        const float x1 = __shfl_sync(kFull, a[2 * high + 1], row + t);
        const float y0 = __shfl_sync(kFull, b[high], column + t);
        const float y1 = __shfl_sync(kFull, b[high], column + 4 + t);
        acc[0] += x0 * y0;
        acc[1] += x0 * y1;
        acc[2] += x1 * y0;
        acc[3] += x1 * y1;
      }
  }
}

/// A fragment of a row-major matrix at `m`: rows g and g + 8, columns t and t + 4.
__device__ __forceinline__ void load_a(float (&a)[4], const float* m, int stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* at = m + g * stride + t;
  a[0] = at[0];
  a[1] = at[8 * stride];
  a[2] = at[4];
  a[3] = at[8 * stride + 4];
}
/// The same of the transpose: m (8, 16) row-major.
__device__ __forceinline__ void load_a_transposed(float (&a)[4], const float* m, int stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* at = m + t * stride + g;
  a[0] = at[0];
  a[1] = at[8];
  a[2] = at[4 * stride];
  a[3] = at[4 * stride + 8];
}
/// B fragment of m (8, 8) row-major by k.
__device__ __forceinline__ void load_b(float (&b)[2], const float* m, int stride) {
  const float* at = m + threadIdx.x % 4 * stride + threadIdx.x % 32 / 4;
  b[0] = at[0];
  b[1] = at[4 * stride];
}
/// B fragment of the transpose: m (8, 8) row-major by n.
__device__ __forceinline__ void load_b_transposed(float (&b)[2], const float* m, int stride) {
  const float* at = m + threadIdx.x % 32 / 4 * stride + threadIdx.x % 4;
  b[0] = at[0];
  b[1] = at[4];
}
/// Row and column of acc[c].
__device__ __forceinline__ int acc_row(int c) { return threadIdx.x % 32 / 4 + (c >= 2 ? 8 : 0); }
__device__ __forceinline__ int acc_column(int c) { return 2 * (threadIdx.x % 4) + c % 2; }

}  // namespace reflex::cuda
