// Attention for many rows on the tensor cores, f16 states (Dao, "FlashAttention-2", 2023): a block
// takes 64 query rows of one key/value head (as many rows of the pass as have their query heads fit
// in 64) and walks the slots 64 at a time with a running softmax. Chains and trees: a row sees its
// prefix and what its mask names. Refuses: other head sizes, f32 states (attention.cu).
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

constexpr int kThreads = 128, kRows = 64, kSlots = 64, kPad = 8;
constexpr float kLog2E = 1.4426950408889634f;

template <int HD>
struct Flash {
  static constexpr int kStride = HD + kPad;  ///< halves per slot in shared memory: no bank twice in 8 rows
  static constexpr int kTileN = kSlots / 8, kTileD = HD / 8, kStepsD = HD / 16;
  struct Shared {
    __half k[kSlots][kStride], v[kSlots][kStride];
  };

  /// Slots base.. of one head; those from `end` on repeat the last.
  static __device__ __forceinline__ void fetch(__half (*to)[kStride], const __half* from, int base, int end,
                                               int stride) {
    constexpr int kQuads = HD / 8;
    for (int i = threadIdx.x; i < kSlots * kQuads; i += kThreads) {
      const int slot = i / kQuads, d = i % kQuads * 8;
      copy_quad(&to[slot][d], from + static_cast<size_t>(min(base + slot, end - 1)) * stride + d);
    }
    copy_commit();
  }

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
      float score[kTileN][4];
      scores(s, q, score, lane);
      __syncthreads();
      fetch(s.k, keys, min(base + kSlots, end - 1), end, stride);
      hide(p, header, base, end, pass_row, prefix, score, t);
      soften(score, top, total, o);
      copy_wait<1>();
      __syncthreads();
      accumulate(s, score, o, lane);
      __syncthreads();
    }
    let_next_start();
    copy_wait<0>();
    store(p, row, head, total, o, t);
  }

  /// score (64 rows, 64 slots) = Q K^T: fragments (g, 2t) (g, 2t + 1) (g + 8, ..) of 8 slots each
  static __device__ __forceinline__ void scores(const Shared& s, const uint32_t (&q)[kStepsD][4],
                                                float (&score)[kTileN][4], int lane) {
#pragma unroll
    for (int n = 0; n < kTileN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0;
#pragma unroll
    for (int k = 0; k < kStepsD; ++k)
#pragma unroll
      for (int n = 0; n < kTileN; n += 2) {
        uint32_t b[4];
        load_matrices(b, &s.k[n * 8 + lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]);
        mma(score[n], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
        mma(score[n + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
      }
  }

  /// Which of the 64 slots from base a row sees: its prefix, and what its mask names.
  static __device__ __forceinline__ uint64_t seen_slots(const AttentionParams& p, const PassHeader& header,
                                                        int base, int pass_row, int prefix) {
    const int n = min(max(prefix - base, 0), 64);
    uint64_t seen = n == 64 ? ~0ull : (1ull << n) - 1;
    if (!header.mask_words) return seen;
    const uint32_t* mask = p.pass.mask + static_cast<size_t>(pass_row) * header.mask_words;
#pragma unroll 1
    for (int w = max(0, (base - header.mask_base) / 32); w < header.mask_words; ++w) {
      const int at = header.mask_base + 32 * w - base;  // of the word's first bit, among the 64
      if (at >= 64) break;
      if (at > -32)
        seen |= at >= 0 ? static_cast<uint64_t>(mask[w]) << at : static_cast<uint64_t>(mask[w]) >> -at;
    }
    return seen;
  }

  /// -inf where a row does not see a slot; nothing is seen beyond the block's last row's own.
  static __device__ __forceinline__ void hide(const AttentionParams& p, const PassHeader& header, int base,
                                              int end, const int (&pass_row)[2], const int (&prefix)[2],
                                              float (&score)[kTileN][4], int t) {
    if (base + kSlots <= min(prefix[0], prefix[1])) return;
    const uint64_t in_range = end - base >= 64 ? ~0ull : (1ull << (end - base)) - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint64_t seen = (seen_slots(p, header, base, pass_row[r], prefix[r]) & in_range) >> (2 * t);
#pragma unroll
      for (int n = 0; n < kTileN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(seen >> (8 * n + i) & 1)) score[n][2 * r + i] = -INFINITY;
    }
  }

  /// The running softmax: score becomes its weights, o and total are scaled to the new maximum.
  static __device__ __forceinline__ void soften(float (&score)[kTileN][4], float (&top)[2], float (&total)[2],
                                                float (&o)[kTileD][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = top[r];
#pragma unroll
      for (int n = 0; n < kTileN; ++n) m = fmaxf(m, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(kFull, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kFull, m, 2));
      const float safe = m == -INFINITY ? 0.0f : m;  // a row that sees nothing yet
      const float keep = exp2_fast(top[r] - safe);
      top[r] = m;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kTileN; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          score[n][i] = exp2_fast(score[n][i] - safe);
          sum += score[n][i];
        }
      total[r] = total[r] * keep + sum;  // of this lane's slots; the four lanes add up at the end
#pragma unroll
      for (int n = 0; n < kTileD; ++n) {
        o[n][2 * r] *= keep;
        o[n][2 * r + 1] *= keep;
      }
    }
  }

  /// o += weights V
  static __device__ __forceinline__ void accumulate(const Shared& s, const float (&w)[kTileN][4],
                                                    float (&o)[kTileD][4], int lane) {
#pragma unroll
    for (int k = 0; k < kSlots / 16; ++k) {
      const uint32_t a0 = h2_of(w[2 * k][0], w[2 * k][1]), a1 = h2_of(w[2 * k][2], w[2 * k][3]);
      const uint32_t a2 = h2_of(w[2 * k + 1][0], w[2 * k + 1][1]),
                     a3 = h2_of(w[2 * k + 1][2], w[2 * k + 1][3]);
#pragma unroll
      for (int n = 0; n < kTileD; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, &s.v[k * 16 + lane / 8 % 2 * 8 + lane % 8][n * 8 + lane / 16 * 8]);
        mma(o[n], a0, a1, a2, a3, b[0], b[1]);
        mma(o[n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
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
