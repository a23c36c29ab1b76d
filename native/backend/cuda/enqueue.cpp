// A pass as launches: one function per kind of step.
#include <algorithm>

#include "backend/cuda/operands.h"
#include "backend/cuda/program.h"
#include "backend/cuda/tile.h"
#include "base/clock.h"

namespace reflex::cuda {

namespace {
constexpr uint32_t kThreads = 256;
constexpr uint32_t kBeginBlocks = 64;

uint32_t blocks_for(size_t n) { return static_cast<uint32_t>((n + kThreads - 1) / kThreads); }
/// Whether a head rotates whole or not at all.
bool all_or_none(const HeadItem& h) { return !h.rotation || h.n_rot == h.head_dim; }
bool half_warp_head(int32_t hd) { return hd == 64 || hd == 128; }
}  // namespace

int32_t CudaProgram::rows_of(ValueId v) const {
  return steps_.values[static_cast<size_t>(v)].rows == Rows::all ? now_.n_rows : now_.n_out;
}

// Where the outputs are all rows a selection is its input.
ValueId CudaProgram::resolve(ValueId v) const {
  while (now_.same_rows && steps_.select_of[static_cast<size_t>(v)] != kNone)
    v = steps_.select_of[static_cast<size_t>(v)];
  return v;
}

bool CudaProgram::in_fragments(ValueId v) const {
  return !options_.exact && fragments_[static_cast<size_t>(v)] && rows_of(v) > 1;
}

PassArrays CudaProgram::arrays() const {
  return {block_.at<PassHeader>(), block_.at<int32_t>(now_.block_at[0]), block_.at<int32_t>(now_.block_at[1]),
          block_.at<int32_t>(now_.block_at[2]), block_.at<uint32_t>(now_.mask_at)};
}

void CudaProgram::enqueue() {
  for (const Step& s : steps_.steps)
    std::visit(
        [this]<class T>(const T& one) {
          if constexpr (kIsOpStep<T>) require_weights(one.op);
          step(one);
        },
        s);
}

// What an op of its own step reads must have come; it may be the first that reads any.
template <class T>
void CudaProgram::require_weights(const T& op) {
  for_vectors(op, [&](WeightId) { loader_->require(kVectorGroup, stream_); });
  for_matrices(op, [&](WeightId id) { loader_->require(residence_.matrix(id).group, stream_); });
}

void CudaProgram::step(const EmbedStep& s) {
  const auto row_bytes = static_cast<size_t>(steps_.values[static_cast<size_t>(s.out)].width) * sizeof(float);
  BeginParams p{};
  p.from[0] = now_.slot->memory.at();
  p.to[0] = block_.at();
  p.n_quads[0] = now_.block_quads;
  p.from[1] = now_.slot->memory.at(static_cast<size_t>(now_.block_quads) * 16);
  p.to[1] = value(s.out);
  p.n_quads[1] = static_cast<uint32_t>((static_cast<size_t>(now_.n_rows) * row_bytes + 15) / 16);
  p.positions = now_.slot->memory.at<int32_t>(now_.block_at[0]);
  p.n_rows = now_.n_rows;
  uint32_t most = std::max(p.n_quads[0], p.n_quads[1]);
  for (size_t i = 0; i < plan_.ropes.size(); ++i) {
    const RopeSpec& rope = plan_.ropes[i];
    p.rope[p.n_ropes++] = {inv_freq_[i].at<float>(), rotations_[i].at<float>(), rope.magnitude,
                           rope.n_rot / 2};
    most = std::max(most, static_cast<uint32_t>(now_.n_rows * (rope.n_rot / 2)));
  }
  launcher_->order_next();
  launcher_->launch("embed", "begin_pass", {std::min(kBeginBlocks, blocks_for(most)), 1}, kThreads, 0, p);
  launcher_->order_next();  // what it leaves may then be read by any later kernel ahead of its wait
  if (now_.replayed) return;
  if (first_kernel_at_ == 0) first_kernel_at_ = now_ms();
  device_->cu.check(device_->cu.cuEventRecord(now_.slot->read, stream_), "a pass");
}

Product CudaProgram::product(WeightId weight, WeightId bias, float* out, const float* residual) const {
  const Weight& w = plan_.weights[static_cast<size_t>(weight)];
  return {&w,  &residence_.matrix(weight),     residence_.vector(bias), residual,
          out, static_cast<int32_t>(w.n_out())};
}

void CudaProgram::step(const MatmulStep& s) {
  const int32_t rows = rows_of(s.in);
  if (rows == 0) return;
  std::vector<Product> parts;
  for (const MatmulPart& p : s.parts) {
    loader_->require(residence_.matrix(p.weight).group, stream_);
    parts.push_back(
        product(p.weight, p.bias, value(p.out), p.residual == kNone ? nullptr : value(p.residual)));
  }
  const Launcher::Input in{value<void>(s.in), in_fragments(s.in), rows,
                           steps_.values[static_cast<size_t>(s.in)].width, norming(s.norm)};
  void* swiglu = s.swiglu == kNone ? nullptr : value<void>(s.swiglu);
  launcher_->products(in, parts, swiglu, swiglu && in_fragments(s.swiglu));
}

HeadItem CudaProgram::head_item(const HeadSpec& spec, int32_t head_dim) const {
  return heads_of<HeadItem>(spec, head_dim);
}

void CudaProgram::launch_heads(const HeadsParams& p) {
  const auto [heads, rows] = extent_of(p);
  if (rows) launcher_->launch("rope", "heads", {rows, (heads + 3) / 4}, 128, 0, p);
}

void CudaProgram::step(const HeadsStep& s) {
  HeadsParams p{};
  p.pass = arrays();
  p.n_items = 1;
  p.item[0] = head_item(s.item, steps_.values[static_cast<size_t>(s.item.in)].width / s.item.n_heads);
  p.item[0].out = value(s.item.out);
  launch_heads(p);
}

AttentionParams CudaProgram::attention_params(const AttentionStep& s) const {
  const Attention& op = s.op;
  const CudaState& state = *now_.state;
  AttentionParams p{};
  p.q_item = head_item(s.q, op.head_dim);
  p.k_item = head_item(s.k, op.head_dim);
  p.v_item = head_item(s.v, op.v_head_dim);
  p.k_item.state = reinterpret_cast<void*>(state.at(op.k_state));
  p.v_item.state = reinterpret_cast<void*>(state.at(op.v_state));
  p.k_item.state_f32 = p.v_item.state_f32 = state.is_f32(op.k_state);
  p.q_item.out = s.q.out == s.q.in ? nullptr : value(s.q.out);
  p.q = value(s.q.out);
  p.k = p.k_item.state;
  p.v = p.v_item.state;
  p.out = value(op.out);
  p.n_rows = rows_of(op.q);
  p.n_heads = op.n_heads;
  p.n_kv_heads = op.n_kv_heads;
  p.head_dim = op.head_dim;
  p.v_head_dim = op.v_head_dim;
  p.scale = op.scale;
  p.on_outputs = p.q_item.on_outputs;
  p.pass = arrays();
  p.partial = partial_.at<float>();
  p.tickets = tickets_.at<uint32_t>();
  if (in_fragments(op.out)) {
    p.out_f16 = p.out;
    p.out_units = Launcher::units(op.n_heads * op.v_head_dim);
  }
  return p;
}

/// Queries as the attention reads them, keys and values to their states.
void CudaProgram::launch_qkv(const AttentionParams& p) {
  HeadsParams heads{};
  heads.pass = p.pass;
  if (p.q_item.out && p.n_rows) heads.item[heads.n_items++] = p.q_item;
  heads.item[heads.n_items++] = p.k_item;
  heads.item[heads.n_items++] = p.v_item;
  launch_heads(heads);
}

void CudaProgram::step(const AttentionStep& s) {
  const Attention& op = s.op;
  const AttentionParams p = attention_params(s);
  const bool f32 = now_.state->is_f32(op.k_state);
  // The new row's heads and attention in one launch, where there is one row at the end of a chain.
  const bool one = now_.n_rows == 1 && p.n_rows == 1 && now_.chain && !f32 && op.head_dim == op.v_head_dim &&
                   half_warp_head(op.head_dim) && op.n_heads / op.n_kv_heads <= 8 && all_or_none(p.q_item) &&
                   all_or_none(p.k_item);
  if (!one) launch_qkv(p);
  if (p.n_rows) launcher_->attention(p, f32, one);
}

void CudaProgram::step(const NormStep& s) {
  loader_->require(kVectorGroup, stream_);
  const int32_t groups = rows_of(s.in) * (steps_.values[static_cast<size_t>(s.in)].width / s.norm.group);
  if (groups) launcher_->norm(value(s.in), value(s.out), norming(s.norm), groups, s.norm.group);
}

void CudaProgram::elementwise(const char* kernel, const float* a, const float* b, float* out, size_t n) {
  if (n) launcher_->launch("norm", kernel, {blocks_for(n), 1}, kThreads, 0, PairParams{a, b, out, n});
}

void CudaProgram::step(const AddStep& s) {
  const auto n = static_cast<size_t>(rows_of(s.out)) *
                 static_cast<size_t>(steps_.values[static_cast<size_t>(s.out)].width);
  elementwise("add", value(s.a), value(s.b), value(s.out), n);
}

void CudaProgram::step(const SwiGluStep& s) {
  const auto n = static_cast<size_t>(rows_of(s.out)) *
                 static_cast<size_t>(steps_.values[static_cast<size_t>(s.out)].width);
  elementwise("swiglu", value(s.gate), value(s.up), value(s.out), n);
}

void CudaProgram::step(const SigmoidGateStep& s) {
  const int32_t width = steps_.values[static_cast<size_t>(s.out)].width;
  const auto n = static_cast<size_t>(rows_of(s.out)) * static_cast<size_t>(width);
  const bool per_row = width != 1 && steps_.values[static_cast<size_t>(s.gate)].width == 1;
  if (n)
    launcher_->launch("norm", "sigmoid_gate", {blocks_for(n), 1}, kThreads, 0,
                      SigmoidGateParams{value(s.in), value(s.gate), value(s.out), n, width, per_row});
}

void CudaProgram::step(const SelectStep& s) {
  if (now_.n_out == 0 || now_.same_rows) return;
  const int32_t width = steps_.values[static_cast<size_t>(s.in)].width;
  launcher_->launch("embed", "select_rows", {static_cast<uint32_t>(now_.n_out), 1}, kThreads, 0,
                    SelectParams{value(s.in), value(s.out), arrays().outputs, now_.n_out, width});
}

void CudaProgram::step(const HeadStep& s) {
  if (now_.head == HeadMode::none || now_.n_out == 0) return;
  const int32_t width = steps_.values[static_cast<size_t>(s.in)].width;
  if (now_.head == HeadMode::gather) {  // of the normed rows; pass.cpp brings the weights' rows
    if (s.norm.weight != kNone)
      launcher_->norm(value(s.in), normed_.at<float>(), norming(s.norm), now_.n_out, width);
    else
      device_->cu.check(
          device_->cu.cuMemcpyDtoDAsync(
              normed_.address(), reinterpret_cast<CUdeviceptr>(value(s.in)),
              static_cast<size_t>(now_.n_out) * static_cast<size_t>(width) * sizeof(float), stream_),
          "the head's input");
    return;
  }
  loader_->require(residence_.matrix(s.weight).group, stream_);
  const Product part = product(s.weight, s.bias, logits_.at<float>(), nullptr);
  // A single row's product finds its best output as it goes.
  const bool found = now_.n_out == 1 && !options_.exact && part.at->tiled;
  if (found) launcher_->set_best(best_partial_.at<Best>());
  launcher_->products({value<void>(s.in), false, now_.n_out, width, norming(s.norm)}, {&part, 1}, nullptr,
                      false);

  BestParams best{};
  best.logits = logits_.at<float>();
  best.n_vocab = static_cast<int32_t>(part.weight->n_out());
  best.n_out = now_.n_out;
  best.n_partial = found ? static_cast<int32_t>(launcher_->one_row_blocks(part)) : kScanBlocks;
  best.partial = best_partial_.at<Best>();
  best.out = results_.at<Best>(kResultsBest);
  best.done = results_.at<uint32_t>(kResultsDone);
  best.header = block_.at<PassHeader>();
  if (!found)
    launcher_->launch("sample", "best_of_blocks", {kScanBlocks, static_cast<uint32_t>(now_.n_out)},
                      kScanThreads, 0, best);
  launcher_->launch("sample", "best_of_rows", {1, 1}, kScanThreads, 0, best);
}

}  // namespace reflex::cuda
