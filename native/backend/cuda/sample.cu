// What is read off a row of logits without moving it: the best, the sum of exponentials, the best n,
// a draw. Sums that decide a draw are integers (2^-40 of the best token's weight), so their order
// does not matter and the same request draws the same token.
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

struct Share {
  int begin, end;
};
__device__ __forceinline__ Share share_of(int n, int part, int parts) {
  const int each = (n + parts - 1) / parts;
  return {min(n, part * each), min(n, (part + 1) * each)};
}

}  // namespace

/// grid (n_partial, O)
REFLEX_KERNEL(best_of_blocks, BestParams, kScanThreads) {
  __shared__ Best scratch[32];
  wait_for_inputs();
  let_next_start();
  const float* x = p.logits + static_cast<size_t>(blockIdx.y) * p.n_vocab;
  const Share share = share_of(p.n_vocab, blockIdx.x, p.n_partial);
  Best best{0, -1};
  for (int i = share.begin + threadIdx.x; i < share.end; i += kScanThreads) best = consider(best, x[i], i);
  best = block_best(best, scratch);
  if (threadIdx.x == 0) p.partial[static_cast<size_t>(blockIdx.y) * p.n_partial + blockIdx.x] = best;
}

/// One block, a warp per row in turn; then the host is told.
REFLEX_KERNEL(best_of_rows, BestParams, kScanThreads) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32;
  const uint32_t sequence = p.header->sequence;
  for (int o = threadIdx.x / 32; o < p.n_out; o += kScanThreads / 32) {
    Best best{0, -1};
    for (int i = lane; i < p.n_partial; i += 32)
      best = better(best, p.partial[static_cast<size_t>(o) * p.n_partial + i]);
    best = warp_best(best);
    if (lane == 0) p.out[o] = best;
  }
  // Results reach the host before the word that says so.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *p.done = sequence;
}

/// grid kScanBlocks
REFLEX_KERNEL(sum_exp, SumExpParams, kScanThreads) {
  __shared__ double scratch[kScanThreads];
  wait_for_inputs();
  const float top = p.max->value;
  const Share share = share_of(p.n, blockIdx.x, kScanBlocks);
  double sum = 0;
  for (int i = share.begin + threadIdx.x; i < share.end; i += kScanThreads)
    sum += static_cast<double>(expf((p.x[i] - top) * p.inv_temperature));
  scratch[threadIdx.x] = sum;
  for (int n = kScanThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) scratch[threadIdx.x] += scratch[threadIdx.x + n];
  }
  if (threadIdx.x == 0) p.partial[blockIdx.x] = scratch[0];
}

/// grid kScanBlocks, shared memory for a block's share: the n_top best of it, one scan each
REFLEX_KERNEL(top_logits, TopParams, kScanThreads) {
  REFLEX_DYNAMIC_SHARED(float, share_values);
  __shared__ Best scratch[32], found;
  wait_for_inputs();
  const Share share = share_of(p.n, blockIdx.x, kScanBlocks);
  const int n = share.end - share.begin;
  for (int i = threadIdx.x; i < n; i += kScanThreads) share_values[i] = p.x[share.begin + i];
  for (int k = 0; k < p.n_top; ++k) {
    __syncthreads();
    Best best{0, -1};
    for (int i = threadIdx.x; i < n; i += kScanThreads) best = consider(best, share_values[i], i);
    best = block_best(best, scratch);
    if (threadIdx.x == 0) {
      found = best;
      p.partial[static_cast<size_t>(blockIdx.x) * p.n_top + k] = {best.value,
                                                                  best.id < 0 ? -1 : share.begin + best.id};
      if (best.id >= 0) share_values[best.id] = -INFINITY;
    }
    __syncthreads();
    if (found.id < 0) {  // the rest is NaN or -inf
      for (int i = k + 1 + threadIdx.x; i < p.n_top; i += kScanThreads)
        p.partial[static_cast<size_t>(blockIdx.x) * p.n_top + i] = {0, -1};
      return;
    }
  }
}

/// bias, then penalties; ids are distinct
REFLEX_KERNEL(adjust_logits, AdjustParams, 256) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.n_items) return;
  const AdjustItem item = p.items[i];
  float v = p.x[item.id] + item.bias;
  v = v > 0 ? v / item.repetition : v * item.repetition;
  p.x[item.id] = v - item.subtract;
}

/// then the mask
REFLEX_KERNEL(mask_logits, AdjustParams, 256) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n && !(p.allowed[i / 32] >> (i % 32) & 1)) p.x[i] = -INFINITY;
}

// ---- the draw ------------------------------------------------------------------------------

namespace {

constexpr int kDrawThreads = 1024;
constexpr int kBins = 256;

/// A token's weight exp((x - max) / T), at most 1; NaN and -inf weigh nothing. Positive floats order
/// as their bits.
__device__ __forceinline__ uint32_t weight_bits(const DrawParams& p, float top, int i) {
  const float w = expf((p.x[i] - top) * p.inv_temperature);
  return w > 0 ? __float_as_uint(w) : 0;
}

__device__ __forceinline__ unsigned long long mass_of(uint32_t bits) {
  return static_cast<unsigned long long>(
      __double2ull_rn(static_cast<double>(__uint_as_float(bits)) * 0x1p40));
}

/// What is kept: weights above `bits`, and the first `ties` (by id) of those equal to it.
struct Cut {
  uint32_t bits;
  uint32_t ties;
};

struct DrawShared {
  unsigned long long bins[kBins];
  unsigned long long scan[kDrawThreads];
  Cut cut;
  unsigned long long before;
  uint32_t prefix;
};

__device__ __forceinline__ unsigned long long block_total(unsigned long long v, DrawShared& s) {
  __syncthreads();
  s.scan[threadIdx.x] = v;
  for (int n = kDrawThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) s.scan[threadIdx.x] += s.scan[threadIdx.x + n];
  }
  __syncthreads();
  return s.scan[0];
}

/// Sum over the threads before this one.
__device__ __forceinline__ unsigned long long block_before(unsigned long long v, DrawShared& s) {
  __syncthreads();
  s.scan[threadIdx.x] = v;
  __syncthreads();
  for (int n = 1; n < kDrawThreads; n *= 2) {
    const unsigned long long other = threadIdx.x >= n ? s.scan[threadIdx.x - n] : 0;
    __syncthreads();
    s.scan[threadIdx.x] += other;
    __syncthreads();
  }
  return s.scan[threadIdx.x] - v;
}

/// In descending order of weight, the first at which the running amount (the count, or the mass)
/// reaches `want`: a radix descent over the weights' bits, 8 at a time, within an earlier cut.
template <bool kMass>
__device__ __forceinline__ Cut reach(const DrawParams& p, float top, const Cut& within,
                                     unsigned long long want, DrawShared& s) {
  uint32_t prefix = 0;
  unsigned long long before = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kBins; i += kDrawThreads) s.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < p.n; i += kDrawThreads) {
      const uint32_t bits = weight_bits(p, top, i);
      if (bits == 0 || bits < within.bits) continue;
      if (shift < 24 && bits >> (shift + 8) != prefix >> (shift + 8)) continue;
      atomicAdd(&s.bins[bits >> shift & 0xFF], kMass ? mass_of(bits) : 1ull);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = kBins - 1;
      unsigned long long sum = before;
      for (; bin > 0 && sum + s.bins[bin] < want; --bin) sum += s.bins[bin];
      s.before = sum;
      s.prefix = prefix | static_cast<uint32_t>(bin) << shift;
    }
    __syncthreads();
    before = s.before;
    prefix = s.prefix;
  }
  // Among equals as many as are still wanted, no more than the earlier cut left.
  const unsigned long long each = kMass ? max(1ull, mass_of(prefix)) : 1ull;
  const unsigned long long left = want > before ? want - before : 1;
  unsigned long long ties = (left + each - 1) / each;
  if (ties > 0xFFFFFFFFull) ties = 0xFFFFFFFFull;
  if (prefix <= within.bits) return {within.bits, min(within.ties, static_cast<uint32_t>(ties))};
  return {prefix, static_cast<uint32_t>(ties)};
}

/// Mass that a cut keeps.
__device__ __forceinline__ unsigned long long kept_mass(const DrawParams& p, float top, const Cut& cut,
                                                        DrawShared& s) {
  unsigned long long mass = 0, equals = 0;
  for (int i = threadIdx.x; i < p.n; i += kDrawThreads) {
    const uint32_t bits = weight_bits(p, top, i);
    if (bits > cut.bits) mass += mass_of(bits);
    if (bits && bits == cut.bits) ++equals;
  }
  mass = block_total(mass, s);
  equals = min(block_total(equals, s), static_cast<unsigned long long>(cut.ties));
  return mass + equals * mass_of(cut.bits);
}

}  // namespace

/// One block: top_k, top_p and min_p cut the tokens, then the first id at which the running mass
/// passes random * total is drawn.
REFLEX_KERNEL(draw_token, DrawParams, kDrawThreads) {
  __shared__ DrawShared s;
  const float top = p.max->value;
  Cut cut{0, 0xFFFFFFFFu};
  if (p.top_k > 0 && p.top_k < p.n) cut = reach<false>(p, top, cut, p.top_k, s);
  if (p.top_p < 1.0f) {
    const double total = static_cast<double>(kept_mass(p, top, cut, s));
    const auto want = static_cast<unsigned long long>(__double2ull_ru(static_cast<double>(p.top_p) * total));
    cut = reach<true>(p, top, cut, max(1ull, want), s);
  }
  const uint32_t least = p.min_p > 0 ? __float_as_uint(p.min_p) : 0;

  // Each thread owns a run of ids, so that order by thread is order by id.
  const int each = (p.n + kDrawThreads - 1) / kDrawThreads;
  const int begin = min(p.n, static_cast<int>(threadIdx.x) * each), end = min(p.n, begin + each);
  unsigned long long equals = 0;
  for (int i = begin; i < end; ++i) equals += weight_bits(p, top, i) == cut.bits && cut.bits;
  const unsigned long long first_equal = block_before(equals, s);
  const auto mass_at = [&](int i, unsigned long long& equal) -> unsigned long long {
    const uint32_t bits = weight_bits(p, top, i);
    if (bits == 0 || bits < cut.bits) return 0;
    if (bits == cut.bits && equal++ >= cut.ties) return 0;
    if (bits < least && i != p.max->id) return 0;
    return max(1ull, mass_of(bits));
  };
  unsigned long long mass = 0, equal = first_equal;
  for (int i = begin; i < end; ++i) mass += mass_at(i, equal);
  const unsigned long long before = block_before(mass, s);
  const unsigned long long total = block_total(mass, s);
  auto target = static_cast<unsigned long long>(static_cast<double>(p.random) * static_cast<double>(total));
  if (target >= total) target = total - 1;
  if (target < before || target >= before + mass) return;
  equal = first_equal;
  unsigned long long sum = before;
  for (int i = begin; i < end; ++i) {
    sum += mass_at(i, equal);
    if (sum > target) {
      *p.out = i;
      return;
    }
  }
}

}  // namespace reflex::cuda
