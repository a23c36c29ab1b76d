// o[r, h] = sum_s softmax_s(scale * q[r, h] . K[s, g]) V[s, g], h in the group of g
//
// Slots are taken in blocks of kSlots with a running maximum (Milakov & Gimelshein, "Online
// normalizer calculation for softmax", 2018). A block of K and V is brought to f32 once, K
// transposed so that a lane is a slot, and shared by all query rows and heads of the group. What
// a row sees past its prefix (its branch of a tree) is gathered into such a block of its own.
#include "backend/cpu/kernels/attention.h"

#include "backend/cpu/kernels/simd.h"

REFLEX_ISA_BEGIN

namespace {

constexpr int32_t kSlots = 64;         ///< slots of a block
constexpr int32_t kVecs = kSlots / W;  ///< vectors of scores of a block

int32_t round_up(int32_t n) { return (n + W - 1) / W * W; }

/// The scratch of one call, cut from the caller's memory.
struct Work {
  int32_t n_q;       ///< queries: rows * heads of the group
  int32_t hd, hd_v;  ///< head sizes; hd_v rounded up to W
  float* kt;         ///< (hd, kSlots)
  float* v;          ///< (kSlots, hd_v)
  float* q;          ///< (n_q, hd), times scale
  float* acc;        ///< (n_q, hd_v)
  float* m;          ///< (n_q) running maximum
  float* l;          ///< (n_q) running sum
};

template <bool F16>
float element(const uint8_t* base, size_t i) {
  if (F16) {
    uint16_t h[W] = {};
    memcpy(h, base + i * 2, 2);
    return load_f16(h)[0];
  }
  float f;
  memcpy(&f, base + i * 4, 4);
  return f;
}

template <bool F16>
vf load_state(const uint8_t* base, size_t i) {
  if (F16) return load_f16(reinterpret_cast<const uint16_t*>(base) + i);
  return load(reinterpret_cast<const float*>(base) + i);
}

/// One row of n state values at element `at`, as f32.
template <bool F16>
void widen(const uint8_t* base, size_t at, int32_t n, float* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, load_state<F16>(base, at + static_cast<size_t>(i)));
  for (; i < n; ++i) y[i] = element<F16>(base, at + static_cast<size_t>(i));
}

/// kt, v <- n slots: slot_of[j], or first + j. Columns up to kSlots are zeroed.
template <bool F16>
void load_block(const AttentionArgs& a, int32_t g, int32_t first, const int32_t* slot_of, int32_t n,
                Work& w) {
  float row[W];
  if (n < kSlots) memset(w.kt, 0, static_cast<size_t>(w.hd) * kSlots * sizeof(float));
  for (int32_t j = 0; j < n; ++j) {
    const auto s = static_cast<size_t>(slot_of ? slot_of[j] : first + j);
    const size_t k_at = s * a.ldk + static_cast<size_t>(g) * static_cast<size_t>(a.head_dim);
    const size_t v_at = s * a.ldv + static_cast<size_t>(g) * static_cast<size_t>(a.v_head_dim);
    for (int32_t d = 0; d < w.hd; d += W) {
      const int32_t part = w.hd - d < W ? w.hd - d : W;
      widen<F16>(a.k, k_at + static_cast<size_t>(d), part, row);
      for (int32_t i = 0; i < part; ++i) w.kt[(d + i) * kSlots + j] = row[i];
    }
    widen<F16>(a.v, v_at, a.v_head_dim, w.v + j * w.hd_v);
  }
}

/// Folds the block's first n slots into query i's running softmax.
void fold(const Work& w, int32_t i, int32_t n) {
  vf s[kVecs] = {};
  const float* q = w.q + i * w.hd;
  for (int32_t d = 0; d < w.hd; ++d) {
    const vf qd = splat(q[d]);
    for (int32_t k = 0; k < kVecs; ++k) s[k] = fma(qd, load(w.kt + d * kSlots + k * W), s[k]);
  }
  float p[kSlots];
  for (int32_t k = 0; k < kVecs; ++k) store(p + k * W, s[k]);
  for (int32_t j = n; j < kSlots; ++j) p[j] = -__builtin_inff();
  vf top = load(p);
  for (int32_t k = 1; k < kVecs; ++k) top = max(top, load(p + k * W));
  const float m_new = __builtin_fmaxf(w.m[i], max_lane(top));
  vf total{};
  for (int32_t k = 0; k < kVecs; ++k) {
    const vf e = exp(load(p + k * W) - m_new);
    total += e;
    store(p + k * W, e);
  }
  float old[W];
  store(old, exp(splat(w.m[i] - m_new)));
  const float keep = w.l[i] == 0 ? 0 : old[0];
  w.l[i] = w.l[i] * keep + sum(total);
  w.m[i] = m_new;
  float* acc = w.acc + i * w.hd_v;
  for (int32_t d = 0; d < w.hd_v; d += W) {
    vf o = load(acc + d) * keep;
    for (int32_t j = 0; j < n; ++j) o = fma(splat(p[j]), load(w.v + j * w.hd_v + d), o);
    store(acc + d, o);
  }
}

Work cut(const AttentionArgs& a, int32_t rows, float* scratch) {
  Work w{};
  w.n_q = rows * (a.n_heads / a.n_kv_heads);
  w.hd = a.head_dim;
  w.hd_v = round_up(a.v_head_dim);
  w.kt = scratch;
  w.v = w.kt + w.hd * kSlots;
  w.acc = w.v + kSlots * w.hd_v;
  w.q = w.acc + w.n_q * w.hd_v;
  w.m = w.q + w.n_q * w.hd;
  w.l = w.m + w.n_q;
  return w;
}

template <bool F16>
void run(const AttentionArgs& a, int32_t q_begin, int32_t q_end, int32_t g, float* scratch) {
  const int32_t rows = q_end - q_begin, rep = a.n_heads / a.n_kv_heads;
  Work w = cut(a, rows, scratch);
  const auto pass_row = [&](int32_t i) { return a.row_of ? a.row_of[q_begin + i] : q_begin + i; };
  memset(w.v, 0, static_cast<size_t>(kSlots * w.hd_v + w.n_q * w.hd_v) * sizeof(float));
  int32_t longest = 0;
  for (int32_t i = 0; i < rows; ++i) {
    const int32_t p = a.prefix[pass_row(i)];
    longest = p > longest ? p : longest;
    for (int32_t h = 0; h < rep; ++h) {
      const float* q = a.q + static_cast<size_t>(q_begin + i) * a.ldq + (g * rep + h) * w.hd;
      for (int32_t d = 0; d < w.hd; ++d) w.q[(i * rep + h) * w.hd + d] = q[d] * a.scale;
      w.m[i * rep + h] = -__builtin_inff();
      w.l[i * rep + h] = 0;
    }
  }
  for (int32_t s = 0; s < longest; s += kSlots) {
    load_block<F16>(a, g, s, nullptr, longest - s < kSlots ? longest - s : kSlots, w);
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t left = a.prefix[pass_row(i)] - s, n = left < kSlots ? left : kSlots;
      for (int32_t h = 0; h < rep && n > 0; ++h) fold(w, i * rep + h, n);
    }
  }
  for (int32_t i = 0; i < rows; ++i) {
    const int32_t end = a.extra_begin[pass_row(i) + 1];
    for (int32_t e = a.extra_begin[pass_row(i)]; e < end; e += kSlots) {
      const int32_t n = end - e < kSlots ? end - e : kSlots;
      load_block<F16>(a, g, 0, a.extra + e, n, w);
      for (int32_t h = 0; h < rep; ++h) fold(w, i * rep + h, n);
    }
  }
  for (int32_t i = 0; i < rows; ++i)
    for (int32_t h = 0; h < rep; ++h) {
      const float* acc = w.acc + (i * rep + h) * w.hd_v;
      const float inv = 1.0f / w.l[i * rep + h];
      float* o = a.out + static_cast<size_t>(q_begin + i) * a.ldo + (g * rep + h) * a.v_head_dim;
      for (int32_t d = 0; d < a.v_head_dim; ++d) o[d] = acc[d] * inv;
    }
}

}  // namespace

size_t attention_scratch(const AttentionArgs& a, int32_t q_rows) {
  const Work w = cut(a, q_rows, nullptr);
  return static_cast<size_t>(w.l + w.n_q - static_cast<float*>(nullptr));
}

void attention(const AttentionArgs& a, int32_t q_begin, int32_t q_end, int32_t kv_head, float* scratch) {
  if (a.f16)
    run<true>(a, q_begin, q_end, kv_head, scratch);
  else
    run<false>(a, q_begin, q_end, kv_head, scratch);
}

REFLEX_ISA_END
