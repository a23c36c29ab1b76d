// Q3_K: 256 values, 3 bits, signed 6-bit scale per 16.
//                                                value = (d * (sc - 32)) * (q - 4)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q3_K {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 16;

  struct Block {
    uint8_t hmask[32];   ///< value 32g + i: its third bit is bit g of byte i
    uint8_t qs[64];      ///< low two bits, as in Q2_K
    uint8_t scales[12];  ///< scale k: nibble k/8 of byte k%8, and above it pair k/4 of byte 8 + k%4
    Half d;
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    const uint8_t* qs = b.qs + g / 4 * 32;
    const int shift = g % 4 * 2;
    for (int i = 0; i < 32; ++i)
      q[i] = static_cast<int8_t>((qs[i] >> shift & 3) + (b.hmask[i] >> g & 1) * 4 - 4);
    const float d = to_float(b.d);
    for (int j = 0; j < 2; ++j) {
      const int k = 2 * g + j;
      const int low = b.scales[k % 8] >> k / 8 * 4 & 0xF, high = b.scales[8 + k % 4] >> k / 4 * 2 & 3;
      scale[j] = d * static_cast<float>((low | high << 4) - 32);
    }
  }
};

REFLEX_QUANT_END
