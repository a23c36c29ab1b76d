// Attention for any head size, any tree, f16 or f32 states, one row and head a block: the plain form
// that exact mode runs and the faster forms (attention_one.cu, attention_flash.cu) fall back to.
//   o[r, h] = sum_s softmax_s(scale * q[r, h] . K[s, g]) V[s, g]
#include "backend/cuda/rope.cuh"

namespace reflex::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kPerThread = kMaxHeadDim / kThreads;

__device__ __forceinline__ float value_at(const float* p) { return *p; }
__device__ __forceinline__ float value_at(const __half* p) { return __half2float(*p); }

__device__ __forceinline__ float block_max(float v, float* scratch) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(kFull, v, m));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) v = fmaxf(v, scratch[i]);
  return v;
}

template <class S>
__device__ __forceinline__ void run(const AttentionParams& p) {
  __shared__ float q[kMaxHeadDim], weights[kThreads], scratch[2][32];
  wait_for_inputs();
  let_next_start();
  const int h = blockIdx.x, row = blockIdx.y, g = h / (p.n_heads / p.n_kv_heads);
  const int pass_row = p.on_outputs ? p.pass.outputs[row] : row;
  const PassHeader head = *p.pass.header;
  const int end = head.first_slot + pass_row + 1, prefix = p.pass.prefix[pass_row];
  const int hd = p.head_dim, hdv = p.v_head_dim;
  for (int i = threadIdx.x; i < hd; i += kThreads)
    q[i] = p.q[(static_cast<size_t>(row) * p.n_heads + h) * hd + i] * p.scale;
  __syncthreads();

  float top = -INFINITY, total = 0, o[kPerThread] = {};
  for (int base = 0; base < end; base += kThreads) {
    const int slot = base + threadIdx.x;
    float score = -INFINITY;
    if (slot < end && row_sees(p.pass, head.mask_base, head.mask_words, pass_row, slot, prefix)) {
      const S* k = static_cast<const S*>(p.k) + (static_cast<size_t>(slot) * p.n_kv_heads + g) * hd;
      score = 0;
      for (int i = 0; i < hd; ++i) score += q[i] * value_at(k + i);
    }
    const float new_top = fmaxf(top, block_max(score, scratch[0]));
    if (new_top == -INFINITY) {  // nothing seen so far (a slot of this tile is NaN-free by mask)
      __syncthreads();
      continue;
    }
    const float w = score == -INFINITY ? 0.0f : expf(score - new_top), keep = expf(top - new_top);
    top = new_top;
    weights[threadIdx.x] = w;
    total = total * keep + block_sum(w, scratch[1]);  // its barrier publishes the weights too
    const int n = min(kThreads, end - base);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int d = threadIdx.x + j * kThreads;
      if (d >= hdv) break;
      const S* v = static_cast<const S*>(p.v) + (static_cast<size_t>(base) * p.n_kv_heads + g) * hdv + d;
      float sum = o[j] * keep;
      for (int i = 0; i < n; ++i)
        if (weights[i] != 0) sum += weights[i] * value_at(v + static_cast<size_t>(i) * p.n_kv_heads * hdv);
      o[j] = sum;
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int d = threadIdx.x + j * kThreads;
    if (d >= hdv) break;
    const float y = o[j] / total;
    if (p.out_f16)
      static_cast<__half*>(p.out_f16)[fragment_index(row, h * hdv + d, p.out_units)] =
          __float2half_rn(y * kXScale);
    else
      p.out[(static_cast<size_t>(row) * p.n_heads + h) * hdv + d] = y;
  }
}

}  // namespace

REFLEX_KERNEL(attention_f32, AttentionParams, kThreads) { run<float>(p); }
REFLEX_KERNEL(attention_f16, AttentionParams, kThreads) { run<__half>(p); }

}  // namespace reflex::cuda
