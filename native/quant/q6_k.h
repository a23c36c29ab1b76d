// Q6_K: 256 values, 6 bits, signed 8-bit scale per 16.
//                                                value = (d * sc) * (q - 32)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q6_K {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 16;

  struct Block {
    uint8_t ql[128];    ///< value 128h + 64n + i (i < 64): nibble n of byte 64h + i
    uint8_t qh[64];     ///< value 128h + 32s + i: its high bits are bits 2s.. of byte 32h + i
    int8_t scales[16];  ///< of values 16k..
    Half d;
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    const uint8_t* ql = b.ql + g / 4 * 64 + g % 2 * 32;
    const uint8_t* qh = b.qh + g / 4 * 32;
    const int low = g % 4 / 2 * 4, high = g % 4 * 2;
    for (int i = 0; i < 32; ++i)
      q[i] = static_cast<int8_t>(((ql[i] >> low & 0xF) | (qh[i] >> high & 3) << 4) - 32);
    const float d = to_float(b.d);
    scale[0] = d * static_cast<float>(b.scales[2 * g]);
    scale[1] = d * static_cast<float>(b.scales[2 * g + 1]);
  }
};

REFLEX_QUANT_END
