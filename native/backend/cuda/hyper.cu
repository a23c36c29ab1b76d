// DeepSeek-V4's streams and heads: the weights of hyper-connections, the reads and writes that they weigh,
// norms without weights, heads of which only the tail is rotated, the clamped SwiGLU. All in f32, sums in a
// fixed order.
#include "backend/cuda/attention_tile.cuh"
#include "backend/cuda/clamp.cuh"
#include "backend/cuda/hyper_params.h"
#include "backend/cuda/seen.cuh"

namespace reflex::cuda {

namespace {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// n lines of a matrix in shared memory, each divided by its sum + eps; a lane a line.
__device__ __forceinline__ void divide_lines(float* x, int n, int line, int along, float eps) {
  for (int i = threadIdx.x % 32; i < n; i += 32) {
    float sum = 0;
    for (int k = 0; k < n; ++k) sum += x[i * line + k * along];
    for (int k = 0; k < n; ++k) x[i * line + k * along] /= sum + eps;
  }
  __syncwarp();
}

/// comb (from, to): softmax over `to`, + eps.
__device__ __forceinline__ void soften_rows(float* comb, int n, float eps) {
  for (int from = threadIdx.x % 32; from < n; from += 32) {
    float* row = comb + from * n;
    float top = row[0], sum = 0;
    for (int to = 1; to < n; ++to) top = fmaxf(top, row[to]);
    for (int to = 0; to < n; ++to) sum += row[to] = expf(row[to] - top);
    for (int to = 0; to < n; ++to) row[to] = row[to] / sum + eps;
  }
  __syncwarp();
}

__device__ __forceinline__ int weights_width(const HyperWeightsParams& p) {
  return p.pre_alone ? p.n_streams : (2 + p.n_streams) * p.n_streams;
}

/// A row's weights by a warp, from x(i) to out; comb (n, n) is room in shared memory.
template <class F>
__device__ __forceinline__ void weigh_streams(const HyperWeightsParams& p, F x, float* comb, float* out) {
  const int lane = threadIdx.x % 32, n = p.n_streams, all = weights_width(p);
  for (int i = lane; i < all; i += 32) {
    const float y = x(i) * p.scale[i < n ? 0 : i < 2 * n ? 1 : 2] + p.base[i];
    if (i < n)
      out[i] = sigmoid(y) + p.eps;
    else if (i < 2 * n)
      out[i] = 2 * sigmoid(y);
    else
      comb[i - 2 * n] = y;
  }
  if (p.pre_alone) return;
  __syncwarp();
  soften_rows(comb, n, p.eps);
  divide_lines(comb, n, 1, n, p.eps);
  for (int k = 1; k < p.n_iterations; ++k) {
    divide_lines(comb, n, n, 1, p.eps);
    divide_lines(comb, n, 1, n, p.eps);
  }
  for (int i = lane; i < n * n; i += 32) out[2 * n + i] = comb[i];
}

constexpr int kHyperWarps = kHyperThreads / 32, kMixEach = kMixOutputs / kHyperWarps;
static_assert(kHyperWarps >= kMixRows && kMixEach * kHyperWarps == kMixOutputs);

__device__ __forceinline__ float dot(float4 a, float4 b) {
  return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
}

/// This block's columns of the group's rows: the products of fn, and the squares, to own (kRows, m + 1).
template <int kRows>
__device__ __forceinline__ void mix_columns(const HyperMixParams& p, int first, int count, float* own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = blockIdx.x * p.n_split, end = min(begin + p.n_split, p.width);
  float sum[kMixEach][kRows] = {}, squares[kRows] = {};
  for (int c = begin + 4 * lane; c < end; c += 128) {
    float4 w[kMixEach];
#pragma unroll
    for (int k = 0; k < kMixEach; ++k) {
      const int j = min(warp + k * kHyperWarps, p.m - 1);
      w[k] = *reinterpret_cast<const float4*>(p.fn + static_cast<size_t>(j) * p.width + c);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) break;
      const float4 x =
          *reinterpret_cast<const float4*>(p.streams + static_cast<size_t>(first + r) * p.width + c);
      squares[r] += dot(x, x);
#pragma unroll
      for (int k = 0; k < kMixEach; ++k) sum[k][r] += dot(w[k], x);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    const float square = warp_sum(squares[r]);
    if (warp == 0 && lane == 0) own[r * (p.m + 1)] = square;
#pragma unroll
    for (int k = 0; k < kMixEach; ++k) {
      const int j = warp + k * kHyperWarps;
      const float all = warp_sum(sum[k][r]);
      if (lane == 0 && j < p.m) own[r * (p.m + 1) + 1 + j] = all;
    }
  }
}

/// grid (splits, groups of kRows rows)
template <int kRows>
__device__ __forceinline__ void mix_streams(const HyperMixParams& p) {
  __shared__ float weights[kRows][kMixOutputs], comb[kRows][kMixOutputs];
  __shared__ bool last;
  wait_for_inputs();
  let_next_start();
  const int first = blockIdx.y * kRows, count = min(kRows, p.weights.n_rows - first), splits = gridDim.x;
  const size_t size = static_cast<size_t>(kRows) * (p.m + 1);
  float* partial = p.partial + blockIdx.y * splits * size;
  mix_columns<kRows>(p, first, count, partial + blockIdx.x * size);
  if (!is_last(p.tickets + blockIdx.y, splits, last)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < count) {
    const auto total = [&](int i) {  // of the row: squares, then products
      float all = 0;
      for (int s = 0; s < splits; ++s) all += __ldcg(partial + s * size + warp * (p.m + 1) + i);
      return all;
    };
    const float factor = rsqrtf(total(0) / static_cast<float>(p.width) + p.norm_eps);
    weigh_streams(
        p.weights, [&](int i) { return total(1 + i) * factor; }, comb[warp], weights[warp]);
    __syncwarp();
    for (int i = lane; i < p.m; i += 32)
      p.weights.out[static_cast<size_t>(first + warp) * p.m + i] = weights[warp][i];
  }
  __syncthreads();
  for (int r = 0; r < count; ++r) {
    const float* x = p.streams + static_cast<size_t>(first + r) * p.width;
#pragma unroll 2
    for (int c = threadIdx.x; c < p.d; c += kHyperThreads) {
      float y = 0;
#pragma unroll 4
      for (int s = 0; s < p.weights.n_streams; ++s) y += weights[r][s] * x[static_cast<size_t>(s) * p.d + c];
      p.read[static_cast<size_t>(first + r) * p.d + c] = y;
    }
  }
}

}  // namespace

REFLEX_KERNEL(hyper_mix_1, HyperMixParams, kHyperThreads, 1) { mix_streams<1>(p); }
REFLEX_KERNEL(hyper_mix_8, HyperMixParams, kHyperThreads, 1) { mix_streams<kMixRows>(p); }

/// y = x * rsqrt(mean(x^2) + eps). grid (groups)
REFLEX_KERNEL(unit_norm, UnitNormParams, kHyperThreads) {
  __shared__ float scratch[32];
  wait_for_inputs();
  let_next_start();
  const float* x = p.x + static_cast<size_t>(blockIdx.x) * p.group;
  float* out = p.out + static_cast<size_t>(blockIdx.x) * p.group;
  float squares = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.group; i += kHyperThreads) squares += x[i] * x[i];
  const float factor = rsqrtf(block_sum(squares, scratch) / static_cast<float>(p.group) + p.eps);
#pragma unroll 4
  for (int i = threadIdx.x; i < p.group; i += kHyperThreads) out[i] = x[i] * factor;
}

REFLEX_KERNEL(clamped_swiglu, ClampedParams, kHyperThreads) {
  wait_for_inputs();
  let_next_start();
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kHyperThreads + threadIdx.x;
  if (i < p.n) p.out[i] = clamped_silu(p.gate[i], p.up[i], p.limit);
}

/// A warp a head of a row. grid (rows, ceil(heads of all items / kTurnWarps))
REFLEX_KERNEL(turn_heads, TurnParams, kTurnWarps * 32) {
  wait_for_inputs();
  let_next_start();
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  int h = blockIdx.y * kTurnWarps + threadIdx.x / 32, k = 0;
  for (; k < p.n_items && h >= p.item[k].n_heads; ++k) h -= p.item[k].n_heads;
  if (k == p.n_items) return;
  const TurnItem& item = p.item[k];
  if (row >= item.n_rows) return;
  const int pass_row = item.on_outputs ? p.pass.outputs[row] : row, dim = item.head_dim;
  const int half = item.n_rot / 2, tail = dim - item.n_rot;
  const size_t at = (static_cast<size_t>(row) * item.n_heads + h) * dim;
  const float* x = item.x + at;
  float factor = 1.0f;
  if (item.normed) {
    float squares = 0;
#pragma unroll 4
    for (int i = lane; i < dim; i += 32) squares += x[i] * x[i];
    factor = rsqrtf(warp_sum(squares) / static_cast<float>(dim) + item.eps);
  }
  const auto value = [&](int i) {
    return item.normed ? x[i] * factor * (item.norm_weight ? item.norm_weight[i] : 1.0f) : x[i];
  };
  const auto* rotation =
      reinterpret_cast<const float2*>(item.rotation) + static_cast<size_t>(pass_row) * half;
  size_t to = 0;
  if (item.state)
    to = static_cast<size_t>(p.pass.header->first_slot + pass_row) * item.state_width +
         static_cast<size_t>(h) * dim;
#pragma unroll 4
  for (int i = lane; i < dim; i += 32) {
    float y;
    if (i < tail) {
      y = value(i);
    } else {
      const int j = i - tail, pair = item.adjacent ? j / 2 : j % half;
      const bool second = item.adjacent ? j % 2 : j >= half;
      const float a = value(tail + (item.adjacent ? 2 * pair : pair));
      const float b = value(tail + (item.adjacent ? 2 * pair + 1 : pair + half));
      const float2 r = rotation[pair];
      const float sine = item.inverse ? -r.y : r.y;
      y = second ? b * r.x + a * sine : a * r.x - b * sine;
    }
    if (item.out) item.out[at + i] = y;
    if (item.state) store_state(item.state, item.state_f32, to + i, y);
  }
}

/// grid (ceil(rows / warps of a block))
REFLEX_KERNEL(hyper_weights, HyperWeightsParams, 128) {
  REFLEX_DYNAMIC_SHARED(uint8_t, shared);
  wait_for_inputs();
  let_next_start();
  const int warp = threadIdx.x / 32, n = p.n_streams, all = weights_width(p);
  const int row = blockIdx.x * (blockDim.x / 32) + warp;
  if (row >= p.n_rows) return;
  const float* x = p.x + static_cast<size_t>(row) * all;
  weigh_streams(
      p, [x](int i) { return x[i]; }, reinterpret_cast<float*>(shared) + warp * n * n,
      p.out + static_cast<size_t>(row) * all);
}

/// grid (ceil(d / 256), rows)
REFLEX_KERNEL(hyper_read, HyperParams, kHyperThreads) {
  wait_for_inputs();
  let_next_start();
  const int c = blockIdx.x * kHyperThreads + threadIdx.x;
  const size_t row = blockIdx.y;
  if (c >= p.d) return;
  const float* pre = p.weights + row * p.weights_width;
  const float* x = p.streams + row * p.n_streams * p.d + c;
  float y = 0;
#pragma unroll 4
  for (int s = 0; s < p.n_streams; ++s) y += pre[s] * x[static_cast<size_t>(s) * p.d];
  p.out[row * p.d + c] = y;
}

/// grid (ceil(d / 256), rows)
REFLEX_KERNEL(hyper_write, HyperParams, kHyperThreads) {
  wait_for_inputs();
  let_next_start();
  const int c = blockIdx.x * kHyperThreads + threadIdx.x, n = p.n_streams;
  const size_t row = blockIdx.y;
  if (c >= p.d) return;
  const float *post = p.weights + row * p.weights_width + n, *comb = post + n;
  const float* x = p.streams + row * n * p.d + c;
  float* out = p.out + row * n * p.d + c;
  const float in = p.in[row * p.d + c];
  for (int first = 0; first < n; first += 4) {  // four streams' sums at a time
    float y[4] = {};
    for (int i = 0; i < 4; ++i)
      if (first + i < n) y[i] = post[first + i] * in;
    for (int from = 0; from < n; ++from) {
      const float v = x[static_cast<size_t>(from) * p.d];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (first + i < n) y[i] += comb[from * n + first + i] * v;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i < n) out[static_cast<size_t>(first + i) * p.d] = y[i];
  }
}

}  // namespace reflex::cuda
