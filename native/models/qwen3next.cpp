// Qwen3-Next (transformers: models/qwen3_next): value heads in transformers' grouped order, beta and alpha
// in one tensor; gated attention with partial rope; experts as in qwen35moe.
#include "models/hybrid.h"
#include "models/moe.h"

namespace reflex {

void build_qwen3next(Builder& b) {
  const MoeConfig moe = read_moe(b, {.renormalise = true, .shared = MoeTraits::Shared::gated});
  build_hybrid(b,
               {.order = GatedDelta::Order::grouped,
                .fused_ba = true,
                .ffn = [&](Builder&, int32_t layer, ValueId h, bool) { return moe_ffn(b, moe, layer, h); }});
}

}  // namespace reflex
