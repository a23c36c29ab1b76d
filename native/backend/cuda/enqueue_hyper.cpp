// Launches of DeepSeek-V4's steps: hyper-connections over streams, heads with a turned tail, compressors and
// the attention that reads their entries.
#include <algorithm>

#include "backend/cuda/compressor_params.h"
#include "backend/cuda/hyper_params.h"
#include "backend/cuda/program.h"

namespace reflex::cuda {

namespace {
constexpr uint32_t kThreads = 256;
uint32_t blocks_of(size_t n, size_t each) { return static_cast<uint32_t>((n + each - 1) / each); }
}  // namespace

// ---- heads -----------------------------------------------------------------------------------

TurnItem CudaProgram::turn_item(const TurnSpec& spec) const {
  auto item = heads_of<TurnItem>(spec, width_of(spec.in) / spec.n_heads);
  item.normed = spec.normed;
  item.inverse = spec.inverse;
  return item;
}

void CudaProgram::launch_turns(const TurnParams& p) {
  const auto [heads, rows] = extent_of(p);
  if (rows)
    launcher_->launch("hyper", "turn_heads", {rows, blocks_of(heads, kTurnWarps)}, kTurnWarps * 32, 0, p);
}

void CudaProgram::step(const TurnStep& s) {
  TurnParams p{};
  p.pass = arrays();
  p.n_items = 1;
  p.item[0] = turn_item(s.item);
  p.item[0].out = value(s.item.out);
  launch_turns(p);
}

void CudaProgram::step(const WindowStep& s) {
  const WindowAttention& op = s.op;
  const CudaState& state = *now_.state;
  TurnParams heads{};
  heads.pass = arrays();
  TurnItem& kv = heads.item[heads.n_items++];
  kv = turn_item(s.kv);
  kv.state = reinterpret_cast<void*>(state.at(op.state));
  kv.state_f32 = state.is_f32(op.state);
  kv.state_width = (op.ratio > 0 ? 2 : 1) * op.head_dim;
  const int32_t rows = rows_of(op.q);
  if (rows && s.q.out != s.q.in) {
    TurnItem& q = heads.item[heads.n_items++];
    q = turn_item(s.q);
    q.out = value(s.q.out);
  }
  launch_turns(heads);
  if (rows == 0) return;
  WindowParams p{};
  p.q = value(s.q.out);
  p.out = value(op.out);
  p.sinks = residence_.vector(op.sinks);
  p.state = kv.state;
  if (op.selection != kNone) {
    p.chosen = value<int32_t>(op.selection);
    p.top_k = width_of(op.selection);
  }
  p.on_outputs = steps_.values[static_cast<size_t>(op.q)].rows == Rows::outputs;
  p.pass = heads.pass;
  window_.run(*launcher_, op, p, rows, kv.state_f32);
}

void CudaProgram::step(const CompressorStep& s) {
  const Compressor& op = s.op;
  const CudaState& state = *now_.state;
  const RopeSpec& rope = plan_.ropes[static_cast<size_t>(op.rope)];
  CompressorParams p{};
  p.kv = value(op.kv);
  p.gate = value(op.gate);
  p.ape = residence_.vector(op.ape);
  p.norm = residence_.vector(op.norm);
  p.inv_freq = inv_freq_[static_cast<size_t>(op.rope)].at<float>();
  p.raw = reinterpret_cast<void*>(state.at(op.raw));
  p.entries = reinterpret_cast<void*>(state.at(op.entries));
  p.magnitude = rope.magnitude;
  p.eps = op.eps;
  p.channels = (op.overlap ? 2 : 1) * op.head_dim;
  p.head_dim = op.head_dim;
  p.ratio = op.ratio;
  p.overlap = op.overlap;
  p.entries_width = plan_.states[static_cast<size_t>(op.entries)].width;
  p.offset = op.offset;
  p.n_rot = rope.n_rot;
  p.adjacent = rope.pairing == RopeSpec::Pairing::adjacent;
  p.raw_f32 = state.is_f32(op.raw);
  p.entries_f32 = state.is_f32(op.entries);
  p.alone = now_.n_rows == 1;
  p.pass = arrays();
  const auto rows = static_cast<uint32_t>(now_.n_rows);
  if (!p.alone) launcher_->launch("compressor", "compress_rows", {rows}, kThreads, 0, p);
  launcher_->launch("compressor", "compress_entries", {rows}, kCompressThreads,
                    compress_bytes(op.ratio, op.overlap, op.head_dim), p);
}

void CudaProgram::step(const GroupedStep& s) {
  const GroupedLinear& op = s.op;
  const int32_t rows = rows_of(op.in);
  if (rows == 0) return;
  loader_->require(residence_.matrix(op.weight).group, stream_);
  LatentProductParams p{};
  p.w = reinterpret_cast<const uint8_t*>(residence_.matrix(op.weight).at);
  p.x_row = width_of(op.in);
  p.y_row = width_of(op.out);
  p.n_heads = op.n_groups;
  p.n_in = p.x_head = static_cast<int32_t>(p.x_row) / op.n_groups;
  p.n_out = p.y_head = p.head_rows = static_cast<int32_t>(p.y_row) / op.n_groups;
  p.n_rows = rows;
  p.x = value(op.in);
  p.y = value(op.out);
  head_products(*launcher_, p, plan_.weights[static_cast<size_t>(op.weight)], options_.exact);
}

// ---- streams ---------------------------------------------------------------------------------

void CudaProgram::step(const UnitNormStep& s) {
  const int32_t width = width_of(s.op.in);
  const auto groups = static_cast<uint32_t>(rows_of(s.op.in)) * static_cast<uint32_t>(width / s.op.group);
  if (groups)
    launcher_->launch("hyper", "unit_norm", {groups}, kHyperThreads, 0,
                      UnitNormParams{value(s.op.in), value(s.op.out), s.op.eps, s.op.group});
}

void CudaProgram::clamped_swiglu(const float* gate, const float* up, float* out, size_t n, float limit) {
  if (n)
    launcher_->launch("hyper", "clamped_swiglu", {blocks_of(n, kHyperThreads)}, kHyperThreads, 0,
                      ClampedParams{gate, up, out, n, limit});
}

void CudaProgram::step(const ClampedSwiGluStep& s) {
  clamped_swiglu(value(s.op.gate), value(s.op.up), value(s.op.out), values_of(s.op.out), s.op.limit);
}

HyperWeightsParams CudaProgram::hyper_weights(const HyperWeights& op) const {
  HyperWeightsParams p{};
  p.scale = residence_.vector(op.scale);
  p.base = residence_.vector(op.base);
  p.out = value(op.out);
  p.eps = op.eps;
  p.n_rows = rows_of(op.out);
  p.n_streams = op.n_streams;
  p.n_iterations = op.n_iterations;
  p.pre_alone = width_of(op.out) == op.n_streams;
  return p;
}

void CudaProgram::step(const HyperWeightsStep& s) {
  HyperWeightsParams p = hyper_weights(s.op);
  if (p.n_rows == 0) return;
  p.x = value(s.op.in);
  const auto each = static_cast<uint32_t>(p.n_streams * p.n_streams) * static_cast<uint32_t>(sizeof(float));
  const uint32_t warps = std::clamp(kHyperShared / each, 1u, 4u);
  launcher_->launch("hyper", "hyper_weights", {blocks_of(static_cast<size_t>(p.n_rows), warps)}, 32 * warps,
                    warps * each, p);
}

namespace {

/// Rows of a group, groups of a pass, and blocks that share a group's columns: enough of them for the card.
struct MixShape {
  int32_t rows, groups, n_split;
  uint32_t splits;
};
MixShape mix_shape(int32_t n_rows, int32_t width, int32_t sms) {
  MixShape s{};
  s.rows = n_rows == 1 ? 1 : kMixRows;
  s.groups = (n_rows + s.rows - 1) / s.rows;
  const int32_t splits = std::clamp(2 * sms / s.groups, 1, kMixSplits);
  s.n_split = std::max(kMixColumns, (width + 4 * splits - 1) / (4 * splits) * 4);
  s.splits = blocks_of(static_cast<size_t>(width), static_cast<size_t>(s.n_split));
  return s;
}

}  // namespace

void CudaProgram::allocate_mixes() {
  size_t partial = 0, groups = 0;
  for (const Step& step : steps_.steps) {
    const auto* s = std::get_if<HyperMixStep>(&step);
    if (!s) continue;
    const auto m = static_cast<size_t>(width_of(s->op.out)) + 1;
    for (int32_t rows = 1; rows <= alloc_rows_; rows += rows == 1 ? kMixRows - 1 : kMixRows) {
      const MixShape shape = mix_shape(rows, s->norm.group, device_->sm_count());
      const auto n = static_cast<size_t>(shape.groups);
      partial = std::max(partial, n * shape.splits * static_cast<size_t>(shape.rows) * m);
      groups = std::max(groups, n);
    }
  }
  mix_partial_ = DeviceBuffer(*device_, partial * sizeof(float), "partial sums of streams");
  mix_tickets_ = DeviceBuffer(*device_, groups * sizeof(uint32_t), "tickets of streams", true);
  scratch_bytes_ += mix_partial_.bytes() + mix_tickets_.bytes();
}

void CudaProgram::step(const HyperMixStep& s) {
  HyperMixParams p{};
  p.weights = hyper_weights(s.op);
  if (p.weights.n_rows == 0) return;
  loader_->require(residence_.matrix(s.fn.weight).group, stream_);
  p.streams = value(s.norm.in);
  p.fn = reinterpret_cast<const float*>(residence_.matrix(s.fn.weight).at);
  p.norm_eps = s.norm.eps;
  p.read = value(s.read.out);
  p.width = s.norm.group;
  p.d = width_of(s.read.out);
  p.m = width_of(s.op.out);
  p.partial = mix_partial_.at<float>();
  p.tickets = mix_tickets_.at<uint32_t>();
  const MixShape shape = mix_shape(p.weights.n_rows, p.width, device_->sm_count());
  p.n_split = shape.n_split;
  launcher_->launch("hyper", shape.rows == 1 ? "hyper_mix_1" : "hyper_mix_8",
                    {shape.splits, static_cast<uint32_t>(shape.groups)}, kHyperThreads, 0, p);
}

HyperParams CudaProgram::hyper_params(ValueId streams, ValueId weights, ValueId out,
                                      int32_t n_streams) const {
  HyperParams p{};
  p.streams = value(streams);
  p.weights = value(weights);
  p.out = value(out);
  p.n_rows = rows_of(streams);
  p.n_streams = n_streams;
  p.d = width_of(streams) / n_streams;
  p.weights_width = width_of(weights);
  return p;
}

void CudaProgram::launch_hyper(const char* kernel, const HyperParams& p) {
  if (p.n_rows)
    launcher_->launch("hyper", kernel,
                      {blocks_of(static_cast<size_t>(p.d), kHyperThreads), static_cast<uint32_t>(p.n_rows)},
                      kHyperThreads, 0, p);
}

void CudaProgram::step(const HyperReadStep& s) {
  launch_hyper("hyper_read", hyper_params(s.op.streams, s.op.weights, s.op.out, s.op.n_streams));
}

void CudaProgram::step(const HyperWriteStep& s) {
  HyperParams p = hyper_params(s.op.streams, s.op.weights, s.op.out, s.op.n_streams);
  p.in = value(s.op.in);
  launch_hyper("hyper_write", p);
}

}  // namespace reflex::cuda
