// Qwen3.8-Flash-Next (transformers: models/qwen4_exp, the text model): qwen35moe's layers, between streams.
//
// x = E[token] in S streams (hyper-connections)
// per layer: where it has one, x += ple(x), then x = inject(x, mixer(mix(x))), x = inject(x, ffn(mix(x)))
//   mix(x)       = mean over streams of sigmoid(Wup silu(Wdown n / S)) * n, n = norm of each stream of x
//   inject(x, y) = x_s + 2 sigmoid((Winject n)_s / S) * y, with the same n
//   mixer        = qwen35's: Gated DeltaNet with sigmoid for its gate, or gated attention, which sees chosen
//                  blocks where compress_ratios says so, else everything
//   ple(x)       = v + silu(conv(norm v)), v_s = gate(norm(Wkey e)_s, norm(x)_s) * Wvalue e, e of the n-grams
// logits = Whead mix(x)
#include <algorithm>

#include "models/hybrid.h"
#include "models/keys.h"
#include "models/moe.h"

namespace reflex {

namespace {

constexpr uint64_t kMaxStreams = 1u << 10, kMaxRank = 1u << 20, kMaxTaps = 1u << 10, kMaxTokens = 1u << 30;
constexpr uint64_t kMaxHeads = 1u << 16, kMaxWidth = 1u << 20, kMaxGrams = 1u << 10;
constexpr uint64_t kMaxTableRows = uint64_t{1} << 40;

/// What the file says beyond qwen35moe's keys.
struct Shape {
  int32_t n_streams = 0, rank = 0;
  std::vector<int32_t> ratios;  ///< tokens of a block in each layer; 0: attention sees everything
  int32_t index_heads = 0, index_dim = 0, top_k = 0;  ///< of layers with a ratio; top_k in tokens
  int32_t ple_layer = -1, ple_taps = 0;
  NgramEmbed ngram{};  ///< its hash
};

std::vector<uint64_t> read_array(const Keys& keys, const gguf::File& file, const char* key,
                                 uint64_t max_count) {
  const gguf::ArrayView& a = file.require_array(keys.name(key));
  if (a.count < 1 || a.count > max_count)
    fail(ErrorKind::gguf, "key '%s': expected 1 to %llu values, found %llu", keys.name(key).c_str(),
         static_cast<unsigned long long>(max_count), static_cast<unsigned long long>(a.count));
  std::vector<uint64_t> out;
  for (uint64_t i = 0; i < a.count; ++i) out.push_back(a.as_uint(i));
  return out;
}

void read_index(const Builder& b, const Keys& keys, Shape& s) {
  const Config& c = b.config();
  const auto n_layers = static_cast<size_t>(c.n_layers);
  s.ratios.assign(n_layers, 0);
  const std::string name = keys.name("attention.compress_ratios");
  const gguf::Value* v = b.file().find(name);
  if (!v) return;
  if (v->type != gguf::ValueType::array) {
    s.ratios.assign(n_layers, keys.get("attention.compress_ratios", 0, kMaxTokens, 0));
  } else {
    if (v->array.count < n_layers)
      fail(ErrorKind::gguf, "key '%s': expected a value for each of %d layers, found %llu", name.c_str(),
           c.n_layers, static_cast<unsigned long long>(v->array.count));
    for (size_t i = 0; i < n_layers; ++i) {
      const uint64_t ratio = v->array.as_uint(i);
      if (ratio > kMaxTokens)
        fail(ErrorKind::gguf, "key '%s': expected 0 to %llu, found %llu for layer %zu", name.c_str(),
             static_cast<unsigned long long>(kMaxTokens), static_cast<unsigned long long>(ratio), i);
      s.ratios[i] = static_cast<int32_t>(ratio);
    }
  }
  const int32_t largest = *std::max_element(s.ratios.begin(), s.ratios.end());
  if (largest == 0) return;
  s.index_heads = keys.require("attention.indexer.head_count", kMaxHeads);
  s.index_dim = keys.require("attention.indexer.key_length", kMaxWidth);
  s.top_k = keys.require("attention.indexer.top_k", kMaxTokens);
  if (s.top_k < largest)
    fail(ErrorKind::gguf, "key '%s': expected at least the %d tokens of a block, found %d",
         keys.name("attention.indexer.top_k").c_str(), largest, s.top_k);
  if (s.index_dim < c.n_rot)
    fail(ErrorKind::gguf, "key '%s': expected at least the %d values that are rotated, found %d",
         keys.name("attention.indexer.key_length").c_str(), c.n_rot, s.index_dim);
}

void read_ple(const Builder& b, const Keys& keys, Shape& s) {
  const gguf::ArrayView* layers = b.file().get_array(keys.name("ple.layers"));
  if (!layers || layers->count == 0) return;
  const std::string name = keys.name("ple.layers");
  if (layers->count > 1)
    fail(ErrorKind::unsupported_architecture,
         "key '%s': expected one layer, found %llu: only one table's hash is there", name.c_str(),
         static_cast<unsigned long long>(layers->count));
  const uint64_t layer = layers->as_uint(0);
  if (layer >= static_cast<uint64_t>(b.config().n_layers))
    fail(ErrorKind::gguf, "key '%s': expected a layer below %d, found %llu", name.c_str(),
         b.config().n_layers, static_cast<unsigned long long>(layer));
  s.ple_layer = static_cast<int32_t>(layer);
  s.ple_taps = keys.require("ple.conv_kernel", kMaxTaps);
  if (s.ple_taps < 2)
    fail(ErrorKind::gguf, "key '%s': expected 2 or more, found %d", keys.name("ple.conv_kernel").c_str(),
         s.ple_taps);
  const int32_t grams = keys.require("ple.ngram_size", kMaxGrams),
                per = keys.require("ple.heads_per_ngram", kMaxHeads);
  NgramEmbed& hash = s.ngram;
  hash.multipliers = read_array(keys, b.file(), "ple.layer_multipliers", kMaxGrams);
  hash.sizes = read_array(keys, b.file(), "ple.head_vocab_sizes", kMaxHeads);
  hash.offsets = read_array(keys, b.file(), "ple.head_offsets", kMaxHeads);
  hash.eos = b.file().require_uint(keys.name("ple.eos_token_id"));
  const auto count = [&](const char* key, size_t found, int64_t want) {
    if (static_cast<int64_t>(found) != want)
      fail(ErrorKind::gguf, "key '%s': expected %lld values, found %zu", keys.name(key).c_str(),
           static_cast<long long>(want), found);
  };
  if (grams < 2)
    fail(ErrorKind::gguf, "key '%s': expected 2 or more, found %d", keys.name("ple.ngram_size").c_str(),
         grams);
  count("ple.layer_multipliers", hash.multipliers.size(), grams);
  count("ple.head_vocab_sizes", hash.sizes.size(), (grams - 1ll) * per);
  count("ple.head_offsets", hash.offsets.size(), (grams - 1ll) * per);
}

// The rows that a table must have for the last of its heads.
int64_t rows_reached(const NgramEmbed& hash) {
  uint64_t rows = 1;
  for (size_t i = 0; i < hash.sizes.size(); ++i) {
    const uint64_t size = std::min(hash.sizes[i], kMaxTableRows);
    rows = std::max(rows, std::min(hash.offsets[i], kMaxTableRows) + size);
  }
  return static_cast<int64_t>(rows);
}

class Streams {
 public:
  Streams(Builder& b, const Shape& s) : b_(b), s_(s), width_(s.n_streams * b.config().n_embd) {}

  /// The block's input; logits: of its injection, where there is one.
  ValueId mix(const std::string& name, ValueId x, ValueId* logits = nullptr) {
    const ValueId normed = b_.stream_norm(x, b_.vector(name + "_norm.weight", width_));
    const ValueId down = b_.linear(normed, b_.matrix(name + "_down.weight", width_, s_.rank));
    if (logits) *logits = b_.linear(normed, b_.matrix(name + "_inject.weight", width_, s_.n_streams));
    const ValueId low = b_.silu(down, 1.0f / static_cast<float>(s_.n_streams));
    return b_.stream_mix(normed, b_.linear(low, b_.matrix(name + "_up.weight", s_.rank, width_)));
  }

  /// x + ple(x)
  ValueId with_ngrams(int32_t i, ValueId x) {
    const auto t = [&](const char* name) { return block_name(i, name); };
    const int32_t d = b_.config().n_embd, row = Keys(b_.file(), b_.config().arch)
                                                    .require("embedding_length_per_layer_input", kMaxWidth);
    NgramEmbed op = s_.ngram;
    const char* table = "per_layer_token_embd.weight";
    const gguf::TensorInfo* found = b_.file().find_tensor(table);
    // It may have more rows than the heads reach.
    const bool plausible = found && found->ne[0] == static_cast<uint64_t>(row);
    op.table = b_.matrix(table, row, plausible ? static_cast<int64_t>(found->ne[1]) : rows_reached(op));
    const auto n_in = static_cast<int64_t>(row) * static_cast<int64_t>(op.sizes.size());
    const ValueId e = b_.ngram_embed(i, op);
    const ValueId key = b_.linear(e, b_.matrix(t("ple_key.weight"), n_in, width_));
    const ValueId value = b_.linear(e, b_.matrix(t("ple_value.weight"), n_in, d));
    const auto norm = [&](ValueId v, const char* name) {
      return b_.stream_norm(v, b_.vector(t(name), width_));
    };
    const ValueId v =
        b_.stream_gate(norm(key, "ple_norm_key.weight"), norm(x, "ple_norm_query.weight"), value);
    const ValueId conv = b_.causal_conv(i, norm(v, "ple_norm_conv.weight"),
                                        b_.matrix(t("ple_conv1d.weight"), s_.ple_taps, width_), s_.ple_taps,
                                        static_cast<int32_t>(op.multipliers.size()));
    return b_.add(b_.add(x, v), conv);
  }

 private:
  Builder& b_;
  const Shape& s_;
  const int32_t width_;
};

ValueId attention_block(Builder& b, const Shape& s, RopeId rope, int32_t i, ValueId h, bool last) {
  const Config& c = b.config();
  const auto t = [&](const char* name) { return block_name(i, name); };
  const GatedHeads a = gated_heads(b, rope, i, h, last);
  const int32_t ratio = s.ratios[static_cast<size_t>(i)];
  if (ratio == 0) b.unread(block_name(i, "indexer."));
  if (ratio == 0) return gated_output(b, i, b.attention(i, a.q, a.k, a.v), a.gate);
  BlockAttention op{};
  op.q = a.q;
  op.k = a.k;
  op.v = a.v;
  const ValueId q = b.linear(
      last ? b.select_outputs(h) : h,
      b.matrix(t("indexer.q_proj.weight"), c.n_embd, static_cast<int64_t>(s.index_heads) * s.index_dim));
  op.index_q = b.rope(b.rms_norm(q, b.vector(t("indexer.q_norm.weight"), s.index_dim), s.index_dim), rope,
                      s.index_heads);
  op.index_k = b.linear(h, b.matrix(t("indexer.k_proj.weight"), c.n_embd, s.index_dim));
  op.index_norm = b.vector(t("indexer.k_norm.weight"), s.index_dim);
  op.index_rope = rope;
  op.n_heads = c.n_heads;
  op.n_kv_heads = c.n_kv_heads;
  op.head_dim = c.head_dim;
  op.v_head_dim = c.v_head_dim;
  op.index_heads = s.index_heads;
  op.index_dim = s.index_dim;
  op.block_size = ratio;
  op.n_blocks = s.top_k / ratio;
  op.scale = c.attn_scale;
  op.index_eps = c.norm_eps;
  return gated_output(b, i, b.block_attention(i, op), a.gate);
}

Shape read_shape(const Builder& b) {
  const Keys keys(b.file(), b.config().arch);
  Shape s;
  s.n_streams = keys.require("hyper_connection.count", kMaxStreams);
  s.rank = keys.require("hyper_connection.low_rank", kMaxRank);
  if (static_cast<int64_t>(s.n_streams) * b.config().n_embd > INT32_MAX / static_cast<int64_t>(kMaxTaps))
    fail(ErrorKind::gguf, "key '%s': %d streams of %d values are too large",
         keys.name("hyper_connection.count").c_str(), s.n_streams, b.config().n_embd);
  read_index(b, keys, s);
  read_ple(b, keys, s);
  return s;
}

}  // namespace

void build_qwen4exp(Builder& b) {
  const Config& c = b.config();
  const Shape s = read_shape(b);
  const Recurrent recurrent = read_recurrent(b);
  const std::vector<bool> is_recurrent = read_recurrent_layers(b);
  const MoeConfig moe = read_moe(b, {.renormalise = true, .shared = MoeTraits::Shared::gated});
  const HybridTraits traits{.gate = GatedDelta::Gate::sigmoid};  // no key says so
  const RopeId rope = b.rope_table(RopeSpec::Pairing::half);
  if (s.ple_layer < 0) b.unread("per_layer_token_embd.");
  for (int32_t i = 0; i < c.n_layers; ++i)
    if (i != s.ple_layer) b.unread(block_name(i, "ple_"));
  Streams streams(b, s);
  const WeightId embd = b.matrix("token_embd.weight", c.n_embd, c.n_vocab);
  ValueId x = b.repeat(b.embed(embd), s.n_streams);
  for (int32_t i = 0; i < c.n_layers; ++i) {
    const bool last = i == c.n_layers - 1;
    if (i == s.ple_layer) x = streams.with_ngrams(i, x);
    ValueId logits = kNone;
    ValueId h = streams.mix(block_name(i, "hc_attn"), x, &logits);
    const ValueId y = is_recurrent[static_cast<size_t>(i)] ? recurrent_block(b, traits, recurrent, i, h, last)
                                                           : attention_block(b, s, rope, i, h, last);
    if (last) {
      x = b.select_outputs(x);
      logits = b.select_outputs(logits);
    }
    x = b.stream_inject(x, logits, y);
    h = streams.mix(block_name(i, "hc_ffn"), x, &logits);
    x = b.stream_inject(x, logits, moe_ffn(b, moe, i, h));
  }
  // Tied models have no output.weight.
  b.head(streams.mix("output_hc", x),
         b.has("output.weight") ? b.matrix("output.weight", c.n_embd, c.n_vocab) : embd);
}

}  // namespace reflex
