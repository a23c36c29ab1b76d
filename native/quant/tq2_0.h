// TQ2_0: 256 values, 2 bits, one scale.          value = d * (q - 1)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct TQ2_0 {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    uint8_t qs[64];  ///< value 128h + 32s + i: bits 2s.. of byte 32h + i
    Half d;
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    const uint8_t* qs = b.qs + g / 4 * 32;
    const int shift = g % 4 * 2;
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>((qs[i] >> shift & 3) - 1);
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
