// A residual of several streams (hyper-connections): copies, norms, the gated mix that a block reads, the
// injection of what it gives. All go row by row.
#include "backend/cuda/device.cuh"
#include "backend/cuda/stream_params.h"

namespace reflex::cuda {

namespace {

constexpr float kLeastGate = 1e-6f;  // |key . query| of a gate is at least this

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// The norm of one stream of y, each thread over the values that it wrote itself.
__device__ __forceinline__ void norm_stream(const float* y, const float* weight, float eps, int d,
                                            float squares, float* out, float* scratch) {
  const float factor = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(d) + eps);
  for (int i = threadIdx.x; i < d; i += blockDim.x) out[i] = y[i] * factor * weight[i];
}

}  // namespace

/// grid (R, ceil(d / 256))
REFLEX_KERNEL(stream_repeat, RepeatParams, kStreamThreads) {
  wait_for_inputs();
  let_next_start();
  const int i = blockIdx.y * kStreamThreads + threadIdx.x;
  if (i >= p.d) return;
  const float x = p.x[static_cast<size_t>(blockIdx.x) * p.d + i];
  for (int s = 0; s < p.n_streams; ++s)
    p.out[(static_cast<size_t>(blockIdx.x) * p.n_streams + s) * p.d + i] = x;
}

/// A block per stream of a row. grid (R * S)
REFLEX_KERNEL(stream_norm, StreamNormParams, kStreamThreads) {
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const size_t at = static_cast<size_t>(blockIdx.x) * p.d;
  const int s = blockIdx.x % p.n_streams;
  float squares = 0;
  for (int i = threadIdx.x; i < p.d; i += kStreamThreads) squares += p.x[at + i] * p.x[at + i];
  norm_stream(p.x + at, p.weight + static_cast<size_t>(s) * p.d, p.eps, p.d, squares, p.out + at, scratch);
}

/// grid (R, ceil(d / 256))
REFLEX_KERNEL(stream_mix, StreamMixParams, kStreamThreads) {
  wait_for_inputs();
  let_next_start();
  const int i = blockIdx.y * kStreamThreads + threadIdx.x;
  if (i >= p.d) return;
  float sum = 0;
  for (int s = 0; s < p.n_streams; ++s) {
    const size_t at = (static_cast<size_t>(blockIdx.x) * p.n_streams + s) * p.d + i;
    sum += p.x[at] * sigmoid(p.gate[at]);
  }
  p.out[static_cast<size_t>(blockIdx.x) * p.d + i] = sum / static_cast<float>(p.n_streams);
}

/// A block per stream of a row. grid (R * S)
REFLEX_KERNEL(stream_inject, StreamInjectParams, kStreamThreads) {
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const size_t at = static_cast<size_t>(blockIdx.x) * p.d;
  const int row = blockIdx.x / p.n_streams, s = blockIdx.x % p.n_streams;
  const float by = 2.0f * sigmoid(p.logits[blockIdx.x] / static_cast<float>(p.n_streams));
  const float* block = p.block + static_cast<size_t>(row) * p.d;
  float squares = 0;
  for (int i = threadIdx.x; i < p.d; i += kStreamThreads) {
    const float y = p.x[at + i] + by * block[i];
    p.out[at + i] = y;
    squares += y * y;
  }
  if (p.weight)
    norm_stream(p.out + at, p.weight + static_cast<size_t>(s) * p.d, p.eps, p.d, squares, p.normed + at,
                scratch);
}

/// A block per stream of a row. grid (R * S)
REFLEX_KERNEL(stream_gate, StreamGateParams, kStreamThreads) {
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const size_t at = static_cast<size_t>(blockIdx.x) * p.d;
  const float* value = p.value + static_cast<size_t>(blockIdx.x / p.n_streams) * p.d;
  float dot = 0;
  for (int i = threadIdx.x; i < p.d; i += kStreamThreads) dot += p.key[at + i] * p.query[at + i];
  const float a = block_sum(dot, scratch) / sqrtf(static_cast<float>(p.d));
  const float root = sqrtf(fmaxf(fabsf(a), kLeastGate));
  const float by = sigmoid(a > 0 ? root : a < 0 ? -root : a);  // 0 stays 0, NaN stays NaN
  for (int i = threadIdx.x; i < p.d; i += kStreamThreads) p.out[at + i] = by * value[i];
}

}  // namespace reflex::cuda
