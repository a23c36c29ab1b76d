// Q2_K: 256 values, 2 bits, 4-bit scale and minimum per 16.
//                                                value = (d * sc) * q - dmin * m
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q2_K {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = true;
  static constexpr int kScaleEvery = 16;

  struct Block {
    uint8_t scales[16];  ///< of values 16k..: sc in the low nibble, m in the high
    uint8_t qs[64];      ///< value 128h + 32s + i: bits 2s.. of byte 32h + i
    Half d;
    Half dmin;
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float* min) {
    const uint8_t* qs = b.qs + g / 4 * 32;
    const int shift = g % 4 * 2;
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(qs[i] >> shift & 3);
    const float d = to_float(b.d), dmin = to_float(b.dmin);
    for (int k = 0; k < 2; ++k) {
      const int sc = b.scales[2 * g + k];
      scale[k] = d * static_cast<float>(sc & 0xF);
      min[k] = -(dmin * static_cast<float>(sc >> 4));
    }
  }
};

REFLEX_QUANT_END
