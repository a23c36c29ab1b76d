// The start of a pass: its header, arrays and embedded rows come from pinned host memory, where the
// host has decoded the rows of the token table. Reading them here costs one trip over the bus and
// no copy engine; the table itself need not be on the card at all.
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

REFLEX_KERNEL(begin_pass, BeginParams, 256) {
  wait_for_inputs();
  let_next_start();
  const uint32_t stride = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const auto* from = static_cast<const uint4*>(p.from[k]);
    auto* to = static_cast<uint4*>(p.to[k]);
    for (uint32_t i = first; i < p.n_quads[k]; i += stride) to[i] = load_volatile(from + i);
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
REFLEX_KERNEL(select_rows, SelectParams, 256) {
  wait_for_inputs();
  let_next_start();
  const float* x = p.x + static_cast<size_t>(p.outputs[blockIdx.x]) * p.width;
  float* out = p.out + static_cast<size_t>(blockIdx.x) * p.width;
  for (int i = threadIdx.x; i < p.width; i += blockDim.x) out[i] = x[i];
}

}  // namespace reflex::cuda
