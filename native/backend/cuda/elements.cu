// Element by element and row by row, for the plans that ask for it: layer norm, rows side by side, silu.
// Loaded by those plans alone; norm.cu has what nearly every plan uses.
#include "backend/cuda/device.cuh"
#include "backend/cuda/element_params.h"

namespace reflex::cuda {

namespace {
constexpr int kThreads = 256;
}

/// y = (x - mean) * rsqrt(var + eps) * w + b: a block per row, the variance around the mean that was found.
REFLEX_KERNEL(layer_norm, LayerNormParams, kThreads) {
  __shared__ float scratch[2][32];
  wait_for_inputs();
  let_next_start();
  const float* x = p.x + static_cast<size_t>(blockIdx.x) * p.width;
  float* out = p.out + static_cast<size_t>(blockIdx.x) * p.width;
  const auto n = static_cast<float>(p.width);
  float sum = 0;
  for (int i = threadIdx.x; i < p.width; i += kThreads) sum += x[i];
  const float mean = block_sum(sum, scratch[0]) / n;
  float squares = 0;
  for (int i = threadIdx.x; i < p.width; i += kThreads) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / sqrtf(block_sum(squares, scratch[1]) / n + p.eps);
  for (int i = threadIdx.x; i < p.width; i += kThreads)
    out[i] = (x[i] - mean) * factor * p.weight[i] + p.bias[i];
}

/// A thread per value of the result.
REFLEX_KERNEL(concat, ConcatParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.n) return;
  const int width = p.a_width + p.b_width, c = static_cast<int>(i % width);
  const uint64_t row = i / width;
  p.out[i] = c < p.a_width ? p.a[row * p.a_width + c] : p.b[row * p.b_width + c - p.a_width];
}

REFLEX_KERNEL(silu_of, SiluParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.n) p.out[i] = silu(p.scale * p.x[i]);
}

}  // namespace reflex::cuda
