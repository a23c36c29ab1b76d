// Gated DeltaNet, what is not the recurrence: convolution, norms and gates of every row before it, the
// gated norm after it, the convolution's history, and a whole layer for one row in one launch.
#include "backend/cuda/gated_delta.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kOneRows = kDeltaOneMaxDim / kDeltaOneGroups;  // of the state, per thread of delta_one

}  // namespace

/// A warp per head of q, k or v of one place. grid (ceil((2 K + H) / 8), n_places)
REFLEX_KERNEL(delta_inputs, DeltaParams, kWarps * 32) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, head = blockIdx.x * kWarps + threadIdx.x / 32, keys = p.n_key_heads;
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

/// out = rms_norm(o) * silu(z): a warp per head of one output row. grid (ceil(H / 8), rows of z)
REFLEX_KERNEL(delta_outputs, DeltaParams, kWarps * 32) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, h = blockIdx.x * kWarps + threadIdx.x / 32, m = p.value_dim;
  if (h >= p.n_value_heads) return;
  const int row = p.outputs ? p.outputs[blockIdx.y] : blockIdx.y;
  const float* o = p.v + (static_cast<size_t>(h) * p.capacity + place_of(p, row)) * p.value_pad;
  float squares = 0;
  for (int i = lane; i < m; i += 32) squares += o[i] * o[i];
  const float factor = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(m) + p.norm_eps);
  const size_t at = (static_cast<size_t>(blockIdx.y) * p.n_value_heads + h) * m;
  for (int i = lane; i < m; i += 32) p.out[at + i] = o[i] * factor * p.norm[i] * silu(p.z[at + i]);
}

/// One row that goes on with the sequence, from the convolution to the gated norm: a block per value head,
/// kDeltaOneGroups warps for every 32 columns, N and M at most kDeltaOneMaxDim. The state is read before
/// the wait: only the kernels of the pass before have written it. grid (H)
REFLEX_KERNEL(delta_one, DeltaParams, 1024) {
  __shared__ float qk[2][kDeltaOneMaxDim], v[kDeltaOneMaxDim], partial[kDeltaOneGroups][kDeltaOneMaxDim];
  __shared__ float sums[4], factors[2];
  __shared__ float2 gates;
  __shared__ bool last;
  const int n = p.key_dim, m = p.value_dim, h = blockIdx.x, keys = p.n_key_heads, kh = key_head_of(p, h);
  const int blocks = (m + 31) / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / blocks, column = warp % blocks * 32 + lane;
  float* state = p.state + static_cast<size_t>(h) * n * m;
  float s[kOneRows];
#pragma unroll
  for (int u = 0; u < kOneRows; ++u) {
    const int i = group + u * kDeltaOneGroups;
    s[u] = i < n && column < m ? state[static_cast<size_t>(i) * m + column] : 0.0f;
  }
  wait_for_inputs();
  let_next_start();

  for (int c = threadIdx.x; c < 2 * n + m; c += blockDim.x) {
    const int part = c < n ? 0 : c < 2 * n ? 1 : 2, i = c - part * n;
    const int channel = part < 2 ? (part * keys + kh) * n + i : 2 * keys * n + h * m + i;
    (part < 2 ? qk[part] : v)[i] = convolved(p, 0, channel);
  }
  __syncthreads();
  if (warp < 2) {
    float squares = 0;
    for (int i = lane; i < n; i += 32) squares += qk[warp][i] * qk[warp][i];
    squares = warp_sum(squares);
    if (lane == 0)
      factors[warp] = (warp ? 1.0f : 1.0f / sqrtf(static_cast<float>(n))) / sqrtf(squares + p.qk_eps);
  }
  if (threadIdx.x == 64) gates = gates_of(p, 0, h);
  if (threadIdx.x == 96) {  // the last of the key head's readers moves its history
    const uint32_t readers = static_cast<uint32_t>(p.n_value_heads / keys);
    __threadfence();
    last = atomicAdd(p.tickets + kh, 1u) + 1 == readers;
    if (last) p.tickets[kh] = 0;
  }
  __syncthreads();
  const float decay = expf(gates.x), key_factor = factors[1], query_factor = factors[0];
  float read = 0;
#pragma unroll
  for (int u = 0; u < kOneRows; ++u) {
    const int i = group + u * kDeltaOneGroups;
    if (i < n) read += qk[1][i] * key_factor * s[u];
  }
  partial[group][column] = read;
  __syncthreads();
  read = 0;
#pragma unroll
  for (int g = 0; g < kDeltaOneGroups; ++g) read += partial[g][column];
  const float d = column < m ? gates.y * (v[column] - decay * read) : 0.0f;
  float o = 0;
#pragma unroll
  for (int u = 0; u < kOneRows; ++u) {
    const int i = group + u * kDeltaOneGroups;
    if (i >= n) continue;
    s[u] = decay * s[u] + qk[1][i] * key_factor * d;
    o += qk[0][i] * query_factor * s[u];
    if (column < m) state[static_cast<size_t>(i) * m + column] = s[u];
  }
  __syncthreads();  // every thread has read the partial sums
  partial[group][column] = o;
  for (int i = threadIdx.x; i < m; i += blockDim.x) move_history(p, 2 * keys * n + h * m + i);
  if (last)
    for (int i = threadIdx.x; i < 2 * n; i += blockDim.x)
      move_history(p, (i < n ? kh * n : (keys + kh) * n - n) + i);
  __syncthreads();
  if (!p.z) return;
  o = 0;
  if (group == 0) {
#pragma unroll
    for (int g = 0; g < kDeltaOneGroups; ++g) o += partial[g][column];
    const float squares = warp_sum(column < m ? o * o : 0.0f);
    if (lane == 0) sums[warp] = squares;
  }
  __syncthreads();
  if (group != 0 || column >= m) return;
  float squares = 0;
  for (int b = 0; b < blocks; ++b) squares += sums[b];
  const float factor = 1.0f / sqrtf(squares / static_cast<float>(m) + p.norm_eps);
  const size_t at = static_cast<size_t>(h) * m + column;
  p.out[at] = o * factor * p.norm[column] * silu(p.z[at]);
}

}  // namespace reflex::cuda
