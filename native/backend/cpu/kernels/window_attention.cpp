// Attention of a few heads to listed rows, each of which is key and value at once, with one more logit in the
// softmax. A block of rows is brought to f32 once for all heads; first all scores, then the softmax, then the
// sums: the order depends on the list alone.
#include "backend/cpu/kernels/simd.h"
#include "backend/cpu/window_kernels.h"

REFLEX_ISA_BEGIN

namespace {

constexpr int32_t kBlock = 16;  ///< rows brought to f32 at once
constexpr int32_t kGroup = 4;   ///< of them, against a head at once
static_assert(kBlock % kGroup == 0);

int32_t round_up(int32_t n) { return (n + W - 1) / W * W; }

/// Row `at` of the state as f32, zero up to a whole vector.
void widen(const WindowArgs& a, int32_t at, float* y) {
  const size_t first = static_cast<size_t>(at) * static_cast<size_t>(a.head_dim);
  if (!a.f16) {
    memcpy(y, reinterpret_cast<const float*>(a.state) + first,
           static_cast<size_t>(a.head_dim) * sizeof(float));
  } else {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(a.state) + first;
    int32_t d = 0;
    for (; d + W <= a.head_dim; d += W) store(y + d, load_f16(x + d));
    if (d < a.head_dim) {
      uint16_t part[W] = {};
      memcpy(part, x + d, static_cast<size_t>(a.head_dim - d) * sizeof(uint16_t));
      store(y + d, load_f16(part));
    }
  }
  for (int32_t d = a.head_dim; d < round_up(a.head_dim); ++d) y[d] = 0;
}

/// p[j] = q . x[j] for kGroup rows ld apart.
void scores(const float* q, const float* x, int32_t ld, float* p) {
  vf s[kGroup] = {};
  for (int32_t d = 0; d < ld; d += W) {
    const vf qd = load(q + d);
    REFLEX_UNROLL
    for (int j = 0; j < kGroup; ++j) s[j] = fma(qd, load(x + j * ld + d), s[j]);
  }
  REFLEX_UNROLL
  for (int j = 0; j < kGroup; ++j) p[j] = sum(s[j]);
}

/// out += sum_j p[j] x[j] for kGroup rows ld apart.
void accumulate(const float* p, const float* x, int32_t ld, float* out) {
  vf w[kGroup];
  REFLEX_UNROLL
  for (int j = 0; j < kGroup; ++j) w[j] = splat(p[j]);
  for (int32_t d = 0; d < ld; d += W) {
    vf y = load(out + d);
    REFLEX_UNROLL
    for (int j = 0; j < kGroup; ++j) y = fma(w[j], load(x + j * ld + d), y);
    store(out + d, y);
  }
}

/// p (n, then room up to ld_p) <- softmax of p and the sink, zero behind n.
void soften(float* p, int32_t n, int32_t ld_p, float sink) {
  float top = sink;
  for (int32_t j = 0; j < n; ++j) top = p[j] > top ? p[j] : top;
  for (int32_t j = n; j < ld_p; ++j) p[j] = -__builtin_inff();
  vf total = {};
  for (int32_t j = 0; j < ld_p; j += W) {
    const vf e = exp(load(p + j) - top);
    store(p + j, e);
    total += e;
  }
  const float inverse = 1.0f / (sum(total) + exp(splat(sink - top))[0]);
  for (int32_t j = 0; j < ld_p; j += W) store(p + j, load(p + j) * inverse);
}

/// Rows of the list up to a whole block, and up to a whole vector.
int32_t padded(int32_t n) { return round_up((n + kBlock - 1) / kBlock * kBlock); }

struct Work {
  float* q;    ///< (H, ld) scaled
  float* acc;  ///< (H, ld)
  float* p;    ///< (H, padded(n))
  float* x;    ///< (kBlock, ld)
  float* end;
};

Work cut(const WindowArgs& a, float* scratch) {
  const size_t heads = static_cast<size_t>(a.n_heads), ld = static_cast<size_t>(round_up(a.head_dim));
  Work w{};
  w.q = scratch;
  w.acc = w.q + heads * ld;
  w.p = w.acc + heads * ld;
  w.x = w.p + heads * static_cast<size_t>(padded(a.n));
  w.end = w.x + kBlock * ld;
  return w;
}

size_t window_scratch(const WindowArgs& a) {
  return reinterpret_cast<size_t>(cut(a, nullptr).end) / sizeof(float);
}

/// Calls f(first) on each block of listed rows, which lie in w.x by then; past the end: zeros.
template <class F>
void for_blocks(const WindowArgs& a, const Work& w, int32_t ld, F f) {
  for (int32_t first = 0; first < a.n; first += kBlock) {
    for (int32_t j = 0; j < kBlock; ++j) {
      if (first + j < a.n)
        widen(a, a.at[first + j], w.x + j * ld);
      else
        memset(w.x + j * ld, 0, static_cast<size_t>(ld) * sizeof(float));
    }
    f(first);
  }
}

void window_attention(const WindowArgs& a, float* scratch) {
  const Work w = cut(a, scratch);
  const int32_t ld = round_up(a.head_dim), ld_p = padded(a.n);
  for (int32_t h = 0; h < a.n_heads; ++h)
    for (int32_t d = 0; d < ld; ++d)
      w.q[h * ld + d] = d < a.head_dim ? a.q[h * a.head_dim + d] * a.scale : 0.0f;
  memset(w.acc, 0, static_cast<size_t>(a.n_heads * ld) * sizeof(float));
  for_blocks(a, w, ld, [&](int32_t first) {
    for (int32_t h = 0; h < a.n_heads; ++h)
      for (int32_t j = 0; j < kBlock; j += kGroup)
        scores(w.q + h * ld, w.x + j * ld, ld, w.p + h * ld_p + first + j);
  });
  for (int32_t h = 0; h < a.n_heads; ++h) soften(w.p + h * ld_p, a.n, ld_p, a.sinks[h]);
  for_blocks(a, w, ld, [&](int32_t first) {
    for (int32_t h = 0; h < a.n_heads; ++h)
      for (int32_t j = 0; j < kBlock; j += kGroup)
        accumulate(w.p + h * ld_p + first + j, w.x + j * ld, ld, w.acc + h * ld);
  });
  for (int32_t h = 0; h < a.n_heads; ++h)
    memcpy(a.out + h * a.head_dim, w.acc + h * ld, static_cast<size_t>(a.head_dim) * sizeof(float));
}

}  // namespace

const WindowKernels& window_kernels() {
  static constexpr WindowKernels table = {.scratch = window_scratch, .attention = window_attention};
  return table;
}

REFLEX_ISA_END
