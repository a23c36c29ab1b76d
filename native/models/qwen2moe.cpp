// Qwen1.5 and Qwen2 with experts (transformers: models/qwen2_moe): qwen2's attention; softmax routing,
// weights not renormalised; one shared expert behind a sigmoid gate of its own.
#include "models/dense.h"
#include "models/moe.h"

namespace reflex {

void build_qwen2moe(Builder& b) {
  const MoeConfig moe = read_moe(b, {.renormalise = false, .shared = MoeTraits::Shared::gated});
  build_dense(b, {.pairing = RopeSpec::Pairing::half,
                  .qk_norm = false,
                  .require_bias = true,
                  .ffn = [&](Builder&, int32_t layer, ValueId h) { return moe_ffn(b, moe, layer, h); }});
}

}  // namespace reflex
