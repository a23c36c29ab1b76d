// A row's choice of experts from their scores, by a whole block: shared by the routers of moe.cu and
// moe_token.cu. In f32 and in a fixed order.
#pragma once
#include "backend/cuda/device.cuh"
#include "backend/cuda/moe_params.h"

namespace reflex::cuda {

inline constexpr float kLowest = -3.402823466e38f;

struct ChoiceMemory {
  float score[kMaxExperts], choice[kMaxExperts];
  float group[kMaxExperts];  ///< scores of groups
  float scratch[32];
  int32_t before[kExpertWarps + 1];
  float sum;
};

__device__ __forceinline__ float block_max(float v, float* scratch) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(kFull, v, m));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float all = scratch[0];
  for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) all = fmaxf(all, scratch[i]);
  __syncthreads();
  return all;
}

/// How many of x (n) come before entry i: the larger, on a tie the lower index.
__device__ __forceinline__ int rank_of(const float* x, int n, int i) {
  const float own = x[i];
  int rank = 0;
#pragma unroll 8
  for (int j = 0; j < n; ++j) rank += x[j] > own || (x[j] == own && j < i);
  return rank;
}

__device__ __forceinline__ float group_score(const float* x, int n, bool best_two) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < n; ++i) {
    if (x[i] > first)
      second = first, first = x[i];
    else if (x[i] > second)
      second = x[i];
  }
  return best_two && n > 1 ? first + second : first;
}

/// Scores by softmax or sigmoid to s.score, each by the thread that pick() wants it of. logits may have been
/// written by other blocks of this launch.
__device__ __forceinline__ void score_experts(const GatingParams& g, const float* logits, ChoiceMemory& s) {
  const int n = g.n_experts, threads = blockDim.x;
  if (g.sigmoid) {
    for (int e = threadIdx.x; e < n; e += threads) s.score[e] = 1.0f / (1.0f + expf(-__ldcg(logits + e)));
  } else {
    float top = -INFINITY, sum = 0;
    for (int e = threadIdx.x; e < n; e += threads) top = fmaxf(top, __ldcg(logits + e));
    top = block_max(top, s.scratch);
    for (int e = threadIdx.x; e < n; e += threads) sum += s.score[e] = expf(__ldcg(logits + e) - top);
    sum = block_sum(sum, s.scratch);
    for (int e = threadIdx.x; e < n; e += threads) s.score[e] /= sum;
  }
}

/// The choice by the whole block, from s.score.
__device__ __forceinline__ void pick(const GatingParams& g, int32_t* ids, float* weights, ChoiceMemory& s) {
  const int n = g.n_experts, threads = blockDim.x;
  for (int e = threadIdx.x; e < n; e += threads) {
    const float c = s.score[e] + (g.bias ? g.bias[e] : 0.0f);
    s.choice[e] = isnan(c) ? kLowest : c;
  }
  __syncthreads();
  if (g.n_groups_used < g.n_groups) {
    const int size = n / g.n_groups;
    for (int i = threadIdx.x; i < g.n_groups; i += threads)
      s.group[i] = group_score(s.choice + i * size, size, g.best_two);
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += threads)
      if (rank_of(s.group, g.n_groups, e / size) >= g.n_groups_used) s.choice[e] = -INFINITY;
    __syncthreads();
  }
  // The chosen in ascending order: thread after thread, 32 experts of a warp at a time.
  int base = 0;
  for (int first = 0; first < n; first += threads) {
    const int e = first + threadIdx.x;
    const bool chosen = e < n && rank_of(s.choice, n, e) < g.n_used;
    const unsigned mine = __ballot_sync(kFull, chosen);
    if (threadIdx.x % 32 == 0) s.before[threadIdx.x / 32] = __popc(mine);
    __syncthreads();
    int before = base;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < static_cast<int>(threadIdx.x) / 32) before += s.before[w];
      base += s.before[w];
    }
    const int k = before + __popc(mine & ((1u << threadIdx.x % 32) - 1));
    if (chosen) {
      ids[k] = e;
      s.group[k] = s.score[e];
    }
    __syncthreads();
  }
  if (threadIdx.x >= static_cast<unsigned>(g.n_used)) return;
  float weight = s.group[threadIdx.x];
  if (g.renormalise) {
    float sum = 0;
    for (int k = 0; k < g.n_used; ++k) sum += s.group[k];
    weight /= sum;
  }
  weights[threadIdx.x] = weight * g.scale;
}

}  // namespace reflex::cuda
