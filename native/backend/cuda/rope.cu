// Per-head norm and rotary embedding, then into the state's slots or back as a value: one warp per
// head of a row, all of q, k and v in one launch.
#include "backend/cuda/rope.cuh"

namespace reflex::cuda {

namespace {
constexpr int kWarps = 4;
}

/// grid (rows, ceil(heads of all items / 4))
REFLEX_KERNEL(heads, HeadsParams, kWarps * 32) {
  __shared__ float shared[kWarps][kMaxHeadDim];
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.x;
  int h = blockIdx.y * kWarps + threadIdx.x / 32, i = 0;
  for (; i < p.n_items && h >= p.item[i].n_heads; ++i) h -= p.item[i].n_heads;
  if (i == p.n_items) return;
  const HeadItem& item = p.item[i];
  if (row >= item.n_rows) return;
  const int pass_row = item.on_outputs ? p.pass.outputs[row] : row;
  float* head = shared[threadIdx.x / 32];
  const size_t at = (static_cast<size_t>(row) * item.n_heads + h) * item.head_dim;
  prepare_head(item, item.x + at, rotation_of(item, pass_row), head);
  if (item.out)
    for (int k = threadIdx.x % 32; k < item.head_dim; k += 32) item.out[at + k] = head[k];
  if (item.state) store_state(item, p.pass.header->first_slot + pass_row, h, head);
}

}  // namespace reflex::cuda
