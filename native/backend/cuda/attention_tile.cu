// Attention over f16 states for head sizes that the faster forms (attention_one.cu, attention_flash.cu) are
// not built for: a block takes 16 queries of one key/value head, its query heads in as many rows as fit, and
// walks the slots 32 at a time; for a single row blocks share the sequence. Chains and trees.
#include "backend/cuda/attention_tile.cuh"

namespace reflex::cuda {

namespace {

constexpr int kSlots = 32;
constexpr int kTiles = kMaxHeadDim / 8 / kTileWarps;  // of 8 values, per warp

/// Query `i` of the block: row of q (or out of the pass: -1) and head.
struct Query {
  int row, head;
};
__device__ __forceinline__ Query query_at(const AttentionParams& p, int i) {
  const int heads = p.n_heads / p.n_kv_heads, per_block = kTileQueries / heads;
  const int row = static_cast<int>(blockIdx.y) * per_block + i / heads;
  return {i < per_block * heads && row < p.n_rows ? row : -1,
          static_cast<int>(blockIdx.x) * heads + i % heads};
}

__device__ __forceinline__ void emit(const AttentionParams& p, Query q, int column, float y) {
  const int width = p.v_head_dim;
  if (p.out_f16)
    static_cast<__half*>(p.out_f16)[fragment_index(q.row, q.head * width + column, p.out_units)] =
        __float2half_rn(y * kXScale);
  else
    p.out[(static_cast<size_t>(q.row) * p.n_heads + q.head) * width + column] = y;
}

/// The block's sums to their place, or for the last of several splits to merge.
__device__ __forceinline__ void finish(const AttentionParams& p, const AttentionTile<__half>& m,
                                       const float (&top)[2], const float (&total)[2],
                                       const float (&o)[kTiles][4]) {
  __shared__ bool last;
  const int warp = threadIdx.x / 32, splits = gridDim.z, split = blockIdx.z;
  const size_t size = p.v_head_dim + 2;
  const auto partial = [&](int head) { return p.partial + static_cast<size_t>(head) * kMaxSplits * size; };
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < 2; ++i) {
      const Query q = query_at(p, 2 * warp + i);
      m.total[2 * warp + i] = total[i];
      if (splits == 1 || q.row < 0) continue;
      partial(q.head)[split * size] = top[i];
      partial(q.head)[split * size + 1] = total[i];
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int index = acc_row(c), column = 8 * (warp + i * kTileWarps) + acc_column(c);
      const Query q = query_at(p, index);
      if (column >= p.v_head_dim || q.row < 0) continue;
      if (splits > 1)
        partial(q.head)[split * size + 2 + column] = o[i][c];
      else
        emit(p, q, column, o[i][c] / m.total[index]);
    }
  if (splits == 1 || !is_last(p.tickets + blockIdx.x, splits, last)) return;
  const int heads = p.n_heads / p.n_kv_heads;
  for (int i = threadIdx.x; i < heads * p.v_head_dim; i += kTileThreads) {
    const Query q = query_at(p, i / p.v_head_dim);
    const int column = i % p.v_head_dim;
    emit(p, q, column, merged(partial(q.head), splits, size, column));
  }
}

}  // namespace

/// grid (G, ceil(rows / (16 / heads of a group)), splits); several splits for one row only
REFLEX_KERNEL(attention_tile, AttentionParams, kTileThreads) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  wait_for_inputs();
  let_next_start();
  const int hd = p.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  AttentionTile<__half> m;
  m.slots = kSlots;
  m.k_stride = tile_stride(hd);
  m.v_stride = tile_stride(p.v_head_dim);
  m.q_stride = m.k_stride - 4;
  m.k_steps = (hd + 7) / 8;
  m.width = p.v_head_dim;
  auto* k = reinterpret_cast<__half*>(raw);
  __half* v = k + kSlots * m.k_stride;
  auto* q = reinterpret_cast<float*>(v + kSlots * m.v_stride);
  m.k = k;
  m.v = v;
  m.q = q;
  m.set_scratch(q + kTileQueries * m.q_stride);
  for (int i = threadIdx.x; i < kTileQueries * m.q_stride; i += kTileThreads) {
    const Query at = query_at(p, i / m.q_stride);
    const int c = i % m.q_stride;
    q[i] = at.row >= 0 && c < hd ? p.q[(static_cast<size_t>(at.row) * p.n_heads + at.head) * hd + c] * p.scale
                                 : 0.0f;
  }
  const PassHeader header = *p.pass.header;
  const int per_block = kTileQueries / (p.n_heads / p.n_kv_heads);
  const int last_row = min(p.n_rows, static_cast<int>(blockIdx.y + 1) * per_block) - 1;
  const int end = header.first_slot + (p.on_outputs ? p.pass.outputs[last_row] : last_row) + 1;
  int pass_row[2], prefix[2];  // of the warp's two queries
  for (int i = 0; i < 2; ++i) {
    const int row = query_at(p, 2 * warp + i).row;
    pass_row[i] = row < 0 ? -1 : p.on_outputs ? p.pass.outputs[row] : row;
    prefix[i] = row < 0 ? 0 : p.pass.prefix[pass_row[i]];
  }
  const SlotRange range = split_slots(end, kSlots, blockIdx.z, gridDim.z);
  const auto* from_k = static_cast<const __half*>(p.k) + blockIdx.x * hd;
  const auto* from_v = static_cast<const __half*>(p.v) + blockIdx.x * p.v_head_dim;
  float o[kTiles][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int base = range.begin; base < range.stop; base += kSlots) {
    load_tile(k, m.k_stride, kSlots, from_k, static_cast<int64_t>(p.n_kv_heads) * hd, hd, base, range.stop);
    load_tile(v, m.v_stride, kSlots, from_v, static_cast<int64_t>(p.n_kv_heads) * p.v_head_dim, p.v_head_dim,
              base, range.stop);
    copy_wait<0>();
    __syncthreads();
    score<__half, 1>(m);
    __syncthreads();
    const int slot = base + lane;
    bool seen[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      seen[i] = pass_row[i] >= 0 && slot < range.stop && slot <= header.first_slot + pass_row[i] &&
                row_sees(p.pass, header.mask_base, header.mask_words, pass_row[i], slot, prefix[i]);
    weigh(m, seen, top, total);
    __syncthreads();
    mix<__half, 1, kTiles>(m, o);
    __syncthreads();
  }
  finish(p, m, top, total, o);
}

}  // namespace reflex::cuda
