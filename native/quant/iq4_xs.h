// IQ4_XS: 256 values, IQ4_NL's table, signed 6-bit scale per 32.
//                                                value = (d * (sc - 32)) * table[q]
#pragma once
#include "quant/iq4_nl.h"

REFLEX_QUANT_BEGIN

struct IQ4_XS {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t scales_h[2];  ///< scale g: its high bits are bits 2g.. of these 16
    uint8_t scales_l[4];  ///< scale g: its low bits are nibble g % 2 of byte g / 2
    uint8_t qs[128];      ///< value 32g + i: low nibble of byte 16g + i, value 32g + 16 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    lookup_nibbles<16, kIq4Low, kIq4High>(b.qs + 16 * g, q);
    const int low = b.scales_l[g / 2] >> g % 2 * 4 & 0xF;
    const int high = static_cast<int>(load_u16(b.scales_h) >> 2 * g & 3);
    scale[0] = scale[1] = to_float(b.d) * static_cast<float>((low | high << 4) - 32);
  }
};

REFLEX_QUANT_END
