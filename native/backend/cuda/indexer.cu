// The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, eq. 1), up to its scores: keys to their slots, and
//   score[r, s] = sum_h weights[r, h] * relu(query[r, h] . K[s])
// with 16 heads as the rows of an mma and 8 slots as its columns. A warp keeps 32 slots and takes row after
// row; lanes read both operands 16 bytes at a time, which permutes the products that make a sum, of both
// alike. Which of them are best: index_select.cu.
#include "backend/cuda/index_params.h"
#include "backend/cuda/split_mma.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kIndexThreads / 32, kTiles = kIndexPlaces / 8;
constexpr int kBeginWarps = 8;

__device__ __forceinline__ int head_tiles(const IndexParams& p) {
  return (p.n_heads + kIndexHeads - 1) / kIndexHeads;
}
__device__ __forceinline__ int pass_row_of(const IndexParams& p, int row) {
  return p.on_outputs ? p.pass.outputs[p.first_row + row] : p.first_row + row;
}

/// 16 bytes of a row of n values from value k on, zero beyond.
__device__ __forceinline__ uint4 piece_of(const float* row, int k, int n) {
  if (n % 4 == 0) {
    if (k < n) return *reinterpret_cast<const uint4*>(row + k);
    return uint4{0, 0, 0, 0};
  }
  const auto at = [&](int i) { return k + i < n ? __float_as_uint(row[k + i]) : 0u; };
  return {at(0), at(1), at(2), at(3)};
}
__device__ __forceinline__ uint4 piece_of(const __half* row, int k, int n) {
  if (n % 8 == 0) {
    if (k < n) return *reinterpret_cast<const uint4*>(row + k);
    return uint4{0, 0, 0, 0};
  }
  const auto at = [&](int i) -> uint32_t { return k + i < n ? __half_as_ushort(row[k + i]) : 0; };
  return {at(0) | at(1) << 16, at(2) | at(3) << 16, at(4) | at(5) << 16, at(6) | at(7) << 16};
}

/// The same of a slot's key; -1: none.
template <class S>
__device__ __forceinline__ uint4 key_piece(const IndexParams& p, int slot, int k) {
  if (slot < 0) return uint4{0, 0, 0, 0};
  return piece_of(static_cast<const S*>(p.state) + static_cast<size_t>(slot) * p.head_dim, k, p.head_dim);
}

/// sum (16 heads, 8 slots) += the two k-steps of a piece.
__device__ __forceinline__ void multiply(float (&sum)[4], uint4 low, uint4 high, uint4 key, const float*) {
  const auto f = [](uint32_t x) { return __uint_as_float(x); };
  const float a0[4] = {f(low.x), f(high.x), f(low.y), f(high.y)}, b0[2] = {f(key.x), f(key.y)};
  const float a1[4] = {f(low.z), f(high.z), f(low.w), f(high.w)}, b1[2] = {f(key.z), f(key.w)};
  mma_f32<3>(sum, a0, b0);
  mma_f32<3>(sum, a1, b1);
}
__device__ __forceinline__ void multiply(float (&sum)[4], uint4 low, uint4 high, uint4 key, const __half*) {
  mma(sum, low.x, high.x, low.y, high.y, key.x, key.y);
  mma(sum, low.z, high.z, low.w, high.w, key.z, key.w);
}

/// As unsigned numbers these order as the scores do; NaN counts as -inf, -0 as 0.
__device__ __forceinline__ uint32_t order_of(float score) {
  if (isnan(score)) score = -INFINITY;
  if (score == 0) score = 0;
  const uint32_t bits = __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// A warp's places: their slots, and which of them a row may choose.
struct Places {
  int first, word;  // place of lane 0; word of the mask, below 0: strided

  __device__ __forceinline__ int slot(const IndexParams& p, const PassHeader& header, int i) const {
    return word < 0 ? (first + i + 1) * p.ratio - 1 : header.mask_base + 32 * word + i;
  }
  /// A bit for each.
  __device__ __forceinline__ uint32_t candidates(const IndexParams& p, const PassHeader& header, int pass_row,
                                                 int prefix) const {
    if (word < 0) {
      const int n = prefix / p.ratio - first;
      return n >= 32 ? kFull : n > 0 ? (1u << n) - 1 : 0;
    }
    const uint32_t* mask = p.pass.mask + static_cast<size_t>(pass_row) * header.mask_words;
    const uint32_t bits = mask[word];
    if (p.ratio == 1 || bits == 0) return bits;
    int before = prefix;  // slots that the row sees ahead of these
    for (int i = 0; i < word; ++i) before += __popc(mask[i]);
    const int lane = threadIdx.x % 32;
    const bool ends = bits >> lane & 1 && (before + __popc(bits & (kFull >> (31 - lane)))) % p.ratio == 0;
    return __ballot_sync(kFull, ends);
  }
};

/// One row's scores of a warp's places, those of columns 2 t and 2 t + 1 of every tile, in every lane of
/// them.
template <class S, bool kHeld, int kChunks>
__device__ __forceinline__ void score_row(const IndexParams& p, int row, const int (&slots)[kTiles],
                                          const uint4 (&held)[kChunks][kTiles], float (&sum)[kTiles][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tiles = head_tiles(p);
  constexpr int kChunk = index_chunk(sizeof(S) == 4), kPiece = kChunk / 4;
  const int chunks = (p.head_dim + kChunk - 1) / kChunk;
  const auto* query =
      static_cast<const uint4*>(p.prepared) + static_cast<size_t>(row) * tiles * chunks * 64 + lane;
  const float* scale = p.scale + static_cast<size_t>(row) * tiles * kIndexHeads + g;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) sum[i][0] = sum[i][1] = 0;
  for (int tile = 0; tile < tiles; ++tile, query += chunks * 64, scale += kIndexHeads) {
    float acc[kTiles][4] = {};
    const auto chunk = [&](int c, const uint4(&key)[kTiles]) {
      const uint4 low = query[64 * c], high = query[64 * c + 32];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) multiply(acc[i], low, high, key[i], static_cast<const S*>(nullptr));
    };
    if constexpr (kHeld) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (c < chunks) chunk(c, held[c]);
    } else {
      for (int c = 0; c < chunks; ++c) {
        uint4 key[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) key[i] = key_piece<S>(p, slots[i], c * kChunk + t * kPiece);
        chunk(c, key);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (tile * kIndexHeads + g + 8 * half >= p.n_heads) continue;
      const float weight = scale[8 * half];
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float x = acc[i][2 * half + j];
          sum[i][j] += weight * (x < 0 ? 0.0f : x);  // NaN stays
        }
    }
  }
#pragma unroll
  for (int m = 4; m < 32; m *= 2)
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) sum[i][j] += __shfl_xor_sync(kFull, sum[i][j], m);
}

/// grid (ceil(places / (32 kWarps)), ceil(n_rows / kIndexRows))
template <class S, bool kHeld>
__device__ __forceinline__ void scores(const IndexParams& p) {
  constexpr int kChunk = index_chunk(sizeof(S) == 4), kChunks = kHeld ? kIndexHeldDim / kChunk : 1;
  wait_for_inputs();
  let_next_start();
  const PassHeader header = *p.pass.header;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Places at;
  at.first = (blockIdx.x * kWarps + threadIdx.x / 32) * kIndexPlaces;
  at.word = at.first < p.n_strided ? -1 : (at.first - p.n_strided) / 32;
  if (at.word >= header.mask_words) return;
  const int end = header.first_slot + header.n_rows;
  int slots[kTiles];
  uint4 held[kChunks][kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int slot = at.slot(p, header, 8 * i + g);
    slots[i] = slot < end ? slot : -1;
    if constexpr (kHeld)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) held[c][i] = key_piece<S>(p, slots[i], c * kChunk + t * (kChunk / 4));
  }
  const int first_row = blockIdx.y * kIndexRows, end_row = min(p.n_rows, first_row + kIndexRows);
  for (int row = first_row; row < end_row; ++row) {
    const int pass_row = pass_row_of(p, row), prefix = p.pass.prefix[pass_row];
    if (at.word < 0 && at.first >= prefix / p.ratio) continue;             // nobody reads these
    if ((prefix + 32 * header.mask_words) / p.ratio <= p.top_k) continue;  // all are chosen
    const uint32_t candidates = at.candidates(p, header, pass_row, prefix);
    float sum[kTiles][2] = {};
    if (candidates) score_row<S, kHeld, kChunks>(p, row, slots, held, sum);
    uint32_t* to = p.scores + static_cast<size_t>(row) * p.places + at.first;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int column = 8 * i + 2 * t;
      if (g == i)
        *reinterpret_cast<uint2*>(to + column) = {candidates >> column & 1 ? order_of(sum[i][0]) : 0,
                                                  candidates >> column & 2 ? order_of(sum[i][1]) : 0};
    }
  }
}

/// One head's query as the lanes of a quad read it, in f16 divided by a power of two that keeps it in range:
/// returns that.
__device__ __forceinline__ float prepare(const IndexParams& p, const float* x, int row, int head) {
  const int lane = threadIdx.x % 32, tile = head / kIndexHeads, g = head % 8, half = head / 8 % 2;
  const bool f32 = p.state_f32;
  const int chunk = index_chunk(f32), chunks = (p.head_dim + chunk - 1) / chunk, piece = chunk / 4;
  const int n = head < p.n_heads ? p.head_dim : 0;
  float most = 0;
  for (int i = lane; i < n; i += 32) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
  for (int m = 16; m > 0; m /= 2) most = fmaxf(most, __shfl_xor_sync(kFull, most, m));
  constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;
  float by = 1.0f;
  if (!f32 && most > kLeast && most < kMost) by = __uint_as_float(__float_as_uint(most) & 0x7F800000u);
  const float times = 1.0f / by;
  auto* to = static_cast<uint4*>(p.prepared) +
             (static_cast<size_t>(row) * head_tiles(p) + tile) * chunks * 64 + 32 * half + 4 * g;
  for (int i = lane; i < 4 * chunks; i += 32) {
    const auto at = [&](int k) { return k < n ? x[k] * times : 0.0f; };
    const int k = i * piece;
    uint4 v;
    if (f32)
      v = {__float_as_uint(at(k)), __float_as_uint(at(k + 1)), __float_as_uint(at(k + 2)),
           __float_as_uint(at(k + 3))};
    else
      v = {h2_of(at(k), at(k + 1)), h2_of(at(k + 2), at(k + 3)), h2_of(at(k + 4), at(k + 5)),
           h2_of(at(k + 6), at(k + 7))};
    to[i / 4 * 64 + i % 4] = v;
  }
  return by;
}

}  // namespace

/// A warp per key to its slot, then one per head of each query. grid (ceil((n_state_rows + rows tiles 16) /
/// 8))
REFLEX_KERNEL(index_begin, IndexParams, 32 * kBeginWarps) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32;
  int64_t item = static_cast<int64_t>(blockIdx.x) * kBeginWarps + threadIdx.x / 32;
  if (item < p.n_state_rows) {
    const float* x = p.key + item * p.head_dim;
    const size_t to = static_cast<size_t>(p.pass.header->first_slot + item) * p.head_dim;
    for (int i = lane; i < p.head_dim; i += 32) {
      if (p.state_f32)
        static_cast<float*>(p.state)[to + i] = x[i];
      else
        static_cast<__half*>(p.state)[to + i] = __float2half_rn(x[i]);
    }
    return;
  }
  item -= p.n_state_rows;
  const int heads = head_tiles(p) * kIndexHeads, head = static_cast<int>(item % heads);
  const int row = static_cast<int>(item / heads);
  if (row >= p.n_rows) return;
  const size_t at = static_cast<size_t>(p.first_row + row) * p.n_heads + head;
  const float by = prepare(p, p.query + at * p.head_dim, row, head);
  if (lane == 0) p.scale[item] = head < p.n_heads ? p.weights[at] * by : 0.0f;
}

REFLEX_KERNEL(index_scores_f32, IndexParams, kIndexThreads, 3) { scores<float, false>(p); }
REFLEX_KERNEL(index_scores_f16, IndexParams, kIndexThreads, 3) { scores<__half, true>(p); }
/// Heads of more than kIndexHeldDim values.
REFLEX_KERNEL(index_scores_f16_wide, IndexParams, kIndexThreads, 3) { scores<__half, false>(p); }

}  // namespace reflex::cuda
