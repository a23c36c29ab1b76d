// One value head of a Gated DeltaNet layer (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464).
//
// The recurrence, S the head's state (N, M), g the decay, b the write strength:
//   d_t = b_t (v_t - g_t S_{t-1}^T k_t),   S_t = g_t S_{t-1} + k_t d_t^T,   o_t = S_t^T q_t
//
// A chunk of C rows at once (the paper's section 3.3; Yang et al. 2024, arXiv 2406.06484, for the UT
// transform). With c_t = g_1 .. g_t and D_ts = c_t / c_s for s <= t, else 0, unrolling gives
//   S_t = c_t S_0 + sum_{s <= t} D_ts k_s d_s^T
// and put into the first line, for all rows of the chunk together,
//   (I + L) d = diag(b) (V - diag(c) K S_0),    L_ts = b_t D_ts (k_t . k_s) for s < t, else 0
//   O = diag(c) Q S_0 + (D * Q K^T) d,          S_C = c_C S_0 + (diag(D_C.) K)^T d
// L is strictly lower triangular: d comes out by forward substitution. The WY form in the paper inverts
// I + L first, since its chunks run at once and S_0 comes later; here a head's chunks follow one
// another, S_0 is there, and the product with the inverse is saved. The c_t are kept as logarithms, summed
// in f64, and only quotients c_t / c_s <= 1 are ever formed, so that nothing over- or underflows.
//
// Chain rows go by chunks, or one by one when they are few (decoding); rows that fork go one by one,
// each from its parent's state.
#include "backend/cpu/delta_kernels.h"
#include "backend/cpu/kernels/simd.h"

REFLEX_ISA_BEGIN

namespace {

constexpr int32_t kChunk = 64;         // rows of a chunk, and the stride of its square matrices
constexpr int32_t kMinChunkRows = 12;  // fewer rows are cheaper one by one
constexpr int32_t kSolveRows = 16;     // rows of the substitution done by dot products alone

size_t at(int32_t i, int32_t stride) { return static_cast<size_t>(i) * static_cast<size_t>(stride); }

// C (m, n) += A (m, k) B (k, n), by strides.
template <int RowCount, int VectorCount>
void product_block(int32_t k, const float* a, int32_t lda, const float* b, int32_t ldb, float* c,
                   int32_t ldc) {
  vf acc[RowCount][VectorCount];
  for (int r = 0; r < RowCount; ++r)
    for (int v = 0; v < VectorCount; ++v) acc[r][v] = load(c + at(r, ldc) + v * W);
  for (int32_t i = 0; i < k; ++i) {
    vf row[VectorCount];
    for (int v = 0; v < VectorCount; ++v) row[v] = load(b + at(i, ldb) + v * W);
    for (int r = 0; r < RowCount; ++r) {
      const vf x = splat(a[at(r, lda) + static_cast<size_t>(i)]);
      for (int v = 0; v < VectorCount; ++v) acc[r][v] = fma(x, row[v], acc[r][v]);
    }
  }
  for (int r = 0; r < RowCount; ++r)
    for (int v = 0; v < VectorCount; ++v) store(c + at(r, ldc) + v * W, acc[r][v]);
}

template <int RowCount>
void product_rows(int32_t n, int32_t k, const float* a, int32_t lda, const float* b, int32_t ldb, float* c,
                  int32_t ldc) {
  int32_t j = 0;
  for (; j + 4 * W <= n; j += 4 * W) product_block<RowCount, 4>(k, a, lda, b + j, ldb, c + j, ldc);
  for (; j + W <= n; j += W) product_block<RowCount, 1>(k, a, lda, b + j, ldb, c + j, ldc);
  for (; j < n; ++j)
    for (int r = 0; r < RowCount; ++r) {
      float y = c[at(r, ldc) + static_cast<size_t>(j)];
      for (int32_t i = 0; i < k; ++i)
        y += a[at(r, lda) + static_cast<size_t>(i)] * b[at(i, ldb) + static_cast<size_t>(j)];
      c[at(r, ldc) + static_cast<size_t>(j)] = y;
    }
}

void product(int32_t m, int32_t n, int32_t k, const float* a, int32_t lda, const float* b, int32_t ldb,
             float* c, int32_t ldc) {
  int32_t r = 0;
  for (; r + 4 <= m; r += 4) product_rows<4>(n, k, a + at(r, lda), lda, b, ldb, c + at(r, ldc), ldc);
  for (; r < m; ++r) product_rows<1>(n, k, a + at(r, lda), lda, b, ldb, c + at(r, ldc), ldc);
}

float dot(const float* a, const float* b, int32_t n) {
  vf acc{};
  int32_t i = 0;
  for (; i + W <= n; i += W) acc = fma(load(a + i), load(b + i), acc);
  float s = sum(acc);
  for (; i < n; ++i) s += a[i] * b[i];
  return s;
}

void zero(float* x, size_t n) { memset(x, 0, n * sizeof(float)); }

float exp_one(float x) { return exp(splat(x))[0]; }

// y = x * sigmoid(x), in place or not.
void silu(const float* x, int32_t n, float* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) {
    const vf v = load(x + i);
    store(y + i, v / (1.0f + exp(-v)));
  }
  for (; i < n; ++i) y[i] = x[i] / (1.0f + exp_one(-x[i]));
}

// Pieces of this thread's scratch, in floats.
struct Work {
  float* qk;      // (R, 2, N): query, key; convolved, normed, queries times 1/sqrt(N)
  float* v;       // (R, M): value, then d
  float* gate;    // (R): log of the decay
  float* beta;    // (R)
  float* taps;    // (T, 2 N + M): this head's kernels, transposed
  float* key_t;   // (N, kChunk)
  float* lower;   // (kChunk, kChunk): -L
  float* inner;   // (kChunk, kChunk): D * Q K^T
  float* read;    // (kChunk, M): K S_0
  float* out;     // (kChunk, M)
  float* ratio;   // (kChunk): a row of D
  float* kept;    // (n_kept, N, M): states of rows that others fork from
  size_t floats;  // in all
};

Work lay_out(const DeltaArgs& a, float* base) {
  Work w{};
  size_t used = 0;
  const auto take = [&](size_t n) {
    float* p = base ? base + used : nullptr;
    used += (n + 15) / 16 * 16;
    return p;
  };
  const auto rows = static_cast<size_t>(a.n_rows), n = static_cast<size_t>(a.key_dim),
             m = static_cast<size_t>(a.value_dim), c = static_cast<size_t>(kChunk);
  w.qk = take(rows * 2 * n);
  w.v = take(rows * m);
  w.gate = take(rows);
  w.beta = take(rows);
  w.taps = take(static_cast<size_t>(a.n_taps) * (2 * n + m));
  w.key_t = take(n * c);
  w.lower = take(c * c);
  w.inner = take(c * c);
  w.read = take(c * m);
  w.out = take(c * m);
  w.ratio = take(c);
  w.kept = take(static_cast<size_t>(a.n_kept) * n * m);
  w.floats = used;
  return w;
}

// The head's three runs of channels: query, key, value.
struct Channels {
  int32_t first[3], count[3];
};

Channels channels_of(const DeltaArgs& a, int32_t h) {
  const int32_t key_head = a.grouped ? h / (a.n_value_heads / a.n_key_heads) : h % a.n_key_heads;
  const int32_t keys = a.n_key_heads * a.key_dim;
  return {{key_head * a.key_dim, keys + key_head * a.key_dim, 2 * keys + h * a.value_dim},
          {a.key_dim, a.key_dim, a.value_dim}};
}

// The convolution's input that lies `back` rows up from row r: a row of the pass, or of the history.
const float* tap_row(const DeltaArgs& a, int32_t r, int32_t back, int32_t n_channels) {
  const int32_t s = a.sources[at(r, a.source_stride) + static_cast<size_t>(back)];
  return s >= 0 ? a.qkv + at(s, n_channels) : a.history + at(a.n_taps - 1 + s, n_channels);
}

// y[c] = silu(sum_j kernel[c, j] * input[c] of the row T - 1 - j rows up)
void convolve(const DeltaArgs& a, const Channels& ch, const Work& w) {
  const int32_t n_channels = 2 * a.n_key_heads * a.key_dim + a.n_value_heads * a.value_dim;
  const int32_t own = 2 * a.key_dim + a.value_dim;
  int32_t column = 0;
  for (int part = 0; part < 3; column += ch.count[part++])
    for (int32_t c = 0; c < ch.count[part]; ++c)
      for (int32_t j = 0; j < a.n_taps; ++j)
        w.taps[at(j, own) + static_cast<size_t>(column + c)] =
            a.conv[at(ch.first[part] + c, a.n_taps) + static_cast<size_t>(j)];
  for (int32_t r = 0; r < a.n_rows; ++r) {
    float* to[3] = {w.qk + at(r, 2 * a.key_dim), w.qk + at(r, 2 * a.key_dim) + a.key_dim,
                    w.v + at(r, a.value_dim)};
    column = 0;
    for (int part = 0; part < 3; column += ch.count[part++]) {
      zero(to[part], static_cast<size_t>(ch.count[part]));
      for (int32_t j = 0; j < a.n_taps; ++j) {
        const float* x = tap_row(a, r, a.n_taps - 1 - j, n_channels) + ch.first[part];
        const float* kernel = w.taps + at(j, own) + column;
        float* y = to[part];
        for (int32_t c = 0; c < ch.count[part]; ++c) y[c] += kernel[c] * x[c];
      }
      silu(to[part], ch.count[part], to[part]);
    }
  }
}

void l2_norm(float* x, int32_t n, float eps, float times) {
  const float scale = times / __builtin_sqrtf(dot(x, x, n) + eps);
  for (int32_t i = 0; i < n; ++i) x[i] *= scale;
}

void gates(const DeltaArgs& a, int32_t h, const Work& w) {
  for (int32_t r = 0; r < a.n_rows; ++r) {
    const size_t i = at(r, a.n_value_heads) + static_cast<size_t>(h);
    const float x = a.alpha[i] + a.dt_bias[h];
    const float softplus = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));  // as torch: linear above 20
    w.gate[r] = a.decay[h] * softplus;
    w.beta[r] = 1.0f / (1.0f + __builtin_expf(-a.beta[i]));
  }
}

// y = sigmoid(x)
void sigmoid(const float* x, int32_t n, float* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, 1.0f / (1.0f + exp(-load(x + i))));
  for (; i < n; ++i) y[i] = 1.0f / (1.0f + exp_one(-x[i]));
}

// out = rms_norm(o) * gate(z)
void emit(const DeltaArgs& a, int32_t h, int32_t r, float* o) {
  if (!a.out) return;
  const int32_t row = a.out_row ? a.out_row[r] : r, m = a.value_dim;
  if (row < 0) return;
  const size_t place = at(row, a.n_value_heads * m) + at(h, m);
  const float scale = 1.0f / __builtin_sqrtf(dot(o, o, m) / static_cast<float>(m) + a.norm_eps);
  float* y = a.out + place;
  (a.sigmoid_gate ? sigmoid : silu)(a.z + place, m, y);
  for (int32_t i = 0; i < m; ++i) y[i] *= o[i] * scale * a.norm[i];
}

// ---- one row ------------------------------------------------------------------------------

// Columns [j, j + V * W) of the state: read once for the output, written where it is kept.
template <int VectorCount>
void step_columns(const float* q, const float* k, const float* d, float g, int32_t n, int32_t m,
                  const float* from, float* to, float* o) {
  vf acc[VectorCount] = {}, dv[VectorCount];
  for (int v = 0; v < VectorCount; ++v) dv[v] = load(d + v * W);
  const vf gv = splat(g);
  for (int32_t i = 0; i < n; ++i) {
    const vf kv = splat(k[i]), qv = splat(q[i]);
    for (int v = 0; v < VectorCount; ++v) {
      const vf s = fma(kv, dv[v], gv * load(from + at(i, m) + v * W));
      if (to) store(to + at(i, m) + v * W, s);
      acc[v] = fma(qv, s, acc[v]);
    }
  }
  for (int v = 0; v < VectorCount; ++v) store(o + v * W, acc[v]);
}

// The recurrence once: `from` and `to` may be the same state; to nullptr: only the output o (M).
void step(const DeltaArgs& a, const Work& w, int32_t r, const float* from, float* to, float* o) {
  const int32_t n = a.key_dim, m = a.value_dim;
  const float* q = w.qk + at(r, 2 * n);
  const float* k = q + n;
  float* d = w.v + at(r, m);
  const float g = __builtin_expf(w.gate[r]);
  zero(o, static_cast<size_t>(m));
  product(1, m, n, k, n, from, m, o, m);
  for (int32_t j = 0; j < m; ++j) d[j] = w.beta[r] * (d[j] - g * o[j]);
  int32_t j = 0;
  for (; j + 2 * W <= m; j += 2 * W) step_columns<2>(q, k, d + j, g, n, m, from + j, to ? to + j : to, o + j);
  for (; j + W <= m; j += W) step_columns<1>(q, k, d + j, g, n, m, from + j, to ? to + j : to, o + j);
  for (; j < m; ++j) {
    o[j] = 0;
    for (int32_t i = 0; i < n; ++i) {
      const size_t e = at(i, m) + static_cast<size_t>(j);
      const float s = g * from[e] + k[i] * d[j];
      if (to) to[e] = s;
      o[j] += q[i] * s;
    }
  }
}

// ---- a chunk ------------------------------------------------------------------------------

// For row t of the chunk: ratio[s] = c_t / c_s, s <= t, from the logarithms.
void decay_ratios(const double* log_c, int32_t t, float* ratio) {
  for (int32_t s = 0; s < kChunk; ++s) ratio[s] = s <= t ? static_cast<float>(log_c[t] - log_c[s]) : 0.0f;
  for (int32_t s = 0; s < kChunk; s += W) store(ratio + s, exp(load(ratio + s)));
}

// w.lower and w.inner of rows [begin, begin + count); w.key_t too.
void pair_matrices(const DeltaArgs& a, const Work& w, int32_t begin, int32_t count, const double* log_c) {
  const int32_t n = a.key_dim;
  const float* q = w.qk + at(begin, 2 * n);
  const float* k = q + n;
  zero(w.key_t, at(n, kChunk));
  for (int32_t s = 0; s < count; ++s)
    for (int32_t i = 0; i < n; ++i)
      w.key_t[at(i, kChunk) + static_cast<size_t>(s)] = k[at(s, 2 * n) + static_cast<size_t>(i)];
  zero(w.lower, at(kChunk, kChunk));
  zero(w.inner, at(kChunk, kChunk));
  for (int32_t t = 0; t < count; t += 4) {  // of the keys only those up to the block's last row
    const int32_t rows = count - t < 4 ? count - t : 4, columns = (t + rows + W - 1) / W * W;
    product(rows, columns, n, k + at(t, 2 * n), 2 * n, w.key_t, kChunk, w.lower + at(t, kChunk), kChunk);
    product(rows, columns, n, q + at(t, 2 * n), 2 * n, w.key_t, kChunk, w.inner + at(t, kChunk), kChunk);
  }
  for (int32_t t = 0; t < count; ++t) {
    decay_ratios(log_c, t, w.ratio);
    float *lower = w.lower + at(t, kChunk), *inner = w.inner + at(t, kChunk);
    const float b = -w.beta[begin + t];
    for (int32_t s = 0; s < kChunk; ++s) {
      lower[s] = s < t ? b * w.ratio[s] * lower[s] : 0.0f;
      inner[s] = s <= t ? w.ratio[s] * inner[s] : 0.0f;
    }
  }
}

// d (count, M) holds the right side; becomes the solution of (I + L) d = right side.
void substitute(const float* minus_l, float* d, int32_t count, int32_t m) {
  for (int32_t t = 0; t < count; t += kSolveRows) {
    const int32_t end = t + kSolveRows < count ? t + kSolveRows : count;
    product(end - t, m, t, minus_l + at(t, kChunk), kChunk, d, m, d + at(t, m), m);
    for (int32_t r = t + 1; r < end; ++r)
      product(1, m, r - t, minus_l + at(r, kChunk) + t, kChunk, d + at(t, m), m, d + at(r, m), m);
  }
}

void chunk(const DeltaArgs& a, int32_t h, const Work& w, int32_t begin, int32_t count, float* state) {
  const int32_t n = a.key_dim, m = a.value_dim;
  const float* q = w.qk + at(begin, 2 * n);
  const float* k = q + n;
  float* d = w.v + at(begin, m);
  double log_c[kChunk];
  double total = 0;
  for (int32_t t = 0; t < count; ++t) log_c[t] = total += static_cast<double>(w.gate[begin + t]);
  for (int32_t t = count; t < kChunk; ++t) log_c[t] = total;
  pair_matrices(a, w, begin, count, log_c);
  zero(w.read, at(count, m));
  product(count, m, n, k, 2 * n, state, m, w.read, m);
  zero(w.out, at(count, m));
  product(count, m, n, q, 2 * n, state, m, w.out, m);
  for (int32_t t = 0; t < count; ++t) {
    const float c = __builtin_expf(static_cast<float>(log_c[t])), b = w.beta[begin + t];
    float *dt = d + at(t, m), *read = w.read + at(t, m), *o = w.out + at(t, m);
    for (int32_t j = 0; j < m; ++j) dt[j] = b * (dt[j] - c * read[j]);
    for (int32_t j = 0; j < m; ++j) o[j] *= c;
  }
  substitute(w.lower, d, count, m);
  product(count, m, count, w.inner, kChunk, d, m, w.out, m);
  for (int32_t t = 0; t < count; ++t) emit(a, h, begin + t, w.out + at(t, m));
  decay_ratios(log_c, count - 1, w.ratio);
  const float c = __builtin_expf(static_cast<float>(total));
  for (int32_t i = 0; i < n; ++i) {
    float *s = state + at(i, m), *column = w.key_t + at(i, kChunk);
    for (int32_t j = 0; j < m; ++j) s[j] *= c;
    for (int32_t t = 0; t < count; ++t) column[t] *= w.ratio[t];
  }
  product(n, m, count, w.key_t, kChunk, d, m, state, m);
}

size_t delta_scratch(const DeltaArgs& a) { return lay_out(a, nullptr).floats; }

void delta_head(const DeltaArgs& a, int32_t h, float* scratch) {
  const Work w = lay_out(a, scratch);
  convolve(a, channels_of(a, h), w);
  gates(a, h, w);
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim));
  for (int32_t r = 0; r < a.n_rows; ++r) {
    float* q = w.qk + at(r, 2 * a.key_dim);
    l2_norm(q, a.key_dim, a.qk_eps, query_scale);
    l2_norm(q + a.key_dim, a.key_dim, a.qk_eps, 1.0f);
  }
  const size_t size = at(a.key_dim, a.value_dim);
  float* state = a.state + static_cast<size_t>(h) * size;
  int32_t r = 0;
  if (a.n_chain >= kMinChunkRows)
    for (; r < a.n_chain; r += kChunk)
      chunk(a, h, w, r, a.n_chain - r < kChunk ? a.n_chain - r : kChunk, state);
  for (r = r < a.n_chain ? r : a.n_chain; r < a.n_chain; ++r) {
    step(a, w, r, state, state, w.out);
    emit(a, h, r, w.out);
  }
  for (; r < a.n_rows; ++r) {
    const DeltaFork& f = a.forks[r - a.n_chain];
    step(a, w, r, f.from < 0 ? state : w.kept + static_cast<size_t>(f.from) * size,
         f.to < 0 ? nullptr : w.kept + static_cast<size_t>(f.to) * size, w.out);
    emit(a, h, r, w.out);
  }
}

}  // namespace

#define REFLEX_NAME_(x) #x
#define REFLEX_NAME(x) REFLEX_NAME_(x)

const DeltaKernels& delta_kernels() {
  static constexpr DeltaKernels table = {
      .name = REFLEX_NAME(REFLEX_ISA), .scratch = delta_scratch, .head = delta_head};
  return table;
}

REFLEX_ISA_END
