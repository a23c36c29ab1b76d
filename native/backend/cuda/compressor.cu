// DeepSeek-V4's compressors: what a token leaves for its block's entry, and the entry that a block's last
// token makes of it, c[d] = sum_j softmax_j(gate[j, d]) kv[j, d], normed and rotated. Everything goes through
// the states, so a prompt in pieces makes the entries of the whole one, bit by bit.
#include "backend/cuda/compressor_params.h"
#include "backend/cuda/seen.cuh"

namespace reflex::cuda {

namespace {

/// [kv | gate + ape] of a row to its slot, by the whole block.
__device__ __forceinline__ void store_raw(const CompressorParams& p, const Seen& seen, int first_slot,
                                          int row) {
  const int c = p.channels;
  const size_t from = static_cast<size_t>(row) * c, to = static_cast<size_t>(first_slot + row) * 2 * c;
  const float* ape = p.ape + static_cast<size_t>((seen.n - 1) % p.ratio) * c;
  for (int i = threadIdx.x; i < c; i += blockDim.x) {
    store_state(p.raw, p.raw_f32, to + i, p.kv[from + i]);
    store_state(p.raw, p.raw_f32, to + c + i, p.gate[from + i] + ape[i]);
  }
}

/// Value d of the pool over n slots, of which the first `older` count with their first half of channels and
/// the others with the half that begins at `own`.
__device__ __forceinline__ float pooled(const CompressorParams& p, const int* slots, int n, int older,
                                        int own, int d) {
  const auto at = [&](int j) {
    return static_cast<size_t>(slots[j]) * 2 * p.channels + (j < older ? 0 : own) + d;
  };
  float top = -INFINITY, total = 0, sum = 0;
#pragma unroll 8
  for (int j = 0; j < n; ++j) top = fmaxf(top, load_state(p.raw, p.raw_f32, at(j) + p.channels));
#pragma unroll 8
  for (int j = 0; j < n; ++j) {
    const float e = expf(load_state(p.raw, p.raw_f32, at(j) + p.channels) - top);
    total += e;
    sum += e * load_state(p.raw, p.raw_f32, at(j));
  }
  return sum / total;
}

/// Value i of the entry (D) whose first token is at `position`.
__device__ __forceinline__ float rotated(const CompressorParams& p, const float* entry, int position, int i) {
  const int half = p.n_rot / 2, tail = p.head_dim - p.n_rot;
  if (i < tail) return entry[i];
  const int j = i - tail, pair = p.adjacent ? j / 2 : j % half;
  const bool second = p.adjacent ? j % 2 : j >= half;
  const float a = entry[tail + (p.adjacent ? 2 * pair : pair)];
  const float b = entry[tail + (p.adjacent ? 2 * pair + 1 : pair + half)];
  float sine, cosine;
  sincosf(static_cast<float>(position) * p.inv_freq[pair], &sine, &cosine);
  sine *= p.magnitude;
  cosine *= p.magnitude;
  return second ? b * cosine + a * sine : a * cosine - b * sine;
}

}  // namespace

/// grid (rows)
REFLEX_KERNEL(compress_rows, CompressorParams, kCompressThreads) {
  wait_for_inputs();
  let_next_start();
  const PassHeader header = *p.pass.header;
  store_raw(p, Seen(p.pass, header, blockIdx.x), header.first_slot, blockIdx.x);
}

/// grid (rows)
REFLEX_KERNEL(compress_entries, CompressorParams, kCompressThreads) {
  REFLEX_DYNAMIC_SHARED(uint8_t, shared);
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.x, dim = p.head_dim;
  const PassHeader header = *p.pass.header;
  const Seen seen(p.pass, header, row);
  if (p.alone) store_raw(p, seen, header.first_slot, row);
  if (seen.n % p.ratio != 0) return;
  const int first = seen.n - p.ratio, older = p.overlap && first > 0 ? p.ratio : 0, n = older + p.ratio;
  auto* slots = reinterpret_cast<int*>(shared);
  auto* entry = reinterpret_cast<float*>(slots + (p.overlap ? 2 : 1) * p.ratio);
  for (int j = threadIdx.x; j < n; j += kCompressThreads) slots[j] = seen.slot(first - older + j);
  __syncthreads();  // and the raw part of the row itself is there
  float squares = 0;
  for (int d = threadIdx.x; d < dim; d += kCompressThreads) {
    const float c = pooled(p, slots, n, older, p.overlap ? dim : 0, d);
    entry[d] = c;
    squares += c * c;
  }
  const float factor = rsqrtf(block_sum(squares, scratch) / static_cast<float>(dim) + p.eps);
  for (int d = threadIdx.x; d < dim; d += kCompressThreads) entry[d] = entry[d] * factor * p.norm[d];
  __syncthreads();
  const size_t to = static_cast<size_t>(header.first_slot + row) * p.entries_width + p.offset;
  for (int i = threadIdx.x; i < dim; i += kCompressThreads)
    store_state(p.entries, p.entries_f32, to + i, rotated(p, entry, first, i));
}

}  // namespace reflex::cuda
