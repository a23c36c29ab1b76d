// DeepSeek-V3.2 (transformers: models/deepseek_v32): deepseek2 as V3 has it, with an indexer in every layer,
// the dense ones too, that chooses the slots which the attention reads:
//   q = rope(Wq_b q_latent), k = rope(layer_norm(Wk h)), w = Wp h;  score = sum over heads of w * relu(q . k)
// Its heads are [rope | nope] and turn half split, where the attention's are [nope | rope] and turn in pairs.
#include <algorithm>

#include "models/dense.h"
#include "models/indexer.h"
#include "models/mla.h"
#include "models/moe.h"

namespace reflex {

namespace {

constexpr float kKeyEps = 1e-6f;  // of the key's layer norm, whatever the model's norms have

ValueId choose(Builder& b, const IndexerSizes& x, RopeId rope, int32_t n_q_latent, int32_t layer,
               const MlaInput& in) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(layer, name); };
  Indexer op{};
  op.query = b.linear(in.q_latent, b.matrix(t("indexer.attn_q_b.weight"), n_q_latent,
                                            static_cast<int64_t>(x.n_heads) * x.head_dim));
  op.query = b.rope(op.query, rope, x.n_heads);
  op.key = b.linear(in.h, b.matrix(t("indexer.attn_k.weight"), c.n_embd, x.head_dim));
  const WeightId norm = b.vector(t("indexer.k_norm.weight"), x.head_dim);
  op.key = b.layer_norm(op.key, norm, b.vector(t("indexer.k_norm.bias"), x.head_dim), kKeyEps);
  op.key = b.rope(op.key, rope, 1);
  op.weights = b.linear(in.hq, b.matrix(t("indexer.proj.weight"), c.n_embd, x.n_heads));
  op.n_heads = x.n_heads;
  op.head_dim = x.head_dim;
  op.top_k = x.top_k;
  return b.indexer(layer, op);
}

}  // namespace

void build_deepseek32(Builder& b) {
  const MoeConfig moe = read_moe(b, {.shared = MoeTraits::Shared::plain, .reads_gating = true});
  const Mla mla = read_mla(b);
  if (mla.n_q_latent == 0)
    fail(ErrorKind::gguf, "key '%s.attention.q_lora_rank' is missing", b.config().arch.c_str());
  const IndexerSizes index = read_indexer(b);
  const Config& c = b.config();
  const RopeId rope = b.rope_table({c.n_rot, RopeSpec::Pairing::half, rope_inv_freq(c, {}), 1.0f});
  const SlotChooser chooser = [&](Builder&, int32_t layer, const MlaInput& in) {
    return choose(b, index, rope, mla.n_q_latent, layer, in);
  };
  build_decoder(
      b,
      [&](Builder&, int32_t layer, ValueId h, bool last) {
        return mla_block(b, mla, layer, h, last, chooser);
      },
      [&](Builder&, int32_t layer, ValueId h, bool) { return moe_ffn(b, moe, layer, h); });
}

}  // namespace reflex
