// Attention of few queries, at most W / 2 per key head: decoding. A lane is a dimension, and keys and
// values are widened in registers, for they are used once and gone. A long context is cut into parts
// of slots, each for all heads, so that memory is read in one stream; parts are merged in order.
#include "backend/cpu/kernels/attention.h"
#include "backend/cpu/kernels/attention_block.h"
#include "backend/cpu/kernels/stream.h"

REFLEX_ISA_BEGIN

namespace {

constexpr int kTogether = 2;  ///< queries that share a widened key or value
constexpr int kWide = 4;      ///< vectors of a value at once: sums stay in registers over the slots

/// A result so far: the running maximum, sum and weighted values of each query.
struct Part {
  float* m;    ///< (n_q)
  float* l;    ///< (n_q)
  float* acc;  ///< (n_q, hd_v rounded up to W)
  int32_t ld;
};

/// Queries of one key head.
int32_t queries(const AttentionArgs& a, int32_t rows) { return rows * (a.n_heads / a.n_kv_heads); }

size_t part_floats(const AttentionArgs& a, int32_t rows) {
  const auto n = static_cast<size_t>(queries(a, rows));
  return (2 * n + 15) / 16 * 16 + n * static_cast<size_t>(round_up(a.v_head_dim));
}

Part cut_part(const AttentionArgs& a, int32_t rows, float* p) {
  const int32_t n = queries(a, rows);
  return {p, p + n, p + (2 * n + 15) / 16 * 16, round_up(a.v_head_dim)};
}

/// Values d .. d + W - 1 of a row of n, zero past its end; WHOLE: it ends no earlier. A template, for a
/// branch between the loads would push the sums out of registers.
template <bool F16, bool WHOLE>
vf widen_at(const uint8_t* row, int32_t d, int32_t n) {
  if constexpr (WHOLE) return load_state<F16>(row, static_cast<size_t>(d));
  float part[W];
  widen<F16>(row, static_cast<size_t>(d), n - d, part);
  return load(part);
}

/// Where the keys and values of a block's slots lie, for one head.
struct Streams {
  const uint8_t* k[kSlots] = {};
  const uint8_t* v[kSlots] = {};
  int32_t n = 0;  ///< slots
  void set(const AttentionArgs& a, const SlotBlock& b, int32_t g) {
    const size_t size = a.f16 ? 2 : 4;
    n = b.n;
    for (int32_t j = 0; j < kSlots; ++j) {  // past the end: the last, computed and not used
      const auto s = static_cast<size_t>(b.slot(j < n ? j : n - 1));
      k[j] = a.k + (s * a.ldk + static_cast<size_t>(g * a.head_dim)) * size;
      v[j] = a.v + (s * a.ldv + static_cast<size_t>(g * a.v_head_dim)) * size;
    }
  }
};

// s[i * W / N + k] += q[i] . K[k] over dimensions d .. d + W - 1, for N queries and W / N keys.
template <bool F16, int N, bool WHOLE>
inline __attribute__((always_inline)) void score_step(const uint8_t* const* keys, const float* q, int32_t ldq,
                                                      int32_t d, int32_t hd, vf (&s)[W]) {
  constexpr int kStep = W / N;
  vf x[N];
  REFLEX_UNROLL
  for (int i = 0; i < N; ++i) x[i] = load(q + i * ldq + d);
  REFLEX_UNROLL
  for (int k = 0; k < kStep; ++k) {
    const vf key = widen_at<F16, WHOLE>(keys[k], d, hd);
    REFLEX_UNROLL
    for (int i = 0; i < N; ++i) s[i * kStep + k] = fma(x[i], key, s[i * kStep + k]);
  }
}

// Asks for `bytes` at p.
inline void fetch(const uint8_t* p, int32_t bytes) {
  for (int32_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// p[i][j] = q[i] . K[j] for N queries, ldq apart. What is needed next is asked for meanwhile.
template <bool F16, int N>
void scores(const AttentionArgs& a, const SlotBlock& b, const Streams& at, const Streams& next,
            const float* q, int32_t ldq, float (*p)[kSlots]) {
  constexpr int kStep = W / N;  // slots at once: W sums
  const int32_t hd = a.head_dim, whole = hd / W * W;
  for (int32_t j = 0; j < kSlots && j < b.n; j += kStep) {
    for (int32_t k = j; k < j + kStep && k < next.n; ++k) fetch(next.k[k], hd * (F16 ? 2 : 4));
    vf s[W] = {};
    for (int32_t d = 0; d < whole; d += W) score_step<F16, N, true>(at.k + j, q, ldq, d, hd, s);
    if (whole < hd) score_step<F16, N, false>(at.k + j, q, ldq, whole, hd, s);
    float sums[W];
    store(sums, sums_of(s));
    REFLEX_UNROLL
    for (int i = 0; i < N; ++i) memcpy(p[i] + j, sums + i * kStep, kStep * sizeof(float));
  }
}

// p <- e^(p - m) where row r sees the slot, else 0; m and l go on. Returns what acc is to be scaled by.
float soften(const SlotBlock& b, int32_t prefix, int32_t r, float* p, float& m, float& l) {
  const int32_t seen = b.masks || b.n < prefix - b.first ? b.n : prefix - b.first;
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  vf most = splat(m);
  for (int32_t j = 0; j < kSlots; j += W) {
    vi sees = lane + j < seen;
    if (b.masks) sees &= (load_i(b.masks + j) & static_cast<int32_t>(1u << r)) != 0;
    const vf x = sees ? load(p + j) : splat(-__builtin_inff());
    store(p + j, x);
    most = max(x, most);
  }
  const float top = max_lane(most);
  const float keep = exp(splat(m - top))[0];
  vf total{};
  for (int32_t j = 0; j < kSlots; j += W) {
    const vf e = exp(load(p + j) - top);
    store(p + j, e);
    total += e;
  }
  m = top;
  l = l * keep + sum(total);
  return keep;
}

// acc[i] <- acc[i] * keep[i] + sum_j p[i][j] V[j] for N queries; V vectors from value d on.
template <bool F16, int N, int V, bool WHOLE>
void accumulate(const AttentionArgs& a, const SlotBlock& b, const Streams& at, const Streams& next,
                const float (*p)[kSlots], const float* keep, int32_t d, float* acc, int32_t ld) {
  constexpr int32_t kBytes = W * V * (F16 ? 2 : 4);
  vf o[N][V];
  REFLEX_UNROLL
  for (int i = 0; i < N; ++i) {
    REFLEX_UNROLL
    for (int v = 0; v < V; ++v) o[i][v] = load(acc + i * ld + d + v * W) * keep[i];
  }
  for (int32_t j = 0; j < b.n; ++j) {
    if (WHOLE && j < next.n) fetch(next.v[j] + d * (F16 ? 2 : 4), kBytes);
    REFLEX_UNROLL
    for (int v = 0; v < V; ++v) {
      const vf value = widen_at<F16, WHOLE>(at.v[j], d + v * W, a.v_head_dim);
      REFLEX_UNROLL
      for (int i = 0; i < N; ++i) o[i][v] = fma(splat(p[i][j]), value, o[i][v]);
    }
  }
  REFLEX_UNROLL
  for (int i = 0; i < N; ++i) {
    REFLEX_UNROLL
    for (int v = 0; v < V; ++v) store(acc + i * ld + d + v * W, o[i][v]);
  }
}

// N queries of one head, the first of which is number i, against a block.
template <bool F16, int N>
void fold(const AttentionArgs& a, const RowBlock& rows, const SlotBlock& b, const Streams& at,
          const Streams& next, int32_t i, const float* q, int32_t ldq, const Part& part) {
  const int32_t rep = a.n_heads / a.n_kv_heads;
  alignas(64) float p[N][kSlots];
  float keep[N];
  scores<F16, N>(a, b, at, next, q + i * ldq, ldq, p);
  REFLEX_UNROLL
  for (int k = 0; k < N; ++k) {
    const int32_t r = (i + k) / rep;
    keep[k] = soften(b, rows.prefix[r], r, p[k], part.m[i + k], part.l[i + k]);
  }
  float* acc = part.acc + i * part.ld;
  int32_t d = 0;
  for (; d + kWide * W <= a.v_head_dim; d += kWide * W)
    accumulate<F16, N, kWide, true>(a, b, at, next, p, keep, d, acc, part.ld);
  for (; d + W <= a.v_head_dim; d += W) accumulate<F16, N, 1, true>(a, b, at, next, p, keep, d, acc, part.ld);
  if (d < a.v_head_dim) accumulate<F16, N, 1, false>(a, b, at, next, p, keep, d, acc, part.ld);
}

template <bool F16>
void fold_head(const AttentionArgs& a, const RowBlock& rows, const SlotBlock& b, const Streams& at,
               const Streams& next, const float* q, const Part& part) {
  constexpr Streams kNothing{};
  const int32_t n = queries(a, rows.count), ldq = round_up(a.head_dim);
  int32_t i = 0;
  for (; i + kTogether <= n; i += kTogether)
    fold<F16, kTogether>(a, rows, b, at, i == 0 ? next : kNothing, i, q, ldq, part);
  for (; i < n; ++i) fold<F16, 1>(a, rows, b, at, i == 0 ? next : kNothing, i, q, ldq, part);
}

void write_out(const AttentionArgs& a, const RowBlock& rows, int32_t g, const Part& part) {
  const int32_t rep = a.n_heads / a.n_kv_heads;
  for (int32_t i = 0; i < queries(a, rows.count); ++i) {
    const float inverse = 1.0f / part.l[i];
    float* to =
        a.out + static_cast<size_t>(rows.first + i / rep) * a.ldo + (g * rep + i % rep) * a.v_head_dim;
    for (int32_t d = 0; d < a.v_head_dim; ++d) to[d] = part.acc[i * part.ld + d] * inverse;
  }
}

// One prefetch for each page of slots [begin, end) below `most`, all heads: their walks go on side by side
// (stream.h).
void touch_slots(const AttentionArgs& a, int32_t begin, int32_t end, int32_t most) {
  end = end < most ? end : most;
  const size_t size = a.f16 ? 2 : 4;
  const auto touch = [&](const uint8_t* base, size_t ld) {
    for (size_t i = static_cast<size_t>(begin) * ld * size; i < static_cast<size_t>(end) * ld * size;
         i += kPage)
      __builtin_prefetch(base + i, 0, 2);
  };
  touch(a.k, a.ldk);
  touch(a.v, a.ldv);
}

// The streams that are needed after block b of some head: those of head g, over the same block or, where
// that was the last head, the block after. False, and no slots, where there are none.
bool next_of(const SlotBlock& b, bool last, int32_t end, const AttentionArgs& a, int32_t g, Streams& next) {
  SlotBlock after = b;
  if (last) {
    after.first += kSlots;
    after.n = b.masks ? 0 : (end - after.first < kSlots ? end - after.first : kSlots);
  }
  next.n = 0;
  if (after.n > 0) next.set(a, after, g);
  return after.n > 0;
}

// Heads [g_begin, g_end) over slots [begin, end) and, where asked, the rows' branches; the parts of the
// heads lie one after another. scratch: their queries, scaled.
void run_part(const AttentionArgs& a, const RowBlock& rows, int32_t g_begin, int32_t g_end, int32_t begin,
              int32_t end, bool branches, float* parts, float* scratch) {
  const int32_t rep = a.n_heads / a.n_kv_heads, n = queries(a, rows.count), ldq = round_up(a.head_dim);
  const size_t stride = part_floats(a, rows.count);
  for (int32_t g = g_begin; g < g_end; ++g) {
    const Part part = cut_part(a, rows.count, parts + static_cast<size_t>(g - g_begin) * stride);
    float* q = scratch + (g - g_begin) * n * ldq;
    for (int32_t i = 0; i < n; ++i) {
      const float* from =
          a.q + static_cast<size_t>(rows.first + i / rep) * a.ldq + (g * rep + i % rep) * a.head_dim;
      int32_t d = 0;
      for (; d + W <= a.head_dim; d += W) store(q + i * ldq + d, load(from + d) * a.scale);
      for (; d < ldq; ++d) q[i * ldq + d] = d < a.head_dim ? from[d] * a.scale : 0.0f;
      part.m[i] = kLowest;
      part.l[i] = 0;
    }
    memset(part.acc, 0, static_cast<size_t>(n * part.ld) * sizeof(float));
  }
  touch_slots(a, begin, begin + 2 * kSlots, end);
  Streams
      streams[2];  // of the head in work; of the one after it, the first over the next block after the last
  int turn = 0;
  bool ready = false;
  for_slots(rows, begin, end, branches, [&](const SlotBlock& b) {
    if (!b.masks) touch_slots(a, b.first + 2 * kSlots, b.first + 3 * kSlots, end);
    if (!ready) streams[turn].set(a, b, g_begin);
    for (int32_t g = g_begin; g < g_end; ++g, turn ^= 1) {
      const Part part = cut_part(a, rows.count, parts + static_cast<size_t>(g - g_begin) * stride);
      const float* q = scratch + (g - g_begin) * n * ldq;
      Streams& next = streams[turn ^ 1];
      ready = next_of(b, g + 1 == g_end, end, a, g + 1 == g_end ? g_begin : g + 1, next);
      if (a.f16)
        fold_head<true>(a, rows, b, streams[turn], next, q, part);
      else
        fold_head<false>(a, rows, b, streams[turn], next, q, part);
    }
  });
}

}  // namespace

size_t few_scratch(const AttentionArgs& a, int32_t rows) {
  const auto heads = static_cast<size_t>(a.n_heads) * static_cast<size_t>(rows);
  return heads * static_cast<size_t>(round_up(a.head_dim)) +
         static_cast<size_t>(a.n_kv_heads) * part_floats(a, rows);
}

void attention_few(const AttentionArgs& a, const RowBlock& rows, int32_t g_begin, int32_t g_end,
                   float* scratch) {
  const size_t each = part_floats(a, rows.count);
  run_part(a, rows, g_begin, g_end, 0, rows.longest, true, scratch,
           scratch + static_cast<size_t>(g_end - g_begin) * each);
  for (int32_t g = g_begin; g < g_end; ++g)
    write_out(a, rows, g, cut_part(a, rows.count, scratch + static_cast<size_t>(g - g_begin) * each));
}

size_t attention_part_floats(const AttentionArgs& a, int32_t rows) {
  return rows <= kMaxRows && is_few(a, rows) ? part_floats(a, rows) * static_cast<size_t>(a.n_kv_heads) : 0;
}

void attention_part(const AttentionArgs& a, int32_t n_rows, int32_t begin, int32_t end, bool last,
                    float* part, float* scratch) {
  const RowBlock rows(a, 0, n_rows);
  run_part(a, rows, 0, a.n_kv_heads, begin, end < rows.longest ? end : rows.longest, last, part, scratch);
}

// m = max m_k; l = sum l_k e^(m_k - m); acc likewise: into the first part.
void attention_merge(const AttentionArgs& a, int32_t n_rows, int32_t kv_head, float* parts, int32_t n_parts) {
  const RowBlock rows(a, 0, n_rows);
  const size_t each = part_floats(a, n_rows), stride = attention_part_floats(a, n_rows);
  float* first = parts + static_cast<size_t>(kv_head) * each;
  const Part into = cut_part(a, n_rows, first);
  for (int32_t i = 0; i < queries(a, n_rows); ++i)
    for (int32_t k = 1; k < n_parts; ++k) {
      const Part from = cut_part(a, n_rows, first + static_cast<size_t>(k) * stride);
      const float m = into.m[i] > from.m[i] ? into.m[i] : from.m[i];
      const vf keep = exp(splat(into.m[i] - m)), more = exp(splat(from.m[i] - m));
      into.m[i] = m;
      into.l[i] = into.l[i] * keep[0] + from.l[i] * more[0];
      float* acc = into.acc + i * into.ld;
      for (int32_t d = 0; d < into.ld; d += W)
        store(acc + d, load(acc + d) * keep + load(from.acc + i * into.ld + d) * more);
    }
  write_out(a, rows, kv_head, into);
}

REFLEX_ISA_END
