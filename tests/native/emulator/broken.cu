// Kernels with one fault each, and their sound twins: what the emulator must find (test_emulator.cpp).
#include "backend/cuda/device.cuh"
#include "broken.h"

namespace reflex::cuda {

namespace {

constexpr int kThreads = 64;

__device__ __forceinline__ float neighbour(const float* shared) {
  return shared[(threadIdx.x + 1) % kThreads];
}

}  // namespace

REFLEX_KERNEL(shared_race, BrokenParams, kThreads) {
  REFLEX_DYNAMIC_SHARED(float, s);
  s[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (p.sound) __syncthreads();
  p.out[threadIdx.x] = neighbour(s);
}

REFLEX_KERNEL(block_race, BrokenParams, kThreads) {
  if (threadIdx.x) return;
  if (p.sound)
    atomicAdd(p.out, static_cast<float>(blockIdx.x));
  else
    *p.out = static_cast<float>(blockIdx.x);  // whichever block comes last
}

REFLEX_KERNEL(beyond_shared, BrokenParams, kThreads) {
  REFLEX_DYNAMIC_SHARED(float, s);
  s[threadIdx.x + (p.sound ? 0 : 1)] = 1;
}

REFLEX_KERNEL(behind_shared, BrokenParams, kThreads) {
  REFLEX_DYNAMIC_SHARED(float, s);
  s[static_cast<int>(threadIdx.x) - (p.sound ? 0 : 1)] = 1;
}

REFLEX_KERNEL(beyond_buffer, BrokenParams, kThreads) { p.out[threadIdx.x] = p.in[threadIdx.x + p.n]; }

REFLEX_KERNEL(unset_shared, BrokenParams, kThreads) {
  __shared__ float s[kThreads];
  REFLEX_DYNAMIC_SHARED(float, d);
  if (p.sound) s[threadIdx.x] = d[threadIdx.x] = 1;
  p.out[threadIdx.x] = s[threadIdx.x] + d[threadIdx.x];
}

REFLEX_KERNEL(barrier_of_some, BrokenParams, kThreads) {
  if (threadIdx.x >= 32 && !p.sound)
    named_barrier(1, kThreads);
  else
    __syncthreads();
  p.out[threadIdx.x] = 1;
}

REFLEX_KERNEL(two_exchanges, BrokenParams, kThreads) {
  if (threadIdx.x % 32 < 16 || p.sound)
    p.out[threadIdx.x] = __shfl_xor_sync(kFull, 1.0f, 1);
  else
    __syncwarp();
}

REFLEX_KERNEL(early_end, BrokenParams, kThreads) {
  if (threadIdx.x % 32 >= 16) return;
  // A lane that has ended gives nothing.
  p.out[threadIdx.x] = __shfl_xor_sync(kFull, static_cast<float>(threadIdx.x), p.sound ? 1 : 16);
}

REFLEX_KERNEL(copied_late, BrokenParams, kThreads) {
  REFLEX_DYNAMIC_SHARED(float, s);
  if (threadIdx.x % 4 == 0) copy_quad(s + threadIdx.x, p.in + threadIdx.x);
  copy_commit();
  if (p.sound) copy_wait<0>();
  __syncthreads();
  p.out[threadIdx.x] = s[threadIdx.x];
}

REFLEX_KERNEL(copied_early, BrokenParams, kThreads) {
  REFLEX_DYNAMIC_SHARED(float, s);
  s[threadIdx.x] = 1;
  __syncthreads();
  // The place is free when all have read it.
  const float read_first = p.sound ? neighbour(s) : 0;
  if (p.sound) __syncthreads();
  if (threadIdx.x % 4 == 0) copy_quad(s + threadIdx.x, p.in + threadIdx.x);
  p.out[threadIdx.x] = p.sound ? read_first : neighbour(s);
  copy_wait<0>();
}

REFLEX_KERNEL(copied_in_bulk, BrokenParams, kThreads) {
  REFLEX_DYNAMIC_SHARED(float, s);
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier);
    barrier_inits_done();
    copy_bulk(s, p.in, kThreads * sizeof(float), &barrier);
  }
  __syncthreads();
  if (p.sound) barrier_wait(&barrier, 0);
  p.out[threadIdx.x] = s[threadIdx.x];
  if (!p.sound) barrier_wait(&barrier, 1);  // the phase before: over already
}

REFLEX_KERNEL(unwaited_inputs, BrokenParams, kThreads) {
  if (p.sound || threadIdx.x < 32) wait_for_inputs();
  p.out[threadIdx.x] = 1;
}

REFLEX_KERNEL(not_aligned, BrokenParams, kThreads) {
  const auto* quads = reinterpret_cast<const float4*>(p.in + (p.sound ? 0 : 1));
  p.out[threadIdx.x] = quads[threadIdx.x % 4].x;
}

REFLEX_KERNEL(products, ProductParams, 32) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto a = [&](int row, int k) { return *reinterpret_cast<const uint32_t*>(p.a + row * 16 + k); };
  __shared__ __align__(16) __half k[8][16], v[16][8];
  for (int i = threadIdx.x; i < 128; i += 32) {
    k[i / 16][i % 16] = p.b[i];  // b is (8, 16): B transposed
    v[i % 16][i / 16] = p.b[i];  // B itself
  }
  __syncthreads();
  uint32_t b[4], c[4];
  const int lane = threadIdx.x;
  load_matrices(b, &k[lane % 8][lane / 8 % 2 * 8]);
  load_matrices_transposed(c, &v[lane / 8 % 2 * 8 + lane % 8][0]);
  float y[4] = {}, z[4] = {};
  mma(y, a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8), b[0], b[1]);
  mma(z, a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8), c[0], c[1]);
  for (int i = 0; i < 4; ++i) {
    const int at = (g + i / 2 * 8) * 8 + 2 * t + i % 2;
    p.y[at] = y[i];
    p.z[at] = z[i];
  }
}

}  // namespace reflex::cuda
