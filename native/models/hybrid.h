// The decoder that qwen35, qwen35moe and qwen3next share: Gated DeltaNet layers, and between them, at
// every so many, full attention whose output passes a gate. Each says what makes it itself.
#pragma once
#include "models/dense.h"

namespace reflex {

struct HybridTraits {
  GatedDelta::Order order = GatedDelta::Order::tiled;  ///< which key head a value head reads
  /// beta and alpha of a recurrent layer come from one ssm_ba, interleaved per key head, else from
  /// ssm_beta and ssm_alpha
  bool fused_ba = false;
  LayerPart ffn;  ///< of the normed x
};

void build_hybrid(Builder& b, const HybridTraits& traits);

}  // namespace reflex
