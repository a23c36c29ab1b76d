// Qwen3.5 to 3.8, dense (transformers: models/qwen3_5, the text model): Gated DeltaNet layers with value
// heads tiled over the key heads by the converter, gated attention with partial rope, a dense FFN.
#include "models/hybrid.h"

namespace reflex {

void build_qwen35(Builder& b) {
  build_hybrid(b, {.order = GatedDelta::Order::tiled,
                   .fused_ba = false,
                   .ffn = [](Builder& m, int32_t layer, ValueId h, bool) {
                     return gated_ffn(m, layer, h, m.config().n_ff);
                   }});
}

}  // namespace reflex
