#include "models/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "models/keys.h"

namespace reflex {

namespace {

// Far above any model, far below where products of two of them leave 64 bits.
constexpr uint64_t kMaxLayers = 4096, kMaxWidth = 1u << 22, kMaxHeads = 1u << 16, kMaxContext = 1u << 30;

// A per-layer array where every layer has the same value is as good as that value.
int32_t uniform(const gguf::File& file, const Keys& keys, std::string_view key, int32_t fallback,
                uint64_t max) {
  const gguf::Value* v = file.find(keys.name(key));
  if (!v || v->type != gguf::ValueType::array) return keys.get(key, fallback, max);
  const gguf::ArrayView& a = v->array;
  if (a.count == 0 || a.type == gguf::ValueType::string || a.type == gguf::ValueType::array ||
      a.type == gguf::ValueType::f32 || a.type == gguf::ValueType::f64)
    fail(ErrorKind::gguf, "key '%s': expected integers, one per layer", keys.name(key).c_str());
  const int64_t first = a.as_int(0);
  for (uint64_t i = 1; i < a.count; ++i)
    if (a.as_int(i) != first)
      fail(ErrorKind::unsupported_architecture, "key '%s': layers differ (%lld, then %lld), not supported",
           keys.name(key).c_str(), static_cast<long long>(first), static_cast<long long>(a.as_int(i)));
  if (first < 1 || static_cast<uint64_t>(first) > max)
    fail(ErrorKind::gguf, "key '%s': expected 1 to %llu, found %lld", keys.name(key).c_str(),
         static_cast<unsigned long long>(max), static_cast<long long>(first));
  return static_cast<int32_t>(first);
}

RopeScaling read_rope_scaling(const gguf::File& file, const Keys& keys, int32_t n_ctx_train) {
  RopeScaling s;
  const std::string kind(file.get_string(keys.name("rope.scaling.type")).value_or(""));
  const double factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0));
  if (kind.empty() ? factor > 0 && factor != 1 : kind == "linear") {
    s.kind = RopeScaling::Kind::linear;
  } else if (kind == "yarn") {
    s.kind = RopeScaling::Kind::yarn;
  } else if (!kind.empty() && kind != "none") {
    fail(ErrorKind::unsupported_architecture, "key '%s': expected none, linear or yarn, found '%s'",
         keys.name("rope.scaling.type").c_str(), kind.c_str());
  }
  if (s.kind == RopeScaling::Kind::none) return s;
  if (!(factor > 0))
    fail(ErrorKind::gguf, "key '%s': expected a positive number, found %g",
         keys.name("rope.scaling.factor").c_str(), factor);
  s.factor = factor;
  s.original_context = keys.get("rope.scaling.original_context_length", n_ctx_train, kMaxContext);
  s.attn_factor = keys.positive("rope.scaling.attn_factor", 1.0);
  s.beta_fast = keys.positive("rope.scaling.yarn_beta_fast", 32.0);
  s.beta_slow = keys.positive("rope.scaling.yarn_beta_slow", 1.0);
  return s;
}

// What would change every logit and is computed nowhere here: better no answer than another model's.
void refuse_what_is_not_computed(const gguf::File& file, const Keys& keys) {
  if (!keys.flag("attention.causal", true))
    fail(ErrorKind::unsupported_architecture,
         "key '%s': expected true, found false: a model that sees what follows gives embeddings, not tokens",
         keys.name("attention.causal").c_str());
  for (const auto& [key, neutral] : {std::pair{"attn_logit_softcapping", 0.0},
                                     {"final_logit_softcapping", 0.0},
                                     {"router_logit_softcapping", 0.0},
                                     {"logit_scale", 1.0},
                                     {"embedding_scale", 1.0},
                                     {"residual_scale", 1.0},
                                     {"attention.clamp_kqv", 0.0},
                                     {"attention.max_alibi_bias", 0.0},
                                     {"attention.temperature_scale", 0.0}}) {
    const double found = file.get_float(keys.name(key)).value_or(neutral);
    if (found != 0 && found != neutral)
      fail(ErrorKind::unsupported_architecture, "key '%s': expected none or %g, found %g",
           keys.name(key).c_str(), neutral, found);
  }
}

// Whether a block at the end that nextn_predict_layers may mean is one: some files count such blocks in
// block_count and some do not, but they have tensors of their own, or were left out altogether.
bool predicts_further(const gguf::File& file, int32_t layer) {
  const std::string block = "blk." + std::to_string(layer) + ".";
  if (!file.find_tensor(block + "attn_norm.weight")) return true;
  return std::any_of(file.tensors().begin(), file.tensors().end(), [&](const gguf::TensorInfo& t) {
    return t.name.substr(0, block.size() + 6) == block + "nextn.";
  });
}

}  // namespace

Config read_config(const gguf::File& file) {
  Config c;
  c.arch = std::string(file.require_string("general.architecture"));
  const Keys keys(file, c.arch);
  refuse_what_is_not_computed(file, keys);
  const int32_t block_count = c.n_layers = keys.require("block_count", kMaxLayers);
  // The last blocks may be there to predict further tokens at once: they take no part in the logits.
  const int32_t n_next = keys.get("nextn_predict_layers", 0, kMaxLayers, 0);
  if (n_next >= c.n_layers)
    fail(ErrorKind::gguf, "key '%s': expected less than the %d blocks, found %d",
         keys.name("nextn_predict_layers").c_str(), c.n_layers, n_next);
  while (c.n_layers > block_count - n_next && predicts_further(file, c.n_layers - 1)) --c.n_layers;
  c.n_embd = keys.require("embedding_length", kMaxWidth);
  c.n_heads = uniform(file, keys, "attention.head_count", 0, kMaxHeads);
  if (c.n_heads == 0) fail(ErrorKind::gguf, "key '%s' is missing", keys.name("attention.head_count").c_str());
  c.n_kv_heads = uniform(file, keys, "attention.head_count_kv", c.n_heads, kMaxHeads);
  if (c.n_heads % c.n_kv_heads != 0)
    fail(ErrorKind::gguf, "key '%s': expected a divisor of the %d heads, found %d",
         keys.name("attention.head_count_kv").c_str(), c.n_heads, c.n_kv_heads);
  c.n_ctx_train = keys.get("context_length", 2048, kMaxContext);
  c.n_ff = uniform(file, keys, "feed_forward_length", 0, kMaxWidth);
  // qwen2 and old llama files carry no key_length: heads share the model's width.
  c.head_dim = keys.get("attention.key_length", c.n_embd / c.n_heads, kMaxWidth);
  c.v_head_dim = keys.get("attention.value_length", c.head_dim, kMaxWidth);
  if (c.head_dim < 1)
    fail(ErrorKind::gguf, "key '%s': %d heads do not fit a width of %d",
         keys.name("attention.head_count").c_str(), c.n_heads, c.n_embd);
  c.n_rot = keys.get("rope.dimension_count", c.head_dim, kMaxWidth, 2);
  if (c.n_rot > c.head_dim || c.n_rot % 2 != 0)
    fail(ErrorKind::gguf, "key '%s': expected an even number up to the head size %d, found %d",
         keys.name("rope.dimension_count").c_str(), c.head_dim, c.n_rot);
  c.norm_eps = static_cast<float>(keys.positive("attention.layer_norm_rms_epsilon", 1e-6));
  c.rope_theta = static_cast<float>(keys.positive("rope.freq_base", 10000.0));
  c.attn_scale = static_cast<float>(keys.positive("attention.scale", 1.0 / std::sqrt(c.head_dim)));
  c.rope_scaling = read_rope_scaling(file, keys, c.n_ctx_train);
  return c;
}

// YaRN: Peng et al. 2023 (arXiv 2309.00071), "NTK-by-parts", with the bounds rounded outwards as
// transformers does (modeling_rope_utils, truncate=True).
std::vector<float> rope_inv_freq(const Config& c, const std::vector<float>& divisors) {
  const int32_t half = c.n_rot / 2;
  const RopeScaling& s = c.rope_scaling;
  std::vector<float> inv(static_cast<size_t>(half));
  const auto turns_at = [&](double beta) {  // the dimension that turns `beta` times over the context
    return c.n_rot * std::log(s.original_context / (beta * 2 * std::numbers::pi)) /
           (2 * std::log(c.rope_theta));
  };
  double low = 0, high = 0;
  if (s.kind == RopeScaling::Kind::yarn) {
    low = std::max(0.0, std::floor(turns_at(s.beta_fast)));
    high = std::min<double>(c.n_rot - 1, std::ceil(turns_at(s.beta_slow)));
    if (low == high) high += 0.001;
  }
  for (int32_t i = 0; i < half; ++i) {
    double f = std::pow(static_cast<double>(c.rope_theta), -2.0 * i / c.n_rot);
    if (s.kind == RopeScaling::Kind::linear) f /= s.factor;
    if (s.kind == RopeScaling::Kind::yarn) {
      const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
      f = f / s.factor * ramp + f * (1 - ramp);
    }
    if (!divisors.empty()) f /= divisors[static_cast<size_t>(i)];
    inv[static_cast<size_t>(i)] = static_cast<float>(f);
  }
  return inv;
}

float rope_magnitude(const RopeScaling& s) {
  if (s.kind != RopeScaling::Kind::yarn) return 1.0f;
  return static_cast<float>(s.attn_factor * (s.factor <= 1 ? 1.0 : 0.1 * std::log(s.factor) + 1.0));
}

}  // namespace reflex
