// The steps of a residual of several streams (hyper-connections), part of PassRun: all of them go row by
// row, so nothing here knows of slots or states.
#include <cmath>
#include <cstring>

#include "backend/cpu/pass_run.h"

namespace reflex::cpu {

namespace {

constexpr float kLeastGate = 1e-6f;  // |key . query| of a StreamGate is at least this
constexpr int kDotLanes = 8;         // partial sums of a dot product

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float dot(const float* a, const float* b, int32_t n) {
  float part[kDotLanes] = {};
  int32_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes)
    for (int k = 0; k < kDotLanes; ++k) part[k] += a[i + k] * b[i + k];
  float sum = 0;
  for (float p : part) sum += p;
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

size_t at(int32_t row, int32_t width) { return static_cast<size_t>(row) * static_cast<size_t>(width); }

}  // namespace

void PassRun::step(const RepeatStep& s, Counter* counters, int) {
  const int32_t d = width(s.op.in);
  share(counters[0], rows(s.op.out), 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r)
      for (int32_t i = 0; i < s.op.n; ++i)
        std::memcpy(value(s.op.out) + at(r * s.op.n + i, d), value(s.op.in) + at(r, d),
                    static_cast<size_t>(d) * sizeof(float));
  });
}

void PassRun::step(const SiluStep& s, Counter* counters, int) {
  const int32_t n = width(s.op.in);
  share(counters[0], rows(s.op.out), 4, [&](int32_t begin, int32_t end) {
    const float* x = value(s.op.in) + at(begin, n);
    float* y = value(s.op.out) + at(begin, n);
    const int32_t count = n * (end - begin);
    kernels_.exp_scaled(x, count, 0.0f, -s.op.scale, y);
    for (int32_t i = 0; i < count; ++i) y[i] = s.op.scale * x[i] / (1.0f + y[i]);
  });
}

void PassRun::step(const StreamNormStep& s, Counter* counters, int) {
  const int32_t d = s.op.group, n_streams = width(s.op.in) / d;
  share(counters[0], rows(s.op.out), 1, [&](int32_t r, int32_t) {
    for (int32_t i = 0; i < n_streams; ++i)
      kernels_.rms_norm_rows(value(s.op.in) + at(r * n_streams + i, d), s.weight + at(i, d), s.op.eps, d, d,
                             1, value(s.op.out) + at(r * n_streams + i, d));
  });
}

void PassRun::step(const StreamMixStep& s, Counter* counters, int t) {
  const int32_t d = width(s.op.out), n_streams = s.op.n_streams, n = d * n_streams;
  auto* e = reinterpret_cast<float*>(scratch(t));  // (S, d): exp(-gate)
  share(counters[0], rows(s.op.out), 1, [&](int32_t r, int32_t) {
    const float* x = value(s.op.in) + at(r, n);
    float* y = value(s.op.out) + at(r, d);
    kernels_.exp_scaled(value(s.op.gate) + at(r, n), n, 0.0f, -1.0f, e);
    for (int32_t i = 0; i < d; ++i) y[i] = x[i] / (1.0f + e[i]);
    for (int32_t k = 1; k < n_streams; ++k)
      for (int32_t i = 0; i < d; ++i) y[i] += x[k * d + i] / (1.0f + e[k * d + i]);
    for (int32_t i = 0; i < d; ++i) y[i] /= static_cast<float>(n_streams);
  });
}

void PassRun::step(const StreamInjectStep& s, Counter* counters, int) {
  const int32_t d = width(s.op.block), n_streams = s.op.n_streams;
  share(counters[0], rows(s.op.out), 1, [&](int32_t r, int32_t) {
    const float* block = value(s.op.block) + at(r, d);
    for (int32_t k = 0; k < n_streams; ++k) {
      const float* x = value(s.op.in) + at(r * n_streams + k, d);
      float* y = value(s.op.out) + at(r * n_streams + k, d);
      const float logit = value(s.op.logits)[at(r, n_streams) + static_cast<size_t>(k)];
      const float by = 2.0f * sigmoid(logit / static_cast<float>(n_streams));
      for (int32_t i = 0; i < d; ++i) y[i] = x[i] + by * block[i];
    }
  });
}

void PassRun::step(const StreamGateStep& s, Counter* counters, int) {
  const int32_t d = width(s.op.value), n_streams = s.op.n_streams;
  share(counters[0], rows(s.op.out), 1, [&](int32_t r, int32_t) {
    const float* v = value(s.op.value) + at(r, d);
    for (int32_t k = 0; k < n_streams; ++k) {
      const size_t first = at(r * n_streams + k, d);
      const float a =
          dot(value(s.op.key) + first, value(s.op.query) + first, d) / std::sqrt(static_cast<float>(d));
      const float root = std::sqrt(std::max(std::fabs(a), kLeastGate));
      const float by = sigmoid(a > 0 ? root : a < 0 ? -root : a);  // 0 stays 0, NaN stays NaN
      float* y = value(s.op.out) + first;
      for (int32_t i = 0; i < d; ++i) y[i] = by * v[i];
    }
  });
}

}  // namespace reflex::cpu
