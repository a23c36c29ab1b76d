// Gated DeltaNet, what is not the recurrence: convolution, norms and gates of every row before it, the
// gated norm after it, the convolution's history, and a whole layer for one row in one launch.
#include "backend/cuda/gated_delta_ends.cuh"

namespace reflex::cuda {

/// A warp per head of q, k or v of one place. grid (ceil((2 K + H) / 8), n_places)
REFLEX_KERNEL(delta_inputs, DeltaParams, kDeltaWarps * 32) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, head = blockIdx.x * kDeltaWarps + threadIdx.x / 32, keys = p.n_key_heads;
  if (head >= 2 * keys + p.n_value_heads) return;
  const int place = blockIdx.y, row = row_at(p, place);
  const bool is_value = head >= 2 * keys;
  const int h = head - (is_value ? 2 * keys : head >= keys ? keys : 0);
  const int n = is_value ? p.value_dim : p.key_dim, pad = is_value ? p.value_pad : p.key_pad;
  const int first = is_value ? 2 * keys * p.key_dim + h * p.value_dim : head * p.key_dim;
  float* to = is_value ? p.v : head >= keys ? p.k : p.q;
  const size_t at = static_cast<size_t>(h) * p.capacity + place;
  to += at * pad;
  float squares = 0;
  for (int i = lane; i < pad; i += 32) {
    const float x = row >= 0 && i < n ? convolved(p, row, first + i) : 0.0f;
    to[i] = x;
    squares += x * x;
  }
  if (is_value) {
    if (lane) return;
    const float2 gates = row >= 0 ? gates_of(p, row, h) : make_float2(0, 0);
    p.gate[at] = gates.x;
    p.strength[at] = gates.y;
    return;
  }
  const float times = head >= keys ? 1.0f : 1.0f / sqrtf(static_cast<float>(n));
  const float factor = times / sqrtf(warp_sum(squares) + p.qk_eps);
  for (int i = lane; i < n; i += 32) to[i] *= factor;
}

/// A thread per channel.
REFLEX_KERNEL(delta_history, DeltaParams, 256) {
  wait_for_inputs();
  let_next_start();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel < n_channels(p)) move_history(p, channel);
}

REFLEX_KERNEL(delta_outputs, DeltaParams, kDeltaWarps * 32) { gated_outputs<false>(p); }
REFLEX_KERNEL(delta_one, DeltaParams, 1024) { one_row<false>(p); }

}  // namespace reflex::cuda
