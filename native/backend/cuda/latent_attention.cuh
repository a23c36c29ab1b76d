// Latent attention of a block: kLatentHeads heads of one row over the sequence, or over a list of its slots.
// Shared by latent_attention.cu and latent_selected.cu; what a block is for is said there.
#pragma once
#include "backend/cuda/attention_tile.cuh"
#include "backend/cuda/latent_params.h"
#include "backend/cuda/seen.cuh"

namespace reflex::cuda {

namespace latent {

constexpr int kWarps = kTileWarps, kThreads = kTileThreads;
constexpr int kTiles = kLatentMaxDim / 8 / kWarps;  // of 8 latent values, per warp
static_assert(kLatentHeads == kTileQueries);

/// The last of several splits: the group's heads from all splits' sums. What each split is worth is worked
/// out once a head, a lane each; then 16 bytes of a sum at a time.
template <class S>
__device__ __forceinline__ void merge(const LatentAttentionParams& p, const AttentionTile<S>& m,
                                      int first_head, const float* partial, int splits, float* out) {
  static_assert(kLatentHeads * kLatentSplits == kThreads && 32 % kLatentSplits == 0);
  const int size = latent_partial_stride(p.n_latent), quads = (p.n_latent + 3) / 4;
  const size_t next = static_cast<size_t>(kLatentHeads) * size;
  float* worth = m.scores;  // (kLatentHeads, kLatentSplits)
  const int split = threadIdx.x % kLatentSplits;
  const float* own = partial + split * next + static_cast<size_t>(threadIdx.x / kLatentSplits) * size;
  const float top = split < splits ? __ldcg(own) : -INFINITY;
  float best = top;
#pragma unroll
  for (int d = kLatentSplits / 2; d > 0; d /= 2) best = fmaxf(best, __shfl_xor_sync(kFull, best, d));
  const float by = top == -INFINITY ? 0.0f : expf(top - best);  // 0: it saw nothing
  const float total = warp_sum<kLatentSplits>(top == -INFINITY ? 0.0f : by * __ldcg(own + 1));
  worth[threadIdx.x] = by / total;
  __syncthreads();
  for (int i = threadIdx.x; i < kLatentHeads * quads; i += kThreads) {
    const int head = i / quads, c = i % quads * 4;
    if (first_head + head >= p.n_heads) break;
    const float* from = partial + static_cast<size_t>(head) * size + kLatentPartialHead + c;
    float sum[4] = {};
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const float w = worth[head * kLatentSplits + s];
      if (w == 0.0f) continue;  // nothing may be there
      const float4 o = __ldcg(reinterpret_cast<const float4*>(from + s * next));
      sum[0] += w * o.x;
      sum[1] += w * o.y;
      sum[2] += w * o.z;
      sum[3] += w * o.w;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (c + k < p.n_latent) out[static_cast<size_t>(head) * p.n_latent + c + k] = sum[k];
  }
}

/// The block's sums to their place, or for the last of several splits to merge; `any`: it had slots.
template <class S>
__device__ __forceinline__ void finish(const LatentAttentionParams& p, const AttentionTile<S>& m,
                                       int first_head, bool any, const float (&top)[2],
                                       const float (&total)[2], const float (&o)[kTiles][4]) {
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = gridDim.z;
  const size_t at = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int size = latent_partial_stride(p.n_latent);
  const int columns = splits > 1 ? size - kLatentPartialHead : p.n_latent;  // whole quads are merged
  float* out = p.latent_o + (static_cast<size_t>(blockIdx.y) * p.n_heads + first_head) * p.n_latent;
  float* partial = p.partial + at * splits * kLatentHeads * size;
  float* own = partial + static_cast<size_t>(blockIdx.z) * kLatentHeads * size;
  if (lane == 0)
    for (int i = 0; i < 2; ++i) {
      m.total[2 * warp + i] = total[i];
      if (splits > 1) *reinterpret_cast<float2*>(own + (2 * warp + i) * size) = {top[i], total[i]};
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      const int head = acc_row(c), column = 8 * (warp + i * kWarps) + acc_column(c);
      if (column >= columns) continue;
      if (splits > 1) {
        if (any)
          *reinterpret_cast<float2*>(own + head * size + kLatentPartialHead + column) = {o[i][c],
                                                                                         o[i][c + 1]};
        continue;
      }
      if (first_head + head >= p.n_heads) continue;
      out[static_cast<size_t>(head) * p.n_latent + column] = o[i][c] / m.total[head];
      if (column + 1 < p.n_latent)
        out[static_cast<size_t>(head) * p.n_latent + column + 1] = o[i][c + 1] / m.total[head];
    }
  if (splits > 1 && is_last(p.tickets + at, splits, last)) merge(p, m, first_head, partial, splits, out);
}

/// As load_tile, of the first n slots of a list.
template <class S>
__device__ __forceinline__ void load_listed(S* tile, int stride, int slots, const S* from, int width,
                                            const int32_t* list, int n) {
  constexpr int kQuad = 16 / sizeof(S);
  if (width % kQuad == 0) {
    const int quads = stride / kQuad, used = width / kQuad;
    for (int i = threadIdx.x; i < slots * quads; i += kTileThreads) {
      const int slot = i / quads, quad = i % quads;
      S* to = tile + slot * stride + quad * kQuad;
      if (slot < n && quad < used)
        copy_quad(to, from + static_cast<int64_t>(list[slot]) * width + quad * kQuad);
      else
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    }
  } else {
    for (int i = threadIdx.x; i < slots * stride; i += kTileThreads) {
      const int slot = i / stride, k = i % stride;
      tile[i] = slot < n && k < width ? from[static_cast<int64_t>(list[slot]) * width + k] : S(0.0f);
    }
  }
  copy_commit();
}

/// kListed: over the slots chosen for the row, `list` (rows of q, top_k), of
/// which as many count as the row sees. grid (ceil(H / kLatentHeads), rows, splits)
template <class S, int kTerms, bool kListed = false>
__device__ __forceinline__ void attend(const LatentAttentionParams& p, const int32_t* list = nullptr,
                                       int top_k = 0) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.y, first_head = blockIdx.x * kLatentHeads, width = p.n_latent + p.rope_dim;
  const int pass_row = p.on_outputs ? p.pass.outputs[p.first_row + row] : p.first_row + row;
  const PassHeader header = *p.pass.header;
  int end = header.first_slot + pass_row + 1;
  const int prefix = p.pass.prefix[pass_row];
  if constexpr (kListed) {
    list += static_cast<size_t>(p.first_row + row) * top_k;
    end = min(top_k, seen_by(p.pass, header.mask_words, pass_row));
  }
  AttentionTile<S> m = shared_tile<S>(raw, p.tile_slots, latent_stride(p.dim_pad, sizeof(S) == 4), p.dim_pad,
                                      p.n_latent, kLatentHeads);
  auto* tile = reinterpret_cast<S*>(raw);
  auto* q = reinterpret_cast<float*>(tile + m.slots * m.k_stride);
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
    if constexpr (kListed)
      load_listed(tile, m.k_stride, m.slots, static_cast<const S*>(p.state), width, list + base,
                  range.stop - base);
    else
      load_tile(tile, m.k_stride, m.slots, static_cast<const S*>(p.state), static_cast<int64_t>(width), width,
                base, range.stop);
    copy_wait<0>();
    __syncthreads();
    score<S, kTerms>(m);
    __syncthreads();
    const int slot = base + lane;
    const bool seen =
        lane < m.slots && slot < range.stop &&
        (kListed || row_sees(p.pass, header.mask_base, header.mask_words, pass_row, slot, prefix));
    weigh(m, {seen, seen}, top, total);
    __syncthreads();
    mix<S, kTerms, kTiles>(m, o);
    __syncthreads();
  }
  finish(p, m, first_head, range.begin < range.stop, top, total, o);
}

}  // namespace latent

}  // namespace reflex::cuda
