// Qwen3.5 to 3.8 with experts (transformers: models/qwen3_5_moe, the text model): qwen35's layers; softmax
// routing, the chosen experts' weights renormalised; one shared expert behind a sigmoid gate of its own.
#include "models/hybrid.h"
#include "models/moe.h"

namespace reflex {

void build_qwen35moe(Builder& b) {
  const MoeConfig moe = read_moe(b, {.renormalise = true, .shared = MoeTraits::Shared::gated});
  build_hybrid(b,
               {.order = GatedDelta::Order::tiled,
                .fused_ba = false,
                .ffn = [&](Builder&, int32_t layer, ValueId h, bool) { return moe_ffn(b, moe, layer, h); }});
}

}  // namespace reflex
