// DeepSeek-V2, V2-Lite, V2.5, V3 and R1 (transformers: models/deepseek_v2, models/deepseek_v3): latent
// attention with and without a low-rank query, files with attn_kv_b split or whole; softmax or
// sigmoid routing, a bias for the choice, groups; dense leading layers; shared experts.
#include "models/dense.h"
#include "models/mla.h"
#include "models/moe.h"

namespace reflex {

void build_deepseek2(Builder& b) {
  const MoeConfig moe = read_moe(b, {.shared = MoeTraits::Shared::plain, .reads_gating = true});
  const Mla mla = read_mla(b);
  build_decoder(
      b, [&](Builder&, int32_t layer, ValueId h, bool last) { return mla_block(b, mla, layer, h, last); },
      [&](Builder&, int32_t layer, ValueId h, bool) { return moe_ffn(b, moe, layer, h); });
}

}  // namespace reflex
