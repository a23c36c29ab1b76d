// DeepSeek-V4 (transformers: models/deepseek_v4). The residual is n streams, mixed by hyper-connections:
//   streams = n copies of E[token]
//   per mixer:  [pre | post | comb] = weights(Wfn unit_norm(streams));  h = rms_norm(sum pre * streams)
//               streams = post * mixer(h) + comb^T streams
//   logits = Whead rms_norm(sum of pre * streams, pre by output_hc_*)
// Attention: many heads to one key that is its value, over a window, entries that stand for 4 or 128 tokens
// each, and a sink; its result is turned back, for the values were turned. Ratio 4 pools overlapping blocks
// and lets an indexer choose among them, ratio 128 shows all. Experts by sqrt(softplus), of the first layers
// by token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "models/dense.h"
#include "models/indexer.h"
#include "models/keys.h"
#include "models/moe.h"

namespace reflex {

namespace {

constexpr uint64_t kMaxWidth = 1u << 22, kMaxHeads = 1u << 16, kMaxSlots = 1u << 30, kMaxLayers = 4096;
constexpr uint64_t kMaxStreams = 64, kMaxIterations = 1u << 10;
constexpr int32_t kSqrtSoftplus = 4;  // gguf-py constants.py, ExpertGatingFuncType
constexpr int32_t kSparseRatio = 4, kDenseRatio = 128;

struct V4 {
  int32_t n_streams = 0, n_iterations = 0, n_q_latent = 0, n_groups = 0, n_out_latent = 0, window = 0;
  IndexerSizes index;  ///< of entries, no more of which a row has than its context has tokens
  int32_t n_hash_layers = 0;
  float hyper_eps = 0, scale = 0;
  RopeId plain = kNone, compressed = kNone;
  std::vector<int32_t> ratios;  ///< of each layer
  std::vector<float> limit_experts, limit_shared;
  MoeConfig moe;
};

// A number for every layer: one for all, or an array that may go on behind the last layer.
template <class T, class Get>
std::vector<T> per_layer(const Builder& b, const Keys& keys, const char* key, T fallback, Get get) {
  const auto n = static_cast<size_t>(b.config().n_layers);
  const gguf::Value* v = b.file().find(keys.name(key));
  if (!v) return std::vector<T>(n, fallback);
  std::vector<T> out(n);
  if (v->type != gguf::ValueType::array) {
    std::fill(out.begin(), out.end(), static_cast<T>(b.file().require_float(keys.name(key))));
    return out;
  }
  if (v->array.count < n)
    fail(ErrorKind::gguf, "key '%s': expected at least one value for each of %zu layers, found %llu",
         keys.name(key).c_str(), n, static_cast<unsigned long long>(v->array.count));
  for (size_t i = 0; i < n; ++i) out[i] = get(v->array, i);
  return out;
}

std::vector<float> limits(const Builder& b, const Keys& keys, const char* key) {
  const auto as_float = [](const gguf::ArrayView& a, size_t i) { return static_cast<float>(a.as_float(i)); };
  std::vector<float> out = per_layer<float>(b, keys, key, 0.0f, as_float);
  for (float x : out)
    if (!(x >= 0) || !std::isfinite(x))
      fail(ErrorKind::gguf, "key '%s': expected limits of 0 or more, found %g", keys.name(key).c_str(),
           static_cast<double>(x));
  return out;
}

std::vector<int32_t> read_ratios(const Builder& b, const Keys& keys) {
  const char* key = "attention.compress_ratios";
  b.file().require_array(keys.name(key));
  const auto as_int = [](const gguf::ArrayView& a, size_t i) {
    return static_cast<int32_t>(std::clamp<int64_t>(a.as_int(i), -1, INT32_MAX));
  };
  std::vector<int32_t> out = per_layer<int32_t>(b, keys, key, 0, as_int);
  for (int32_t r : out)
    if (r != 0 && r != kSparseRatio && r != kDenseRatio)
      fail(ErrorKind::unsupported_architecture, "key '%s': expected 0, %d or %d, found %d",
           keys.name(key).c_str(), kSparseRatio, kDenseRatio, r);
  return out;
}

void read_experts(Builder& b, const Keys& keys, V4& v) {
  v.moe = read_moe(b, {.renormalise = true, .shared = MoeTraits::Shared::plain, .own_gating = true});
  const int32_t gating = keys.get("expert_gating_func", kSqrtSoftplus, INT32_MAX, 0);
  if (gating != kSqrtSoftplus)
    fail(ErrorKind::unsupported_architecture, "key '%s': expected %d (sqrt of softplus), found %d",
         keys.name("expert_gating_func").c_str(), kSqrtSoftplus, gating);
  if (keys.get("expert_group_count", 0, kMaxHeads, 0) > 1)
    fail(ErrorKind::unsupported_architecture, "key '%s': groups of experts are not supported here",
         keys.name("expert_group_count").c_str());
  v.n_hash_layers = keys.get("hash_layer_count", 0, kMaxLayers, 0);
  v.limit_experts = limits(b, keys, "swiglu_clamp_exp");
  v.limit_shared = b.file().find(keys.name("swiglu_clamp_shexp")) ? limits(b, keys, "swiglu_clamp_shexp")
                                                                  : v.limit_experts;
}

V4 read_v4(Builder& b) {
  const Config& c = b.config();
  const Keys keys(b.file(), c.arch);
  V4 v;
  v.n_streams = keys.require("hyper_connection.count", kMaxStreams);
  v.n_iterations = keys.require("hyper_connection.sinkhorn_iterations", kMaxIterations);
  v.hyper_eps = static_cast<float>(keys.positive("hyper_connection.epsilon", 1e-6));
  v.n_q_latent = keys.require("attention.q_lora_rank", kMaxWidth);
  v.n_groups = keys.require("attention.output_group_count", kMaxHeads);
  v.n_out_latent = keys.require("attention.output_lora_rank", kMaxWidth);
  v.window = keys.require("attention.sliding_window", kMaxSlots);
  if (c.n_heads % v.n_groups != 0)
    fail(ErrorKind::gguf, "key '%s': expected a divisor of the %d heads, found %d",
         keys.name("attention.output_group_count").c_str(), c.n_heads, v.n_groups);
  if (c.n_kv_heads != 1)
    fail(ErrorKind::gguf, "key '%s': expected 1, found %d", keys.name("attention.head_count_kv").c_str(),
         c.n_kv_heads);
  v.ratios = read_ratios(b, keys);
  if (std::count(v.ratios.begin(), v.ratios.end(), kSparseRatio) > 0) v.index = read_indexer(b);
  v.scale = static_cast<float>(1.0 / std::sqrt(c.head_dim));
  // Scaling is of the layers that compress alone; cos and sin stay as they are.
  Config plain = c, compressed = c;
  plain.rope_scaling = {};
  compressed.rope_theta =
      static_cast<float>(keys.positive("attention.compress_rope_freq_base", c.rope_theta));
  v.plain = b.rope_table({c.n_rot, RopeSpec::Pairing::adjacent, rope_inv_freq(plain, {}), 1.0f});
  v.compressed = b.rope_table({c.n_rot, RopeSpec::Pairing::adjacent, rope_inv_freq(compressed, {}), 1.0f});
  read_experts(b, keys, v);
  return v;
}

/// A layer's tensors: blk.N. + part + name
struct Names {
  int32_t layer;
  std::string operator()(const std::string& name) const { return block_name(layer, name + ".weight"); }
};

// The tensors prefix + {kv, gate, ape, norm}; entries of `dim` values go to `entries` from `offset` on.
void compress(Builder& b, const V4& v, int32_t layer, ValueId h, const std::string& prefix, const char* raw,
              int32_t dim, StateId entries, int32_t offset) {
  const Config& c = b.config();
  const Names t{layer};
  Compressor op{};
  op.ratio = v.ratios[static_cast<size_t>(layer)];
  op.overlap = op.ratio == kSparseRatio;
  const int32_t width = op.overlap ? 2 * dim : dim;
  op.kv = b.linear(h, b.matrix(t(prefix + "kv"), c.n_embd, width));
  op.gate = b.linear(h, b.matrix(t(prefix + "gate"), c.n_embd, width));
  op.ape = b.matrix(t(prefix + "ape"), width, op.ratio);
  op.norm = b.vector(t(prefix + "norm"), dim);
  op.eps = c.norm_eps;
  op.rope = v.compressed;
  op.head_dim = dim;
  op.raw = b.state_per_token(layer, raw, 2 * width);
  op.entries = entries;
  op.offset = offset;
  b.compressor(op);
}

ValueId choose(Builder& b, const V4& v, int32_t layer, ValueId h, ValueId hq, ValueId q_latent) {
  const Names t{layer};
  Indexer op{};
  op.state = b.state_per_token(layer, "index", v.index.head_dim);
  compress(b, v, layer, h, "indexer_compressor_", "index_compress", v.index.head_dim, op.state, 0);
  op.query = b.linear(q_latent, b.matrix(t("indexer.attn_q_b"), v.n_q_latent,
                                         static_cast<int64_t>(v.index.n_heads) * v.index.head_dim));
  op.query = b.tail_rope(op.query, v.compressed, v.index.n_heads, false);
  op.weights = b.linear(hq, b.matrix(t("indexer.proj"), b.config().n_embd, v.index.n_heads));
  op.key = kNone;
  op.n_heads = v.index.n_heads;
  op.head_dim = v.index.head_dim;
  op.top_k = v.index.top_k;
  op.ratio = kSparseRatio;
  return b.indexer(layer, op);
}

ValueId attention_block(Builder& b, const V4& v, int32_t layer, ValueId h, bool last) {
  const Config& c = b.config();
  const Names t{layer};
  const int32_t ratio = v.ratios[static_cast<size_t>(layer)];
  const RopeId rope = ratio == 0 ? v.plain : v.compressed;
  const int64_t nq = static_cast<int64_t>(c.n_heads) * c.head_dim;

  // Every row's key is needed by later tokens; of the last layer's queries only the outputs'.
  const ValueId hq = last ? b.select_outputs(h) : h;
  ValueId q_latent = b.linear(hq, b.matrix(t("attn_q_a"), c.n_embd, v.n_q_latent));
  q_latent = b.rms_norm(q_latent, b.vector(t("attn_q_a_norm"), v.n_q_latent), v.n_q_latent);
  ValueId q = b.linear(q_latent, b.matrix(t("attn_q_b"), v.n_q_latent, nq));
  q = b.tail_rope(b.unit_norm(q, c.head_dim, c.norm_eps), rope, c.n_heads, false);
  ValueId kv = b.linear(h, b.matrix(t("attn_kv"), c.n_embd, c.head_dim));
  kv = b.rms_norm(kv, b.vector(t("attn_kv_a_norm"), c.head_dim), c.head_dim);

  WindowAttention op{};
  op.q = q;
  op.kv = b.tail_rope(kv, rope, 1, false);
  op.sinks = b.vector(t("attn_sinks"), c.n_heads);
  op.n_heads = c.n_heads;
  op.head_dim = c.head_dim;
  op.window = v.window;
  op.scale = v.scale;
  op.ratio = ratio;
  op.state = b.state_per_token(layer, "kv", (ratio > 0 ? 2 : 1) * c.head_dim);
  if (ratio > 0) compress(b, v, layer, h, "attn_compressor_", "compress", c.head_dim, op.state, c.head_dim);
  if (ratio == kSparseRatio) op.selection = choose(b, v, layer, h, hq, q_latent);
  ValueId o = b.tail_rope(b.window_attention(op), rope, c.n_heads, true);
  o = b.grouped_linear(
      o, b.matrix(t("attn_output_a"), nq / v.n_groups, static_cast<int64_t>(v.n_groups) * v.n_out_latent),
      v.n_groups);
  return b.linear(o,
                  b.matrix(t("attn_output_b"), static_cast<int64_t>(v.n_groups) * v.n_out_latent, c.n_embd));
}

ValueId experts_block(Builder& b, const V4& v, int32_t layer, ValueId x) {
  const Config& c = b.config();
  const Names t{layer};
  const MoeConfig& m = v.moe;
  Moe op = bind_experts(b, m, layer, x);
  if (layer < v.n_hash_layers)
    op.of_token = b.indices(t("ffn_gate_tid2eid"), m.n_used, c.n_vocab);
  else
    op.bias = b.optional_vector(block_name(layer, "exp_probs_b.bias"), m.n_experts);
  op.gating = Moe::Gating::sqrt_softplus;
  op.limit = v.limit_experts[static_cast<size_t>(layer)];
  const ValueId routed = b.moe(op);
  if (m.n_ff_shared == 0) return routed;
  const ValueId gate = b.linear(x, b.matrix(t("ffn_gate_shexp"), c.n_embd, m.n_ff_shared));
  const ValueId up = b.linear(x, b.matrix(t("ffn_up_shexp"), c.n_embd, m.n_ff_shared));
  const ValueId hidden = b.clamped_swiglu(gate, up, v.limit_shared[static_cast<size_t>(layer)]);
  return b.add(routed, b.linear(hidden, b.matrix(t("ffn_down_shexp"), m.n_ff_shared, c.n_embd)));
}

// The weights of one mix; prefix: "blk.N.hc_attn_", "output_hc_".
ValueId mix(Builder& b, const V4& v, ValueId streams, const std::string& prefix, int32_t n_weights) {
  const Config& c = b.config();
  const int32_t all = v.n_streams * c.n_embd;
  const ValueId x = b.unit_norm(streams, all, c.norm_eps);
  HyperWeights op{};
  op.in = b.linear(x, b.matrix(prefix + "fn.weight", all, n_weights));
  op.base = b.vector(prefix + "base.weight", n_weights);
  op.scale = b.vector(prefix + "scale.weight", n_weights == v.n_streams ? 1 : 3);
  op.n_streams = v.n_streams;
  op.n_iterations = v.n_iterations;
  op.eps = v.hyper_eps;
  return b.hyper_weights(op);
}

// What hash_layer_count and a ratio leave no use for in a layer.
void turn_off(Builder& b, const V4& v) {
  for (int32_t i = 0; i < b.config().n_layers; ++i) {
    const int32_t ratio = v.ratios[static_cast<size_t>(i)];
    b.unread(block_name(i, i < v.n_hash_layers ? "exp_probs_b." : "ffn_gate_tid2eid."));
    if (ratio != kSparseRatio) b.unread(block_name(i, "indexer"));
    if (ratio == 0) b.unread(block_name(i, "attn_compressor_"));
  }
}

}  // namespace

void build_deepseek4(Builder& b) {
  const Config& c = b.config();
  const V4 v = read_v4(b);
  turn_off(b, v);
  const int32_t n = v.n_streams, n_weights = (2 + n) * n;
  const WeightId embd = b.matrix("token_embd.weight", c.n_embd, c.n_vocab);
  ValueId streams = b.repeat(b.embed(embd), n);
  for (int32_t i = 0; i < c.n_layers; ++i) {
    const bool last = i == c.n_layers - 1;
    const auto input = [&](ValueId weights, const char* norm) {
      return b.rms_norm(b.hyper_read(streams, weights, n), b.vector(block_name(i, norm), c.n_embd), c.n_embd);
    };
    ValueId weights = mix(b, v, streams, block_name(i, "hc_attn_"), n_weights);
    const ValueId a = attention_block(b, v, i, input(weights, "attn_norm.weight"), last);
    if (last) {
      streams = b.select_outputs(streams);
      weights = b.select_outputs(weights);
    }
    streams = b.hyper_write(streams, weights, a, n);
    weights = mix(b, v, streams, block_name(i, "hc_ffn_"), n_weights);
    const ValueId f = experts_block(b, v, i, input(weights, "ffn_norm.weight"));
    streams = b.hyper_write(streams, weights, f, n);
  }
  const ValueId weights = mix(b, v, streams, "output_hc_", n);
  const ValueId x =
      b.rms_norm(b.hyper_read(streams, weights, n), b.vector("output_norm.weight", c.n_embd), c.n_embd);
  b.head(x, b.has("output.weight") ? b.matrix("output.weight", c.n_embd, c.n_vocab) : embd);
}

}  // namespace reflex
