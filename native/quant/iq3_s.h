// IQ3_S: 256 values, rows of 4 from a grid of 512, a sign bit each, 4-bit scale per 32.
//                                                value = (d * (1 + 2 sc)) * (+-grid)
#pragma once
#include "quant/iq_common.h"

REFLEX_QUANT_BEGIN

struct IQ3_S {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[64];     ///< of row r: the low 8 bits of its number
    uint8_t qh[8];      ///< of row r: its number's ninth bit is bit r % 8 of byte r / 8
    uint8_t signs[32];  ///< value 8k + i: bit i of byte k negates it
    uint8_t scales[4];  ///< of values 32g..: nibble g % 2 of byte g / 2
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    const uint8_t* rows = b.qs + 8 * g;
    const uint32_t high = b.qh[g];
    uint64_t values[4];
    for (int i = 0; i < 4; ++i) {
      const uint32_t row_a = rows[2 * i] | (high >> 2 * i & 1) << 8;
      const uint32_t row_b = rows[2 * i + 1] | (high >> (2 * i + 1) & 1) << 8;
      values[i] = iq3s_values(iq3s_row(row_a), iq3s_row(row_b));
    }
    store_signed(values, load_u32(b.signs + 4 * g), q);
    const int sc = b.scales[g / 2] >> g % 2 * 4 & 0xF;
    scale[0] = scale[1] = to_float(b.d) * static_cast<float>(1 + 2 * sc);
  }
};

REFLEX_QUANT_END
