// The lightning indexer and the layer norm of its keys, part of PassRun. A query's heads meet the keys as a
// product: the state is the matrix, the heads are its rows. Rows are independent of each other.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "backend/cpu/pass_run.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kIndexSlots = 40 * kMatmulUnit;  ///< keys of one product

uint32_t type_of(bool f16) { return static_cast<uint32_t>(f16 ? GgmlType::F16 : GgmlType::F32); }

/// The k best of n scores into `order` (n), by index ascending; ties to the lower index.
void best_of(const float* scores, int32_t n, int32_t k, int32_t* order) {
  std::iota(order, order + n, 0);
  const auto better = [scores](int32_t a, int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  };
  std::nth_element(order, order + k - 1, order + n, better);
  std::sort(order, order + k);
}

}  // namespace

void PassRun::reserve_indexer(const Indexer& op, size_t& scratch) {
  const auto seen_slots = static_cast<size_t>(most_seen());
  const Form form =
      kernels_.form(type_of(state_.is_f16(op.state)), op.head_dim, op.n_heads, program_.options_.exact);
  const size_t kernel = round_line(kernel_scratch(kernels_.matmul_scratch, op.head_dim, op.n_heads));
  const size_t act = round_line(kernels_.act_bytes(form, op.head_dim, op.n_heads));
  const size_t products =
      round_line(static_cast<size_t>(op.n_heads) * static_cast<size_t>(kIndexSlots) * sizeof(float));
  scratch = std::max(scratch, kernel + act + products + 2 * round_line(seen_slots * sizeof(float)));
}

// scores[j]: that of the j-th slot the row sees. scratch: as reserve_indexer has it.
void PassRun::index_scores(const Indexer& op, int32_t i, uint8_t* scratch, float* scores) {
  const auto heads = static_cast<size_t>(op.n_heads), dim = static_cast<size_t>(op.head_dim);
  const int32_t r = pass_row(op.query, i);
  const bool f16 = state_.is_f16(op.state);
  MatmulArgs a;
  a.type = type_of(f16);
  a.w = state_.buffer(op.state);
  a.row_bytes = dim * (f16 ? 2 : 4);
  a.n_in = op.head_dim;
  a.form = kernels_.form(a.type, op.head_dim, op.n_heads, program_.options_.exact);
  a.n_rows = op.n_heads;
  a.scratch = scratch;
  uint8_t* act = scratch + round_line(kernel_scratch(kernels_.matmul_scratch, op.head_dim, op.n_heads));
  kernels_.prepare(a.form, value(op.query) + static_cast<size_t>(i) * heads * dim, dim, op.head_dim,
                   op.n_heads, 0, op.n_heads, act);
  a.act = act;
  a.y = reinterpret_cast<float*>(act + round_line(kernels_.act_bytes(a.form, op.head_dim, op.n_heads)));
  a.ldy = kIndexSlots;
  const float* weights = value(op.weights) + static_cast<size_t>(i) * heads;
  const auto score = [&](const MatmulArgs& m, int32_t begin, int32_t end, float* to) {
    kernels_.matmul(m, begin, end);
    std::fill_n(to, end - begin, 0.0f);
    for (size_t h = 0; h < heads; ++h) {
      const float* y = m.y + h * m.ldy;
      for (int32_t j = 0; j < end - begin; ++j) to[j] += weights[h] * std::max(y[j], 0.0f);
    }
  };
  // Of the prefix every ratio-th slot, the first at ratio - 1; those of the branch one by one.
  MatmulArgs strided = a;
  strided.w += static_cast<size_t>(op.ratio - 1) * a.row_bytes;
  strided.row_bytes *= static_cast<size_t>(op.ratio);
  const int32_t n = seen(r) / op.ratio, in_prefix = visibility_.prefix[static_cast<size_t>(r)] / op.ratio;
  for (int32_t begin = 0; begin < in_prefix; begin += kIndexSlots)
    score(strided, begin, std::min(begin + kIndexSlots, in_prefix), scores + begin);
  for (int32_t j = in_prefix; j < n; ++j) {
    const int32_t slot = slot_seen(r, (j + 1) * op.ratio - 1);
    score(a, slot, slot + 1, scores + j);
  }
}

void PassRun::index_row(const Indexer& op, int32_t i, int t) {
  const int32_t r = pass_row(op.query, i), n = seen(r) / op.ratio, k = std::min(n, op.top_k);
  auto* out =
      reinterpret_cast<int32_t*>(value(op.out)) + static_cast<size_t>(i) * static_cast<size_t>(op.top_k);
  auto* scores = reinterpret_cast<float*>(scratch(t));
  auto* order = reinterpret_cast<int32_t*>(scratch(t) + round_line(static_cast<size_t>(n) * sizeof(float)));
  if (n > op.top_k) {
    index_scores(op, i, scratch(t) + 2 * round_line(static_cast<size_t>(n) * sizeof(float)), scores);
    for (int32_t j = 0; j < n; ++j)
      if (std::isnan(scores[j])) scores[j] = -std::numeric_limits<float>::infinity();
    best_of(scores, n, k, order);
  } else {
    std::iota(order, order + n, 0);
  }
  for (int32_t j = 0; j < k; ++j) out[j] = slot_seen(r, (order[j] + 1) * op.ratio - 1);
  std::fill(out + k, out + op.top_k, -1);
}

void PassRun::step(const IndexerStep& s, Counter* counters, int t) {
  const Indexer& op = s.op;
  share(counters[0], op.key == kNone ? 0 : n_rows_, 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r)
      write_state(op.state, r, value(op.key) + static_cast<size_t>(r) * static_cast<size_t>(op.head_dim),
                  op.head_dim);
  });
  if (!s.with_output) return;
  program_.pool_->barrier();
  share(counters[1], rows(op.query), 1, [&](int32_t i, int32_t) { index_row(op, i, t); });
}

void PassRun::step(const LayerNormStep& s, Counter* counters, int) {
  const auto n = static_cast<size_t>(width(s.op.out));
  share(counters[0], rows(s.op.out), 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r) {
      const float* x = value(s.op.in) + static_cast<size_t>(r) * n;
      float* y = value(s.op.out) + static_cast<size_t>(r) * n;
      double mean = 0, variance = 0;
      for (size_t i = 0; i < n; ++i) mean += x[i];
      mean /= static_cast<double>(n);
      for (size_t i = 0; i < n; ++i) variance += (x[i] - mean) * (x[i] - mean);
      const double scale = 1.0 / std::sqrt(variance / static_cast<double>(n) + s.op.eps);
      for (size_t i = 0; i < n; ++i)
        y[i] = static_cast<float>((x[i] - mean) * scale) * s.weight[i] + s.bias[i];
    }
  });
}

}  // namespace reflex::cpu
