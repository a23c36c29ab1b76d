// The dense decoder that qwen2, qwen3 and llama share; each says what makes it itself.
#pragma once
#include "models/builder.h"

namespace reflex {

struct DenseTraits {
  RopeSpec::Pairing pairing = RopeSpec::Pairing::half;
  bool qk_norm = false;       ///< RMS norm per head on q and k, before rope
  bool require_bias = false;  ///< q, k, v must have biases (else they may)
};

void build_dense(Builder& b, const DenseTraits& traits);

}  // namespace reflex
