#include "models/mla.h"

#include <cmath>

#include "models/keys.h"

namespace reflex {

namespace {

constexpr uint64_t kMaxWidth = 1u << 22;
constexpr float kLatentEps = 1e-6f;  // of both low-rank norms, whatever the model's is

// YaRN the DeepSeek way: cos and sin stay as they are, the softmax scale takes all of it.
float softmax_scale(const Keys& keys, const RopeScaling& s, int32_t head_dim) {
  double mscale = 1;
  if (s.kind == RopeScaling::Kind::yarn && s.factor > 1)
    mscale += keys.number("rope.scaling.yarn_log_multiplier", 0) * std::log(s.factor);
  return static_cast<float>(mscale * mscale / std::sqrt(head_dim));
}

}  // namespace

Mla read_mla(Builder& b) {
  const Config& c = b.config();
  const Keys keys(b.file(), c.arch);
  Mla l;
  l.n_q_latent = keys.get("attention.q_lora_rank", 0, kMaxWidth);
  l.n_latent = keys.require("attention.kv_lora_rank", kMaxWidth);
  // The plain keys describe the absorbed form in newer files, the heads themselves in older ones.
  const int32_t head_dim = keys.get("attention.key_length_mla", c.head_dim, kMaxWidth);
  l.v_head_dim = keys.get("attention.value_length_mla", c.v_head_dim, kMaxWidth);
  l.rope_dim = c.n_rot;
  l.nope_dim = head_dim - l.rope_dim;
  if (l.nope_dim < 1)
    fail(ErrorKind::gguf, "key '%s': expected less than the head size %d, found %d",
         keys.name("rope.dimension_count").c_str(), head_dim, l.rope_dim);
  l.scale = softmax_scale(keys, c.rope_scaling, head_dim);
  l.rope = b.rope_table({c.n_rot, RopeSpec::Pairing::adjacent, rope_inv_freq(c, {}), 1.0f});
  return l;
}

ValueId mla_block(Builder& b, const Mla& l, int32_t i, ValueId h, bool last, const SlotChooser& choose) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(i, name); };
  const int32_t nq = c.n_heads * (l.nope_dim + l.rope_dim);

  // Every row's latent is needed by later tokens; of the last layer's queries only the outputs'.
  const ValueId hq = last ? b.select_outputs(h) : h;
  ValueId q = hq, q_latent = kNone;
  if (l.n_q_latent == 0) {
    q = b.linear(q, b.matrix(t("attn_q.weight"), c.n_embd, nq));
  } else {
    q = b.linear(q, b.matrix(t("attn_q_a.weight"), c.n_embd, l.n_q_latent));
    q_latent = b.rms_norm(q, b.vector(t("attn_q_a_norm.weight"), l.n_q_latent), l.n_q_latent, kLatentEps);
    q = b.linear(q_latent, b.matrix(t("attn_q_b.weight"), l.n_q_latent, nq));
  }
  LatentAttention op{};
  op.q = q;
  op.kv = b.linear(h, b.matrix(t("attn_kv_a_mqa.weight"), c.n_embd, l.n_latent + l.rope_dim));
  op.norm = b.vector(t("attn_kv_a_norm.weight"), l.n_latent);
  op.eps = kLatentEps;
  // Older files have the two in one; a file with none of them is told of the one.
  if (b.has(t("attn_kv_b.weight")) || (!b.has(t("attn_k_b.weight")) && !b.has(t("attn_v_b.weight")))) {
    b.unread(t("attn_k_b."));  // a few files have both
    b.unread(t("attn_v_b."));
    op.kv_b = b.matrix(t("attn_kv_b.weight"), l.n_latent,
                       static_cast<int64_t>(c.n_heads) * (l.nope_dim + l.v_head_dim));
  } else {
    op.k_b = b.stack(t("attn_k_b.weight"), l.nope_dim, l.n_latent, c.n_heads);
    op.v_b = b.stack(t("attn_v_b.weight"), l.n_latent, l.v_head_dim, c.n_heads);
  }
  op.rope = l.rope;
  op.n_heads = c.n_heads;
  op.n_latent = l.n_latent;
  op.nope_dim = l.nope_dim;
  op.rope_dim = l.rope_dim;
  op.v_head_dim = l.v_head_dim;
  op.scale = l.scale;
  if (choose) op.selection = choose(b, i, {h, hq, q_latent});
  const ValueId o = b.latent_attention(i, op);
  return b.linear(o, b.matrix(t("attn_output.weight"), c.n_heads * l.v_head_dim, c.n_embd));
}

}  // namespace reflex
