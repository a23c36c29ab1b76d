// DeepSeek-MoE, the V1 16B (Dai et al. 2024, arXiv 2401.06066): llama's attention, rows of q and k
// permuted by the converter alike; dense leading layers; softmax routing, weights not renormalised;
// shared experts beside it.
#include "models/dense.h"
#include "models/moe.h"

namespace reflex {

void build_deepseek(Builder& b) {
  const MoeConfig moe = read_moe(b, {.renormalise = false, .shared = MoeTraits::Shared::plain});
  build_dense(b, {.pairing = RopeSpec::Pairing::adjacent,
                  .qk_norm = false,
                  .require_bias = false,
                  .ffn = [&](Builder&, int32_t layer, ValueId h) { return moe_ffn(b, moe, layer, h); }});
}

}  // namespace reflex
