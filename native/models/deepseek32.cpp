// DeepSeek-V3.2 (transformers: models/deepseek_v32): deepseek2 as V3 has it, with an indexer in every layer,
// the dense ones too, that chooses the slots which the attention reads:
//   q = rope(Wq_b q_latent), k = rope(layer_norm(Wk h)), w = Wp h;  score = sum over heads of w * relu(q . k)
// Its heads are [rope | nope] and turn half split, where the attention's are [nope | rope] and turn in pairs.
#include <algorithm>

#include "models/dense.h"
#include "models/keys.h"
#include "models/mla.h"
#include "models/moe.h"

namespace reflex {

namespace {

constexpr uint64_t kMaxHeads = 1u << 16, kMaxWidth = 1u << 20, kMaxSlots = 1u << 30;
constexpr float kKeyEps = 1e-6f;  // of the key's layer norm, whatever the model's norms have

struct Index {
  int32_t n_heads = 0, head_dim = 0, top_k = 0;
  RopeId rope = kNone;
};

Index read_index(Builder& b) {
  const Config& c = b.config();
  const Keys keys(b.file(), c.arch);
  Index x;
  x.n_heads = keys.require("attention.indexer.head_count", kMaxHeads);
  x.head_dim = keys.require("attention.indexer.key_length", kMaxWidth);
  // A row sees no more slots than the context has, and a selection has room for top_k.
  x.top_k = std::min(keys.require("attention.indexer.top_k", kMaxSlots), c.n_ctx_train);
  if (x.head_dim < c.n_rot)
    fail(ErrorKind::gguf, "key '%s': expected at least the %d values that rope turns, found %d",
         keys.name("attention.indexer.key_length").c_str(), c.n_rot, x.head_dim);
  x.rope = b.rope_table({c.n_rot, RopeSpec::Pairing::half, rope_inv_freq(c, {}), 1.0f});
  return x;
}

ValueId choose(Builder& b, const Index& x, int32_t n_q_latent, int32_t layer, const MlaInput& in) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(layer, name); };
  Indexer op{};
  op.query = b.linear(in.q_latent, b.matrix(t("indexer.attn_q_b.weight"), n_q_latent,
                                            static_cast<int64_t>(x.n_heads) * x.head_dim));
  op.query = b.rope(op.query, x.rope, x.n_heads);
  op.key = b.linear(in.h, b.matrix(t("indexer.attn_k.weight"), c.n_embd, x.head_dim));
  const WeightId norm = b.vector(t("indexer.k_norm.weight"), x.head_dim);
  op.key = b.layer_norm(op.key, norm, b.vector(t("indexer.k_norm.bias"), x.head_dim), kKeyEps);
  op.key = b.rope(op.key, x.rope, 1);
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
  const Index index = read_index(b);
  const SlotChooser chooser = [&](Builder&, int32_t layer, const MlaInput& in) {
    return choose(b, index, mla.n_q_latent, layer, in);
  };
  build_decoder(
      b,
      [&](Builder&, int32_t layer, ValueId h, bool last) {
        return mla_block(b, mla, layer, h, last, chooser);
      },
      [&](Builder&, int32_t layer, ValueId h, bool) { return moe_ffn(b, moe, layer, h); });
}

}  // namespace reflex
