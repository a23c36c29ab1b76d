// x = E[token]
// per layer:  x += mixer(rms_norm(x)),  x += ffn(rms_norm(x))
//   mixer, recurrent:  Wout gated_delta(conv(Wqkv h), z = Wgate h, beta = Wbeta h, alpha = Walpha h)
//   mixer, full:       Wo (attention(rope(norm(q)), rope(norm(k)), Wv h) * sigmoid(gate)), [q ; gate] = Wq h
// logits = Whead rms_norm(x)
#include "models/hybrid.h"

#include <vector>

#include "models/keys.h"

namespace reflex {

namespace {

constexpr uint64_t kMaxHeads = 1u << 16, kMaxWidth = 1u << 20, kMaxTaps = 1u << 10;
constexpr float kL2Eps = 1e-6f;  // of q and k, whatever the model's norms have

}  // namespace

// ssm.* keys in the converter's use of them: group = key head, time step = value head, state = key size.
Recurrent read_recurrent(const Builder& b) {
  const Keys keys(b.file(), b.config().arch);
  Recurrent r;
  r.n_key_heads = keys.require("ssm.group_count", kMaxHeads);
  r.n_value_heads = keys.require("ssm.time_step_rank", kMaxHeads);
  r.key_dim = keys.require("ssm.state_size", kMaxWidth);
  r.n_taps = keys.require("ssm.conv_kernel", kMaxTaps);
  const int32_t inner = keys.require("ssm.inner_size", kMaxWidth);
  if (r.n_value_heads % r.n_key_heads != 0)
    fail(ErrorKind::gguf, "key '%s': expected a multiple of the %d key heads, found %d",
         keys.name("ssm.time_step_rank").c_str(), r.n_key_heads, r.n_value_heads);
  if (inner % r.n_value_heads != 0)
    fail(ErrorKind::gguf, "key '%s': expected a multiple of the %d value heads, found %d",
         keys.name("ssm.inner_size").c_str(), r.n_value_heads, inner);
  r.value_dim = inner / r.n_value_heads;
  if (r.n_taps < 2)
    fail(ErrorKind::gguf, "key '%s': expected 2 or more, found %d", keys.name("ssm.conv_kernel").c_str(),
         r.n_taps);
  // Widths of a layer's values and states must fit 32 bits.
  const int64_t channels = 2ll * r.n_key_heads * r.key_dim + inner;
  if (channels * r.n_taps > INT32_MAX || static_cast<int64_t>(inner) * r.key_dim > INT32_MAX)
    fail(ErrorKind::gguf, "keys '%s*': %d and %d heads of %d and %d values are too large",
         keys.name("ssm.").c_str(), r.n_key_heads, r.n_value_heads, r.key_dim, r.value_dim);
  return r;
}

// attention.recurrent_layers says it layer by layer; older files have only every how many are full.
std::vector<bool> read_recurrent_layers(const Builder& b) {
  const Config& c = b.config();
  const Keys keys(b.file(), c.arch);
  std::vector<bool> recurrent(static_cast<size_t>(c.n_layers));
  const gguf::Value* v = b.file().find(keys.name("attention.recurrent_layers"));
  if (!v) {
    const int32_t interval = keys.get("full_attention_interval", 4, 1u << 12);
    for (int32_t i = 0; i < c.n_layers; ++i) recurrent[static_cast<size_t>(i)] = (i + 1) % interval != 0;
    return recurrent;
  }
  if (v->type != gguf::ValueType::array || v->array.type != gguf::ValueType::boolean ||
      v->array.count < static_cast<uint64_t>(c.n_layers))
    fail(ErrorKind::gguf, "key '%s': expected an array of bool, one for each of %d layers",
         keys.name("attention.recurrent_layers").c_str(), c.n_layers);
  for (int32_t i = 0; i < c.n_layers; ++i)
    recurrent[static_cast<size_t>(i)] = v->array.as_int(static_cast<uint64_t>(i)) != 0;
  return recurrent;
}

ValueId recurrent_block(Builder& b, const HybridTraits& traits, const Recurrent& r, int32_t i, ValueId h,
                        bool last) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(i, name); };
  const int32_t inner = r.n_value_heads * r.value_dim;
  GatedDelta op{};
  if (traits.fused_ba && b.has(t("ssm_in.weight"))) {
    // The first qwen3next files have it all in one, interleaved per key head: [q ; k ; v.. ; z..].
    const int32_t n = r.key_dim, m = inner / r.n_key_heads, k = r.n_key_heads;
    const ValueId all = b.linear(h, b.matrix(t("ssm_in.weight"), c.n_embd, r.n_channels() + inner));
    const ValueId keys = b.concat(b.head_slice(all, k, 0, n), b.head_slice(all, k, n, n));
    op.qkv = b.concat(keys, b.head_slice(all, k, 2 * n, m));
    const ValueId z = b.head_slice(all, k, 2 * n + m, m);
    op.z = last ? b.select_outputs(z) : z;
  } else {
    op.qkv = b.linear(h, b.matrix(t("attn_qkv.weight"), c.n_embd, r.n_channels()));
    op.z = b.linear(last ? b.select_outputs(h) : h, b.matrix(t("attn_gate.weight"), c.n_embd, inner));
  }
  if (traits.fused_ba) {
    const int32_t per_key = r.n_value_heads / r.n_key_heads;
    const ValueId ba = b.linear(h, b.matrix(t("ssm_ba.weight"), c.n_embd, 2 * r.n_value_heads));
    op.beta = b.head_slice(ba, r.n_key_heads, 0, per_key);
    op.alpha = b.head_slice(ba, r.n_key_heads, per_key, per_key);
  } else {
    op.beta = b.linear(h, b.matrix(t("ssm_beta.weight"), c.n_embd, r.n_value_heads));
    op.alpha = b.linear(h, b.matrix(t("ssm_alpha.weight"), c.n_embd, r.n_value_heads));
  }
  op.conv = b.matrix(t("ssm_conv1d.weight"), r.n_taps, r.n_channels());
  op.decay = b.vector(t("ssm_a"), r.n_value_heads);  // -exp(A_log) already
  op.dt_bias = b.vector(t("ssm_dt.bias"), r.n_value_heads);
  op.norm = b.vector(t("ssm_norm.weight"), r.value_dim);
  op.n_key_heads = r.n_key_heads;
  op.n_value_heads = r.n_value_heads;
  op.key_dim = r.key_dim;
  op.value_dim = r.value_dim;
  op.n_taps = r.n_taps;
  op.order = traits.order;
  op.gate = traits.gate;
  op.qk_eps = kL2Eps;
  op.norm_eps = c.norm_eps;
  return b.linear(b.gated_delta(i, op), b.matrix(t("ssm_out.weight"), inner, c.n_embd));
}

GatedHeads gated_heads(Builder& b, RopeId rope, int32_t i, ValueId h, bool last) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(i, name); };
  const int32_t nq = c.n_heads * c.head_dim, nk = c.n_kv_heads * c.head_dim, nv = c.n_kv_heads * c.v_head_dim;
  if (c.v_head_dim != c.head_dim)
    fail(ErrorKind::gguf, "key '%s.attention.value_length': expected the key length %d, found %d",
         c.arch.c_str(), c.head_dim, c.v_head_dim);
  // attn_q holds each head's query, then its gate.
  const ValueId qg = b.linear(last ? b.select_outputs(h) : h, b.matrix(t("attn_q.weight"), c.n_embd, 2 * nq));
  ValueId q = b.head_slice(qg, c.n_heads, 0, c.head_dim);
  const ValueId gate = b.head_slice(qg, c.n_heads, c.head_dim, c.head_dim);
  ValueId k = b.linear(h, b.matrix(t("attn_k.weight"), c.n_embd, nk));
  const ValueId v = b.linear(h, b.matrix(t("attn_v.weight"), c.n_embd, nv));
  q = b.rope(b.rms_norm(q, b.vector(t("attn_q_norm.weight"), c.head_dim), c.head_dim), rope, c.n_heads);
  k = b.rope(b.rms_norm(k, b.vector(t("attn_k_norm.weight"), c.head_dim), c.head_dim), rope, c.n_kv_heads);
  return {q, gate, k, v};
}

ValueId gated_output(Builder& b, int32_t i, ValueId o, ValueId gate) {
  const Config& c = b.config();
  return b.linear(b.sigmoid_gate(o, gate),
                  b.matrix(block_name(i, "attn_output.weight"), c.n_heads * c.head_dim, c.n_embd));
}

void build_hybrid(Builder& b, const HybridTraits& traits) {
  const Recurrent shape = read_recurrent(b);
  const std::vector<bool> recurrent = read_recurrent_layers(b);
  // The sections of rope.dimension_sections turn by positions that are all the same for text.
  const RopeId rope = b.rope_table(RopeSpec::Pairing::half);
  build_decoder(
      b,
      [&](Builder&, int32_t layer, ValueId h, bool last) {
        if (recurrent[static_cast<size_t>(layer)]) return recurrent_block(b, traits, shape, layer, h, last);
        const GatedHeads a = gated_heads(b, rope, layer, h, last);
        return gated_output(b, layer, b.attention(layer, a.q, a.k, a.v), a.gate);
      },
      traits.ffn, "post_attention_norm.weight");
}

}  // namespace reflex
