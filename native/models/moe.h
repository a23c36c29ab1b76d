// The mixture of experts that the Qwen and DeepSeek families share: what the keys say of it, and the
// feed-forward part of a layer. What no key says (a family's habit) comes in as defaults.
#pragma once
#include <cstdint>

#include "models/builder.h"

namespace reflex {

struct MoeTraits {
  enum class Shared : uint8_t {
    none,
    plain,  ///< expert_shared_count experts side by side, as wide as the routed ones each
    gated,  ///< one of its own width, times sigmoid(ffn_gate_inp_shexp x)
  };
  bool renormalise = false;  ///< where expert_weights_norm is absent
  Shared shared = Shared::none;
  bool reads_gating = false;  ///< expert_gating_func counts (else softmax), exp_probs_b and groups too
  bool own_gating = false;    ///< the model reads those keys itself
};

struct MoeConfig {
  int32_t n_experts = 0, n_used = 0, n_ff = 0;
  int32_t n_ff_shared = 0;  ///< 0: no shared expert
  bool shared_gate = false;
  int32_t n_leading_dense = 0;  ///< layers before the first mixture
  int32_t n_groups = 1, n_groups_used = 1;
  Moe::Gating gating = Moe::Gating::softmax;
  bool renormalise = false;
  float scale = 1.0f;
};

/// Error(gguf) names the key, what was expected and what was found.
MoeConfig read_moe(const Builder& b, const MoeTraits& traits);

/// The experts of a layer, of the normed x: router, stacks and how many are chosen; bias, groups and limits
/// are the caller's.
Moe bind_experts(Builder& b, const MoeConfig& moe, int32_t layer, ValueId x);

/// The layer's feed-forward part, of the normed x: dense in the leading layers, else experts.
ValueId moe_ffn(Builder& b, const MoeConfig& moe, int32_t layer, ValueId x);

}  // namespace reflex
