// IQ1_M: 256 values, IQ1_S's grid, +-1/8 per 8, 3-bit scale per 16.
//                                                value = (d * (2 sc + 1)) * (grid + delta)
// As int8: grid + delta is an eighth of an integer, so the scale takes the 1/8.
#pragma once
#include "quant/iq_common.h"

REFLEX_QUANT_BEGIN

struct IQ1_M {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 16;

  struct Block {
    uint8_t qs[32];     ///< of row r: the low 8 bits of its number
    uint8_t qh[16];     ///< of row r, in nibble r % 2 of byte r / 2: 3 bits of number, 1: delta is negative
    uint8_t scales[8];  ///< four times 16 bits: 4 scales of 3 bits, and 4 bits of d, low bits first
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = b.qh[2 * g + i / 2] >> i % 2 * 4;
      const uint32_t row = b.qs[4 * g + i] | (bits & 7) << 8;
      store_u64(q + 8 * i, iq1_values(iq1_row(row), bits & 8));
    }
    const float d = block_scale(b);
    const uint32_t packed = load_u16(b.scales + g / 2 * 2) >> g % 2 * 6;
    scale[0] = d * static_cast<float>(2 * (packed & 7) + 1) * 0.125f;
    scale[1] = d * static_cast<float>(2 * (packed >> 3 & 7) + 1) * 0.125f;
  }

  /// The half that lies in the top nibbles of the four words of scales.
  REFLEX_HD static float block_scale(const Block& b) {
    const Half d = {{static_cast<uint8_t>(b.scales[1] >> 4 | (b.scales[3] & 0xF0)),
                     static_cast<uint8_t>(b.scales[5] >> 4 | (b.scales[7] & 0xF0))}};
    return to_float(d);
  }
};

REFLEX_QUANT_END
