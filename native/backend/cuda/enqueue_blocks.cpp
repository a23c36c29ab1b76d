// Launches of attention over chosen blocks: its heads as plain attention's, then its index.
#include "backend/cuda/program.h"

namespace reflex::cuda {

void CudaProgram::step(const BlockAttentionStep& s) {
  const BlockAttention& op = s.op;
  const RopeSpec& rope = plan_.ropes[static_cast<size_t>(op.index_rope)];
  loader_->require(kVectorGroup, stream_);
  BlockMemory m{};
  m.index_q = value(s.index_q.out);
  m.index_k = value(op.index_k);
  m.norm = residence_.vector(op.index_norm);
  m.inv_freq = inv_freq_[static_cast<size_t>(op.index_rope)].at<float>();
  m.magnitude = rope.magnitude;
  m.n_rot = rope.n_rot;
  m.adjacent = rope.pairing == RopeSpec::Pairing::adjacent;
  m.state = reinterpret_cast<void*>(now_.state->at(op.index_state));
  m.state_f32 = now_.state->is_f32(op.index_state);
  m.n_rows = now_.n_rows;
  blocks_.keep_keys(*launcher_, op, m, arrays());
  if (!BlockSteps::chooses(op, now_.most_seen)) return step(s.plain);
  const AttentionParams a = attention_params(s.plain);
  launch_qkv(a);
  if (a.n_rows == 0) return;
  if (s.index_q.out != s.index_q.in) {
    HeadsParams heads{};
    heads.pass = arrays();
    heads.item[heads.n_items++] = head_item(s.index_q, op.index_dim);
    heads.item[0].out = value(s.index_q.out);
    launch_heads(heads);
  }
  blocks_.attend(*launcher_, op, m, a, now_.state->is_f32(op.k_state));
}

}  // namespace reflex::cuda
