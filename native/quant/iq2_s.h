// IQ2_S: 256 values, rows of 8 from a grid of 1024, 8 sign bits a row, 4-bit scale per 16.
//                                                value = (d * (1/2 + sc) / 4) * (+-grid)
#pragma once
#include "quant/iq_common.h"

REFLEX_QUANT_BEGIN

struct IQ2_S {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 16;

  struct Block {
    Half d;
    uint8_t qs[32];     ///< of row r: the low 8 bits of its number
    uint8_t signs[32];  ///< of row r: bit i negates value i
    uint8_t qh[8];      ///< of row r: its number's high bits are pair r % 4 of byte r / 4
    uint8_t scales[8];  ///< of values 16k..: nibble k % 2 of byte k / 2
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    uint64_t values[4];
    for (int i = 0; i < 4; ++i)
      values[i] = iq2_values(iq2s_row(b.qs[4 * g + i] | (b.qh[g] >> 2 * i & 3u) << 8));
    store_signed(values, load_u32(b.signs + 4 * g), q);
    const float d = to_float(b.d);
    scale[0] = d * (0.5f + static_cast<float>(b.scales[g] & 0xF)) * 0.25f;
    scale[1] = d * (0.5f + static_cast<float>(b.scales[g] >> 4)) * 0.25f;
  }
};

REFLEX_QUANT_END
