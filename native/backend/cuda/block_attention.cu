// Attention of a row over a list of slots: a block takes up to 16 query heads of one key/value head, gathers
// the listed slots 32 or 16 at a time, and for a single row blocks share the list. f16 states round their
// operands as attention_tile.cu does; f32 states keep both parts of each.
#include "backend/cuda/attention_tile.cuh"
#include "backend/cuda/block_params.h"

namespace reflex::cuda {

namespace {

constexpr int kTiles = kMaxHeadDim / 8 / kTileWarps;  // of 8 values, per warp

/// What the block computes: heads [head, head + count) of a row of q.
struct Share {
  int row, kv_head, head, count;
};
__device__ __forceinline__ Share share_of(const ListAttentionParams& p) {
  const int heads = p.a.n_heads / p.a.n_kv_heads, groups = (heads + kTileQueries - 1) / kTileQueries;
  const int kv_head = static_cast<int>(blockIdx.x) / groups;
  const int first = static_cast<int>(blockIdx.x) % groups * kTileQueries;
  return {p.first_row + static_cast<int>(blockIdx.y), kv_head, kv_head * heads + first,
          min(kTileQueries, heads - first)};
}

/// Listed slots [base, base + slots) of rows of `width` values, `row` apart, as load_tile lays them out.
template <class S>
__device__ __forceinline__ void load_listed(S* tile, int stride, int slots, const S* from, int64_t row,
                                            int width, const int32_t* list, int base, int end) {
  constexpr int kQuad = 16 / sizeof(S);
  if (width % kQuad == 0 && row % kQuad == 0) {
    const int quads = stride / kQuad, used = width / kQuad;
    for (int i = threadIdx.x; i < slots * quads; i += kTileThreads) {
      const int at = i / quads, quad = i % quads;
      S* to = tile + at * stride + quad * kQuad;
      if (base + at < end && quad < used)
        copy_quad(to, from + list[base + at] * row + quad * kQuad);
      else
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    }
  } else {
    for (int i = threadIdx.x; i < slots * stride; i += kTileThreads) {
      const int at = i / stride, c = i % stride;
      tile[i] = base + at < end && c < width ? from[list[base + at] * row + c] : S(0.0f);
    }
  }
  copy_commit();
}

__device__ __forceinline__ void emit(const AttentionParams& a, int row, int head, int column, float y) {
  const int width = a.v_head_dim;
  if (a.out_f16)
    static_cast<__half*>(a.out_f16)[fragment_index(row, head * width + column, a.out_units)] =
        __float2half_rn(y * kXScale);
  else
    a.out[(static_cast<size_t>(row) * a.n_heads + head) * width + column] = y;
}

/// The block's sums to their place, or for the last of several splits to merge.
template <class S>
__device__ __forceinline__ void finish(const AttentionParams& a, const Share& own, const AttentionTile<S>& m,
                                       const float (&top)[2], const float (&total)[2],
                                       const float (&o)[kTiles][4]) {
  __shared__ bool last;
  const int warp = threadIdx.x / 32, splits = gridDim.z, split = blockIdx.z;
  const size_t size = a.v_head_dim + 2;
  const auto partial = [&](int query) {
    return a.partial + static_cast<size_t>(own.head + query) * kMaxSplits * size;
  };
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < 2; ++i) {
      const int query = 2 * warp + i;
      m.total[query] = total[i];
      if (splits == 1 || query >= own.count) continue;
      partial(query)[split * size] = top[i];
      partial(query)[split * size + 1] = total[i];
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int query = acc_row(c), column = 8 * (warp + i * kTileWarps) + acc_column(c);
      if (column >= a.v_head_dim || query >= own.count) continue;
      if (splits > 1)
        partial(query)[split * size + 2 + column] = o[i][c];
      else
        emit(a, own.row, own.head + query, column, o[i][c] / m.total[query]);
    }
  if (splits == 1 || !is_last(a.tickets + blockIdx.x, splits, last)) return;
  for (int i = threadIdx.x; i < own.count * a.v_head_dim; i += kTileThreads) {
    const int query = i / a.v_head_dim, column = i % a.v_head_dim;
    emit(a, own.row, own.head + query, column, merged(partial(query), splits, size, column));
  }
}

template <class S, int kTerms>
__device__ __forceinline__ void run(const ListAttentionParams& p) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  wait_for_inputs();
  let_next_start();
  const AttentionParams& a = p.a;
  const int hd = a.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Share own = share_of(p);
  AttentionTile<S> m;
  m.slots = p.tile_slots;
  m.k_stride = list_tile_stride(hd, sizeof(S) == 4);
  m.v_stride = list_tile_stride(a.v_head_dim, sizeof(S) == 4);
  m.q_stride = list_tile_stride(hd, true);
  m.k_steps = (hd + 7) / 8;
  m.width = a.v_head_dim;
  auto* k = reinterpret_cast<S*>(raw);
  S* v = k + m.slots * m.k_stride;
  auto* q = reinterpret_cast<float*>(v + m.slots * m.v_stride);
  m.k = k;
  m.v = v;
  m.q = q;
  m.set_scratch(q + kTileQueries * m.q_stride);
  for (int i = threadIdx.x; i < kTileQueries * m.q_stride; i += kTileThreads) {
    const int query = i / m.q_stride, c = i % m.q_stride;
    q[i] = query < own.count && c < hd
               ? a.q[(static_cast<size_t>(own.row) * a.n_heads + own.head + query) * hd + c] * a.scale
               : 0.0f;
  }
  const int32_t* list = p.lists + static_cast<size_t>(blockIdx.y) * p.list_stride;
  const SlotRange range = split_slots(p.counts[blockIdx.y], m.slots, blockIdx.z, gridDim.z);
  const auto* from_k = static_cast<const S*>(a.k) + own.kv_head * hd;
  const auto* from_v = static_cast<const S*>(a.v) + own.kv_head * a.v_head_dim;
  float o[kTiles][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int base = range.begin; base < range.stop; base += m.slots) {
    load_listed(k, m.k_stride, m.slots, from_k, static_cast<int64_t>(a.n_kv_heads) * hd, hd, list, base,
                range.stop);
    load_listed(v, m.v_stride, m.slots, from_v, static_cast<int64_t>(a.n_kv_heads) * a.v_head_dim,
                a.v_head_dim, list, base, range.stop);
    copy_wait<0>();
    __syncthreads();
    score<S, kTerms>(m);
    __syncthreads();
    const bool there = lane < m.slots && base + lane < range.stop;
    const bool seen[2] = {there && 2 * warp < own.count, there && 2 * warp + 1 < own.count};
    weigh(m, seen, top, total);
    __syncthreads();
    mix<S, kTerms, kTiles>(m, o);
    __syncthreads();
  }
  finish(a, own, m, top, total, o);
}

}  // namespace

/// grid (G * groups of 16 query heads, rows, splits); several splits for one row only
REFLEX_KERNEL(list_attention_f16, ListAttentionParams, kTileThreads) { run<__half, 1>(p); }
REFLEX_KERNEL(list_attention_f32, ListAttentionParams, kTileThreads) { run<float, 3>(p); }

}  // namespace reflex::cuda
