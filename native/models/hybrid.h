// The decoder that qwen35, qwen35moe and qwen3next share: Gated DeltaNet layers, and between them, at
// every so many, full attention whose output passes a gate. Each says what makes it itself; qwen4exp has a
// residual of its own and takes the layers' parts.
#pragma once
#include <vector>

#include "models/dense.h"

namespace reflex {

struct HybridTraits {
  GatedDelta::Order order = GatedDelta::Order::tiled;  ///< which key head a value head reads
  /// beta and alpha of a recurrent layer come from one ssm_ba, interleaved per key head, else from
  /// ssm_beta and ssm_alpha; then older files may have attn_qkv and attn_gate in one ssm_in, likewise
  bool fused_ba = false;
  GatedDelta::Gate gate = GatedDelta::Gate::silu;
  LayerPart ffn{};  ///< of the normed x
};

void build_hybrid(Builder& b, const HybridTraits& traits);

// ---- its parts, for decoders around other residuals --------------------------------------

/// Sizes of the Gated DeltaNet layers.
struct Recurrent {
  int32_t n_key_heads = 0, n_value_heads = 0, key_dim = 0, value_dim = 0, n_taps = 0;
  int32_t n_channels() const { return 2 * n_key_heads * key_dim + n_value_heads * value_dim; }
};
Recurrent read_recurrent(const Builder& b);
/// Which layers are recurrent.
std::vector<bool> read_recurrent_layers(const Builder& b);
/// A recurrent layer's block of the normed h; of its last, output rows only.
ValueId recurrent_block(Builder& b, const HybridTraits& traits, const Recurrent& r, int32_t i, ValueId h,
                        bool last);

/// What a full layer's attention reads: q and k normed and rotated; q and its gate on output rows in the
/// last.
struct GatedHeads {
  ValueId q, gate, k, v;
};
GatedHeads gated_heads(Builder& b, RopeId rope, int32_t i, ValueId h, bool last);
/// Wo (o * sigmoid(gate))
ValueId gated_output(Builder& b, int32_t i, ValueId o, ValueId gate);

}  // namespace reflex
