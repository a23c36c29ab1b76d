// Experts whose gate and up are limited (DeepSeek-V4): those of one row, and what lies between the products
// of several. Refuses: the products themselves (moe_rows.cu, moe_raw.cu) and the weighted sum (moe_one.cu,
// moe.cu).
#include "backend/cuda/moe_one.cuh"

namespace reflex::cuda {

// A place a block; what pads a row of fragments is zero.
REFLEX_KERNEL(moe_limit, LimitParams, kExpertThreads) {
  wait_for_inputs();
  let_next_start();
  const int place = blockIdx.x;
  if (p.row_of[place] < 0) return;
  const size_t from = static_cast<size_t>(place) * p.n_hidden;
  auto* out = static_cast<uint32_t*>(p.out);
  const auto value = [&](int c) {
    return c < p.n_hidden ? clamped_silu(p.gate[from + c], p.up[from + c], p.limit) : 0.0f;
  };
#pragma unroll 2
  for (int c = 4 * threadIdx.x; c < p.n_units * kUnit; c += 4 * kExpertThreads) {
    const size_t at = fragment_index(place, c, p.n_units) / 2;
    out[at] = activation_pair(value(c), value(c + 1));
    out[at + 2] = activation_pair(value(c + 2), value(c + 3));
  }
}

// Shared memory: n_cells units of x.
#define REFLEX_EXPERT(t)                                                           \
  REFLEX_KERNEL(moe_gate_up_limited_##t, LimitedGateUpParams, kExpertThreads, 2) { \
    gate_up<Tile<GgmlType::t>>(p);                                                 \
  }
REFLEX_TILED(REFLEX_EXPERT)

}  // namespace reflex::cuda
