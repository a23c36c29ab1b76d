// DeepSeek-V4's attention: all heads of a row read one list of rows of D values, each key and value at once:
// the last slots the row sees, and entries that stand for blocks of its slots. A block has kWindowHeads heads
// of one row, so that a tile of the list in shared memory serves them all as the 16 rows of an mma; the list
// is made as it is read, so any tree of rows is the same code as a chain.
#include "backend/cuda/attention_tile.cuh"
#include "backend/cuda/seen.cuh"
#include "backend/cuda/window_params.h"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kTileWarps, kThreads = kTileThreads;
constexpr int kTiles = kWindowMaxDim / 8 / kWarps;  // of 8 values, per warp
static_assert(kWindowHeads == kTileQueries);

/// What a query reads: `window` slots, then entries; row numbers of the state taken as rows of D values.
struct List {
  Seen seen;
  const int32_t* chosen;  // of this row, or null
  int ratio, recent, total;

  __device__ __forceinline__ List(const WindowParams& p, const PassHeader& header, int row, int pass_row)
      : seen(p.pass, header, pass_row),
        chosen(p.chosen ? p.chosen + static_cast<size_t>(row) * p.top_k : nullptr),
        ratio(p.ratio),
        recent(min(p.window, seen.n)) {
    int entries = ratio > 0 ? seen.n / ratio : 0;
    if (chosen) entries = min(entries, p.top_k);
    total = recent + entries;
  }
  __device__ __forceinline__ int at(int i) const {
    if (i < recent) return seen.slot(seen.n - recent + i) * (ratio > 0 ? 2 : 1);
    const int e = i - recent, slot = chosen ? chosen[e] : seen.slot((e + 1) * ratio - 1);
    return slot * 2 + 1;
  }
};

/// The listed rows to a tile, zero beyond the width; rows that are not there (-1) as zeros.
template <class S>
__device__ __forceinline__ void load_rows(S* tile, int stride, int slots, const S* from, const int* rows,
                                          int width) {
  constexpr int kQuad = 16 / sizeof(S);
  if (width % kQuad == 0) {
    const int quads = stride / kQuad, used = width / kQuad;
    for (int i = threadIdx.x; i < slots * quads; i += kThreads) {
      const int slot = i / quads, quad = i % quads;
      S* to = tile + slot * stride + quad * kQuad;
      if (rows[slot] >= 0 && quad < used)
        copy_quad(to, from + static_cast<size_t>(rows[slot]) * width + quad * kQuad);
      else
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    }
  } else {
    for (int i = threadIdx.x; i < slots * stride; i += kThreads) {
      const int slot = i / stride, k = i % stride;
      tile[i] = rows[slot] >= 0 && k < width ? from[static_cast<size_t>(rows[slot]) * width + k] : S(0.0f);
    }
  }
  copy_commit();
}

/// The sums of all splits, each (top, total, o (D)) a head, to out (heads, D), with the sinks' share of the
/// totals. First what each split's sums are worth, a thread each; then the values, whose loads wait for
/// nothing.
__device__ __forceinline__ void merge(const WindowParams& p, const float* partial, int splits, int first_head,
                                      float* out) {
  static_assert(kWindowHeads * kWindowSplits == kThreads && kWindowSplits == 16);
  __shared__ float worth[kWindowHeads][kWindowSplits];
  const size_t size = p.head_dim + 2, next = kWindowHeads * size;
  const int split = threadIdx.x % kWindowSplits, own_head = threadIdx.x / kWindowSplits;
  const float sink = first_head + own_head < p.n_heads ? p.sinks[first_head + own_head] : 0.0f;
  const float* own = partial + split * next + own_head * size;
  const float top = split < splits ? __ldcg(own) : -INFINITY;
  float most = fmaxf(top, sink);
#pragma unroll
  for (int m = kWindowSplits / 2; m > 0; m /= 2) most = fmaxf(most, __shfl_xor_sync(kFull, most, m));
  const float by = top == -INFINITY ? 0.0f : expf(top - most);  // -inf: the split saw nothing
  const float total = warp_sum<kWindowSplits>(by == 0.0f ? 0.0f : by * __ldcg(own + 1));
  worth[own_head][split] = by / (total + expf(sink - most));
  __syncthreads();
  for (int i = threadIdx.x; i < kWindowHeads * p.head_dim; i += kThreads) {
    const int head = i / p.head_dim, c = i % p.head_dim;
    if (first_head + head >= p.n_heads) break;
    const float* from = partial + head * size + 2 + c;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += worth[head][s] * __ldcg(from + s * next);
    out[static_cast<size_t>(head) * p.head_dim + c] = sum;
  }
}

/// The block's sums to their place, or for the last of several splits to merge.
template <class S>
__device__ __forceinline__ void finish(const WindowParams& p, const AttentionTile<S>& m, int first_head,
                                       const float (&top)[2], const float (&total)[2],
                                       const float (&o)[kTiles][4]) {
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = gridDim.z;
  const size_t at = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x, size = p.head_dim + 2;
  float* out = p.out + (static_cast<size_t>(blockIdx.y) * p.n_heads + first_head) * p.head_dim;
  float* partial = p.partial + at * splits * kWindowHeads * size;
  float* own = partial + blockIdx.z * kWindowHeads * size;
  if (lane == 0)
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * warp + i;
      if (splits == 1) {
        // What the sums are worth beside the sink: both are scaled by the larger of the two tops.
        const float sink = first_head + head < p.n_heads ? p.sinks[first_head + head] : 0.0f;
        const float most = fmaxf(top[i], sink), by = expf(top[i] - most);
        m.total[head] = total[i] * by + expf(sink - most);
        m.keep[head] = by;
      } else {
        own[head * size] = top[i];
        own[head * size + 1] = total[i];
      }
    }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int head = acc_row(c), column = 8 * (warp + i * kWarps) + acc_column(c);
      if (column >= p.head_dim) continue;
      if (splits > 1)
        own[head * size + 2 + column] = o[i][c];
      else if (first_head + head < p.n_heads)
        out[static_cast<size_t>(head) * p.head_dim + column] = o[i][c] * m.keep[head] / m.total[head];
    }
  if (splits == 1 || !is_last(p.tickets + at, splits, last)) return;
  merge(p, partial, splits, first_head, out);
}

/// grid (ceil(H / kWindowHeads), rows, splits)
template <class S, int kTerms>
__device__ __forceinline__ void attend(const WindowParams& p) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  __shared__ int rows[32];
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.y, first_head = blockIdx.x * kWindowHeads;
  const List list(p, *p.pass.header, row, p.on_outputs ? p.pass.outputs[row] : row);
  AttentionTile<S> m = shared_tile<S>(raw, p.tile_slots, window_stride(p.dim_pad, sizeof(S) == 4), p.dim_pad,
                                      p.head_dim, kWindowHeads);
  auto* tile = reinterpret_cast<S*>(raw);
  auto* q = reinterpret_cast<float*>(tile + m.slots * m.k_stride);
  const float* from = p.q + static_cast<size_t>(row) * p.n_heads * p.head_dim;
  for (int i = threadIdx.x; i < kWindowHeads * p.dim_pad; i += kThreads) {
    const int head = i / p.dim_pad, k = i % p.dim_pad;
    q[head * m.q_stride + k] = first_head + head < p.n_heads && k < p.head_dim
                                   ? from[static_cast<size_t>(first_head + head) * p.head_dim + k] * p.scale
                                   : 0.0f;
  }
  const int lane = threadIdx.x % 32;
  const SlotRange range = split_slots(list.total, m.slots, blockIdx.z, gridDim.z);
  float o[kTiles][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {};
  for (int base = range.begin; base < range.stop; base += m.slots) {
    if (threadIdx.x < m.slots) rows[threadIdx.x] = base + lane < range.stop ? list.at(base + lane) : -1;
    __syncthreads();
    load_rows(tile, m.k_stride, m.slots, static_cast<const S*>(p.state), rows, p.head_dim);
    copy_wait<0>();
    __syncthreads();
    score<S, kTerms>(m);
    __syncthreads();
    const bool seen = lane < m.slots && rows[lane] >= 0;
    weigh(m, {seen, seen}, top, total);
    __syncthreads();
    mix<S, kTerms, kTiles>(m, o);
    __syncthreads();
  }
  finish(p, m, first_head, top, total, o);
}

}  // namespace

REFLEX_KERNEL(window_attention_f32, WindowParams, kThreads) { attend<float, 3>(p); }
REFLEX_KERNEL(window_attention_f16, WindowParams, kThreads) { attend<__half, 1>(p); }

}  // namespace reflex::cuda
