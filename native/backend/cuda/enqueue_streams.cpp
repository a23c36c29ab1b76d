// Launches of the steps of a residual of several streams, of n-grams' rows and of convolutions.
#include <algorithm>

#include "backend/cuda/program.h"
#include "backend/cuda/stream_params.h"

namespace reflex::cuda {

namespace {
constexpr uint32_t kCopyBlocks = 64;
uint32_t blocks_of(uint64_t n) { return static_cast<uint32_t>((n + kStreamThreads - 1) / kStreamThreads); }
}  // namespace

void CudaProgram::step(const RepeatStep& s) {
  const int32_t d = width_of(s.op.in), rows = rows_of(s.op.out);
  if (rows)
    launcher_->launch("streams", "stream_repeat",
                      {static_cast<uint32_t>(rows), blocks_of(static_cast<uint64_t>(d))}, kStreamThreads, 0,
                      RepeatParams{value(s.op.in), value(s.op.out), d, s.op.n});
}

void CudaProgram::step(const StreamNormStep& s) {
  const int32_t d = s.op.group, n_streams = width_of(s.op.in) / d;
  const auto blocks = static_cast<uint32_t>(rows_of(s.op.out) * n_streams);
  if (blocks)
    launcher_->launch("streams", "stream_norm", {blocks}, kStreamThreads, 0,
                      StreamNormParams{value(s.op.in), residence_.vector(s.op.weight), value(s.op.out),
                                       s.op.eps, d, n_streams});
}

void CudaProgram::step(const StreamMixStep& s) {
  const int32_t d = width_of(s.op.out), rows = rows_of(s.op.out);
  if (rows)
    launcher_->launch("streams", "stream_mix",
                      {static_cast<uint32_t>(rows), blocks_of(static_cast<uint64_t>(d))}, kStreamThreads, 0,
                      StreamMixParams{value(s.op.in), value(s.op.gate), value(s.op.out), d, s.op.n_streams});
}

void CudaProgram::step(const StreamInjectStep& s) {
  const auto blocks = static_cast<uint32_t>(rows_of(s.op.out) * s.op.n_streams);
  if (blocks == 0) return;
  StreamInjectParams p{};
  p.x = value(s.op.in);
  p.logits = value(s.op.logits);
  p.block = value(s.op.block);
  p.out = value(s.op.out);
  p.d = width_of(s.op.block);
  p.n_streams = s.op.n_streams;
  if (s.norm.out != kNone) {
    loader_->require(kVectorGroup, stream_);
    p.weight = residence_.vector(s.norm.weight);
    p.normed = value(s.norm.out);
    p.eps = s.norm.eps;
  }
  launcher_->launch("streams", "stream_inject", {blocks}, kStreamThreads, 0, p);
}

void CudaProgram::step(const StreamGateStep& s) {
  const auto blocks = static_cast<uint32_t>(rows_of(s.op.out) * s.op.n_streams);
  if (blocks)
    launcher_->launch("streams", "stream_gate", {blocks}, kStreamThreads, 0,
                      StreamGateParams{value(s.op.key), value(s.op.query), value(s.op.value), value(s.op.out),
                                       width_of(s.op.value), s.op.n_streams});
}

void CudaProgram::step(const NgramStep& s) {
  CopyParams p{};
  p.from = now_.slot->memory.at<char>(now_.ngrams_at + ngrams_.at(s.op, now_.n_rows));
  p.to = value(s.op.out);
  p.n_quads = static_cast<uint32_t>((values_of(s.op.out) * sizeof(float) + 15) / 16);
  launcher_->launch("causal_conv", "copy_pinned", {std::min(kCopyBlocks, blocks_of(p.n_quads))},
                    kStreamThreads, 0, p);
  // The pass's memory is free again only now (see EmbedStep).
  if (!now_.replayed) device_->cu.check(device_->cu.cuEventRecord(now_.slot->read, stream_), "a pass");
}

void CudaProgram::step(const ConvStep& s) {
  ConvParams p{};
  p.x = value(s.op.in);
  p.weight = residence_.vector(s.op.weight);
  p.out = value(s.op.out);
  p.history = now_.state->fixed(s.op.history);
  p.parents = block_.at<int32_t>(now_.delta_at[0]);
  p.n_rows = now_.n_rows;
  p.n_chain = now_.n_chain;
  p.n_channels = width_of(s.op.in);
  p.n_taps = s.op.n_taps;
  p.dilation = s.op.dilation;
  const uint32_t blocks = blocks_of(static_cast<uint64_t>(p.n_channels));
  launcher_->launch("causal_conv", "causal_conv", {blocks, static_cast<uint32_t>(p.n_rows)}, kStreamThreads,
                    0, p);
  if (p.n_rows > 1 && p.n_chain > 0)
    launcher_->launch("causal_conv", "conv_history", {blocks}, kStreamThreads, 0, p);
}

}  // namespace reflex::cuda
