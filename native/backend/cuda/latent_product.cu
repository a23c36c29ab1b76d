// Latent attention's products with a matrix per head, in the file's layout and any type: queries into the
// latent space, results out of it.
#include "backend/cuda/latent_params.h"
#include "backend/cuda/raw_group.cuh"
#include "backend/cuda/split_mma.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = kLatentProductTile, kStride = kLatentProductStride;
static_assert(kTile == 64);

__device__ __forceinline__ const uint8_t* row_of(const LatentProductParams& p, int h, int j) {
  return p.w + (static_cast<size_t>(h) * p.head_rows + p.first + j) * p.row_bytes;
}

/// w (kTile, kStride) = outputs out0 .., inputs in0 .. of W[h]; zero beyond its sizes. Half of the threads.
__device__ __forceinline__ void decode(const LatentProductParams& p, int h, int out0, int in0, float* w) {
  const int j = threadIdx.x % kTile, group = threadIdx.x / kTile;
  const int row0 = p.transposed ? in0 : out0, column0 = p.transposed ? out0 : in0;
  const int n_rows = p.transposed ? p.n_in : p.n_out, n_columns = p.transposed ? p.n_out : p.n_in;
  float y[32] = {};
  if (row0 + j < n_rows && column0 + 32 * group < n_columns)
    read_group(p.type, row_of(p, h, row0 + j), column0 / 32 + group, n_columns, y);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = 32 * group + i;
    w[p.transposed ? column * kStride + j : j * kStride + column] = y[i];
  }
}

/// grid (ceil(n_out / kTile), ceil(rows / kTile), H)
template <int kTerms>
__device__ __forceinline__ void product(const LatentProductParams& p) {
  __shared__ float w[kTile * kStride], x[kTile * kStride];
  wait_for_inputs();
  let_next_start();
  const int h = blockIdx.z, out0 = blockIdx.x * kTile, first = blockIdx.y * kTile;
  const int warp = threadIdx.x / 32, row0 = warp % 4 * 16, column0 = warp / 4 * 32;
  float acc[4][4] = {};
  for (int in0 = 0; in0 < p.n_in; in0 += kTile) {
    __syncthreads();
    if (threadIdx.x < kThreads / 2) {
      decode(p, h, out0, in0, w);
    } else {
      for (int i = threadIdx.x - kThreads / 2; i < kTile * kTile; i += kThreads / 2) {
        const int r = i / kTile, k = i % kTile;
        x[r * kStride + k] = first + r < p.n_rows && in0 + k < p.n_in
                                 ? p.x[(first + r) * p.x_row + static_cast<int64_t>(h) * p.x_head + in0 + k]
                                 : 0.0f;
      }
    }
    __syncthreads();
    const int end = min(kTile, (p.n_in - in0 + 7) / 8 * 8);
    for (int i = 0; i < end; i += 8) {
      float a[4], b[2];
      load_a(a, x + row0 * kStride + i, kStride);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        load_b_transposed(b, w + (column0 + 8 * j) * kStride + i, kStride);
        mma_f32<kTerms>(acc[j], a, b);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int r = first + row0 + acc_row(c), out = out0 + column0 + 8 * j + acc_column(c);
      if (r < p.n_rows && out < p.n_out)
        p.y[r * p.y_row + static_cast<int64_t>(h) * p.y_head + out] = acc[j][c];
    }
}

}  // namespace

REFLEX_KERNEL(latent_product_1, LatentProductParams, kThreads) { product<1>(p); }
REFLEX_KERNEL(latent_product_3, LatentProductParams, kThreads) { product<3>(p); }

/// A few rows, W not transposed: p.lanes lanes of a warp (a power of two) make one output of each row.
/// grid (ceil(H n_out lanes / 256), ceil(rows / kLatentRows))
REFLEX_KERNEL(latent_rows, LatentProductParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / p.lanes;
  const int lane = threadIdx.x % p.lanes, first = blockIdx.y * kLatentRows;
  const bool there = at < static_cast<int64_t>(p.n_heads) * p.n_out;
  const int h = there ? static_cast<int>(at / p.n_out) : 0, out = there ? static_cast<int>(at % p.n_out) : 0;
  float sum[kLatentRows] = {};
  for (int group = lane; there && 32 * group < p.n_in; group += p.lanes) {
    float y[32];
    read_group(p.type, row_of(p, h, out), group, p.n_in, y);
    const int n = min(32, p.n_in - 32 * group);
#pragma unroll
    for (int r = 0; r < kLatentRows; ++r) {
      if (first + r >= p.n_rows) break;
      const float* x = p.x + (first + r) * p.x_row + static_cast<int64_t>(h) * p.x_head + 32 * group;
      float part = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (i < n) part += y[i] * x[i];
      sum[r] += part;
    }
  }
#pragma unroll
  for (int r = 0; r < kLatentRows; ++r) {
    float all = sum[r];
    for (int m = p.lanes / 2; m > 0; m /= 2) all += __shfl_xor_sync(kFull, all, m);
    if (there && lane == 0 && first + r < p.n_rows)
      p.y[(first + r) * p.y_row + static_cast<int64_t>(h) * p.y_head + out] = all;
  }
}

}  // namespace reflex::cuda
