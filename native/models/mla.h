// The latent attention that deepseek2 and deepseek32 share; each says what makes it itself.
#pragma once
#include <functional>

#include "models/builder.h"

namespace reflex {

struct Mla {
  int32_t n_q_latent = 0;  ///< q_lora_rank; 0: attn_q is one matrix
  int32_t n_latent = 0, nope_dim = 0, rope_dim = 0, v_head_dim = 0;
  float scale = 0;
  RopeId rope = kNone;
};

/// Error(gguf) names the key, what was expected and what was found. Adds the rotary table.
Mla read_mla(Builder& b);

/// What a layer's attention knows of its rows.
struct MlaInput {
  ValueId h;         ///< the normed input, on all rows
  ValueId hq;        ///< the same where queries are wanted
  ValueId q_latent;  ///< normed, on the rows of hq; kNone without a low-rank query
};
/// The selection (LatentAttention) of a layer whose attention is sparse.
using SlotChooser = std::function<ValueId(Builder& b, int32_t layer, const MlaInput& in)>;

/// Wo attention(h), without a chooser over every slot that a row sees
ValueId mla_block(Builder& b, const Mla& mla, int32_t layer, ValueId h, bool last,
                  const SlotChooser& choose = {});

}  // namespace reflex
