// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): all heads of a row attend to one
// sequence of C + P values a token. A block has kLatentHeads heads of one row, so that a tile of the sequence
// in shared memory serves them all as the 16 rows of an mma, and any tree of rows is a mask.
#include "backend/cuda/attention_tile.cuh"
#include "backend/cuda/latent_params.h"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kTileWarps, kThreads = kTileThreads;
constexpr int kTiles = kLatentMaxDim / 8 / kWarps;  // of 8 latent values, per warp
static_assert(kLatentHeads == kTileQueries);

__device__ __forceinline__ void store_value(void* state, bool f32, size_t at, float x) {
  if (f32)
    static_cast<float*>(state)[at] = x;
  else
    static_cast<__half*>(state)[at] = __float2half_rn(x);
}

/// Element i of P rotated values of x.
__device__ __forceinline__ float rotated(const LatentBeginParams& p, const float* x, int pass_row, int i) {
  const int half = p.rope_dim / 2, pair = p.adjacent ? i / 2 : i % half;
  const bool second = p.adjacent ? i % 2 : i >= half;
  const float* r = p.rotation + (static_cast<size_t>(pass_row) * half + pair) * 2;
  const float a = x[p.adjacent ? 2 * pair : pair], b = x[p.adjacent ? 2 * pair + 1 : pair + half];
  return second ? b * r[0] + a * r[1] : a * r[0] - b * r[1];
}

/// The block's sums to their place, or for the last of several splits to merge.
template <class S>
__device__ __forceinline__ void finish(const LatentAttentionParams& p, const AttentionTile<S>& m,
                                       int first_head, const float (&top)[2], const float (&total)[2],
                                       const float (&o)[kTiles][4]) {
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = gridDim.z;
  const size_t at = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x, size = p.n_latent + 2;
  float* out = p.latent_o + (static_cast<size_t>(blockIdx.y) * p.n_heads + first_head) * p.n_latent;
  float* partial = p.partial + at * splits * kLatentHeads * size;
  float* own = partial + blockIdx.z * kLatentHeads * size;
  if (lane == 0)
    for (int i = 0; i < 2; ++i) {
      m.total[2 * warp + i] = total[i];
      if (splits == 1) continue;
      own[(2 * warp + i) * size] = top[i];
      own[(2 * warp + i) * size + 1] = total[i];
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int head = acc_row(c), column = 8 * (warp + i * kWarps) + acc_column(c);
      if (column >= p.n_latent) continue;
      if (splits > 1)
        own[head * size + 2 + column] = o[i][c];
      else if (first_head + head < p.n_heads)
        out[static_cast<size_t>(head) * p.n_latent + column] = o[i][c] / m.total[head];
    }
  if (splits == 1 || !is_last(p.tickets + at, splits, last)) return;
  for (int i = threadIdx.x; i < kLatentHeads * p.n_latent; i += kThreads) {
    const int head = i / p.n_latent, c = i % p.n_latent;
    if (first_head + head < p.n_heads)
      out[static_cast<size_t>(head) * p.n_latent + c] =
          merged(partial + head * size, splits, kLatentHeads * size, c);
  }
}

/// grid (ceil(H / kLatentHeads), rows, splits)
template <class S, int kTerms>
__device__ __forceinline__ void attend(const LatentAttentionParams& p) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.y, first_head = blockIdx.x * kLatentHeads, width = p.n_latent + p.rope_dim;
  const int pass_row = p.on_outputs ? p.pass.outputs[p.first_row + row] : p.first_row + row;
  const PassHeader header = *p.pass.header;
  const int end = header.first_slot + pass_row + 1, prefix = p.pass.prefix[pass_row];
  AttentionTile<S> m;
  m.slots = p.tile_slots;
  m.k_stride = m.v_stride = latent_stride(p.dim_pad, sizeof(S) == 4);
  m.q_stride = p.dim_pad + 4;
  m.k_steps = p.dim_pad / 8;
  m.width = p.n_latent;
  auto* tile = reinterpret_cast<S*>(raw);
  auto* q = reinterpret_cast<float*>(tile + m.slots * m.k_stride);
  m.k = m.v = tile;
  m.q = q;
  m.set_scratch(q + kLatentHeads * m.q_stride);
  for (int i = threadIdx.x; i < kLatentHeads * p.dim_pad; i += kThreads) {
    const int head = i / p.dim_pad, k = i % p.dim_pad;
    q[head * m.q_stride + k] =
        first_head + head < p.n_heads
            ? p.latent_q[(static_cast<size_t>(row) * p.n_heads + first_head + head) * p.dim_pad + k] * p.scale
            : 0.0f;
  }
  const int lane = threadIdx.x % 32;
  const SlotRange range = split_slots(end, m.slots, blockIdx.z, gridDim.z);
  float o[kTiles][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int base = range.begin; base < range.stop; base += m.slots) {
    load_tile(tile, m.k_stride, m.slots, static_cast<const S*>(p.state), static_cast<int64_t>(width), width,
              base, range.stop);
    copy_wait<0>();
    __syncthreads();
    score<S, kTerms>(m);
    __syncthreads();
    const int slot = base + lane;
    const bool seen = lane < m.slots && slot < range.stop &&
                      row_sees(p.pass, header.mask_base, header.mask_words, pass_row, slot, prefix);
    weigh(m, {seen, seen}, top, total);
    __syncthreads();
    mix<S, kTerms, kTiles>(m, o);
    __syncthreads();
  }
  finish(p, m, first_head, top, total, o);
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
      store_value(p.state, p.state_f32, to + p.n_latent + i, rotated(p, x + p.n_latent, row, i));
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
    to[i] = i < width ? rotated(p, x, pass_row, i - p.n_latent) : 0.0f;
}

REFLEX_KERNEL(latent_attention_f32, LatentAttentionParams, kThreads) { attend<float, 3>(p); }
REFLEX_KERNEL(latent_attention_f16, LatentAttentionParams, kThreads) { attend<__half, 1>(p); }

/// A thread per value of the slice.
REFLEX_KERNEL(head_slice, HeadSliceParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.n) p.out[i] = p.x[i / p.count * p.stride + p.begin + i % p.count];
}

}  // namespace reflex::cuda
