// Launches of what mixes rows beside plain attention: Gated DeltaNet and latent attention, and the slices
// of heads that their plans ask for.
#include "backend/cuda/program.h"

namespace reflex::cuda {

namespace {
constexpr uint32_t kThreads = 256;
}

void CudaProgram::step(const DeltaStep& s) {
  const GatedDelta& op = s.op;
  DeltaParams p{};
  p.conv = residence_.vector(op.conv);
  p.decay = residence_.vector(op.decay);
  p.dt_bias = residence_.vector(op.dt_bias);
  p.norm = residence_.vector(op.norm);
  p.qkv = value(op.qkv);
  p.beta = value(op.beta);
  p.alpha = value(op.alpha);
  p.n_rows = now_.n_rows;
  p.n_out = rows_of(op.out);
  p.z = p.n_out ? value(op.z) : nullptr;
  p.out = value(op.out);
  if (steps_.values[static_cast<size_t>(op.out)].rows == Rows::outputs) p.outputs = arrays().outputs;
  p.history = now_.state->fixed(op.conv_state);
  p.state = now_.state->fixed(op.delta_state);
  p.n_chain = now_.n_chain;
  p.parents = block_.at<int32_t>(now_.delta_at[0]);
  p.forks = block_.at<DeltaFork>(now_.delta_at[1]);
  p.branches = block_.at<int32_t>(now_.delta_at[2]);
  delta_.run(*launcher_, op, p, now_.n_branches);
}

void CudaProgram::step(const LatentStep& s) {
  const LatentAttention& op = s.op;
  const WeightId k = op.kv_b == kNone ? op.k_b : op.kv_b, v = op.kv_b == kNone ? op.v_b : op.kv_b;
  for (WeightId w : {k, v}) loader_->require(residence_.matrix(w).group, stream_);
  LatentMemory m{};
  m.q = value(op.q);
  m.kv = value(op.kv);
  m.norm = residence_.vector(op.norm);
  m.rotation = rotations_[static_cast<size_t>(op.rope)].at<float>();
  m.out = value(op.out);
  m.state = reinterpret_cast<void*>(now_.state->at(op.state));
  m.state_f32 = now_.state->is_f32(op.state);
  m.n_rows = now_.n_rows;
  m.n_q_rows = rows_of(op.q);
  m.n_slots = now_.n_slots;
  m.on_outputs = steps_.values[static_cast<size_t>(op.q)].rows == Rows::outputs;
  m.adjacent = plan_.ropes[static_cast<size_t>(op.rope)].pairing == RopeSpec::Pairing::adjacent;
  m.pass = arrays();
  if (op.selection != kNone && !IndexSteps::chooses_all(width_of(op.selection), 1, now_.reach)) {
    m.selection = value<int32_t>(op.selection);
    m.top_k = width_of(op.selection);
  }
  m.k_at = reinterpret_cast<const uint8_t*>(residence_.matrix(k).at);
  m.v_at = reinterpret_cast<const uint8_t*>(residence_.matrix(v).at);
  m.k_weight = &plan_.weights[static_cast<size_t>(k)];
  m.v_weight = &plan_.weights[static_cast<size_t>(v)];
  latent_.run(*launcher_, op, m);
}

void CudaProgram::step(const HeadSliceStep& s) {
  const HeadSlice& op = s.op;
  const auto n = static_cast<uint64_t>(rows_of(op.out)) * static_cast<uint64_t>(op.n_heads) *
                 static_cast<uint64_t>(op.count);
  const int32_t stride = steps_.values[static_cast<size_t>(op.in)].width / op.n_heads;
  if (n)
    launcher_->launch("latent_attention", "head_slice",
                      {static_cast<uint32_t>((n + kThreads - 1) / kThreads), 1}, kThreads, 0,
                      HeadSliceParams{value(op.in), value(op.out), n, stride, op.begin, op.count});
}

}  // namespace reflex::cuda
