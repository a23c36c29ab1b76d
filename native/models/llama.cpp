// Llama 2 and 3, DeepSeek-LLM, R1-Distill-Llama (transformers: models/llama): adjacent-pair rope,
// because the converter permutes the rows of q and k; llama 3 scaling by rope_freqs.weight.
#include "models/dense.h"

namespace reflex {

void build_llama(Builder& b) {
  if (b.file().get_uint("llama.expert_count").value_or(0) > 0)
    fail(ErrorKind::unsupported_architecture,
         "llama with experts (Mixtral) is not supported, only dense llama");
  build_dense(b, {.pairing = RopeSpec::Pairing::adjacent, .qk_norm = false, .require_bias = false});
}

}  // namespace reflex
