// DeepSeek-V4's hyper-connections over parallel streams and its clamped SwiGLU, part of PassRun.
#include <cmath>
#include <cstring>

#include "backend/cpu/pass_run.h"

namespace reflex::cpu {

namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

/// comb (n, n), row = from: softmax over each row, + eps.
void soften_rows(float* comb, int32_t n, float eps) {
  for (int32_t from = 0; from < n; ++from) {
    float* row = comb + from * n;
    const float top = *std::max_element(row, row + n);
    float sum = 0;
    for (int32_t to = 0; to < n; ++to) sum += row[to] = std::exp(row[to] - top);
    for (int32_t to = 0; to < n; ++to) row[to] = row[to] / sum + eps;
  }
}

/// Each of n lines divided by its sum + eps: line i holds x[i * line + k * along].
void divide_lines(float* x, int32_t n, int32_t line, int32_t along, float eps) {
  for (int32_t i = 0; i < n; ++i) {
    float sum = 0;
    for (int32_t k = 0; k < n; ++k) sum += x[i * line + k * along];
    for (int32_t k = 0; k < n; ++k) x[i * line + k * along] /= sum + eps;
  }
}

}  // namespace

void PassRun::step(const HyperWeightsStep& s, Counter* counters, int) {
  const HyperWeights& op = s.op;
  const int32_t n = op.n_streams, all = width(op.in);
  share(counters[0], rows(op.in), 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r) {
      const float* x = value(op.in) + static_cast<size_t>(r) * static_cast<size_t>(all);
      float* y = value(op.out) + static_cast<size_t>(r) * static_cast<size_t>(all);
      for (int32_t i = 0; i < all; ++i) y[i] = x[i] * s.scale[i < n ? 0 : i < 2 * n ? 1 : 2] + s.base[i];
      for (int32_t i = 0; i < n; ++i) y[i] = sigmoid(y[i]) + op.eps;
      if (all == n) continue;
      for (int32_t i = n; i < 2 * n; ++i) y[i] = 2 * sigmoid(y[i]);
      float* comb = y + 2 * n;
      soften_rows(comb, n, op.eps);
      divide_lines(comb, n, 1, n, op.eps);
      for (int32_t k = 1; k < op.n_iterations; ++k) {
        divide_lines(comb, n, n, 1, op.eps);
        divide_lines(comb, n, 1, n, op.eps);
      }
    }
  });
}

void PassRun::step(const HyperReadStep& s, Counter* counters, int) {
  const HyperRead& op = s.op;
  const auto n = static_cast<size_t>(op.n_streams), d = static_cast<size_t>(width(op.out));
  share_columns(counters[0], rows(op.out), width(op.out), [&](size_t r, size_t first, size_t count) {
    const float* pre = value(op.weights) + r * static_cast<size_t>(width(op.weights));
    const float* x = value(op.streams) + r * n * d + first;
    float* y = value(op.out) + r * d + first;
    for (size_t i = 0; i < count; ++i) y[i] = pre[0] * x[i];
    for (size_t k = 1; k < n; ++k)
      for (size_t i = 0; i < count; ++i) y[i] += pre[k] * x[k * d + i];
  });
}

void PassRun::step(const HyperWriteStep& s, Counter* counters, int) {
  const HyperWrite& op = s.op;
  const auto n = static_cast<size_t>(op.n_streams), d = static_cast<size_t>(width(op.in));
  share_columns(counters[0], rows(op.out), width(op.in), [&](size_t r, size_t first, size_t count) {
    const float* post = value(op.weights) + r * static_cast<size_t>(width(op.weights)) + n;
    const float* comb = post + n;
    const float* in = value(op.in) + r * d + first;
    const float* x = value(op.streams) + r * n * d + first;
    for (size_t to = 0; to < n; ++to) {
      float* y = value(op.out) + (r * n + to) * d + first;
      for (size_t i = 0; i < count; ++i) y[i] = post[to] * in[i];
      for (size_t from = 0; from < n; ++from)
        for (size_t i = 0; i < count; ++i) y[i] += comb[from * n + to] * x[from * d + i];
    }
  });
}

void PassRun::step(const ClampedSwiGluStep& s, Counter* counters, int) {
  const auto n = static_cast<size_t>(width(s.op.out));
  const float limit = s.op.limit;
  share(counters[0], rows(s.op.out), 1, [&](int32_t r, int32_t) {
    const float* gate = value(s.op.gate) + static_cast<size_t>(r) * n;
    const float* up = value(s.op.up) + static_cast<size_t>(r) * n;
    float* y = value(s.op.out) + static_cast<size_t>(r) * n;
    for (size_t i = 0; i < n; ++i) {
      const float g = std::min(gate[i], limit);
      y[i] = g * sigmoid(g) * std::clamp(up[i], -limit, limit);
    }
  });
}

}  // namespace reflex::cpu
