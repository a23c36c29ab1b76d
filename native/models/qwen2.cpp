// Qwen2, Qwen2.5 and R1-Distill-Qwen (transformers: models/qwen2): biases on q, k and v, half-split
// rope over the whole head, no key_length key.
#include "models/dense.h"

namespace reflex {

void build_qwen2(Builder& b) {
  build_dense(b, {.pairing = RopeSpec::Pairing::half, .qk_norm = false, .require_bias = true});
}

}  // namespace reflex
