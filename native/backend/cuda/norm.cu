// RMS norm, and the way from f32 rows to f16 fragments that the matrix kernels read.
//   y = x * rsqrt(mean(x^2) + eps) * w
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

constexpr int kRowThreads = 512;

/// rsqrt(mean of squares + eps) of n values, n a multiple of 4 where x is 16-byte aligned rows.
__device__ __forceinline__ float norm_factor(const float* x, int n, float eps, float* scratch) {
  float squares = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) squares += x[i] * x[i];
  return rsqrtf(block_sum(squares, scratch) / static_cast<float>(n) + eps);
}

}  // namespace

/// One row a block: x (rows, width) -> fragments of n_units units, zero beyond width. Four values at a
/// time, which is what a lane has of an mma step.
REFLEX_KERNEL(rows_to_fragments, FragmentParams, kRowThreads) {
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.x;
  const float* x = p.x + static_cast<size_t>(row) * p.width;
  const bool quads = p.width % 4 == 0;
  const auto quad_at = [&](const float* from, int c) -> float4 {
    if (quads && c < p.width) return *reinterpret_cast<const float4*>(from + c);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = c + i < p.width ? from[c + i] : 0.0f;
    return {v[0], v[1], v[2], v[3]};
  };
  float factor = 1.0f;
  if (p.norm_weight) {
    float sum = 0;
#pragma unroll 2
    for (int c = 4 * threadIdx.x; c < p.width; c += 4 * kRowThreads) {
      const float4 v = quad_at(x, c);
      sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    }
    factor = rsqrtf(block_sum(sum, scratch) / static_cast<float>(p.width) + p.eps);
  }
  auto* out = static_cast<uint32_t*>(p.out);
#pragma unroll 2
  for (int c = 4 * threadIdx.x; c < p.n_units * kUnit; c += 4 * kRowThreads) {
    float4 v = quad_at(x, c);
    if (p.norm_weight) {
      const float4 w = quad_at(p.norm_weight, c);
      v = {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
    }
    const size_t at = fragment_index(row, c, p.n_units) / 2;
    out[at] = activation_pair(v.x, v.y);
    out[at + 2] = activation_pair(v.z, v.w);
  }
}

/// One group a block.
REFLEX_KERNEL(rms_norm, NormParams, 256) {
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const float* x = p.x + static_cast<size_t>(blockIdx.x) * p.group;
  float* out = p.out + static_cast<size_t>(blockIdx.x) * p.group;
  const float factor = norm_factor(x, p.group, p.eps, scratch);
  for (int i = threadIdx.x; i < p.group; i += blockDim.x) out[i] = x[i] * factor * p.weight[i];
}

REFLEX_KERNEL(add, PairParams, 256) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.n) p.out[i] = p.a[i] + p.b[i];
}

/// out = silu(a) * b
REFLEX_KERNEL(swiglu, PairParams, 256) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.n) p.out[i] = silu(p.a[i]) * p.b[i];
}

/// out = x * sigmoid(gate)
REFLEX_KERNEL(sigmoid_gate, SigmoidGateParams, 256) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.n) return;
  const float gate = p.gate[p.per_row ? i / static_cast<uint32_t>(p.width) : i];
  p.out[i] = p.x[i] / (1.0f + expf(-gate));
}

}  // namespace reflex::cuda
