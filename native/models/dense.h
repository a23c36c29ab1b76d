// The dense decoder that qwen2, qwen3 and llama share; each says what makes it itself.
#pragma once
#include <functional>

#include "models/builder.h"

namespace reflex {

struct DenseTraits {
  RopeSpec::Pairing pairing = RopeSpec::Pairing::half;
  bool qk_norm = false;       ///< RMS norm per head on q and k, before rope
  bool require_bias = false;  ///< q, k, v must have biases (else they may)
  /// A layer's feed-forward part, of the normed x; where absent the dense one.
  std::function<ValueId(Builder&, int32_t layer, ValueId h)> ffn{};
};

/// down(silu(gate x) * up x) with the tensors blk.N.ffn_{gate,up,down} + suffix + ".weight"
ValueId gated_ffn(Builder& b, int32_t layer, ValueId x, int32_t n_ff, const char* suffix = "");

/// The whole model around a per-layer attention: x += attention(norm(x)), x += ffn(norm(x)).
using LayerPart = std::function<ValueId(Builder& b, int32_t layer, ValueId h, bool last)>;
void build_decoder(Builder& b, const LayerPart& attention, const LayerPart& ffn,
                   const char* ffn_norm = "ffn_norm.weight");

void build_dense(Builder& b, const DenseTraits& traits);

}  // namespace reflex
