// Who goes to which expert: the router, the choice, and the rows of a pass sorted by expert; and the
// weighted sum of what the experts make. All in f32 and in a fixed order, whatever else runs.
// Refuses: the experts' own products (moe_one.cu, moe_rows.cu, moe_raw.cu).
#include "backend/cuda/moe_choice.cuh"

namespace reflex::cuda {

namespace {

/// A row's choice by the whole block.
__device__ __forceinline__ void choose(const GatingParams& g, const float* logits, int32_t* ids,
                                       float* weights, ChoiceMemory& s) {
  score_experts(g, logits, s);
  pick(g, ids, weights, s);
}

}  // namespace

// A warp an expert; the last block to finish chooses. The norm's factor is common to all of a row, so it is
// left for the sum, and every warp has it from the values that it reads anyway.
REFLEX_KERNEL(moe_route, RouteParams, kExpertThreads) {
  __shared__ ChoiceMemory memory;
  __shared__ bool last;
  const int lane = threadIdx.x % 32, e = blockIdx.x * kExpertWarps + threadIdx.x / 32;
  const bool mine = e < p.gating.n_experts;
  const float* w = p.router + static_cast<size_t>(mine ? e : 0) * p.width;
  if (mine && lane == 0) prefetch_l2(w, static_cast<uint32_t>(p.width) * 4u);
  wait_for_inputs();
  let_next_start();
  float sum = 0, squares = 0;
#pragma unroll 8
  for (int c = lane * 4; c < p.width; c += 128) {
    float4 v = *reinterpret_cast<const float4*>(p.x + c);
    const float4 r = *reinterpret_cast<const float4*>(w + c);
    if (p.norm_weight) {
      const float4 n = *reinterpret_cast<const float4*>(p.norm_weight + c);
      squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
      v = {v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w};
    }
    sum += v.x * r.x + v.y * r.y + (v.z * r.z + v.w * r.w);
  }
  float factor = 1.0f;
  if (p.norm_weight) factor = rsqrtf(warp_sum(squares) / static_cast<float>(p.width) + p.norm_eps);
  sum = warp_sum(sum) * factor;
  if (mine && lane == 0) p.logits[e] = sum;
  if (p.norm_weight && blockIdx.x == gridDim.x - 1)
    for (int c = threadIdx.x; c < p.width; c += kExpertThreads)
      p.normed[c] = p.x[c] * factor * p.norm_weight[c];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.ticket, 1u) == gridDim.x - 1;
    if (last) *p.ticket = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  choose(p.gating, p.logits, p.ids, p.weights, memory);
}

REFLEX_KERNEL(moe_choose, ChooseParams, kExpertThreads) {
  __shared__ ChoiceMemory memory;
  wait_for_inputs();
  let_next_start();
  const size_t row = blockIdx.x;
  choose(p.gating, p.logits + row * p.gating.n_experts, p.ids + row * p.gating.n_used,
         p.weights + row * p.gating.n_used, memory);
}

// A warp makes one expert's logits of a few rows, which the block's warps share.
REFLEX_KERNEL(moe_logits, RouterParams, kExpertThreads) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, e = blockIdx.x * kExpertWarps + threadIdx.x / 32;
  if (e >= p.n_experts) return;
  const float* w = p.router + static_cast<size_t>(e) * p.width;
  const float* x[kRouterRows];
  const int first = blockIdx.y * kRouterRows;
#pragma unroll
  for (int r = 0; r < kRouterRows; ++r)
    x[r] = p.x + static_cast<size_t>(min(first + r, p.n_rows - 1)) * p.width;
  float sum[kRouterRows] = {};
#pragma unroll 2
  for (int c = lane * 4; c < p.width; c += 128) {
    const float4 v = *reinterpret_cast<const float4*>(w + c);
#pragma unroll
    for (int r = 0; r < kRouterRows; ++r) {
      const float4 u = *reinterpret_cast<const float4*>(x[r] + c);
      sum[r] += v.x * u.x + v.y * u.y + (v.z * u.z + v.w * u.w);
    }
  }
#pragma unroll
  for (int r = 0; r < kRouterRows; ++r) {
    const float all = warp_sum(sum[r]);
    if (lane == 0 && first + r < p.n_rows) p.logits[static_cast<size_t>(first + r) * p.n_experts + e] = all;
  }
}

// A bit per expert and row says who goes where; a row's place among its expert's is the bits before it.
REFLEX_KERNEL(moe_sort, SortParams, kSortThreads) {
  REFLEX_DYNAMIC_SHARED(uint8_t, shared);
  __shared__ int32_t totals[2][32];
  const int n = p.n_experts, words = (p.n_rows + 31) / 32, n_pairs = p.n_rows * p.n_used;
  auto* bits = reinterpret_cast<uint32_t*>(shared);
  auto* begin = reinterpret_cast<int32_t*>(bits + words * n);
  auto* count = begin + n;
  wait_for_inputs();
  let_next_start();
  for (int i = threadIdx.x; i < words * n; i += kSortThreads) bits[i] = 0;
  for (int i = threadIdx.x; i < p.n_places; i += kSortThreads) p.row_of[i] = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < n_pairs; i += kSortThreads) {
    const int row = i / p.n_used;
    atomicOr(bits + p.ids[i] * words + row / 32, 1u << row % 32);
  }
  __syncthreads();
  // Where each expert's places and blocks begin: sums over the experts before it.
  int base_place = 0, base_block = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = 0; first < n; first += kSortThreads) {
    const int e = first + threadIdx.x;
    int own = 0;
    if (e < n)
      for (int w = 0; w < words; ++w) own += __popc(bits[e * words + w]);
    const int places = (own + kPlaceAlign - 1) / kPlaceAlign * kPlaceAlign;
    const int blocks = (own + p.block_rows - 1) / p.block_rows;
    int place = places, block = blocks;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const int a = __shfl_up_sync(kFull, place, m), b = __shfl_up_sync(kFull, block, m);
      if (lane >= m) place += a, block += b;
    }
    if (lane == 31) totals[0][warp] = place, totals[1][warp] = block;
    __syncthreads();
    int place_before = base_place, block_before = base_block;
    for (int w = 0; w < kSortThreads / 32; ++w) {
      if (w < warp) place_before += totals[0][w], block_before += totals[1][w];
      base_place += totals[0][w], base_block += totals[1][w];
    }
    place += place_before - places;
    block += block_before - blocks;
    if (e < n) {
      begin[e] = place;
      count[e] = own;
      for (int i = 0; i < blocks; ++i)
        p.blocks[block + i] = {e, place + i * p.block_rows, min(p.block_rows, own - i * p.block_rows)};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.n_blocks = base_block;
  for (int i = threadIdx.x; i < n_pairs; i += kSortThreads) {
    const int row = i / p.n_used, e = p.ids[i];
    int place = begin[e] + __popc(bits[e * words + row / 32] & ((1u << row % 32) - 1));
    for (int w = 0; w < row / 32; ++w) place += __popc(bits[e * words + w]);
    p.place_of[i] = place;
    p.row_of[place] = row;
  }
}

// A place a block.
REFLEX_KERNEL(moe_gather, PlaceParams, kExpertThreads) {
  wait_for_inputs();
  let_next_start();
  const int place = blockIdx.x, row = p.row_of[place];
  if (row < 0) return;
  const float* x = p.x + static_cast<size_t>(row) * p.width;
  auto* out = static_cast<uint32_t*>(p.out);
#pragma unroll 2
  for (int c = 4 * threadIdx.x; c < p.n_units * kUnit; c += 4 * kExpertThreads) {
    float v[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (c + i < p.width) v[i] = x[c + i];
    const size_t at = fragment_index(place, c, p.n_units) / 2;
    out[at] = activation_pair(v[0], v[1]);
    out[at + 2] = activation_pair(v[2], v[3]);
  }
}

// grid (ceil(width / 256), rows)
REFLEX_KERNEL(moe_combine, CombineParams, kExpertThreads) {
  wait_for_inputs();
  let_next_start();
  const int c = blockIdx.x * kExpertThreads + threadIdx.x;
  const size_t row = blockIdx.y;
  if (c >= p.width) return;
  float y = 0;
#pragma unroll 4
  for (int k = 0; k < p.n_used; ++k) {
    const size_t pair = row * p.n_used + k;
    y += p.weights[pair] * p.experts[static_cast<size_t>(p.place_of[pair]) * p.width + c];
  }
  const size_t at = row * p.width + c;
  p.out[at] = y + (p.residual ? p.residual[at] : 0.0f);
}

}  // namespace reflex::cuda
