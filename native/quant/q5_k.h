// Q5_K: 256 values, 5 bits, 6-bit scale and minimum per 32.
//                                                value = (d * sc) * q - dmin * m
#pragma once
#include "quant/q4_k.h"

REFLEX_QUANT_BEGIN

struct Q5_K {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = true;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    Half dmin;
    uint8_t scales[12];  ///< as in Q4_K
    uint8_t qh[32];      ///< value 32g + i: its fifth bit is bit g of byte i
    uint8_t qs[128];     ///< as in Q4_K
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float* min) {
    const uint8_t* qs = b.qs + g / 2 * 32;
    const int shift = g % 2 * 4;
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>((qs[i] >> shift & 0xF) | (b.qh[i] >> g & 1) << 4);
    scale_min_32(b.d, b.dmin, b.scales, g, scale, min);
  }
};

REFLEX_QUANT_END
