// o[r, h] = sum_s softmax_s(scale * q[r, h] . K[s, g]) V[s, g], h in the group of g
//
// A query is one head of one row. Slots are taken in blocks with a running maximum (Milakov &
// Gimelshein, "Online normalizer calculation for softmax", 2018); a block of K and V is brought to
// f32 once for all queries of the group. Many queries: a lane is a query, so that nothing is ever
// summed across lanes (attention_many). Few: a lane is a dimension (attention_few). What rows see past
// their prefixes, their branches of a tree, comes as blocks of the slots any of them sees, masked.
#include "backend/cpu/kernels/attention.h"

#include "backend/cpu/kernels/attention_block.h"

REFLEX_ISA_BEGIN

namespace {

#if defined(__AVX512F__)
constexpr int kRows = 8;  ///< slots, or dimensions, against two tiles at once
#else
constexpr int kRows = 4;
#endif
static_assert(kSlots % kRows == 0 && W % kRows == 0);

/// A block's keys and values in f32.
struct Block {
  SlotBlock at;
  float* k;  ///< (kSlots, hd) with rows ldk apart, zero up to a whole vector
  float* v;  ///< (kSlots, hd_v) with rows ldv apart, likewise
  int32_t ldk, ldv;
  float* end;
};

Block cut_block(const AttentionArgs& a, float* p) {
  Block b{};
  b.ldk = round_up(a.head_dim);
  b.ldv = round_up(a.v_head_dim);
  b.k = p;
  b.v = b.k + kSlots * b.ldk;
  b.end = b.v + kSlots * b.ldv;
  return b;
}

template <bool F16>
void load_block(const AttentionArgs& a, int32_t g, Block& b) {
  for (int32_t j = 0; j < b.at.n; ++j) {
    const auto s = static_cast<size_t>(b.at.slot(j));
    widen<F16>(a.k, s * a.ldk + static_cast<size_t>(g * a.head_dim), a.head_dim, b.k + j * b.ldk);
    widen<F16>(a.v, s * a.ldv + static_cast<size_t>(g * a.v_head_dim), a.v_head_dim, b.v + j * b.ldv);
  }
}

/// Scratch of one block of rows, a lane a query. Tiles of W queries.
struct Lanes {
  int32_t tiles, hd, hd_v;
  float* q;         ///< (tiles, hd, W), times scale
  float* p;         ///< (tiles, kSlots, W)
  float* acc;       ///< (tiles, hd_v, W)
  float* m;         ///< (tiles, W) running maximum
  float* l;         ///< (tiles, W) running sum
  int32_t* prefix;  ///< (tiles, W)
  int32_t* bit;     ///< (tiles, W) of the row in a Union's masks; 0: no query
  float* end;
};

Lanes cut(const AttentionArgs& a, int32_t rows, float* p) {
  Lanes s{};
  s.tiles = (rows * (a.n_heads / a.n_kv_heads) + W - 1) / W;
  s.hd = a.head_dim;
  s.hd_v = round_up(a.v_head_dim);
  const auto take = [&](int32_t each) {
    float* at = p;
    p += s.tiles * each * W;
    return at;
  };
  s.q = take(s.hd);
  s.p = take(kSlots);
  s.acc = take(s.hd_v);
  s.m = take(1);
  s.l = take(1);
  s.prefix = reinterpret_cast<int32_t*>(take(1));
  s.bit = reinterpret_cast<int32_t*>(take(1));
  s.end = p;
  return s;
}

void load_queries(const AttentionArgs& a, const RowBlock& rows, int32_t g, Lanes& s) {
  const int32_t rep = a.n_heads / a.n_kv_heads, n = rows.count * rep;
  memset(s.acc, 0, static_cast<size_t>(s.tiles * s.hd_v * W) * sizeof(float));
  memset(s.l, 0, static_cast<size_t>(s.tiles * W) * sizeof(float));
  for (int32_t t = 0; t < s.tiles; ++t) {
    float* q = s.q + t * s.hd * W;
    for (int lane = 0; lane < W; ++lane) {
      const int32_t i = t * W + lane, r = i / rep;
      s.m[i] = kLowest;
      s.prefix[i] = i < n ? rows.prefix[r] : 0;
      s.bit[i] = i < n ? static_cast<int32_t>(1u << r) : 0;
    }
    // W heads at a time, turned so that a lane is a head.
    for (int32_t d = 0; d < s.hd; d += W) {
      const int32_t part = s.hd - d < W ? s.hd - d : W;
      vf v[W] = {};
      for (int lane = 0; lane < W && t * W + lane < n; ++lane) {
        const int32_t i = t * W + lane;
        const float* from =
            a.q + static_cast<size_t>(rows.first + i / rep) * a.ldq + (g * rep + i % rep) * s.hd;
        memcpy(&v[lane], from + d, static_cast<size_t>(part) * sizeof(float));
      }
      transpose(v);
      for (int32_t k = 0; k < part; ++k) store(q + (d + k) * W, v[k] * a.scale);
    }
  }
}

// p[j] = K[j] . q for the block's slots, N tiles from tile t on.
template <int N>
void scores(const Lanes& s, const Block& b, int32_t t) {
  const float* q = s.q + t * s.hd * W;
  for (int32_t j = 0; j < b.at.n; j += kRows) {
    vf sum[kRows][N] = {};
    const float* k = b.k + j * b.ldk;
    for (int32_t d = 0; d < s.hd; ++d) {
      vf x[N];
      REFLEX_UNROLL
      for (int i = 0; i < N; ++i) x[i] = load(q + (i * s.hd + d) * W);
      REFLEX_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const vf kd = splat(k[r * b.ldk + d]);
        REFLEX_UNROLL
        for (int i = 0; i < N; ++i) sum[r][i] = fma(kd, x[i], sum[r][i]);
      }
    }
    REFLEX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      REFLEX_UNROLL
      for (int i = 0; i < N; ++i) store(s.p + ((t + i) * kSlots + j + r) * W, sum[r][i]);
    }
  }
}

// p <- e^(p - m) where the query sees the slot, else 0; m and l go on; returns what acc is to be
// scaled by. Slots of the block are first, first + 1, ... or, with masks, seen by the rows of a mask.
vf soften(const Lanes& s, const Block& b, int32_t t) {
  const vi prefix = load_i(s.prefix + t * W), bit = load_i(s.bit + t * W);
  float* p = s.p + t * kSlots * W;
  const vf m_old = load(s.m + t * W);
  vf m = m_old;
  for (int32_t j = 0; j < b.at.n; ++j) {
    const vi seen =
        b.at.masks ? ((bit & splat_i(static_cast<int32_t>(b.at.masks[j]))) != 0) : (prefix > b.at.first + j);
    const vf x = seen ? load(p + j * W) : splat(-__builtin_inff());
    store(p + j * W, x);
    m = max(x, m);
  }
  const vf keep = exp(m_old - m);
  vf l = load(s.l + t * W) * keep;
  for (int32_t j = 0; j < b.at.n; ++j) {
    const vf e = exp(load(p + j * W) - m);
    store(p + j * W, e);
    l += e;
  }
  store(s.m + t * W, m);
  store(s.l + t * W, l);
  return keep;
}

// acc <- acc * keep + sum_j V[j] p[j], N tiles from tile t on.
template <int N>
void accumulate(const Lanes& s, const Block& b, int32_t t, const vf (&keep)[N]) {
  float* acc = s.acc + t * s.hd_v * W;
  for (int32_t d = 0; d < s.hd_v; d += kRows) {
    vf sum[kRows][N];
    REFLEX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      REFLEX_UNROLL
      for (int i = 0; i < N; ++i) sum[r][i] = load(acc + (i * s.hd_v + d + r) * W) * keep[i];
    }
    for (int32_t j = 0; j < b.at.n; ++j) {
      vf x[N];
      REFLEX_UNROLL
      for (int i = 0; i < N; ++i) x[i] = load(s.p + ((t + i) * kSlots + j) * W);
      REFLEX_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const vf v = splat(b.v[j * b.ldv + d + r]);
        REFLEX_UNROLL
        for (int i = 0; i < N; ++i) sum[r][i] = fma(v, x[i], sum[r][i]);
      }
    }
    REFLEX_UNROLL
    for (int r = 0; r < kRows; ++r) {
      REFLEX_UNROLL
      for (int i = 0; i < N; ++i) store(acc + (i * s.hd_v + d + r) * W, sum[r][i]);
    }
  }
}

void fold(const Lanes& s, const Block& b) {
  int32_t t = 0;
  for (; t + 2 <= s.tiles; t += 2) {
    scores<2>(s, b, t);
    const vf keep[2] = {soften(s, b, t), soften(s, b, t + 1)};
    accumulate<2>(s, b, t, keep);
  }
  if (t == s.tiles) return;
  scores<1>(s, b, t);
  const vf keep[1] = {soften(s, b, t)};
  accumulate<1>(s, b, t, keep);
}

void write_out(const AttentionArgs& a, const RowBlock& rows, int32_t g, const Lanes& s) {
  const int32_t rep = a.n_heads / a.n_kv_heads, n = rows.count * rep;
  for (int32_t t = 0; t < s.tiles; ++t) {
    const vf inverse = 1.0f / load(s.l + t * W);
    const float* acc = s.acc + t * s.hd_v * W;
    for (int32_t d = 0; d < s.hd_v; d += W) {
      vf o[W];
      REFLEX_UNROLL
      for (int i = 0; i < W; ++i) o[i] = load(acc + (d + i) * W) * inverse;
      transpose(o);
      const int32_t part = a.v_head_dim - d < W ? a.v_head_dim - d : W;
      for (int lane = 0; lane < W && t * W + lane < n; ++lane) {
        const int32_t i = t * W + lane;
        float* to =
            a.out + static_cast<size_t>(rows.first + i / rep) * a.ldo + (g * rep + i % rep) * a.v_head_dim;
        memcpy(to + d, &o[lane], static_cast<size_t>(part) * sizeof(float));
      }
    }
  }
}

void attention_many(const AttentionArgs& a, const RowBlock& rows, int32_t g, float* scratch) {
  Lanes s = cut(a, rows.count, scratch);
  Block b = cut_block(a, s.end);
  load_queries(a, rows, g, s);
  for_slots(rows, 0, rows.longest, true, [&](const SlotBlock& slots) {
    b.at = slots;
    if (a.f16)
      load_block<true>(a, g, b);
    else
      load_block<false>(a, g, b);
    if (!slots.masks)
      for (int32_t n = slots.first + kSlots, j = 0; j < kSlots && n + j < rows.longest; ++j)
        fetch_slot(a, g, n + j);
    fold(s, b);
  });
  write_out(a, rows, g, s);
}

/// Rows of one block: as many as fill four tiles with their heads, so that a key brought to f32 serves
/// long enough.
int32_t block_rows(const AttentionArgs& a) {
  const int32_t rep = a.n_heads / a.n_kv_heads, n = 4 * W / rep;
  return n < 1 ? 1 : (n > kMaxRows ? kMaxRows : n);
}

}  // namespace

size_t attention_scratch(const AttentionArgs& a, int32_t q_rows) {
  const int32_t most = block_rows(a);
  const Lanes s = cut(a, q_rows < most ? q_rows : most, nullptr);
  const size_t many = reinterpret_cast<size_t>(cut_block(a, s.end).end) / sizeof(float);
  const int32_t few_rows = q_rows < kMaxRows ? q_rows : kMaxRows;
  const size_t few = few_scratch(a, is_few(a, few_rows) ? few_rows : 1);
  return many > few ? many : few;
}

void attention(const AttentionArgs& a, int32_t q_begin, int32_t q_end, int32_t g_begin, int32_t g_end,
               float* scratch) {
  const int32_t step = block_rows(a);
  for (int32_t first = q_begin; first < q_end; first += step) {
    const RowBlock rows(a, first, q_end - first < step ? q_end - first : step);
    if (is_few(a, rows.count))
      attention_few(a, rows, g_begin, g_end, scratch);
    else
      for (int32_t g = g_begin; g < g_end; ++g) attention_many(a, rows, g, scratch);
  }
}

REFLEX_ISA_END
