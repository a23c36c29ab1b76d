// RMS norm, and the way from f32 rows to f16 fragments that the matrix kernels read.
//   y = x * rsqrt(mean(x^2) + eps) * w
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

/// rsqrt(mean of squares + eps) of n values, n a multiple of 4 where x is 16-byte aligned rows.
__device__ __forceinline__ float norm_factor(const float* x, int n, float eps, float* scratch) {
  float squares = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) squares += x[i] * x[i];
  return rsqrtf(block_sum(squares, scratch) / static_cast<float>(n) + eps);
}

}  // namespace

/// One row a block: x (rows, width) -> fragments of n_units units, zero beyond width.
extern "C" __global__ void __launch_bounds__(256)
    rows_to_fragments(const __grid_constant__ FragmentParams p) {
  __shared__ float scratch[32];
  let_next_start();
  wait_for_inputs();
  const int row = blockIdx.x;
  const float* x = p.x + static_cast<size_t>(row) * p.width;
  const float factor = p.norm_weight ? norm_factor(x, p.width, p.eps, scratch) : 1.0f;
  auto* out = static_cast<uint32_t*>(p.out);
  for (int c = 2 * threadIdx.x; c < p.n_units * kUnit; c += 2 * blockDim.x) {
    float v[2] = {0, 0};
    for (int i = 0; i < 2; ++i)
      if (c + i < p.width) v[i] = p.norm_weight ? x[c + i] * factor * p.norm_weight[c + i] : x[c + i];
    out[fragment_index(row, c, p.n_units) / 2] = activation_pair(v[0], v[1]);
  }
}

/// One group a block.
extern "C" __global__ void __launch_bounds__(256) rms_norm(const __grid_constant__ NormParams p) {
  __shared__ float scratch[32];
  let_next_start();
  wait_for_inputs();
  const float* x = p.x + static_cast<size_t>(blockIdx.x) * p.group;
  float* out = p.out + static_cast<size_t>(blockIdx.x) * p.group;
  const float factor = norm_factor(x, p.group, p.eps, scratch);
  for (int i = threadIdx.x; i < p.group; i += blockDim.x) out[i] = x[i] * factor * p.weight[i];
}

extern "C" __global__ void __launch_bounds__(256) add(const __grid_constant__ PairParams p) {
  let_next_start();
  wait_for_inputs();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.n) p.out[i] = p.a[i] + p.b[i];
}

/// out = silu(a) * b
extern "C" __global__ void __launch_bounds__(256) swiglu(const __grid_constant__ PairParams p) {
  let_next_start();
  wait_for_inputs();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.n) p.out[i] = silu(p.a[i]) * p.b[i];
}

}  // namespace reflex::cuda
