// What a model's metadata says of its shape, in the field's words, checked and with defaults
// filled in. Reads keys only; tensors are bound by builder.h.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"

namespace reflex {

struct RopeScaling {
  enum class Kind { none, linear, yarn };
  Kind kind = Kind::none;
  double factor = 1.0;
  int32_t original_context = 0;
  double attn_factor = 1.0;                  ///< rope.scaling.attn_factor
  double beta_fast = 32.0, beta_slow = 1.0;  ///< absent in older files
};

struct Config {
  std::string arch;  ///< general.architecture, the prefix of its keys
  int32_t n_layers = 0, n_embd = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0, v_head_dim = 0;
  int32_t n_ff = 0, n_vocab = 0, n_ctx_train = 0, n_rot = 0;
  float norm_eps = 0, rope_theta = 0;
  float attn_scale = 0;  ///< softmax scale
  RopeScaling rope_scaling;
};

/// The keys that all dense decoders share. Error(gguf) names the key, what was expected and found.
Config read_config(const gguf::File& file);

/// theta^(-2i/n_rot) with the file's scaling and, where given, divided by `divisors`
/// (llama 3's rope_freqs.weight, n_rot/2 values).
std::vector<float> rope_inv_freq(const Config& config, const std::vector<float>& divisors);

/// What cos and sin are multiplied with: 0.1 ln(factor) + 1 under YaRN, else 1.
float rope_magnitude(const RopeScaling& scaling);

}  // namespace reflex
