#include "backend/cuda/indexer.h"

#include <algorithm>
#include <bit>

namespace reflex::cuda {

namespace {

// More rows go in turn.
constexpr size_t kScores = size_t{64} << 20, kQueries = size_t{16} << 20;  // bytes
constexpr int32_t kMinRows = 16;        // of queries that go together however large they are
constexpr uint32_t kLeastReach = 1024;  // slots
constexpr uint32_t kBeginThreads = 256;
constexpr int32_t kBeginWarps = kBeginThreads / 32;

uint32_t blocks_of(int64_t n, int64_t each) { return static_cast<uint32_t>((n + each - 1) / each); }
int32_t head_tiles(const Indexer& op) { return (op.n_heads + kIndexHeads - 1) / kIndexHeads; }

/// Bytes of one row's queries as the kernels take them.
size_t prepared_bytes(const Indexer& op, bool f32) {
  const int32_t chunks = (op.head_dim + index_chunk(f32) - 1) / index_chunk(f32);
  return static_cast<size_t>(head_tiles(op)) * static_cast<size_t>(chunks) * 2 * 32 * 16;
}

int32_t strided(const Indexer& op, int32_t slots) {
  return (slots / op.ratio + kIndexPlaces - 1) / kIndexPlaces * kIndexPlaces;
}

}  // namespace

IndexSteps::IndexSteps(Device& device, const StepList& steps, int32_t max_rows, int32_t n_ctx)
    : n_ctx_(n_ctx) {
  size_t row = 0, heads = 0;
  for (const Step& step : steps.steps) {
    const auto* s = std::get_if<IndexStep>(&step);
    if (!s) continue;
    if (s->op.head_dim > kIndexMaxDim)
      fail(ErrorKind::unsupported, "Indexer: heads of %d values, the CUDA backend takes up to %d",
           s->op.head_dim, kIndexMaxDim);
    row = std::max({row, prepared_bytes(s->op, false), prepared_bytes(s->op, true)});
    heads = std::max(heads, static_cast<size_t>(head_tiles(s->op)) * kIndexHeads);
    const int64_t border = (int64_t{s->op.top_k} + 1) * s->op.ratio - 1;
    borders_.push_back(static_cast<int32_t>(std::min<int64_t>(border, n_ctx)));
  }
  if (row == 0) return;
  std::sort(borders_.begin(), borders_.end());
  prepared_rows_ = std::min(max_rows, std::max(kMinRows, static_cast<int32_t>(kQueries / row)));
  const auto rows = static_cast<size_t>(prepared_rows_);
  prepared_ = DeviceBuffer(device, rows * row, "the indexer's queries");
  scale_ = DeviceBuffer(device, rows * heads * sizeof(float), "the indexer's weights");
  // One row's at least, were every slot both in its prefix and under the mask.
  const size_t most = 2 * (static_cast<size_t>(n_ctx) + 4 * kIndexPlaces) * sizeof(uint32_t);
  scores_ = DeviceBuffer(device, std::max(most, std::min(kScores, rows * most)), "the indexer's scores");
}

int32_t IndexSteps::reach(int32_t n) const {
  if (!any()) return 0;
  auto reach = static_cast<int32_t>(std::max(kLeastReach, std::bit_ceil(static_cast<uint32_t>(n))));
  const auto border = std::lower_bound(borders_.begin(), borders_.end(), n);
  if (border != borders_.end()) reach = std::min(reach, *border);
  return std::min(reach, n_ctx_);
}

void IndexSteps::run(Launcher& launcher, const IndexStep& s, const IndexMemory& m) const {
  const Indexer& op = s.op;
  const bool all = chooses_all(op.top_k, op.ratio, m.reach);
  IndexParams p{};
  p.query = m.query;
  p.weights = m.weights;
  p.key = m.key;
  p.state = m.state;
  p.out = m.out;
  p.state_f32 = m.state_f32;
  p.n_heads = op.n_heads;
  p.head_dim = op.head_dim;
  p.top_k = op.top_k;
  p.ratio = op.ratio;
  p.on_outputs = m.on_outputs;
  p.n_strided = strided(op, m.reach.slots);
  p.places = p.n_strided + 32 * m.reach.mask_words;
  p.pass = m.pass;
  p.prepared = prepared_.at();
  p.scale = scale_.at<float>();
  p.scores = scores_.at<uint32_t>();
  const auto fit = static_cast<int32_t>(scores_.bytes() / sizeof(uint32_t) / static_cast<size_t>(p.places));
  const int32_t step = all ? std::max(1, m.n_q_rows) : std::min(prepared_rows_, fit);
  for (int32_t first = 0; first == 0 || first < m.n_q_rows; first += step) {
    const int32_t rows = std::min(step, m.n_q_rows - first);
    p.first_row = first;
    p.n_rows = all ? 0 : rows;
    p.n_state_rows = first == 0 && m.key ? m.n_rows : 0;
    const int64_t warps = p.n_state_rows + int64_t{p.n_rows} * head_tiles(op) * kIndexHeads;
    if (warps)
      launcher.launch("indexer", "index_begin", {blocks_of(warps, kBeginWarps), 1}, kBeginThreads, 0, p);
    if (rows == 0 || (all && s.read_where_chosen)) return;
    if (!all) {
      const char* kernel = m.state_f32                    ? "index_scores_f32"
                           : op.head_dim <= kIndexHeldDim ? "index_scores_f16"
                                                          : "index_scores_f16_wide";
      launcher.launch("indexer", kernel, {blocks_of(p.places, kIndexThreads), blocks_of(rows, kIndexRows)},
                      kIndexThreads, 0, p);
    }
    launcher.launch("index_select", "index_select", {static_cast<uint32_t>(rows), 1}, kSelectThreads, 0, p);
  }
}

}  // namespace reflex::cuda
