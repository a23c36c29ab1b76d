// One row of x as integers, 15 bits a value in two planes of bytes with a step per 32, for the products that
// meet quantised weights by dp4a (matvec.cu, moe_one.cu). Refuses: where x comes from, what it is multiplied
// by.
#pragma once
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

constexpr int kPlane = 127 * 128;   ///< largest |x| as an integer: hi * 128 + lo, both bytes
constexpr float kTiniest = 1e-30f;  ///< a block of x that is smaller counts as zero

/// Four values from c as integers. A unit is [plane][16-byte half][lane t][16] and then per lane
/// {step, sum of the first 16, of the last 16, of all 32}; eight threads make a lane's 32 values.
template <bool kNibbleOrder>
__device__ __forceinline__ void stage_ints(uint8_t* unit, int c, const float (&v)[4]) {
  // As bits, the magnitude of a NaN is the largest of all: it reaches every sum.
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) top = max(top, __float_as_uint(fabsf(v[i])));
#pragma unroll
  for (int m = 1; m < 8; m *= 2) top = max(top, __shfl_xor_sync(kFull, top, m));
  const float largest = __uint_as_float(top);
  const float per_step = largest < kTiniest ? 0.0f : __fdividef(kPlane, largest);
  uint32_t hi = 0, lo = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int q = __float2int_rn(v[i] * per_step), h = (q + 64) >> 7;
    hi |= (static_cast<uint32_t>(h) & 0xFF) << 8 * i;
    lo |= (static_cast<uint32_t>(q - (h << 7)) & 0xFF) << 8 * i;
    sum += q;
  }
  const int word = c % 32 / 4, t = c % kUnit / 32;
  if constexpr (kNibbleOrder) {  // of 8 values: 0 4 1 5 to the even word, 2 6 3 7 to the odd one
    const uint32_t other_hi = __shfl_xor_sync(kFull, hi, 1), other_lo = __shfl_xor_sync(kFull, lo, 1);
    hi = word % 2 ? __byte_perm(other_hi, hi, 0x7362) : __byte_perm(hi, other_hi, 0x5140);
    lo = word % 2 ? __byte_perm(other_lo, lo, 0x7362) : __byte_perm(lo, other_lo, 0x5140);
  }
  uint8_t* at = unit + word / 4 * 64 + t * 16 + word % 4 * 4;
  *reinterpret_cast<uint32_t*>(at) = hi;
  *reinterpret_cast<uint32_t*>(at + 128) = lo;
  sum += __shfl_xor_sync(kFull, sum, 1);
  sum += __shfl_xor_sync(kFull, sum, 2);
  const int last = __shfl_xor_sync(kFull, sum, 4);
  if (word == 0)
    *reinterpret_cast<float4*>(unit + 256 + t * 16) = {largest * (1.0f / kPlane), static_cast<float>(sum),
                                                       static_cast<float>(last),
                                                       static_cast<float>(sum + last)};
}

}  // namespace

}  // namespace reflex::cuda
