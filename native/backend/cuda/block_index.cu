// The index of attention over chosen blocks: keys of blocks, their scores, and the choice as a list of slots.
// A slot's index state holds its raw key or, where the slot ends a block along its row's ancestors, the
// block's: made once, by the row that ends it, whatever passes or branches of a tree its tokens came in.
#include "backend/cuda/block_params.h"
#include "backend/cuda/split_mma.cuh"

namespace reflex::cuda {

namespace {

constexpr int kBuckets = 256, kDigits = 8;  // of a radix select

__device__ __forceinline__ float key_value(const float* p) { return *p; }
__device__ __forceinline__ float key_value(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float positive(float x) {
  return x > 0 ? x : 0.0f;
}  // of NaN: 0, so that scores order

/// What a row looks back on: slots [0, prefix), then those that its mask names.
struct Sight {
  const uint32_t* mask;
  int prefix, seen, base, first_slot;

  __device__ __forceinline__ Sight(const PassArrays& p, int row) {
    const PassHeader head = *p.header;
    mask = p.mask + static_cast<size_t>(row) * head.mask_words;
    base = head.mask_base;
    first_slot = head.first_slot;
    prefix = seen = p.prefix[row];
    for (int w = 0; w < head.mask_words; ++w) seen += __popc(mask[w]);
  }
  /// The slot of token number `depth` along the row's ancestors, below `seen`.
  __device__ __forceinline__ int slot(int depth) const {
    if (depth < prefix) return depth;
    int left = depth - prefix, w = 0;
    for (int n = __popc(mask[0]); left >= n; n = __popc(mask[w])) {
      left -= n;
      ++w;
    }
    uint32_t bits = mask[w];
    for (; left > 0; --left) bits &= bits - 1;
    return base + 32 * w + __ffs(static_cast<int>(bits)) - 1;
  }
};

/// As the state keeps it.
__device__ __forceinline__ float as_kept(const BlockKeysParams& p, float x) {
  return p.state_f32 ? x : __half2float(__float2half_rn(x));
}
/// A raw key's value: of this pass, which no other block may have stored yet, or of an earlier one.
__device__ __forceinline__ float raw_key(const BlockKeysParams& p, int slot, int first_slot, int i) {
  if (slot >= first_slot) return as_kept(p, p.index_k[static_cast<size_t>(slot - first_slot) * p.dim + i]);
  const size_t at = static_cast<size_t>(slot) * p.dim + i;
  return p.state_f32 ? static_cast<const float*>(p.state)[at]
                     : __half2float(static_cast<const __half*>(p.state)[at]);
}
__device__ __forceinline__ void keep(const BlockKeysParams& p, int slot, int i, float x) {
  const size_t at = static_cast<size_t>(slot) * p.dim + i;
  if (p.state_f32)
    static_cast<float*>(p.state)[at] = x;
  else
    static_cast<__half*>(p.state)[at] = __float2half_rn(x);
}

}  // namespace

/// A block per row of the pass; shared: (dim). grid (R)
REFLEX_KERNEL(block_keys, BlockKeysParams, kBlockKeyThreads) {
  REFLEX_DYNAMIC_SHARED(float, key);
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.x, n = p.dim, block = p.block_size;
  const Sight sight(p.pass, row);
  const int slot = sight.first_slot + row;
  const float* own = p.index_k + static_cast<size_t>(row) * n;
  if (sight.seen % block != 0) {
    for (int i = threadIdx.x; i < n; i += kBlockKeyThreads) keep(p, slot, i, own[i]);
    return;
  }
  float squares = 0;
  for (int i = threadIdx.x; i < n; i += kBlockKeyThreads) {
    float sum = 0;
    for (int j = 0; j < block - 1; ++j)
      sum += raw_key(p, sight.slot(sight.seen - block + j), sight.first_slot, i);
    key[i] = (sum + own[i]) / static_cast<float>(block);
    squares += key[i] * key[i];
  }
  const float factor = 1.0f / sqrtf(block_sum(squares, scratch) / static_cast<float>(n) + p.eps);
  for (int i = threadIdx.x; i < n; i += kBlockKeyThreads) key[i] *= factor * p.norm[i];
  __syncthreads();
  const auto position = static_cast<float>(p.pass.positions[row] - (block - 1));
  const int half = p.n_rot / 2;
  for (int i = threadIdx.x; i < half; i += kBlockKeyThreads) {
    float sine, cosine;
    sincosf(position * p.inv_freq[i], &sine, &cosine);
    sine *= p.magnitude;
    cosine *= p.magnitude;
    const int a = p.adjacent ? 2 * i : i, b = p.adjacent ? 2 * i + 1 : i + half;
    const float x = key[a], y = key[b];
    key[a] = x * cosine - y * sine;
    key[b] = y * cosine + x * sine;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kBlockKeyThreads) keep(p, slot, i, key[i]);
}

namespace {

/// Keys in eights by warp, heads in sixteens: products on tensor cores, relu, sums over heads in a fixed
/// order. grid (any, rows)
template <class S>
__device__ __forceinline__ void score_blocks(const BlockScoresParams& p) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  wait_for_inputs();
  let_next_start();
  const int row = p.first_row + blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Sight sight(p.pass, p.on_outputs ? p.pass.outputs[row] : row);
  const int n = sight.seen / p.block_size, warps = blockDim.x / 32;
  if (n <= p.n_blocks) return;
  const int stride = block_key_stride(p.dim), heads = block_query_rows(p.heads);
  auto* q = reinterpret_cast<float*>(raw);
  float* keys = q + (heads + warp * kBlockScoreKeys) * stride;
  for (int i = threadIdx.x; i < heads * stride; i += blockDim.x) {
    const int h = i / stride, c = i % stride;
    q[i] = h < p.heads && c < p.dim ? p.q[(static_cast<size_t>(row) * p.heads + h) * p.dim + c] : 0.0f;
  }
  __syncthreads();
  const int step = kBlockScoreKeys * warps * gridDim.x;
  for (int first = kBlockScoreKeys * (blockIdx.x * warps + warp); first < n; first += step) {
    __syncwarp();  // the keys before have been read
    for (int k = 0; k < kBlockScoreKeys; ++k) {
      const bool there = first + k < n;
      const int slot = there ? sight.slot((first + k) * p.block_size + p.block_size - 1) : 0;
      const S* from = static_cast<const S*>(p.state) + static_cast<size_t>(slot) * p.dim;
      for (int c = lane; c < stride; c += 32)
        keys[k * stride + c] = there && c < p.dim ? key_value(from + c) : 0.0f;
    }
    __syncwarp();
    float sum[2] = {};  // of keys 2 t and 2 t + 1
    for (int h = 0; h < heads; h += kBlockScoreHeads) {
      float acc[4] = {};
      for (int c = 0; c < stride - 4; c += 8) {
        float a[4], b[2];
        load_a(a, q + h * stride + c, stride);
        load_b_transposed(b, keys + c, stride);
        mma_f32<3>(acc, a, b);
      }
      sum[0] += positive(acc[0]) + positive(acc[2]);
      sum[1] += positive(acc[1]) + positive(acc[3]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int m = 4; m < 32; m *= 2) sum[k] += __shfl_xor_sync(kFull, sum[k], m);
      const int b = first + 2 * lane + k;
      if (lane < 4 && b < n) p.scores[static_cast<size_t>(blockIdx.y) * p.score_stride + b] = sum[k];
    }
  }
}

}  // namespace

REFLEX_KERNEL(block_scores_f32, BlockScoresParams, 256) { score_blocks<float>(p); }
REFLEX_KERNEL(block_scores_f16, BlockScoresParams, 256) { score_blocks<__half>(p); }

namespace {

struct ChoiceMemory {
  uint32_t histogram[kBuckets];
  uint32_t found;
  int left;
  uint32_t totals[kBlockChoiceThreads / 32];  // of a warp: better ones, and as good as the last, in halves
};

/// The n_blocks-th best of n scores, as bits (none is negative: bits order as scores do), and how many as
/// good as it are chosen: a radix select, digit by digit.
__device__ __forceinline__ void find_last(const uint32_t* keys, int n, int n_blocks, ChoiceMemory& s) {
  if (threadIdx.x == 0) {
    s.found = 0;
    s.left = n_blocks;
  }
  for (int shift = 32 - kDigits; shift >= 0; shift -= kDigits) {
    for (int i = threadIdx.x; i < kBuckets; i += kBlockChoiceThreads) s.histogram[i] = 0;
    __syncthreads();
    const uint64_t high = static_cast<uint64_t>(s.found) >> (shift + kDigits);
    for (int i = threadIdx.x; i < n; i += kBlockChoiceThreads)
      if (static_cast<uint64_t>(keys[i]) >> (shift + kDigits) == high)
        atomicAdd(s.histogram + (keys[i] >> shift & (kBuckets - 1)), 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
      int bucket = kBuckets - 1;
      for (; s.left > static_cast<int>(s.histogram[bucket]); --bucket)
        s.left -= static_cast<int>(s.histogram[bucket]);
      s.found |= static_cast<uint32_t>(bucket) << shift;
    }
    __syncthreads();
  }
}

/// Chosen block number k, in ascending order, to list[k * block_size].
__device__ __forceinline__ void write_chosen(const uint32_t* keys, int n, int block_size, int32_t* list,
                                             ChoiceMemory& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned below = (1u << lane) - 1;
  int better = 0, equal = 0;  // before this chunk
  for (int base = 0; base < n; base += kBlockChoiceThreads) {
    const int i = base + threadIdx.x;
    const bool is_better = i < n && keys[i] > s.found, is_equal = i < n && keys[i] == s.found;
    const unsigned b = __ballot_sync(kFull, is_better), e = __ballot_sync(kFull, is_equal);
    if (lane == 0) s.totals[warp] = static_cast<uint32_t>(__popc(b)) << 16 | static_cast<uint32_t>(__popc(e));
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (int w = 0; w < kBlockChoiceThreads / 32; ++w) {
      if (w < warp) before += s.totals[w];
      all += s.totals[w];
    }
    const int own_better = better + static_cast<int>(before >> 16) + __popc(b & below);
    const int own_equal = equal + static_cast<int>(before & 0xFFFF) + __popc(e & below);
    if (is_better || (is_equal && own_equal < s.left))
      list[static_cast<size_t>(own_better + min(own_equal, s.left)) * block_size] = i;
    better += static_cast<int>(all >> 16);
    equal += static_cast<int>(all & 0xFFFF);
    __syncthreads();
  }
}

}  // namespace

/// A block per row. grid (rows)
REFLEX_KERNEL(block_choice, BlockChoiceParams, kBlockChoiceThreads) {
  __shared__ ChoiceMemory memory;
  wait_for_inputs();
  let_next_start();
  const int row = p.first_row + blockIdx.x, size = p.block_size;
  const Sight sight(p.pass, p.on_outputs ? p.pass.outputs[row] : row);
  const int n = sight.seen / size;
  int32_t* list = p.lists + static_cast<size_t>(blockIdx.x) * p.list_stride;
  if (n <= p.n_blocks) {
    if (threadIdx.x == 0) p.counts[blockIdx.x] = sight.seen;
    for (int i = threadIdx.x; i < sight.seen; i += kBlockChoiceThreads) list[i] = sight.slot(i);
    return;
  }
  const auto* keys =
      reinterpret_cast<const uint32_t*>(p.scores + static_cast<size_t>(blockIdx.x) * p.score_stride);
  find_last(keys, n, p.n_blocks, memory);
  write_chosen(keys, n, size, list, memory);
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < p.n_blocks; k += kBlockChoiceThreads / 32) {
    const int block = list[static_cast<size_t>(k) * size];
    __syncwarp();  // every lane has it
    for (int j = lane; j < size; j += 32)
      list[static_cast<size_t>(k) * size + j] = sight.slot(block * size + j);
  }
  const int chosen = p.n_blocks * size, rest = sight.seen - n * size;
  if (threadIdx.x == 0) p.counts[blockIdx.x] = chosen + rest;
  for (int j = threadIdx.x; j < rest; j += kBlockChoiceThreads) list[chosen + j] = sight.slot(n * size + j);
}

}  // namespace reflex::cuda
