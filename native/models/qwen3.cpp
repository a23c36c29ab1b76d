// Qwen3 dense (transformers: models/qwen3): RMS norm per head on q and k before half-split rope,
// no biases, head size of its own.
#include "models/dense.h"

namespace reflex {

void build_qwen3(Builder& b) {
  build_dense(b, {.pairing = RopeSpec::Pairing::half, .qk_norm = true, .require_bias = false});
}

}  // namespace reflex
