// The choice of experts beyond softmax and sigmoid (DeepSeek-V4): scores by the root of softplus, and experts
// that a table holds for the row's token, whose weights are still their scores.
#include "backend/cuda/moe_choice.cuh"

namespace reflex::cuda {

namespace {

/// sqrt(log(1 + e^x)), the logarithm as max(x, 0) + log(1 + e^-|x|).
__device__ __forceinline__ float sqrt_softplus(float x) {
  return sqrtf((x > 0 ? x : x == x ? 0.0f : x) + log1pf(expf(-fabsf(x))));
}

/// The row's experts of the table, ascending, to ids, and their weights. After s.score is there.
__device__ __forceinline__ void look_up(const GatingParams& g, const int32_t* experts, int32_t* ids,
                                        float* weights, const ChoiceMemory& s) {
  const int k = threadIdx.x;
  if (k >= g.n_used) return;
  const int own = experts[k];
  int place = 0;
  float sum = 0;
  for (int i = 0; i < g.n_used; ++i) {
    place += experts[i] < own || (experts[i] == own && i < k);
    sum += s.score[experts[i]];
  }
  ids[place] = own;
  weights[place] = (g.renormalise ? s.score[own] / sum : s.score[own]) * g.scale;
}

}  // namespace

// A row a block.
REFLEX_KERNEL(moe_choose_more, ChooseMoreParams, kExpertThreads) {
  __shared__ ChoiceMemory memory;
  wait_for_inputs();
  let_next_start();
  const GatingParams& g = p.choose.gating;
  const size_t row = blockIdx.x;
  const float* logits = p.choose.logits + row * g.n_experts;
  int32_t* ids = p.choose.ids + row * g.n_used;
  float* weights = p.choose.weights + row * g.n_used;
  if (p.sqrt_softplus)
    for (int e = threadIdx.x; e < g.n_experts; e += kExpertThreads)
      memory.score[e] = sqrt_softplus(logits[e]);
  else
    score_experts(g, logits, memory);
  if (!p.of_token) return pick(g, ids, weights, memory);
  __syncthreads();
  const int token = p.tokens[p.outputs ? p.outputs[row] : row];
  look_up(g, p.of_token + static_cast<size_t>(token) * g.n_used, ids, weights, memory);
}

}  // namespace reflex::cuda
