// y (R, n_out) = x (R, n_in) W^T [+ bias + residual] in f32, W in the file's layout, any type: what
// exact mode runs, and fast mode for a row of a type without tiles. A warp makes one output of a
// few rows; each lane decodes 32 values at a time. Refuses: speed.
#include "backend/cuda/raw.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = 8, kRows = 4;

template <class Raw>
__device__ __forceinline__ void run(const RawLinearParams& p) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, out = blockIdx.x * kWarps + threadIdx.x / 32, first = blockIdx.y * kRows;
  if (out >= p.n_out) return;
  const uint8_t* w = p.w + static_cast<size_t>(out) * p.row_bytes;
  float sum[kRows] = {};
  for (int group = lane; 32 * group < p.n_in; group += 32) {
    float y[32];
    Raw::read(w, group, p.n_in, y);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= p.n_rows) break;
      const float* x = p.x + static_cast<size_t>(first + r) * p.n_in + 32 * group;
      float part = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (32 * group + i < p.n_in) part += y[i] * x[i];
      sum[r] += part;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= p.n_rows) break;
    const float all = warp_sum(sum[r]);
    if (lane) continue;
    const size_t at = static_cast<size_t>(first + r) * p.n_out + out;
    p.out[at] = all + (p.bias ? p.bias[out] : 0.0f) + (p.residual ? p.residual[at] : 0.0f);
  }
}

}  // namespace

// grid (ceil(n_out / 8), ceil(rows / 4))
#define REFLEX_RAW(name) \
  REFLEX_KERNEL(linear_raw_##name, RawLinearParams, kWarps * 32) { run<Raw_##name>(p); }
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_EACH_##kind(REFLEX_RAW, name)
#include "quant/types.def"
#undef REFLEX_TYPE

}  // namespace reflex::cuda
