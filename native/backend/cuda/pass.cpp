// What a pass is made of on the host: its block in pinned memory, its embedded rows, the choice
// between launching and replaying.
#include <algorithm>
#include <cstring>

#include "backend/cuda/program.h"
#include "backend/cuda/tile.h"
#include "quant/dequantize.h"

namespace reflex::cuda {

namespace {

constexpr size_t kQuad = 16;
constexpr size_t kMaxGraphs = 32;
constexpr const char *kGatherImage = "gather", *kGatherKernel = "gather_dots";
constexpr size_t kGatherBytes = size_t{16} << 20;  // of the head's rows decoded at a time

uint32_t align_quad(size_t n) { return static_cast<uint32_t>((n + kQuad - 1) / kQuad * kQuad); }

/// The mask over slots [base, base + 32 words) for the rows that see more than a prefix.
struct Mask {
  int32_t base = 0, words = 0;
};

Mask mask_of(const Pass& pass, const Visibility& vis) {
  Mask m;
  if (vis.chain) return m;
  m.base = INT32_MAX;
  for (size_t r = 0; r < pass.tokens.size(); ++r) {
    const int32_t begin = vis.extra_begin[r];
    if (vis.extra_begin[r + 1] > begin) m.base = std::min(m.base, vis.extra[static_cast<size_t>(begin)]);
  }
  if (m.base == INT32_MAX) return {};
  const int32_t end = pass.first_slot + static_cast<int32_t>(pass.tokens.size());
  m.words = (end - m.base + 31) / 32;
  return m;
}

}  // namespace

void CudaProgram::check_pass(const Pass& pass) const {
  const size_t n = pass.tokens.size(), o = pass.outputs.size();
  if (n == 0 || n > static_cast<size_t>(options_.max_rows))
    fail(ErrorKind::invalid_input, "pass: %zu rows, expected 1 to %d", n, options_.max_rows);
  if (pass.positions.size() != n || pass.parents.size() != n)
    fail(ErrorKind::invalid_input,
         "pass: %zu tokens, %zu positions and %zu parents, expected as many of each", n,
         pass.positions.size(), pass.parents.size());
  if (pass.first_slot + static_cast<int64_t>(n) > options_.n_ctx)
    fail(ErrorKind::context_overflow, "pass: slots up to %lld, the context holds %d",
         static_cast<long long>(pass.first_slot + static_cast<int64_t>(n)), options_.n_ctx);
  for (int32_t t : pass.tokens)
    if (t < 0 || t >= n_table_rows_)
      fail(ErrorKind::invalid_input, "pass: token id %d is outside the vocabulary of %d", t, n_table_rows_);
  for (size_t i = 0; i < o; ++i)
    if (pass.outputs[i] < 0 || static_cast<size_t>(pass.outputs[i]) >= n ||
        (i && pass.outputs[i] <= pass.outputs[i - 1]))
      fail(ErrorKind::invalid_input, "pass: outputs must be ascending rows below %zu, found %d", n,
           pass.outputs[i]);
  if (pass.head != HeadMode::gather) return;
  if (pass.gather_begin.size() != o + 1 || pass.gather_begin[0] != 0 ||
      static_cast<size_t>(pass.gather_begin[o]) != pass.gather_ids.size())
    fail(ErrorKind::invalid_input, "pass: gather_begin must hold %zu offsets into gather_ids", o + 1);
  for (int32_t id : pass.gather_ids)
    if (id < 0 || id >= plan_.n_vocab)
      fail(ErrorKind::invalid_input, "pass: gathered id %d is outside the vocabulary of %d", id,
           plan_.n_vocab);
}

void CudaProgram::embed_rows(char* to, std::span<const int32_t> tokens) const {
  const Weight& table = plan_.weights[static_cast<size_t>(embed_.table)];
  const auto width = static_cast<size_t>(table.n_in());
  const size_t stride = row_bytes(table.type, width);
  for (size_t r = 0; r < tokens.size(); ++r)
    dequantize_row(table.type, static_cast<const char*>(table.data) + static_cast<size_t>(tokens[r]) * stride,
                   reinterpret_cast<float*>(to + r * width * sizeof(float)), width);
}

/// Slot 0 is for passes that are replayed: graphs hold its address. The others alternate, so that a
/// long prompt's next chunk is written while the last one runs.
CudaProgram::Slot& CudaProgram::take_slot(bool replayed, size_t bytes) {
  if (!replayed) turn_ = turn_ == 1 ? 2 : 1;
  Slot& s = slots_[replayed ? 0 : turn_];
  if (s.busy) device_->cu.check(device_->cu.cuEventSynchronize(s.read), "the pass before");
  s.busy = false;
  if (s.memory.bytes() < bytes) {
    if (replayed) drop_graphs();
    s.memory = PinnedBuffer(*device_, std::max(bytes, 2 * s.memory.bytes()), "pinned memory for a pass");
  }
  return s;
}

/// Which rows fork, for plans with fixed states. Error(kv_cache) where a row would need one that is not
/// there.
DeltaPass CudaProgram::plan_delta(const CudaState& state, const Pass& pass) {
  if (!forks_) return {};
  DeltaPass delta(pass, check_forks(pass, state.fixed_length()));
  if (!delta_.has_room(delta)) {
    synchronize("the pass before");
    drop_graphs();
    delta_.reserve(delta);
  }
  return delta;
}

/// [header][positions R][prefix R][outputs O][parents R][forks][branches][tokens R][mask R * words][embedded
/// rows], three for plans with fixed states, the tokens for those that read them; returns the quads before
/// the rows.
uint32_t CudaProgram::write_block(Slot& slot, const Pass& pass, const Visibility& vis,
                                  const DeltaPass& delta) {
  const size_t n = pass.tokens.size(), o = pass.outputs.size();
  const Mask mask = mask_of(pass, vis);
  auto* base = slot.memory.at<char>();
  PassHeader header{};
  header.n_rows = static_cast<int32_t>(n);
  header.n_out = static_cast<int32_t>(o);
  header.first_slot = pass.first_slot;
  header.mask_base = mask.base;
  header.mask_words = mask.words;
  header.sequence = sequence_;
  std::memcpy(base, &header, sizeof header);
  std::memcpy(base + now_.block_at[0], pass.positions.data(), n * 4);
  std::memcpy(base + now_.block_at[1], vis.prefix.data(), n * 4);
  if (o) std::memcpy(base + now_.block_at[2], pass.outputs.data(), o * 4);
  const auto copy = [base](uint32_t at, const auto& from) {
    if (!from.empty()) std::memcpy(base + at, from.data(), from.size() * sizeof(from[0]));
  };
  copy(now_.delta_at[0], delta.parents);
  copy(now_.delta_at[1], delta.forks);
  copy(now_.delta_at[2], delta.branches);
  if (reads_tokens_) std::memcpy(base + now_.tokens_at, pass.tokens.data(), n * 4);
  auto* bits = reinterpret_cast<uint32_t*>(base + now_.mask_at);
  std::memset(bits, 0, n * static_cast<size_t>(mask.words) * 4);
  if (mask.words)
    for (size_t r = 0; r < n; ++r)
      for (int32_t i = vis.extra_begin[r]; i < vis.extra_begin[r + 1]; ++i) {
        const int32_t b = vis.extra[static_cast<size_t>(i)] - mask.base;
        bits[r * static_cast<size_t>(mask.words) + static_cast<size_t>(b / 32)] |= 1u << (b % 32);
      }
  return align_quad(now_.mask_at + n * static_cast<size_t>(mask.words) * 4) / kQuad;
}

void CudaProgram::run(State& base, const Pass& pass) {
  auto& state = static_cast<CudaState&>(base);
  device_->enter();
  check_pass(pass);
  const auto n = static_cast<int32_t>(pass.tokens.size()), o = static_cast<int32_t>(pass.outputs.size());
  const DeltaPass delta = plan_delta(state, pass);
  state.reserve(pass.first_slot + n, stream_);
  ensure_outputs(o, o ? pass.head : HeadMode::none);
  if (pass.head == HeadMode::full && o) loader_->want_deferred();
  const Visibility vis = state.slots.extend(pass);

  now_ = {};
  now_.n_rows = n;
  now_.n_out = o;
  now_.n_slots = pass.first_slot + n;
  now_.head = o ? pass.head : HeadMode::none;
  now_.same_rows = n == o;
  now_.chain = vis.chain;
  for (size_t r = 0; r < vis.prefix.size(); ++r)
    now_.most_seen = std::max(now_.most_seen, vis.prefix[r] + vis.extra_begin[r + 1] - vis.extra_begin[r]);
  now_.block_at[0] = sizeof(PassHeader);
  now_.block_at[1] = align_quad(now_.block_at[0] + static_cast<size_t>(n) * 4);
  now_.block_at[2] = align_quad(now_.block_at[1] + static_cast<size_t>(n) * 4);
  now_.delta_at[0] = align_quad(now_.block_at[2] + static_cast<size_t>(o) * 4);
  now_.delta_at[1] = align_quad(now_.delta_at[0] + static_cast<size_t>(n) * 4);
  now_.delta_at[2] = align_quad(now_.delta_at[1] + static_cast<size_t>(n) * sizeof(DeltaFork));
  // Room for so many rows whether they fork or not: the places depend on the graph's key alone.
  now_.tokens_at = align_quad(now_.delta_at[0] + static_cast<uint32_t>(forks_ ? DeltaPass::bytes(n) : 0));
  now_.mask_at = reads_tokens_ ? align_quad(now_.tokens_at + static_cast<size_t>(n) * 4) : now_.tokens_at;
  now_.n_chain = delta.n_chain;
  now_.n_branches = forks_ ? delta.n_branches() : 0;
  const size_t mask_bytes = static_cast<size_t>(n) * static_cast<size_t>(mask_of(pass, vis).words) * 4;
  const size_t block_bytes = align_quad(now_.mask_at + mask_bytes);
  if (block_bytes > block_.bytes()) {
    synchronize("the pass before");
    drop_graphs();
    block_ = DeviceBuffer(*device_, 2 * block_bytes, "a pass's mask");
  }
  const auto row_bytes =
      static_cast<size_t>(steps_.values[static_cast<size_t>(embed_.out)].width) * sizeof(float);

  ++sequence_;
  best_known_ = false;
  host_logits_.assign(static_cast<size_t>(o), {});
  const bool loaded = loader_->complete(), replayable = loaded && n <= kMaxGraphRows;
  now_.loaded = loaded;
  launcher_->set_overlap(loaded);
  now_.ngrams_at = block_bytes + align_quad(static_cast<size_t>(n) * row_bytes);
  Slot& slot = take_slot(replayable, now_.ngrams_at + ngrams_.bytes(n) + kQuad);
  const uint32_t quads = write_block(slot, pass, vis, delta);
  // As many words as the block has room for: its size is part of a graph's key.
  now_.reach.slots = index_.reach(pass.first_slot + n);
  if (!vis.chain) now_.reach.mask_words = static_cast<int32_t>((quads * kQuad - now_.mask_at) / 4) / n;
  embed_rows(slot.memory.at<char>(static_cast<size_t>(quads) * kQuad), pass.tokens);
  ngrams_.write(slot.memory.at<char>(now_.ngrams_at), pass, delta.parents,
                [&state](StateId id) { return state.tokens(id); });
  Graph* graph = nullptr;
  if (replayable)
    graph =
        graph_for({n, o, static_cast<int32_t>(now_.head), quads, now_.chain, now_.n_chain, now_.n_branches,
                   now_.reach.slots, blocks_.n_choosing(now_.most_seen), state.generation()});
  now_.state = &state;
  now_.slot = &slot;
  now_.block_quads = quads;
  now_.replayed = graph != nullptr;
  state.begin_fixed();
  const bool gathers = now_.head == HeadMode::gather;
  if (gathers && !loaded) begin_gather(pass);  // the host would only wait for weights
  slot.busy = true;                            // a pass that is given up has been begun
  if (!graph) {
    enqueue();
  } else {
    if (!graph->exec) capture(*graph);
    device_->cu.check(device_->cu.cuGraphLaunch(graph->exec, stream_), "replaying a pass");
    device_->cu.check(device_->cu.cuEventRecord(slot.read, stream_), "a pass");
  }
  ngrams_.move_on(pass, now_.n_chain, [&state](StateId id) { return state.tokens(id); });
  state.end_fixed(pass.first_slot + now_.n_chain);
  if (gathers && loaded) begin_gather(pass);  // while the layers run
  if (gathers) gather_rows(pass);
  // The first answer is on its way: what no router has asked for may come now.
  if (now_.head != HeadMode::none) loader_->stream_rest();
}

// ---- graphs --------------------------------------------------------------------------------

/// The graph of a pass of this shape, to be replayed or (exec null) captured; null: launch it. The
/// first pass of a shape is always launched: it loads the kernels, and it may be the only one.
CudaProgram::Graph* CudaProgram::graph_for(const GraphKey& key) {
  auto it = graphs_.find(key);
  if (it == graphs_.end()) {
    if (graphs_.size() == kMaxGraphs) {
      auto oldest = std::min_element(graphs_.begin(), graphs_.end(), [](const auto& a, const auto& b) {
        return a.second.last_used < b.second.last_used;
      });
      if (oldest->second.exec) device_->cu.cuGraphExecDestroy(oldest->second.exec);
      graphs_.erase(oldest);
    }
    graphs_[key].last_used = sequence_;
    return nullptr;
  }
  it->second.last_used = sequence_;
  return &it->second;
}

void CudaProgram::capture(Graph& graph) {
  const Driver& cu = device_->cu;
  cu.check(cu.cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_RELAXED), "capturing a pass");
  CUgraph captured = nullptr;
  try {
    enqueue();
  } catch (...) {
    cu.cuStreamEndCapture(stream_, &captured);
    if (captured) cu.cuGraphDestroy(captured);
    throw;
  }
  cu.check(cu.cuStreamEndCapture(stream_, &captured), "capturing a pass");
  const CUresult r = cu.cuGraphInstantiateWithFlags(&graph.exec, captured, 0);
  cu.cuGraphDestroy(captured);
  cu.check(r, "capturing a pass");
}

void CudaProgram::drop_graphs() {
  for (auto& [key, graph] : graphs_)
    if (graph.exec) device_->cu.cuGraphExecDestroy(graph.exec);
  graphs_.clear();
}

// ---- chosen rows of the head -----------------------------------------------------------------

// The logits of a few ids need a few rows of the head, not the head: the host decodes them while the
// weights come or the layers run, and they are multiplied in f32 where they are.

/// All that does not need the layers' result: memory, kernel, the first rows.
void CudaProgram::begin_gather(const Pass& pass) {
  const Weight& head = plan_.weights[static_cast<size_t>(head_.weight)];
  const auto width = static_cast<size_t>(head.n_in()), n = pass.gather_ids.size();
  gather_begin_.assign(pass.gather_begin.begin(), pass.gather_begin.end());
  gathered_.resize(n);
  gather_row_.resize(n);
  for (size_t o = 0; o + 1 < gather_begin_.size(); ++o)
    std::fill(gather_row_.begin() + gather_begin_[o], gather_row_.begin() + gather_begin_[o + 1],
              static_cast<int32_t>(o));
  gather_bias_.clear();
  if (head_.bias != kNone) {
    std::vector<float> bias(static_cast<size_t>(head.n_out()));
    const Weight& b = plan_.weights[static_cast<size_t>(head_.bias)];
    dequantize_row(b.type, b.data, bias.data(), bias.size());
    for (int32_t id : pass.gather_ids) gather_bias_.push_back(bias[static_cast<size_t>(id)]);
  }
  if (!n) return;
  ensure_gather_memory(std::min(n, gather_room()), width);
  device_->kernel(kGatherImage, kGatherKernel);
  decode_gathered(pass, 0);
}

/// How many of the head's rows are decoded at a time.
size_t CudaProgram::gather_room() const {
  const auto width = static_cast<size_t>(plan_.weights[static_cast<size_t>(head_.weight)].n_in());
  return std::max<size_t>(1, kGatherBytes / (width * sizeof(float)));
}

/// The rows of gather_ids from `first` on, as many as there is room for; returns how many.
size_t CudaProgram::decode_gathered(const Pass& pass, size_t first) {
  const Weight& head = plan_.weights[static_cast<size_t>(head_.weight)];
  const auto width = static_cast<size_t>(head.n_in());
  const size_t stride = row_bytes(head.type, width);
  const size_t some = std::min(gather_room(), pass.gather_ids.size() - first);
  std::memcpy(gather_memory_.at<int32_t>(), gather_row_.data() + first, some * sizeof(int32_t));
  auto* w = gather_memory_.at<float>(gather_weights_at_);
  for (size_t i = 0; i < some; ++i)
    dequantize_row(
        head.type,
        static_cast<const char*>(head.data) + static_cast<size_t>(pass.gather_ids[first + i]) * stride,
        w + i * width, width);
  return some;
}

/// After the layers, and after begin_gather().
void CudaProgram::gather_rows(const Pass& pass) {
  const size_t n = pass.gather_ids.size(), room = gather_room();
  for (size_t first = 0; first < n; first += room) {
    if (first) synchronize("the head's chosen rows");
    const size_t some = first ? decode_gathered(pass, first) : std::min(n, room);
    auto* out = gather_memory_.at<float>(gather_out_at_);
    launcher_->order_next();
    launcher_->launch(
        kGatherImage, kGatherKernel, {static_cast<uint32_t>((some + 7) / 8), 1}, 256, 0,
        GatherParams{normed_.at<float>(), gather_memory_.at<float>(gather_weights_at_),
                     gather_memory_.at<int32_t>(), out, static_cast<int32_t>(some),
                     static_cast<int32_t>(plan_.weights[static_cast<size_t>(head_.weight)].n_in())});
    if (first + some < n || n > room) synchronize("the head's chosen rows");
    gather_pending_ = n <= room;
    if (!gather_pending_) std::memcpy(gathered_.data() + first, out, some * sizeof(float));
  }
  if (!gather_pending_) add_gather_bias();
}

void CudaProgram::ensure_gather_memory(size_t n, size_t width) {
  gather_out_at_ = align_quad(n * sizeof(int32_t));
  gather_weights_at_ = gather_out_at_ + align_quad(n * sizeof(float));
  const size_t bytes = gather_weights_at_ + n * width * sizeof(float);
  // A pass that nobody has read may still be using it.
  if (gather_pending_) synchronize("the pass before");
  gather_pending_ = false;
  if (gather_memory_.bytes() < bytes)
    gather_memory_ = PinnedBuffer(*device_, bytes, "the head's chosen rows");
}

void CudaProgram::add_gather_bias() {
  for (size_t i = 0; i < gather_bias_.size(); ++i) gathered_[i] += gather_bias_[i];
}

}  // namespace reflex::cuda
