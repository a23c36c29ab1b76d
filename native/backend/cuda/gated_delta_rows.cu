// Gated DeltaNet's recurrence row by row, for chains too short to be worth a chunk and for rows that fork:
// a block keeps kDeltaSlice columns of one head's state in registers.
//   d = b (v - g S^T k),  S = g S + k d^T,  o = S^T q
#include "backend/cuda/gated_delta.cuh"

namespace reflex::cuda {

namespace {

/// The slice of a state: warp `group` of `groups` has rows group, group + groups, ...
template <int kRows>
struct Slice {
  int group, groups, column, n, m;
  float s[kRows];

  __device__ __forceinline__ void load(const float* state) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int i = group + u * groups;
      s[u] = i < n && column < m ? state[static_cast<size_t>(i) * m + column] : 0.0f;
    }
  }
  __device__ __forceinline__ void store(float* state) const {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int i = group + u * groups;
      if (i < n && column < m) state[static_cast<size_t>(i) * m + column] = s[u];
    }
  }
};

__device__ __forceinline__ float* shared_memory() {
  REFLEX_DYNAMIC_SHARED(float, raw);
  return raw;
}

/// One row, its output to where its value was. `turn` alternates: the next row's keys come while a slow
/// warp still reads this one's.
template <int kRows>
__device__ __forceinline__ void advance(const DeltaParams& p, Slice<kRows>& slice, int h, int row, int turn) {
  const int pad = p.key_pad, lane = threadIdx.x % 32;
  float* qk = shared_memory() + turn * 2 * pad;
  float* reads = shared_memory() + 4 * pad;
  float* outs = reads + slice.groups * kDeltaSlice;
  const int place = place_of(p, row);
  const size_t key_at = (static_cast<size_t>(key_head_of(p, h)) * p.capacity + place) * pad;
  for (int i = threadIdx.x; i < 2 * pad; i += blockDim.x)
    qk[i] = i < pad ? p.q[key_at + i] : p.k[key_at + i - pad];
  const size_t at = static_cast<size_t>(h) * p.capacity + place;
  const float decay = expf(p.gate[at]), strength = p.strength[at];
  float* v = p.v + at * p.value_pad + slice.column;
  const float value = *v;
  __syncthreads();
  float read = 0;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int i = slice.group + u * slice.groups;
    if (i < slice.n) read += qk[pad + i] * slice.s[u];
  }
  reads[slice.group * kDeltaSlice + lane] = read;
  __syncthreads();
  read = 0;
  for (int g = 0; g < slice.groups; ++g) read += reads[g * kDeltaSlice + lane];
  const float d = strength * (value - decay * read);
  float o = 0;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int i = slice.group + u * slice.groups;
    if (i >= slice.n) continue;
    slice.s[u] = decay * slice.s[u] + qk[pad + i] * d;
    o += qk[i] * slice.s[u];
  }
  outs[slice.group * kDeltaSlice + lane] = o;
  __syncthreads();
  if (slice.group) return;
  o = 0;
  for (int g = 0; g < slice.groups; ++g) o += outs[g * kDeltaSlice + lane];
  *v = o;
}

template <int kRows>
__device__ __forceinline__ Slice<kRows> slice_of(const DeltaParams& p) {
  Slice<kRows> slice;
  slice.group = threadIdx.x / 32;
  slice.groups = blockDim.x / 32;
  slice.column = blockIdx.x * kDeltaSlice + threadIdx.x % 32;
  slice.n = p.key_dim;
  slice.m = p.value_dim;
  return slice;
}

/// grid (value_pad / kDeltaSlice, H)
template <int kRows>
__device__ __forceinline__ void chain(const DeltaParams& p) {
  wait_for_inputs();
  let_next_start();
  const int h = blockIdx.y;
  float* state = p.state + static_cast<size_t>(h) * p.key_dim * p.value_dim;
  Slice<kRows> slice = slice_of<kRows>(p);
  slice.load(state);
  for (int row = 0; row < p.n_chain; ++row) advance(p, slice, h, row, row % 2);
  slice.store(state);
}

/// grid (value_pad / kDeltaSlice, H, branches)
template <int kRows>
__device__ __forceinline__ void forks(const DeltaParams& p) {
  wait_for_inputs();
  let_next_start();
  const int h = blockIdx.y, end = p.branches[blockIdx.z + 1];
  const size_t size = static_cast<size_t>(p.key_dim) * p.value_dim;
  const auto kept = [&](int i) { return p.kept + (static_cast<size_t>(i) * p.n_value_heads + h) * size; };
  Slice<kRows> slice = slice_of<kRows>(p);
  for (int i = p.branches[blockIdx.z]; i < end; ++i) {
    const DeltaFork fork = p.forks[i];
    if (fork.from == kFromChain)
      slice.load(p.state + h * size);
    else if (fork.from >= 0)
      slice.load(kept(fork.from));
    advance(p, slice, h, fork.row, i % 2);
    if (fork.to != kDropped) slice.store(kept(fork.to));
  }
}

}  // namespace

// So many rows of the state per thread, threads of a block at most, blocks of a multiprocessor at least.
#define REFLEX_ROWS(rows, threads, blocks)                                            \
  REFLEX_KERNEL(delta_chain_##rows, DeltaParams, threads, blocks) { chain<rows>(p); } \
  REFLEX_KERNEL(delta_forks_##rows, DeltaParams, threads, blocks) { forks<rows>(p); }
REFLEX_ROWS(16, 256, 3)
REFLEX_ROWS(32, 1024, 1)
#undef REFLEX_ROWS

}  // namespace reflex::cuda
