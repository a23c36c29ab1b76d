// Attention for many rows on the tensor cores, f16 states (flash.cuh): a block takes 64 query rows of one
// key/value head (as many rows of the pass as have their query heads fit in 64). Refuses: other head sizes,
// f32 states (attention.cu).
#include "backend/cuda/flash.cuh"

namespace reflex::cuda {

namespace {

using namespace flash;

template <int HD>
struct Flash : Walk<HD> {
  using typename Walk<HD>::Shared;
  using Walk<HD>::kTileD, Walk<HD>::kStepsD, Walk<HD>::fetch;

  static __device__ __forceinline__ void run(const AttentionParams& p) {
    REFLEX_DYNAMIC_SHARED(uint8_t, raw);
    auto& s = *reinterpret_cast<Shared*>(raw);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int kv = blockIdx.x, heads = p.n_heads / p.n_kv_heads, per_block = kRows / heads;
    const int first_row = blockIdx.y * per_block, n_rows = min(per_block, p.n_rows - first_row);
    wait_for_inputs();
    const PassHeader header = *p.pass.header;

    // This lane's two query rows: of the 64, numbers 16 warp + g and + 8.
    int row[2], pass_row[2], prefix[2], head[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 16 * warp + g + 8 * i;
      row[i] = j / heads < n_rows ? first_row + j / heads : -1;
      head[i] = kv * heads + j % heads;
      pass_row[i] = row[i] < 0 ? 0 : p.on_outputs ? p.pass.outputs[row[i]] : row[i];
      prefix[i] = row[i] < 0 ? 0 : p.pass.prefix[pass_row[i]];
    }
    const int last = first_row + n_rows - 1, last_pass_row = p.on_outputs ? p.pass.outputs[last] : last;
    const int end = header.first_slot + last_pass_row + 1, stride = p.n_kv_heads * HD;
    const auto* keys = static_cast<const __half*>(p.k) + kv * HD;
    const auto* values = static_cast<const __half*>(p.v) + kv * HD;
    fetch(s.k, keys, 0, end, stride);

    uint32_t q[kStepsD][4];
#pragma unroll
    for (int k = 0; k < kStepsD; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2, d = 16 * k + 2 * t + i / 2 * 8;
        float2 v = {0, 0};
        if (row[r] >= 0)
          v = *reinterpret_cast<const float2*>(p.q +
                                               (static_cast<size_t>(row[r]) * p.n_heads + head[r]) * HD + d);
        q[k][i] = h2_of(v.x * (p.scale * kLog2E), v.y * (p.scale * kLog2E));
      }

    float o[kTileD][4], top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kTileD; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;

    for (int base = 0; base < end; base += kSlots) {
      fetch(s.v, values, base, end, stride);
      copy_wait<1>();
      __syncthreads();
      float score[Walk<HD>::kTileN][4];
      Walk<HD>::scores(s, q, score, lane);
      __syncthreads();
      fetch(s.k, keys, min(base + kSlots, end - 1), end, stride);
      Walk<HD>::hide(p.pass, header, base, end, pass_row, prefix, score, t);
      Walk<HD>::soften(score, top, total, o);
      copy_wait<1>();
      __syncthreads();
      Walk<HD>::accumulate(s, score, o, lane);
      __syncthreads();
    }
    let_next_start();
    copy_wait<0>();
    store(p, row, head, total, o, t);
  }

  static __device__ __forceinline__ void store(const AttentionParams& p, const int (&row)[2],
                                               const int (&head)[2], float (&total)[2],
                                               const float (&o)[kTileD][4], int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(kFull, total[r], 1);
      total[r] += __shfl_xor_sync(kFull, total[r], 2);
      if (row[r] < 0) continue;
      const float inverse = 1.0f / total[r];
      // Of the fragments (tile.h), 8 values on are two steps on, 32 are the next lane.
      uint32_t* halves = static_cast<uint32_t*>(p.out_f16) +
                         (p.out_f16 ? fragment_index(row[r], head[r] * HD + 2 * t, p.out_units) / 2 : 0);
      float* out = p.out + (static_cast<size_t>(row[r]) * p.n_heads + head[r]) * HD + 2 * t;
#pragma unroll
      for (int n = 0; n < kTileD; ++n) {
        const float a = o[n][2 * r] * inverse, b = o[n][2 * r + 1] * inverse;
        if (p.out_f16)
          halves[n % 4 * (2 * 32 * 4) + n / 4 * 4] = activation_pair(a, b);
        else
          *reinterpret_cast<float2*>(out + n * 8) = {a, b};
      }
    }
  }
};

}  // namespace

// grid (G, ceil(rows / (64 / (H / G)))), shared memory flash_bytes(hd)
#define REFLEX_FLASH(hd)                                       \
  static_assert(sizeof(Flash<hd>::Shared) == flash_bytes(hd)); \
  REFLEX_KERNEL(attention_flash_##hd, AttentionParams, kThreads) { Flash<hd>::run(p); }
REFLEX_FLASH(64)
REFLEX_FLASH(128)

}  // namespace reflex::cuda
