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
    uint64_t values[4];
    const uint64_t bits = load_u64(b.qs + 8 * g);
    for (int i = 0; i < 4; ++i) values[i] = iq2_values(iq2xs_row(bits >> 16 * i & 511));
    const uint64_t sevens =
        (bits >> 9 & 0x7F) | (bits >> 18 & 0x3F80) | (bits >> 27 & 0x1FC000) | (bits >> 36 & 0xFE00000);
    store_signed(values, signs_of_28_bits(static_cast<uint32_t>(sevens)), q);
    const float d = to_float(b.d);
    scale[0] = d * (0.5f + static_cast<float>(b.scales[g] & 0xF)) * 0.25f;
    scale[1] = d * (0.5f + static_cast<float>(b.scales[g] >> 4)) * 0.25f;
  }
};

REFLEX_QUANT_END
