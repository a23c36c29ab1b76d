// IQ1_S: 256 values, rows of 8 from a grid of 2048, 3-bit scale and +-1/8 per 32.
//                                                value = (d * (2 sc + 1)) * (grid + delta)
// As int8: grid + delta is an eighth of an integer, so the scale takes the 1/8.
#pragma once
#include "quant/iq_common.h"

REFLEX_QUANT_BEGIN

struct IQ1_S {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[32];  ///< of row r: the low 8 bits of its number
    uint8_t qh[16];  ///< 16 bits per 32 values: 4 times 3 of row number, 3 of scale, 1: delta is negative
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    const uint32_t bits = load_u16(b.qh + 2 * g);
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = b.qs[4 * g + i] | (bits >> 3 * i & 7) << 8;
      store_u64(q + 8 * i, iq1_values(iq1_row(row), bits >> 15));
    }
    scale[0] = scale[1] = to_float(b.d) * static_cast<float>(2 * (bits >> 12 & 7) + 1) * 0.125f;
  }
};

REFLEX_QUANT_END
