#include "backend/cuda/gated_delta.h"

#include <algorithm>

namespace reflex::cuda {

namespace {

constexpr int32_t kMinChunkRows = 16;  // fewer chain rows are quicker one by one
constexpr int32_t kBlockWarps = 8;
constexpr uint32_t kReserved = 1024;  // of a block's shared memory, for what is not ours to lay out

int32_t round_up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }
uint32_t blocks_of(int32_t n, int32_t each) { return static_cast<uint32_t>((n + each - 1) / each); }
size_t quads(size_t bytes) { return (bytes + 15) / 16 * 16; }

/// Writes the forks below `root` in an order where a child follows its parent when it can, so that the
/// state stays in registers; a fork with more children than one is kept for the others.
class Brancher {
 public:
  Brancher(DeltaPass& out, const std::vector<std::vector<int32_t>>& children)
      : out_(out), children_(children) {}

  void branch(int32_t root) {
    unused_.clear();  // other branches run at the same time
    out_.branches.push_back(static_cast<int32_t>(out_.forks.size()));
    std::vector<Entry> stack = {{root, kFromChain, false}};
    while (!stack.empty()) {
      const Entry e = stack.back();
      stack.pop_back();
      const std::vector<int32_t>& children = children_[static_cast<size_t>(e.row)];
      // Its copy is free once its last reader has taken it; then this very row may be kept there.
      if (e.last && e.from >= 0) unused_.push_back(e.from);
      const int32_t to = children.size() > 1 ? take() : kDropped;
      out_.forks.push_back({e.row, e.from, to});
      for (size_t i = children.size(); i-- > 0;)
        stack.push_back({children[i], i == 0 ? kFromBefore : to, i + 1 == children.size()});
    }
  }

 private:
  struct Entry {
    int32_t row, from;
    bool last;  ///< of its parent's children
  };
  int32_t take() {
    if (unused_.empty()) return out_.n_kept++;
    const int32_t k = unused_.back();
    unused_.pop_back();
    return k;
  }

  DeltaPass& out_;
  const std::vector<std::vector<int32_t>>& children_;
  std::vector<int32_t> unused_;
};

}  // namespace

DeltaPass::DeltaPass(const Pass& pass, int32_t chain) : n_chain(chain) {
  const auto rows = static_cast<int32_t>(pass.tokens.size());
  std::vector<std::vector<int32_t>> children(static_cast<size_t>(rows));
  std::vector<int32_t> roots;
  for (int32_t r = 0; r < rows; ++r) {
    if (r < n_chain) {
      parents.push_back(r - 1);
      continue;
    }
    const int32_t parent = pass.parents[static_cast<size_t>(r)] - pass.first_slot;
    parents.push_back(parent < n_chain ? n_chain - 1 : parent);
    if (parent < n_chain)
      roots.push_back(r);
    else
      children[static_cast<size_t>(parent)].push_back(r);
  }
  Brancher brancher(*this, children);
  for (int32_t r : roots) brancher.branch(r);
  branches.push_back(static_cast<int32_t>(forks.size()));
}

size_t DeltaPass::bytes(int32_t rows) {
  const auto n = static_cast<size_t>(rows);
  return quads(n * sizeof(int32_t)) + quads(n * sizeof(DeltaFork)) + quads((n + 1) * sizeof(int32_t));
}

DeltaSteps::DeltaSteps(Device& device, const StepList& steps, int32_t max_rows, bool exact)
    : device_(device), exact_(exact) {
  // The chain's last chunk may be all but empty.
  capacity_ = round_up(max_rows + kDeltaChunk - 1, kDeltaChunk);
  size_t floats = 0;
  for (const Step& step : steps.steps) {
    const auto* s = std::get_if<DeltaStep>(&step);
    if (!s) continue;
    if (s->op.key_dim > kDeltaMaxKeyDim)
      fail(ErrorKind::unsupported, "GatedDelta: key heads of %d values, the CUDA backend takes up to %d",
           s->op.key_dim, kDeltaMaxKeyDim);
    DeltaParams p{};
    size_t own = 0;
    lay_out(s->op, p, own);
    floats = std::max(floats, own);
    max_key_heads_ = std::max(max_key_heads_, s->op.n_key_heads);
    state_floats_ = std::max(state_floats_, static_cast<size_t>(s->op.n_value_heads) *
                                                static_cast<size_t>(s->op.key_dim) *
                                                static_cast<size_t>(s->op.value_dim));
  }
  if (!any()) return;
  scratch_ = DeviceBuffer(device, floats * sizeof(float), "the recurrent layers' scratch");
  tickets_ = DeviceBuffer(device, static_cast<size_t>(max_key_heads_) * sizeof(uint32_t),
                          "the recurrent layers' tickets", true);
}

void DeltaSteps::reserve(const DeltaPass& pass) {
  const size_t bytes = std::max(kept_bytes(pass), 2 * kept_.bytes());
  kept_ = {};
  kept_ = DeviceBuffer(device_, bytes, "states of forks");
}

// Sizes and places in the scratch of one layer's arrays.
void DeltaSteps::lay_out(const GatedDelta& op, DeltaParams& p, size_t& floats) const {
  p.n_key_heads = op.n_key_heads;
  p.n_value_heads = op.n_value_heads;
  p.key_dim = op.key_dim;
  p.value_dim = op.value_dim;
  p.n_taps = op.n_taps;
  p.grouped = op.order == GatedDelta::Order::grouped;
  p.qk_eps = op.qk_eps;
  p.norm_eps = op.norm_eps;
  p.key_pad = round_up(op.key_dim, 16);
  p.value_pad = round_up(op.value_dim, kDeltaSlice);
  p.capacity = capacity_;
  floats = 0;
  const auto take = [&](float*& at, int32_t heads, int32_t width) {
    at = scratch_ ? scratch_.at<float>() + floats : nullptr;
    floats += static_cast<size_t>(heads) * static_cast<size_t>(capacity_) * static_cast<size_t>(width);
  };
  take(p.q, op.n_key_heads, p.key_pad);
  take(p.k, op.n_key_heads, p.key_pad);
  take(p.v, op.n_value_heads, p.value_pad);
  take(p.w, op.n_value_heads, p.key_pad);
  take(p.pairs, op.n_value_heads, kDeltaChunk);
  for (float** at : {&p.gate, &p.strength, &p.carry, &p.ratio}) take(*at, op.n_value_heads, 1);
}

bool DeltaSteps::chunks_fit(int32_t key_pad) const {
  return std::max(delta_chunks_bytes(key_pad), delta_scan_bytes(key_pad, 1)) + kReserved <=
         device_.max_shared();
}

void DeltaSteps::run(Launcher& launcher, const GatedDelta& op, DeltaParams p, int32_t n_branches) const {
  size_t floats = 0;
  lay_out(op, p, floats);
  p.kept = kept_.at<float>();
  p.tickets = tickets_.at<uint32_t>();
  const auto heads = static_cast<uint32_t>(p.n_value_heads);
  const auto launch = [&](const char* image, const std::string& kernel, Grid grid, uint32_t threads,
                          uint32_t shared) { launcher.launch(image, kernel, grid, threads, shared, p); };
  const bool sigmoid = op.gate == GatedDelta::Gate::sigmoid;
  const char* gated = sigmoid ? "gated_delta_sigmoid" : "gated_delta";
  const std::string suffix = sigmoid ? "_sigmoid" : "";
  if (p.n_rows == 1 && p.n_chain == 1 && std::max(p.key_dim, p.value_dim) <= kDeltaOneMaxDim) {
    const auto columns = blocks_of(p.value_dim, 32);
    launch(gated, "delta_one" + suffix, {heads}, 32 * kDeltaOneGroups * columns, 0);
    return;
  }
  const bool chunked = p.n_chain >= kMinChunkRows && chunks_fit(p.key_pad);
  p.fork_base = chunked ? round_up(p.n_chain, kDeltaChunk) : p.n_chain;
  p.n_places = p.fork_base + p.n_rows - p.n_chain;
  launch("gated_delta", "delta_inputs",
         {blocks_of(2 * p.n_key_heads + p.n_value_heads, kBlockWarps), static_cast<uint32_t>(p.n_places)},
         32 * kBlockWarps, 0);
  if (p.n_chain > 0) {
    const int32_t channels = 2 * p.n_key_heads * p.key_dim + p.n_value_heads * p.value_dim;
    launch("gated_delta", "delta_history", {blocks_of(channels, 256)}, 256, 0);
  }
  const uint32_t slices = blocks_of(p.value_pad, kDeltaSlice);
  if (chunked) {
    const uint32_t fixed = kReserved + delta_scan_bytes(p.key_pad, 3);
    p.buffers = fixed <= device_.max_shared() ? 3 : 1;
    const int terms = exact_ ? 3 : 1;
    launch("gated_delta_chunks", format("delta_chunks_%d", terms), {blocks_of(p.n_chain, kDeltaChunk), heads},
           32 * kBlockWarps, delta_chunks_bytes(p.key_pad));
    launch("gated_delta_chunks", format("delta_scan_%d", terms), {slices, heads}, 32 * kBlockWarps,
           delta_scan_bytes(p.key_pad, p.buffers));
  }
  // Rows of the state per thread, and warps that share a column.
  const int32_t per_thread = p.key_dim <= 128 ? 16 : 32;
  const int32_t groups = std::max(8, round_up(p.key_dim, per_thread) / per_thread);
  const auto threads = static_cast<uint32_t>(32 * groups);
  const uint32_t shared = delta_rows_bytes(p.key_pad, groups);
  if (!chunked && p.n_chain > 0)
    launch("gated_delta_rows", format("delta_chain_%d", per_thread), {slices, heads}, threads, shared);
  if (n_branches > 0)
    launch("gated_delta_rows", format("delta_forks_%d", per_thread),
           {slices, heads, static_cast<uint32_t>(n_branches)}, threads, shared);
  if (p.z)
    launch(gated, "delta_outputs" + suffix,
           {blocks_of(p.n_value_heads, kBlockWarps), static_cast<uint32_t>(p.n_out)}, 32 * kBlockWarps, 0);
}

}  // namespace reflex::cuda
