// What all kernels share: tensor-core and copy instructions, reductions in a fixed order, and the
// two instructions that let a kernel start before the one before it has ended.
#pragma once
#include <cuda_fp16.h>

#include "backend/cuda/params.h"
#include "backend/cuda/tile.h"

namespace reflex::cuda {

inline constexpr unsigned kFull = 0xFFFFFFFFu;

/// Wait for the kernels before this one (programmatic dependent launch). Everything a kernel may
/// do ahead of it is prefetching weights; every thread of every kernel calls it, because the next
/// kernel relies on that.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Let the next kernel's blocks start as soon as there is room for them.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Begin moving bytes (a multiple of 16) to the second-level cache; called by one thread.
__device__ __forceinline__ void prefetch_l2(const void* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

/// acc (16, 8) += A (16, 16) B (16, 8), f16 in, f32 out. a: (g, k) (g+8, k) (g, k+8) (g+8, k+8).
__device__ __forceinline__ void mma(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a2), "r"(a3), "r"(b1));
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// 16 bytes to shared memory; done at copy_wait.
__device__ __forceinline__ void copy_quad(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}
__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ---- bulk copies (Hopper on): one lane moves a whole cell, an mbarrier counts its bytes in --------

__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
#endif
}
/// After the inits, before the first copy.
__device__ __forceinline__ void barrier_inits_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  const uint32_t bar = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
#endif
}
/// Until the barrier's phase of that parity has ended.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

/// A barrier among `threads` threads, id 1..15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kLanes = 32>
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) v += __shfl_xor_sync(kFull, v, m);
  return v;
}

/// Sum over the block, the same in every thread; scratch (32) is free again after the next barrier.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float all = 0;
  for (int i = 0; i < warps; ++i) all += scratch[i];
  return all;
}

/// The larger; on a tie the lower id; NaN never wins.
__device__ __forceinline__ Best better(Best a, Best b) {
  if (b.id < 0) return a;
  if (a.id < 0 || b.value > a.value || (b.value == a.value && b.id < a.id)) return b;
  return a;
}

__device__ __forceinline__ Best consider(Best best, float value, int id) {
  return value > -INFINITY ? better(best, {value, id}) : best;
}

__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2)
    b = better(b, {__shfl_xor_sync(kFull, b.value, m), __shfl_xor_sync(kFull, b.id, m)});
  return b;
}

/// The block's best, in thread 0 alone.
__device__ __forceinline__ Best block_best(Best b, Best* scratch) {
  b = warp_best(b);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = b;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) b = better(b, scratch[i]);
  return b;
}

/// x as f16 activation: scaled, and kept finite where x is.
__device__ __forceinline__ h2 activation_pair(float a, float b) {
  constexpr float kMax = 65504.0f;
  // fmin/fmax would turn a NaN into a number; a comparison lets it through.
  a *= kXScale;
  b *= kXScale;
  a = a > kMax ? kMax : a < -kMax ? -kMax : a;
  b = b > kMax ? kMax : b < -kMax ? -kMax : b;
  return h2_of(a, b);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

/// Whether the row of this pass sees a slot.
__device__ __forceinline__ bool row_sees(const PassArrays& p, int mask_base, int mask_words, int row,
                                         int slot, int prefix) {
  if (slot < prefix) return true;
  if (!mask_words || slot < mask_base) return false;
  const int b = slot - mask_base;
  return b < mask_words * 32 && (p.mask[static_cast<size_t>(row) * mask_words + b / 32] >> (b % 32) & 1);
}

/// f(tile type's Tile<>) for a type known at run time.
template <class F>
__device__ __forceinline__ void with_tile(int32_t type, F&& f) {
  switch (static_cast<GgmlType>(type)) {
#define REFLEX_CASE(name)      \
  case GgmlType::name:         \
    f(Tile<GgmlType::name>{}); \
    break;
    REFLEX_TILED(REFLEX_CASE)
#undef REFLEX_CASE
    default:
      break;
  }
}

}  // namespace reflex::cuda
