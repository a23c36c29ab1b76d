// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): all heads of a row attend to one
// sequence of C + P values a token. A block has kLatentHeads heads of one row, so that a tile of the sequence
// in shared memory serves them all as the 16 rows of an mma, and any tree of rows is a mask.
#include "backend/cuda/latent_attention.cuh"
#include "backend/cuda/latent_rotation.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kTileWarps, kThreads = kTileThreads;

__device__ __forceinline__ void store_value(void* state, bool f32, size_t at, float x) {
  if (f32)
    static_cast<float*>(state)[at] = x;
  else
    static_cast<__half*>(state)[at] = __float2half_rn(x);
}

}  // namespace

/// A warp per row of the state, then one per head of each query. grid (ceil((n_state_rows + rows H) / 8))
REFLEX_KERNEL(latent_begin, LatentBeginParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, width = p.n_latent + p.rope_dim;
  int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item < p.n_state_rows) {
    const int row = static_cast<int>(item);
    const float* x = p.kv + static_cast<size_t>(row) * width;
    const size_t to = static_cast<size_t>(p.header->first_slot + row) * width;
    float squares = 0;
    for (int i = lane; i < p.n_latent; i += 32) squares += x[i] * x[i];
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.n_latent) + p.eps);
    for (int i = lane; i < p.n_latent; i += 32)
      store_value(p.state, p.state_f32, to + i, x[i] * factor * p.norm[i]);
    for (int i = lane; i < p.rope_dim; i += 32)
      store_value(p.state, p.state_f32, to + p.n_latent + i,
                  rotated(p.rotation, p.rope_dim, p.adjacent, x + p.n_latent, row, i));
    return;
  }
  item -= p.n_state_rows;
  if (item >= static_cast<int64_t>(p.n_rows) * p.n_heads) return;
  const int row = p.first_row + static_cast<int>(item / p.n_heads),
            pass_row = p.outputs ? p.outputs[row] : row;
  const int h = static_cast<int>(item % p.n_heads), dim = p.nope_dim + p.rope_dim;
  const float* x = p.q + (static_cast<size_t>(row) * p.n_heads + h) * dim + p.nope_dim;
  float* to = p.latent_q + item * p.dim_pad;
  for (int i = p.n_latent + lane; i < p.dim_pad; i += 32)
    to[i] = i < width ? rotated(p.rotation, p.rope_dim, p.adjacent, x, pass_row, i - p.n_latent) : 0.0f;
}

REFLEX_KERNEL(latent_attention_f32, LatentAttentionParams, kThreads) { latent::attend<float, 3>(p); }
REFLEX_KERNEL(latent_attention_f16, LatentAttentionParams, kThreads) { latent::attend<__half, 1>(p); }

/// A thread per value of the slice.
REFLEX_KERNEL(head_slice, HeadSliceParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.n) p.out[i] = p.x[i / p.count * p.stride + p.begin + i % p.count];
}

}  // namespace reflex::cuda
