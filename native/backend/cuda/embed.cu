// The start of a pass: its header, arrays and embedded rows come from pinned host memory, where the
// host has decoded the rows of the token table. Reading them here costs one trip over the bus and
// no copy engine; the table itself need not be on the card at all.
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

extern "C" __global__ void __launch_bounds__(256) begin_pass(const __grid_constant__ BeginParams p) {
  wait_for_inputs();
  let_next_start();
  const uint32_t stride = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const auto* from = static_cast<const uint4*>(p.from[k]);
    auto* to = static_cast<uint4*>(p.to[k]);
    // Volatile: pinned memory that the host rewrites between passes, never to be cached.
    for (uint32_t i = first; i < p.n_quads[k]; i += stride) {
      uint4 v;
      asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "l"(from + i));
      to[i] = v;
    }
  }
  for (int k = 0; k < p.n_ropes; ++k) {
    const BeginParams::Rope& rope = p.rope[k];
    for (uint32_t i = first; i < static_cast<uint32_t>(p.n_rows * rope.half); i += stride) {
      const auto position =
          static_cast<float>(*static_cast<const volatile int32_t*>(p.positions + i / rope.half));
      float sine, cosine;
      sincosf(position * rope.inv_freq[i % rope.half], &sine, &cosine);
      rope.out[2 * i] = cosine * rope.magnitude;
      rope.out[2 * i + 1] = sine * rope.magnitude;
    }
  }
}

/// out[o] = x[outputs[o]]                               x (R, width); out (O, width)
extern "C" __global__ void __launch_bounds__(256) select_rows(const __grid_constant__ SelectParams p) {
  wait_for_inputs();
  let_next_start();
  const float* x = p.x + static_cast<size_t>(p.outputs[blockIdx.x]) * p.width;
  float* out = p.out + static_cast<size_t>(blockIdx.x) * p.width;
  for (int i = threadIdx.x; i < p.width; i += blockDim.x) out[i] = x[i];
}

}  // namespace reflex::cuda
