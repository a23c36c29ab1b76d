// NVFP4: 64 values, e2m1 floats, an unsigned e4m3 scale per 16.
//                                                value = ue4m3 / 2 * (2 * e2m1)
#pragma once
#include "quant/mxfp4.h"

REFLEX_QUANT_BEGIN

struct NVFP4 {
  static constexpr int kValues = 64;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 16;

  struct Block {
    uint8_t d[4];    ///< of values 16s..: bias 7, the top bit unused, 0x7F zero
    uint8_t qs[32];  ///< value 16s + i (i < 8): low nibble of byte 8s + i, value 16s + 8 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    for (int k = 0; k < 2; ++k) {
      const int s = 2 * g + k;
      lookup_nibbles<8, kE2m1Low, kE2m1High>(b.qs + 8 * s, q + 16 * k);
      scale[k] = half_of_ue4m3(b.d[s]);
    }
  }

  /// Half the value of an unsigned e4m3.
  REFLEX_HD static float half_of_ue4m3(uint32_t x) {
    const uint32_t exponent = x >> 3 & 0xF, mantissa = x & 7;
    const float subnormal = static_cast<float>(mantissa) * 0x1p-10f;
    const float normal = float_of_bits((exponent + 119) << 23 | mantissa << 20);  // 119 = 127 - 7 - 1
    return x == 0x7F ? 0.0f : exponent ? normal : subnormal;
  }
};

REFLEX_QUANT_END
