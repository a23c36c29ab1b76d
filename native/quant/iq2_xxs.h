// IQ2_XXS: 256 values, rows of 8 from a grid of 256, signs in 7 bits, 4-bit scale per 32.
//                                                value = (d * (1/2 + sc) / 4) * (+-grid)
#pragma once
#include "quant/iq_common.h"

REFLEX_QUANT_BEGIN

struct IQ2_XXS {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[64];  ///< per 32 values: 4 row numbers, then 32 bits: 4 times 7 of signs, 4 of scale
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    const uint8_t* rows = b.qs + 8 * g;
    const uint32_t bits = load_u32(rows + 4);
    uint64_t values[4];
    for (int i = 0; i < 4; ++i) values[i] = iq2_values(iq2xxs_row(rows[i]));
    store_signed(values, signs_of_28_bits(bits), q);
    scale[0] = scale[1] = to_float(b.d) * (0.5f + static_cast<float>(bits >> 28)) * 0.25f;
  }
};

REFLEX_QUANT_END
