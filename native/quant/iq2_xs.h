// IQ2_XS: 256 values, rows of 8 from a grid of 512, signs in 7 bits, 4-bit scale per 16.
//                                                value = (d * (1/2 + sc) / 4) * (+-grid)
#pragma once
#include "quant/iq_common.h"

REFLEX_QUANT_BEGIN

struct IQ2_XS {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 16;

  struct Block {
    Half d;
    uint8_t qs[64];     ///< 16 bits per 8 values: 9 of row number, 7 of signs
    uint8_t scales[8];  ///< of values 16k..: nibble k % 2 of byte k / 2
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = load_u16(b.qs + 8 * g + 2 * i);
      store_u64(q + 8 * i, negate_bytes(iq2_values(iq2xs_row(bits & 511)), signs_of_7_bits(bits >> 9)));
    }
    const float d = to_float(b.d);
    scale[0] = d * (0.5f + static_cast<float>(b.scales[g] & 0xF)) * 0.25f;
    scale[1] = d * (0.5f + static_cast<float>(b.scales[g] >> 4)) * 0.25f;
  }
};

REFLEX_QUANT_END
