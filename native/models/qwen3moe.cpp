// Qwen3 with experts (transformers: models/qwen3_moe): qwen3's attention; softmax routing, the chosen
// experts' weights renormalised, which no key says; no shared expert.
#include "models/dense.h"
#include "models/moe.h"

namespace reflex {

void build_qwen3moe(Builder& b) {
  const MoeConfig moe = read_moe(b, {.renormalise = true});
  build_dense(b, {.pairing = RopeSpec::Pairing::half,
                  .qk_norm = true,
                  .require_bias = false,
                  .ffn = [&](Builder&, int32_t layer, ValueId h) { return moe_ffn(b, moe, layer, h); }});
}

}  // namespace reflex
