#include "models/moe.h"

#include "models/dense.h"
#include "models/keys.h"

namespace reflex {

namespace {

constexpr uint64_t kMaxExperts = 1u << 14, kMaxExpertWidth = 1u << 22;

// gguf-py constants.py, ExpertGatingFuncType.
Moe::Gating gating_of(const Keys& keys, int32_t id) {
  switch (id) {
    case 1:
      return Moe::Gating::softmax;
    case 2:
      return Moe::Gating::sigmoid;
    default:
      fail(ErrorKind::unsupported_architecture, "key '%s': expected 1 (softmax) or 2 (sigmoid), found %d",
           keys.name("expert_gating_func").c_str(), id);
  }
}

void read_groups(const Keys& keys, MoeConfig& m) {
  m.n_groups = keys.get("expert_group_count", 1, kMaxExperts);
  if (m.n_experts % m.n_groups != 0)
    fail(ErrorKind::gguf, "key '%s': expected a divisor of the %d experts, found %d",
         keys.name("expert_group_count").c_str(), m.n_experts, m.n_groups);
  m.n_groups_used = keys.get("expert_group_used_count", m.n_groups, kMaxExperts);
  if (m.n_groups_used > m.n_groups || m.n_experts / m.n_groups * m.n_groups_used < m.n_used)
    fail(ErrorKind::gguf, "key '%s': expected at most %d groups, that hold %d experts, found %d",
         keys.name("expert_group_used_count").c_str(), m.n_groups, m.n_used, m.n_groups_used);
}

}  // namespace

MoeConfig read_moe(const Builder& b, const MoeTraits& traits) {
  const Keys keys(b.file(), b.config().arch);
  MoeConfig m;
  m.n_experts = keys.require("expert_count", kMaxExperts);
  m.n_used = keys.require("expert_used_count", kMaxExperts);
  if (m.n_used > m.n_experts)
    fail(ErrorKind::gguf, "key '%s': expected at most the %d experts, found %d",
         keys.name("expert_used_count").c_str(), m.n_experts, m.n_used);
  m.n_ff = keys.require("expert_feed_forward_length", kMaxExpertWidth);
  m.n_leading_dense = keys.get("leading_dense_block_count", 0, kMaxExperts, 0);
  m.renormalise = keys.flag("expert_weights_norm", traits.renormalise);
  m.scale = static_cast<float>(keys.positive("expert_weights_scale", 1.0));
  if (traits.shared == MoeTraits::Shared::plain)
    m.n_ff_shared = m.n_ff * keys.get("expert_shared_count", 0, kMaxExperts, 0);
  if (traits.shared == MoeTraits::Shared::gated) {
    m.n_ff_shared = keys.require("expert_shared_feed_forward_length", kMaxExpertWidth);
    m.shared_gate = true;
  }
  if (!traits.reads_gating && !traits.own_gating) {
    const int32_t id = keys.get("expert_gating_func", 1, kMaxExperts, 0);
    if (gating_of(keys, id) != Moe::Gating::softmax)
      fail(ErrorKind::unsupported_architecture, "key '%s': expected 1 (softmax), found %d",
           keys.name("expert_gating_func").c_str(), id);
    if (const int32_t n = keys.get("expert_group_count", 1, kMaxExperts, 0); n > 1)
      fail(ErrorKind::unsupported_architecture, "key '%s': expected no groups of experts, found %d",
           keys.name("expert_group_count").c_str(), n);
  }
  if (traits.reads_gating) {
    m.gating = gating_of(keys, keys.get("expert_gating_func", 1, kMaxExperts, 0));
    read_groups(keys, m);
  }
  return m;
}

Moe bind_experts(Builder& b, const MoeConfig& m, int32_t layer, ValueId x) {
  const int32_t n_embd = b.config().n_embd;
  const auto t = [&](const char* name) { return block_name(layer, name); };
  if (const std::string fused = t("ffn_gate_up_exps.weight"); b.has(fused))
    fail(ErrorKind::unsupported_architecture,
         "tensor '%s': gate and up experts in one stack are not read, expected '%s' and '%s'", fused.c_str(),
         t("ffn_gate_exps.weight").c_str(), t("ffn_up_exps.weight").c_str());
  Moe op{};
  op.in = x;
  op.router = b.linear(x, b.matrix(t("ffn_gate_inp.weight"), n_embd, m.n_experts));
  op.gate = b.stack(t("ffn_gate_exps.weight"), n_embd, m.n_ff, m.n_experts);
  op.up = b.stack(t("ffn_up_exps.weight"), n_embd, m.n_ff, m.n_experts);
  op.down = b.stack(t("ffn_down_exps.weight"), m.n_ff, n_embd, m.n_experts);
  op.n_experts = m.n_experts;
  op.n_used = m.n_used;
  op.gating = m.gating;
  op.renormalise = m.renormalise;
  op.scale = m.scale;
  return op;
}

ValueId moe_ffn(Builder& b, const MoeConfig& m, int32_t layer, ValueId x) {
  const Config& c = b.config();
  if (layer < m.n_leading_dense) return gated_ffn(b, layer, x, c.n_ff);
  const auto t = [&](const char* name) { return block_name(layer, name); };
  Moe op = bind_experts(b, m, layer, x);
  op.bias = b.optional_vector(t("exp_probs_b.bias"), m.n_experts);
  op.n_groups = m.n_groups;
  op.n_groups_used = m.n_groups_used;
  // A group of DeepSeek-V3 scores its two best biased sigmoids, one of V2 its best softmax.
  op.group_score = m.gating == Moe::Gating::sigmoid ? Moe::GroupScore::best_two : Moe::GroupScore::maximum;
  const ValueId routed = b.moe(op);
  if (m.n_ff_shared == 0) return routed;
  ValueId shared = gated_ffn(b, layer, x, m.n_ff_shared, "_shexp");
  if (m.shared_gate)
    shared = b.sigmoid_gate(shared, b.linear(x, b.matrix(t("ffn_gate_inp_shexp.weight"), c.n_embd, 1)));
  return b.add(routed, shared);
}

}  // namespace reflex
