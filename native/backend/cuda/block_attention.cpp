#include "backend/cuda/block_attention.h"

#include <algorithm>

namespace reflex::cuda {

namespace {

constexpr size_t kScratch = size_t{64} << 20;  // of scores and lists; more rows go in turn
constexpr int32_t kMinRows = 16;               // that go together however long the sequence
constexpr uint32_t kReserved = 1024;           // of a block's shared memory, for what is not laid out by us
constexpr uint32_t kTileThreads = 256, kMaxScoreWarps = 8;

int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
uint32_t head_groups(const BlockAttention& op) {
  return static_cast<uint32_t>(op.n_kv_heads * ceil_div(op.n_heads / op.n_kv_heads, kTileQueries));
}

}  // namespace

BlockSteps::BlockSteps(Device& device, const StepList& steps, int32_t max_rows, int32_t n_ctx, bool exact)
    : device_(device), max_rows_(max_rows), n_ctx_(n_ctx) {
  size_t scores = 0, lists = 0, rows = 0, partial = 0, tickets = 0;
  for (const Step& step : steps.steps) {
    const auto* s = std::get_if<BlockAttentionStep>(&step);
    if (!s) continue;
    const BlockAttention& op = s->op;
    layers_.push_back(op);
    for (int32_t dim : {op.head_dim, op.v_head_dim, op.index_dim})
      if (dim > kMaxHeadDim)
        fail(ErrorKind::unsupported, "BlockAttention: heads of %d values, the CUDA backend takes up to %d",
             dim, kMaxHeadDim);
    if (score_warps(op) == 0)
      fail(ErrorKind::unsupported,
           "BlockAttention: %d index heads of %d values are more than a block of this GPU holds",
           op.index_heads, op.index_dim);
    if (tile_slots(op, exact) == 0)
      fail(ErrorKind::unsupported,
           "BlockAttention: keys of %d and values of %d are more than a block of this GPU holds", op.head_dim,
           op.v_head_dim);
    const auto n = static_cast<size_t>(rows_per_go(op));
    rows = std::max(rows, n);
    scores = std::max(scores, n * static_cast<size_t>(score_stride(op)));
    lists = std::max(lists, n * static_cast<size_t>(list_stride(op)));
    partial = std::max(partial,
                       static_cast<size_t>(op.n_heads) * kMaxSplits * static_cast<size_t>(op.v_head_dim + 2));
    tickets = std::max(tickets, static_cast<size_t>(head_groups(op)));
  }
  scores_ = DeviceBuffer(device, scores * sizeof(float), "blocks' scores");
  lists_ = DeviceBuffer(device, lists * sizeof(int32_t), "lists of slots");
  counts_ = DeviceBuffer(device, rows * sizeof(int32_t), "lists of slots");
  partial_ = DeviceBuffer(device, partial * sizeof(float), "attention's partial sums");
  tickets_ = DeviceBuffer(device, tickets * sizeof(uint32_t), "attention's tickets", true);
}

int32_t BlockSteps::n_choosing(int32_t most_seen) const {
  return static_cast<int32_t>(std::count_if(
      layers_.begin(), layers_.end(), [&](const BlockAttention& op) { return chooses(op, most_seen); }));
}

// A row that chooses sees more than it lists; one that does not sees at most as much.
int32_t BlockSteps::list_stride(const BlockAttention& op) const {
  return static_cast<int32_t>(
      std::min<int64_t>(n_ctx_, int64_t{op.n_blocks} * op.block_size + op.block_size - 1));
}

int32_t BlockSteps::rows_per_go(const BlockAttention& op) const {
  const size_t row =
      (static_cast<size_t>(score_stride(op)) + static_cast<size_t>(list_stride(op))) * sizeof(float);
  const auto rows = static_cast<int32_t>(std::min<size_t>(kScratch / row, static_cast<size_t>(max_rows_)));
  return std::min(max_rows_, std::max(kMinRows, rows));
}

/// Of a block that scores; 0: none fit.
uint32_t BlockSteps::score_warps(const BlockAttention& op) const {
  for (uint32_t warps = kMaxScoreWarps; warps > 0; warps /= 2)
    if (int64_t{4} * block_key_stride(op.index_dim) *
            (int64_t{op.index_heads} + kBlockScoreHeads + int64_t{warps} * kBlockScoreKeys) <
        INT32_MAX)
      if (block_scores_bytes(op.index_heads, op.index_dim, static_cast<int>(warps)) + kReserved <=
          device_.max_shared())
        return warps;
  return 0;
}

/// 0: none fit.
int32_t BlockSteps::tile_slots(const BlockAttention& op, bool f32) const {
  for (int32_t slots : {32, 16})
    if (list_attention_bytes(op.head_dim, op.v_head_dim, slots, f32) + kReserved <= device_.max_shared())
      return slots;
  return 0;
}

void BlockSteps::keep_keys(Launcher& launcher, const BlockAttention& op, const BlockMemory& m,
                           const PassArrays& pass) const {
  BlockKeysParams p{};
  p.index_k = m.index_k;
  p.state = m.state;
  p.norm = m.norm;
  p.inv_freq = m.inv_freq;
  p.eps = op.index_eps;
  p.magnitude = m.magnitude;
  p.state_f32 = m.state_f32;
  p.dim = op.index_dim;
  p.n_rot = m.n_rot;
  p.adjacent = m.adjacent;
  p.block_size = op.block_size;
  p.pass = pass;
  launcher.launch("block_index", "block_keys", {static_cast<uint32_t>(m.n_rows)}, kBlockKeyThreads,
                  static_cast<uint32_t>(op.index_dim) * sizeof(float), p);
}

void BlockSteps::attend(Launcher& launcher, const BlockAttention& op, const BlockMemory& m, AttentionParams a,
                        bool f32_states) const {
  BlockScoresParams scores{};
  scores.q = m.index_q;
  scores.state = m.state;
  scores.scores = scores_.at<float>();
  scores.heads = op.index_heads;
  scores.dim = op.index_dim;
  scores.block_size = op.block_size;
  scores.n_blocks = op.n_blocks;
  scores.score_stride = score_stride(op);
  scores.on_outputs = a.on_outputs;
  scores.pass = a.pass;
  BlockChoiceParams choice{};
  choice.scores = scores.scores;
  choice.lists = lists_.at<int32_t>();
  choice.counts = counts_.at<int32_t>();
  choice.block_size = op.block_size;
  choice.n_blocks = op.n_blocks;
  choice.score_stride = scores.score_stride;
  choice.list_stride = list_stride(op);
  choice.on_outputs = a.on_outputs;
  choice.pass = a.pass;
  a.partial = partial_.at<float>();
  a.tickets = tickets_.at<uint32_t>();
  ListAttentionParams list{a, choice.lists, choice.counts, choice.list_stride, 0, tile_slots(op, f32_states)};
  const uint32_t warps = score_warps(op);
  const uint32_t splits = a.n_rows == 1 ? kMaxSplits : 1;
  const int32_t per_go = rows_per_go(op);
  for (int32_t first = 0; first < a.n_rows; first += per_go) {
    const int32_t rows = std::min(per_go, a.n_rows - first);
    const auto n = static_cast<uint32_t>(rows);
    scores.first_row = choice.first_row = list.first_row = first;
    // A launch must not depend on how long the sequence is: blocks beyond it have nothing to do.
    const int32_t groups = ceil_div(scores.score_stride, static_cast<int32_t>(warps) * kBlockScoreKeys);
    const int32_t blocks = std::clamp(ceil_div(2 * device_.sm_count(), rows), 1, groups);
    launcher.launch("block_index", m.state_f32 ? "block_scores_f32" : "block_scores_f16",
                    {static_cast<uint32_t>(blocks), n}, 32 * warps,
                    block_scores_bytes(op.index_heads, op.index_dim, static_cast<int>(warps)), scores);
    launcher.launch("block_index", "block_choice", {n}, kBlockChoiceThreads, 0, choice);
    launcher.launch("block_attention", f32_states ? "list_attention_f32" : "list_attention_f16",
                    {head_groups(op), n, splits}, kTileThreads,
                    list_attention_bytes(op.head_dim, op.v_head_dim, list.tile_slots, f32_states), list);
  }
}

}  // namespace reflex::cuda
