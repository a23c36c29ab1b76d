// Flash attention's walk over the slots on the tensor cores, f16 keys and values (Dao, "FlashAttention-2",
// 2023): a block of four warps has 64 queries, keeps their sums in registers and takes 64 slots at a time
// with a running softmax. Chains and trees: a row sees its prefix and what its mask names. What a query is,
// where keys and values lie and where results go is said by attention_flash.cu and latent_prefill.cu.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace flash {

constexpr int kThreads = kFlashThreads, kRows = kFlashRows, kSlots = kFlashSlots, kPad = kFlashPad;
constexpr float kLog2E = 1.4426950408889634f;

/// DK values a key, DV a value: multiples of 16.
template <int DK, int DV = DK>
struct Walk {
  static constexpr int kKeyStride = DK + kPad, kValueStride = DV + kPad;  ///< no bank twice in 8 rows
  static constexpr int kTileN = kSlots / 8, kTileD = DV / 8, kStepsD = DK / 16;
  struct Shared {
    __half k[kSlots][kKeyStride], v[kSlots][kValueStride];
  };

  /// Slots base.. of one head; those from `end` on repeat the last.
  template <int kStride>
  static __device__ __forceinline__ void fetch(__half (*to)[kStride], const __half* from, int base, int end,
                                               int stride) {
    constexpr int kQuads = (kStride - kPad) / 8;
    for (int i = threadIdx.x; i < kSlots * kQuads; i += kThreads) {
      const int slot = i / kQuads, d = i % kQuads * 8;
      copy_quad(&to[slot][d], from + static_cast<size_t>(min(base + slot, end - 1)) * stride + d);
    }
    copy_commit();
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
  static __device__ __forceinline__ uint64_t seen_slots(const PassArrays& pass, const PassHeader& header,
                                                        int base, int pass_row, int prefix) {
    const int n = min(max(prefix - base, 0), 64);
    uint64_t seen = n == 64 ? ~0ull : (1ull << n) - 1;
    if (!header.mask_words) return seen;
    const uint32_t* mask = pass.mask + static_cast<size_t>(pass_row) * header.mask_words;
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
  static __device__ __forceinline__ void hide(const PassArrays& pass, const PassHeader& header, int base,
                                              int end, const int (&pass_row)[2], const int (&prefix)[2],
                                              float (&score)[kTileN][4], int t) {
    if (base + kSlots <= min(prefix[0], prefix[1])) return;
    const uint64_t in_range = end - base >= 64 ? ~0ull : (1ull << (end - base)) - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint64_t seen = (seen_slots(pass, header, base, pass_row[r], prefix[r]) & in_range) >> (2 * t);
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
};

}  // namespace flash

}  // namespace reflex::cuda
