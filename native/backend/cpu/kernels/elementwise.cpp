// Row-wise steps: norm, rotary embedding, add, SwiGLU, f16 store. No threads, no buffers.
#include "backend/cpu/kernels/elementwise.h"

#include "backend/cpu/kernels/simd.h"

REFLEX_ISA_BEGIN

namespace {

// Sum of squares of n values; four accumulators, added as a tree.
float sum_of_squares(const float* x, int32_t n) {
  vf a[4] = {};
  int32_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) {
      const vf v = load(x + i + k * W);
      a[k] = fma(v, v, a[k]);
    }
  for (; i + W <= n; i += W) {
    const vf v = load(x + i);
    a[0] = fma(v, v, a[0]);
  }
  float s = sum((a[0] + a[1]) + (a[2] + a[3]));
  for (; i < n; ++i) s += x[i] * x[i];
  return s;
}

// The tail of n values past the last whole vector, as one vector padded with zeros.
vf load_part(const float* p, int32_t n) {
  float t[W] = {};
  memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
  return load(t);
}
void store_part(float* p, vf v, int32_t n) {
  float t[W];
  store(t, v);
  memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
}

vf silu(vf x) { return x / (1.0f + exp(-x)); }

}  // namespace

// y = x * rsqrt(mean(x^2) + eps) * w
void rms_norm_rows(const float* x, const float* w, float eps, int32_t group, int32_t n, int32_t rows,
                   float* y) {
  for (int32_t g = 0; g < n * rows; g += group) {
    const float mean = sum_of_squares(x + g, group) / static_cast<float>(group);
    const float s = 1.0f / __builtin_sqrtf(mean + eps);
    int32_t i = 0;
    for (; i + W <= group; i += W) store(y + g + i, load(x + g + i) * s * load(w + i));
    for (; i < group; ++i) y[g + i] = x[g + i] * s * w[i];
  }
}

// (a, b) <- (a cos - b sin, b cos + a sin) for each pair of a head's first n_rot values
void rope(float* x, const float* cs, int32_t n_heads, int32_t head_dim, int32_t n_rot, bool adjacent) {
  const int32_t half = n_rot / 2;
  const float* c = cs;
  const float* s = cs + half;
  for (int32_t h = 0; h < n_heads; ++h, x += head_dim) {
    if (adjacent) {
      for (int32_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c[i] - b * s[i];
        x[2 * i + 1] = b * c[i] + a * s[i];
      }
      continue;
    }
    int32_t i = 0;
    for (; i + W <= half; i += W) {
      const vf a = load(x + i), b = load(x + half + i), ci = load(c + i), si = load(s + i);
      store(x + i, a * ci - b * si);
      store(x + half + i, b * ci + a * si);
    }
    for (; i < half; ++i) {
      const float a = x[i], b = x[half + i];
      x[i] = a * c[i] - b * s[i];
      x[half + i] = b * c[i] + a * s[i];
    }
  }
}

void add(const float* a, const float* b, int32_t n, float* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, load(a + i) + load(b + i));
  for (; i < n; ++i) y[i] = a[i] + b[i];
}

// y = gate / (1 + e^-gate) * up
void swiglu(const float* gate, const float* up, int32_t n, float* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, silu(load(gate + i)) * load(up + i));
  if (i < n) store_part(y + i, silu(load_part(gate + i, n - i)) * load_part(up + i, n - i), n - i);
}

void to_f16(const float* x, int32_t n, uint16_t* y) {
  int32_t i = 0;
  for (; i + W <= n; i += W) store_f16(y + i, load(x + i));
  if (i < n) {
    uint16_t t[W];
    store_f16(t, load_part(x + i, n - i));
    memcpy(y + i, t, static_cast<size_t>(n - i) * sizeof(uint16_t));
  }
}

float max_value(const float* x, int32_t n) {
  vf m = splat(-__builtin_inff());
  int32_t i = 0;
  for (; i + W <= n; i += W) m = max(load(x + i), m);  // a NaN on the left never wins
  float best = max_lane(m);
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// Lanes are f32 over kRun vectors at most, then double: better than f32 for any n.
double sum_exp(const float* x, int32_t n, float shift) {
  constexpr int32_t kRun = 64;
  double total = 0;
  int32_t i = 0;
  while (i + W <= n) {
    vf s{};
    for (int32_t k = 0; k < kRun && i + W <= n; ++k, i += W) {
      const vf e = exp(load(x + i) - shift);
      s += e == e ? e : vf{};
    }
    total += static_cast<double>(sum(s));
  }
  if (i < n) {
    const vf e = exp(load_part(x + i, n - i) - shift);
    for (int32_t k = 0; k < n - i; ++k) total += e[k] == e[k] ? static_cast<double>(e[k]) : 0.0;
  }
  return total;
}

void exp_scaled(const float* x, int32_t n, float shift, float scale, float* y) {
  const auto f = [=](vf v) {
    const vf e = exp((v - shift) * scale);
    return e == e ? e : vf{};
  };
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, f(load(x + i)));
  if (i < n) store_part(y + i, f(load_part(x + i, n - i)), n - i);
}

REFLEX_ISA_END
