// x = E[token]
// per layer:  x += Wo attention(rope(norm(Wq h)), rope(norm(Wk h)), Wv h)   h = rms_norm(x)
//             x += Wdown (silu(Wgate h) * Wup h)                            h = rms_norm(x)
// logits = Whead rms_norm(x)
#include "models/dense.h"

namespace reflex {

namespace {

WeightId bias(Builder& b, const DenseTraits& traits, const std::string& name, int64_t n) {
  return traits.require_bias ? b.vector(name, n) : b.optional_vector(name, n);
}

// Llama 3's frequency scaling lives in no key: this tensor divides the frequencies.
std::vector<float> rope_divisors(Builder& b) {
  if (!b.has("rope_freqs.weight")) return {};
  std::vector<float> divisors = b.host_vector("rope_freqs.weight", b.config().n_rot / 2);
  for (float d : divisors)
    if (!(d > 0))
      fail(ErrorKind::gguf, "tensor 'rope_freqs.weight': expected positive divisors, found %g", d);
  return divisors;
}

ValueId attention_block(Builder& b, const DenseTraits& traits, RopeId rope, int32_t i, ValueId h, bool last) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(i, name); };
  const int32_t nq = c.n_heads * c.head_dim, nk = c.n_kv_heads * c.head_dim, nv = c.n_kv_heads * c.v_head_dim;

  // Every row's k and v are needed by later tokens; of the last layer's queries only the outputs'.
  const ValueId hq = last ? b.select_outputs(h) : h;
  ValueId q = b.linear(hq, b.matrix(t("attn_q.weight"), c.n_embd, nq), bias(b, traits, t("attn_q.bias"), nq));
  ValueId k = b.linear(h, b.matrix(t("attn_k.weight"), c.n_embd, nk), bias(b, traits, t("attn_k.bias"), nk));
  const ValueId v =
      b.linear(h, b.matrix(t("attn_v.weight"), c.n_embd, nv), bias(b, traits, t("attn_v.bias"), nv));
  if (traits.qk_norm) {
    q = b.rms_norm(q, b.vector(t("attn_q_norm.weight"), c.head_dim), c.head_dim);
    k = b.rms_norm(k, b.vector(t("attn_k_norm.weight"), c.head_dim), c.head_dim);
  }
  q = b.rope(q, rope, c.n_heads);
  k = b.rope(k, rope, c.n_kv_heads);
  const ValueId o = b.attention(i, q, k, v);
  return b.linear(o, b.matrix(t("attn_output.weight"), c.n_heads * c.v_head_dim, c.n_embd),
                  b.optional_vector(t("attn_output.bias"), c.n_embd));
}

}  // namespace

ValueId gated_ffn(Builder& b, int32_t layer, ValueId x, int32_t n_ff, const char* suffix) {
  const Config& c = b.config();
  if (n_ff < 1) fail(ErrorKind::gguf, "key '%s.feed_forward_length' is missing", c.arch.c_str());
  const auto t = [&](const char* name) { return block_name(layer, name) + suffix + ".weight"; };
  const ValueId gate = b.linear(x, b.matrix(t("ffn_gate"), c.n_embd, n_ff));
  const ValueId up = b.linear(x, b.matrix(t("ffn_up"), c.n_embd, n_ff));
  return b.linear(b.swiglu(gate, up), b.matrix(t("ffn_down"), n_ff, c.n_embd));
}

void build_decoder(Builder& b, const LayerPart& attention, const LayerPart& ffn, const char* ffn_norm) {
  const Config& c = b.config();
  const WeightId embd = b.matrix("token_embd.weight", c.n_embd, c.n_vocab);
  ValueId x = b.embed(embd);
  for (int32_t i = 0; i < c.n_layers; ++i) {
    const bool last = i == c.n_layers - 1;
    const auto norm = [&](const char* name) {
      return b.rms_norm(x, b.vector(block_name(i, name), c.n_embd), c.n_embd);
    };
    const ValueId a = attention(b, i, norm("attn_norm.weight"), last);
    x = b.add(last ? b.select_outputs(x) : x, a);
    x = b.add(x, ffn(b, i, norm(ffn_norm), last));
  }
  x = b.rms_norm(x, b.vector("output_norm.weight", c.n_embd), c.n_embd);
  // Tied models have no output.weight.
  b.head(x, b.has("output.weight") ? b.matrix("output.weight", c.n_embd, c.n_vocab) : embd);
}

void build_dense(Builder& b, const DenseTraits& traits) {
  const RopeId rope = b.rope_table(traits.pairing, rope_divisors(b));
  build_decoder(
      b,
      [&](Builder&, int32_t layer, ValueId h, bool last) {
        return attention_block(b, traits, rope, layer, h, last);
      },
      [&](Builder&, int32_t layer, ValueId h, bool) {
        return traits.ffn ? traits.ffn(b, layer, h) : gated_ffn(b, layer, h, b.config().n_ff);
      });
}

}  // namespace reflex
