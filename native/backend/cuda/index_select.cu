// Which slots a row's attention reads: the top_k best of its candidates' scores, or all where there are no
// more; ties go to the earlier slot; ascending, then -1. A block per row finds the score that the last of the
// chosen has, digit after digit from the top, and writes what is better and the first of what is equal.
// (block_index.cu chooses by the same digits, but among a hundredth as many scores: one histogram and one
// thread's walk through it do there, where here a lane has counters of its own and a warp adds up; no step of
// the two is alike.)
#include "backend/cuda/index_params.h"
#include "backend/cuda/seen.cuh"

namespace reflex::cuda {

namespace {

constexpr int kThreads = kSelectThreads, kWarps = kThreads / 32;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr int kEach = 4;  // places that a thread takes at once

/// A row's places without the gap between the two parts: `strided`, then the mask's; both multiples of kEach.
struct Row {
  const uint32_t* scores;  // (places)
  const uint32_t* mask;    // (mask_words)
  int n_strided;           // where the mask's begin among `scores`
  int strided, n;          // here
  int in_prefix, prefix, ratio, mask_base;

  __device__ __forceinline__ uint4 load(int i) const {
    return *reinterpret_cast<const uint4*>(scores + (i < strided ? i : n_strided + i - strided));
  }
  __device__ __forceinline__ int slot(int i) const {
    return i < strided ? (i + 1) * ratio - 1 : mask_base + i - strided;
  }
  /// Whether place i is a candidate, for rows without scores.
  __device__ __forceinline__ bool candidate(int i) const {
    if (i < strided) return i < in_prefix;
    const int word = (i - strided) / 32, bit = (i - strided) % 32;
    if (!(mask[word] >> bit & 1)) return false;
    if (ratio == 1) return true;
    int rank = prefix + __popc(mask[word] & (kFull >> (31 - bit)));
    for (int w = 0; w < word; ++w) rank += __popc(mask[w]);
    return rank % ratio == 0;
  }
};

struct Threshold {
  uint32_t score;
  int equal;  // how many that have it are chosen
};

/// The digit at which the k best end, and how many of that digit are among them: by warp 0.
__device__ __forceinline__ void find_digit(const int* counts, int k, int& digit, int& left) {
  constexpr int kPer = kDigits / 32;
  const int lane = threadIdx.x, first = kDigits - 1 - kPer * lane;  // lane 0 has the highest
  int own = 0;
  for (int i = 0; i < kPer; ++i) own += counts[first - i];
  int before = own;
  for (int m = 1; m < 32; m *= 2) {
    const int other = __shfl_up_sync(kFull, before, m);
    if (lane >= m) before += other;
  }
  before -= own;
  if (before >= k || before + own < k) return;
  int at = first;
  for (; before + counts[at] < k; --at) before += counts[at];
  digit = at;
  left = k - before;
}

/// The k-th best score, 0 < k <= the candidates. counters: (kDigits, 32), a lane's own: no two lanes of a
/// warp ever count in one place.
__device__ __forceinline__ Threshold threshold(const Row& row, int k, int* counters, int* counts) {
  __shared__ int digit, left;
  const int lane = threadIdx.x % 32;
  uint32_t found = 0;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int i = threadIdx.x; i < kDigits * 32; i += kThreads) counters[i] = 0;
    __syncthreads();
    const auto count = [&](uint32_t score) {
      if (shift + kDigitBits == 32 || score >> (shift + kDigitBits) == found)
        atomicAdd(counters + (score >> shift & (kDigits - 1)) * 32 + lane, 1);
    };
    for (int i = threadIdx.x * kEach; i < row.n; i += kThreads * kEach) {
      const uint4 s = row.load(i);
      count(s.x), count(s.y), count(s.z), count(s.w);
    }
    __syncthreads();
    if (threadIdx.x < kDigits) {
      int sum = 0;
      for (int i = 0; i < 32; ++i) sum += counters[threadIdx.x * 32 + (i + lane) % 32];
      counts[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(counts, k, digit, left);
    __syncthreads();
    found = found << kDigitBits | static_cast<uint32_t>(digit);
    k = left;
  }
  return {found, k};
}

/// The block's sum of x before each thread, and of all of it.
__device__ __forceinline__ int sum_before(int x, int* sums, int& all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto inclusive = [lane](int v) {
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
      const int other = __shfl_up_sync(kFull, v, m);
      if (lane >= m) v += other;
    }
    return v;
  };
  const int own = inclusive(x);
  if (lane == 31) sums[warp] = own;
  __syncthreads();
  const int warps = inclusive(sums[lane]);
  all = __shfl_sync(kFull, warps, 31);
  const int before = __shfl_sync(kFull, warps, warp > 0 ? warp - 1 : 0);
  __syncthreads();  // sums may be written again
  return own - x + (warp > 0 ? before : 0);
}

/// Writes the chosen in order and returns how many. chosen(i, better, same): a bit for each of places i .. i
/// + 3.
template <class F>
__device__ __forceinline__ int write(const Row& row, int n_equal, int32_t* out, int* sums, F chosen) {
  int n_better = 0, n_same = 0;  // before this round
  for (int base = 0; base < row.n; base += kThreads * kEach) {
    const int i = base + threadIdx.x * kEach;
    uint32_t better = 0, same = 0;
    if (i < row.n) chosen(i, better, same);
    int all = 0;
    const int before = sum_before(__popc(better) | __popc(same) << 16, sums, all);
    int b = n_better + (before & 0xFFFF), s = n_same + (before >> 16);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool is_better = better >> j & 1, is_same = same >> j & 1;
      if (is_better || (is_same && s < n_equal)) out[b + min(s, n_equal)] = row.slot(i + j);
      b += is_better;
      s += is_same;
    }
    n_better += all & 0xFFFF;
    n_same += all >> 16;
  }
  return n_better + min(n_same, n_equal);
}

}  // namespace

/// grid (n_rows)
REFLEX_KERNEL(index_select, IndexParams, kThreads) {
  __shared__ int counters[kDigits * 32], counts[kDigits], sums[kWarps];
  static_assert(kWarps == 32 && kThreads * kEach < 1 << 16);
  wait_for_inputs();
  let_next_start();
  const PassHeader header = *p.pass.header;
  const int value_row = p.first_row + blockIdx.x;
  const int pass_row = p.on_outputs ? p.pass.outputs[value_row] : value_row;
  Row row;
  row.scores = p.scores + static_cast<size_t>(blockIdx.x) * p.places;
  row.mask = p.pass.mask + static_cast<size_t>(pass_row) * header.mask_words;
  row.n_strided = p.n_strided;
  row.prefix = p.pass.prefix[pass_row];
  row.ratio = p.ratio;
  row.in_prefix = row.prefix / p.ratio;
  row.strided = (row.in_prefix + kEach - 1) / kEach * kEach;
  row.n = row.strided + 32 * header.mask_words;
  row.mask_base = header.mask_base;
  const int candidates = seen_by(p.pass, header.mask_words, pass_row) / p.ratio;
  int32_t* out = p.out + static_cast<size_t>(value_row) * p.top_k;
  int n = 0;
  if (candidates <= p.top_k) {
    n = write(row, 0, out, sums, [&](int i, uint32_t& better, uint32_t&) {
      for (int j = 0; j < kEach; ++j) better |= static_cast<uint32_t>(row.candidate(i + j)) << j;
    });
  } else {
    const Threshold last = threshold(row, p.top_k, counters, counts);
    n = write(row, last.equal, out, sums, [&](int i, uint32_t& better, uint32_t& same) {
      const uint4 s = row.load(i);
      const auto bits = [&](auto is) { return is(s.x) | is(s.y) << 1 | is(s.z) << 2 | is(s.w) << 3; };
      better = bits([&](uint32_t x) { return static_cast<uint32_t>(x > last.score); });
      same = bits([&](uint32_t x) { return static_cast<uint32_t>(x == last.score); });
    });
  }
  for (int i = n + threadIdx.x; i < p.top_k; i += kThreads) out[i] = -1;
}

}  // namespace reflex::cuda
