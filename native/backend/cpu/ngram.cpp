// Embeddings of n-grams and convolutions along a row's ancestors, part of PassRun. Both look a fixed number
// of rows up, in the pass or in what a fixed state keeps of the sequence before it (DeltaPlan::sources).
#include <sys/mman.h>

#include <cstring>

#include "backend/cpu/pass_run.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kNgramRows = 16;  // rows of one task: their table rows are asked for together

size_t at(int32_t row, int32_t width) { return static_cast<size_t>(row) * static_cast<size_t>(width); }

/// What the state `history` (n, width), the newest last, keeps of columns [begin, end) after n_chain rows of
/// x.
void shift_history(const float* x, int32_t n_chain, float* history, int32_t n, int32_t width, int32_t begin,
                   int32_t end) {
  for (int32_t i = 0; i < n; ++i) {
    const int32_t row = n_chain - n + i;  // of the pass; before it: of the old history
    const float* from = row >= 0 ? x + at(row, width) : history + at(i + n_chain, width);
    float* to = history + at(i, width);
    if (to != from) std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(float));
  }
}

}  // namespace

// rows (heads): the table's rows for row r.
void PassRun::ngram_rows(const NgramEmbed& op, int32_t r, uint64_t* table_rows) const {
  const auto n = static_cast<int32_t>(op.multipliers.size());
  const size_t per_gram = op.sizes.size() / static_cast<size_t>(n - 1);
  const auto* history = reinterpret_cast<const float*>(state_.buffer(op.tokens));
  const int32_t* sources = program_.delta_.sources().data() + at(r, program_.delta_.n_taps());
  uint64_t hash = 0;
  bool ended = false;  // by an eos, or by the sequence's beginning
  for (int32_t j = 0; j < n; ++j) {
    int32_t token = -1;
    if (sources[j] >= 0)
      token = pass_.tokens[static_cast<size_t>(sources[j])];
    else if (n - 1 + sources[j] >= 0)
      token = static_cast<int32_t>(history[n - 1 + sources[j]]) - 1;
    if (j > 0) ended = ended || token < 0 || static_cast<uint64_t>(token) == op.eos;
    hash ^= (ended ? op.eos : static_cast<uint64_t>(token)) * op.multipliers[static_cast<size_t>(j)];
    for (size_t h = 0; j > 0 && h < per_gram; ++h) {
      const size_t head = static_cast<size_t>(j - 1) * per_gram + h;
      table_rows[head] = hash % op.sizes[head] + op.offsets[head];
    }
  }
}

void PassRun::step(const NgramStep& s, Counter* counters, int) {
  const NgramEmbed& op = s.op;
  const Weight& table = program_.plan_.weights[static_cast<size_t>(op.table)];
  const size_t heads = op.sizes.size();
  const auto w = static_cast<size_t>(table.n_in()), bytes = row_bytes(table.type, w);
  const auto* data = static_cast<const uint8_t*>(table.data);
  std::vector<uint64_t> table_rows(heads * kNgramRows);
  share(counters[0], s.with_output ? n_rows_ : 0, kNgramRows, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r)
      ngram_rows(op, r, table_rows.data() + static_cast<size_t>(r - begin) * heads);
    const size_t n = static_cast<size_t>(end - begin) * heads;
    for (size_t i = 0; i < n && table.fd >= 0; ++i)
      advise_pages(data + table_rows[i] * bytes, bytes, MADV_WILLNEED);
    float* out = value(op.out) + static_cast<size_t>(begin) * heads * w;
    for (size_t i = 0; i < n; ++i) dequantize_row(table.type, data + table_rows[i] * bytes, out + i * w, w);
  });
  program_.pool_->barrier();
  share(counters[1], 1, 1, [&](int32_t, int32_t) {
    const int32_t n_chain = program_.delta_.n_chain(), n = static_cast<int32_t>(op.multipliers.size()) - 1;
    auto* history = reinterpret_cast<float*>(state_.buffer(op.tokens));
    for (int32_t i = 0; i < n; ++i) {
      const int32_t row = n_chain - n + i;
      history[i] =
          row >= 0 ? static_cast<float>(pass_.tokens[static_cast<size_t>(row)] + 1) : history[i + n_chain];
    }
  });
}

// Channels [begin, end) of every row; then of the history, which no other task reads.
void PassRun::conv_channels(const ConvStep& s, int32_t begin, int32_t end, int t) {
  const CausalConv& op = s.op;
  const int32_t c = width(op.in), taps = op.n_taps, n = end - begin, n_history = (taps - 1) * op.dilation;
  const float* x = value(op.in);
  auto* history = reinterpret_cast<float*>(state_.buffer(op.history));
  auto* w = reinterpret_cast<float*>(scratch(t));  // (T, n): these channels' kernels, transposed
  float* sum = w + at(taps, n);                    // (n)
  for (int32_t j = 0; j < taps; ++j)
    for (int32_t i = 0; i < n; ++i) w[j * n + i] = s.weight[at(begin + i, taps) + static_cast<size_t>(j)];
  for (int32_t r = 0; s.with_output && r < n_rows_; ++r) {
    const int32_t* sources = program_.delta_.sources().data() + at(r, program_.delta_.n_taps());
    std::fill_n(sum, n, 0.0f);
    for (int32_t j = 0; j < taps; ++j) {
      const int32_t source = sources[(taps - 1 - j) * op.dilation];
      const float* from = (source >= 0 ? x + at(source, c) : history + at(n_history + source, c)) + begin;
      for (int32_t i = 0; i < n; ++i) sum[i] += w[j * n + i] * from[i];
    }
    float* y = value(op.out) + at(r, c) + begin;
    kernels_.exp_scaled(sum, n, 0.0f, -1.0f, y);
    for (int32_t i = 0; i < n; ++i) y[i] = sum[i] / (1.0f + y[i]);
  }
  shift_history(x, program_.delta_.n_chain(), history, n_history, c, begin, end);
}

void PassRun::step(const ConvStep& s, Counter* counters, int t) {
  share(counters[0], width(s.op.in), kConvChannels,
        [&](int32_t begin, int32_t end) { conv_channels(s, begin, end, t); });
}

}  // namespace reflex::cpu
