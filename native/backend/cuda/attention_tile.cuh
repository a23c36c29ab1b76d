// Attention over a tile of slots in shared memory for 16 queries at once, the rows of an mma: what
// attention_tile.cu and latent_attention.cu share. A block of kTileWarps warps keeps running sums; between
// score, weigh and mix everybody waits.
#pragma once
#include "backend/cuda/split_mma.cuh"
#include "backend/cuda/tile_params.h"

namespace reflex::cuda {

inline constexpr int kTileWarps = 8, kTileThreads = 32 * kTileWarps;

__device__ __forceinline__ float value_at(const float* p) { return *p; }
__device__ __forceinline__ float value_at(const __half* p) { return __half2float(*p); }

/// Shared memory of a tile: S is the states' type. k and v may be the same.
template <class S>
struct AttentionTile {
  const S *k, *v;  // (slots, k_stride or v_stride)
  const float* q;  // (kTileQueries, q_stride), times the scale
  float* scores;   // (parts, kTileQueries, slots + 4): sums over a part of the key
  float* weights;  // (kTileQueries, kTileWeights)
  float* keep;     // (kTileQueries): what the sums so far are worth
  float* total;    // (kTileQueries)
  int k_stride, v_stride, q_stride, slots, parts;
  int k_steps;  // of 8 values of a key
  int width;    // of a value

  /// Takes what lies behind the tiles and the queries; returns its end.
  __device__ __forceinline__ float* set_scratch(float* at) {
    parts = kTileWarps / (slots / 8);
    scores = at;
    weights = scores + parts * kTileQueries * (slots + 4);
    keep = weights + kTileQueries * kTileWeights;
    total = keep + kTileQueries;
    return total + kTileQueries;
  }
};

/// A tile in `raw` whose keys are its values too, `width` of each slot's `dim_pad`, and room for the queries
/// of `heads` heads behind it.
template <class S>
__device__ __forceinline__ AttentionTile<S> shared_tile(uint8_t* raw, int slots, int stride, int dim_pad,
                                                        int width, int heads) {
  AttentionTile<S> m;
  m.slots = slots;
  m.k_stride = m.v_stride = stride;
  m.q_stride = dim_pad + 4;
  m.k_steps = dim_pad / 8;
  m.width = width;
  auto* tile = reinterpret_cast<S*>(raw);
  auto* q = reinterpret_cast<float*>(tile + m.slots * m.k_stride);
  m.k = m.v = tile;
  m.q = q;
  m.set_scratch(q + heads * m.q_stride);
  return m;
}

/// A warp's 8 slots of the tile, over its part of the key.
template <class S, int kTerms>
__device__ __forceinline__ void score(const AttentionTile<S>& m) {
  const int warp = threadIdx.x / 32, tiles = m.slots / 8, tile = warp % tiles, part = warp / tiles;
  const int first = m.k_steps * part / m.parts, end = m.k_steps * (part + 1) / m.parts;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float sum[4] = {};
  for (int i = first; i < end; ++i) {
    float a[4];
    load_a(a, m.q + 8 * i, m.q_stride);
    const S* c = m.k + (8 * tile + g) * m.k_stride + 8 * i + t;
    const float b[2] = {value_at(c), value_at(c + 4)};
    mma_f32<kTerms>(sum, a, b);
  }
  float* to = m.scores + part * kTileQueries * (m.slots + 4) + 8 * tile;
#pragma unroll
  for (int c = 0; c < 4; ++c) to[acc_row(c) * (m.slots + 4) + acc_column(c)] = sum[c];
}

/// Two queries per warp, a slot per lane: weights, and how far the sums so far count. seen: of each query.
template <class S>
__device__ __forceinline__ void weigh(const AttentionTile<S>& m, const bool (&seen)[2], float (&top)[2],
                                      float (&total)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = 2 * warp + i;
    float s = -INFINITY;
    if (seen[i]) {
      s = 0;
      for (int part = 0; part < m.parts; ++part)
        s += m.scores[(part * kTileQueries + query) * (m.slots + 4) + lane];
    }
    float best = s;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) best = fmaxf(best, __shfl_xor_sync(kFull, best, d));
    best = fmaxf(best, top[i]);
    const bool none = best == -INFINITY;  // nothing seen so far
    const float w = none || !seen[i] ? 0.0f : expf(s - best), kept = none ? 1.0f : expf(top[i] - best);
    top[i] = best;
    total[i] = total[i] * kept + warp_sum(w);
    m.weights[query * kTileWeights + lane] = w;
    if (lane == 0) m.keep[query] = kept;
  }
}

/// o = keep * o + weights (16, slots) v (slots, width): a warp has every kTileWarps-th 8 of the width.
template <class S, int kTerms, int kTiles>
__device__ __forceinline__ void mix(const AttentionTile<S>& m, float (&o)[kTiles][4]) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float keep[2] = {m.keep[g], m.keep[g + 8]};
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) o[i][c] *= keep[c / 2];
  for (int k = 0; k < m.slots; k += 8) {
    float a[4];
    load_a(a, m.weights + k, kTileWeights);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int column = 8 * (warp + i * kTileWarps);
      if (column >= m.width) break;
      const S* c = m.v + (k + t) * m.v_stride + column + g;
      const float b[2] = {value_at(c), value_at(c + 4 * m.v_stride)};
      mma_f32<kTerms>(o[i], a, b);
    }
  }
}

/// Slots base .. of rows of `width` values, `row` apart, to a tile whose stride is a whole number of quads;
/// zero from `end` on and beyond the width. Done at copy_wait and a barrier.
template <class S>
__device__ __forceinline__ void load_tile(S* tile, int stride, int slots, const S* from, int64_t row,
                                          int width, int base, int end) {
  constexpr int kQuad = 16 / sizeof(S);
  if (width % kQuad == 0 && row % kQuad == 0) {
    const int quads = stride / kQuad, used = width / kQuad;
    for (int i = threadIdx.x; i < slots * quads; i += kTileThreads) {
      const int slot = i / quads, quad = i % quads;
      S* to = tile + slot * stride + quad * kQuad;
      if (base + slot < end && quad < used)
        copy_quad(to, from + (base + slot) * row + quad * kQuad);
      else
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    }
  } else {
    for (int i = threadIdx.x; i < slots * stride; i += kTileThreads) {
      const int slot = i / stride, k = i % stride;
      tile[i] = base + slot < end && k < width ? from[(base + slot) * row + k] : S(0.0f);
    }
  }
  copy_commit();
}

/// What a block has of the sequence's slots [0, end), which `splits` blocks share.
struct SlotRange {
  int begin, stop;
};
__device__ __forceinline__ SlotRange split_slots(int end, int slots, int split, int splits) {
  const int tiles = (end + slots - 1) / slots, each = (tiles + splits - 1) / splits * slots;
  return {split * each, min(end, (split + 1) * each)};
}

/// One query's sums of all splits, each (top, total, o (width)), `next` floats apart: column c of the result.
/// A split that saw nothing says so by its top, -inf.
__device__ __forceinline__ float merged(const float* partial, int splits, size_t next, int c) {
  float top = -INFINITY, total = 0, sum = 0;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, __ldcg(partial + s * next));
  for (int s = 0; s < splits; ++s) {
    const float own = __ldcg(partial + s * next);
    if (own == -INFINITY) continue;
    const float by = expf(own - top);
    total += by * __ldcg(partial + s * next + 1);
    sum += by * __ldcg(partial + s * next + 2 + c);
  }
  return sum / total;
}

/// Whether this block is the last of `splits` to come here; what the others wrote before is then there.
__device__ __forceinline__ bool is_last(uint32_t* ticket, int splits, bool& shared_flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_flag = atomicAdd(ticket, 1u) + 1 == static_cast<uint32_t>(splits);
    if (shared_flag) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return shared_flag;
}

}  // namespace reflex::cuda
