// Q4_K: 256 values, 4 bits, 6-bit scale and minimum per 32.
//                                                value = (d * sc) * q - dmin * m
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

/// Scale and minimum g (of 8) of a Q4_K or Q5_K block, 6 bits each in 12 bytes:
/// sc 0..3 in the low 6 bits of bytes 0..3 and m 0..3 in those of bytes 4..7; sc 4..7 and m 4..7
/// have their low 4 bits in the nibbles of bytes 8..11, their high 2 atop bytes 0..3 and 4..7.
REFLEX_HD void scale_min_6bit(const uint8_t* scales, int g, int& sc, int& m) {
  if (g < 4) {
    sc = scales[g] & 63;
    m = scales[g + 4] & 63;
  } else {
    sc = (scales[g + 4] & 0xF) | scales[g - 4] >> 6 << 4;
    m = scales[g + 4] >> 4 | scales[g] >> 6 << 4;
  }
}

/// Both with their factors, for the two 16s of group g; the minimum signed so that it adds.
REFLEX_HD void scale_min_32(const Half& d, const Half& dmin, const uint8_t* scales, int g, float* scale,
                            float* min) {
  int sc, m;
  scale_min_6bit(scales, g, sc, m);
  scale[0] = scale[1] = to_float(d) * static_cast<float>(sc);
  min[0] = min[1] = -(to_float(dmin) * static_cast<float>(m));
}

struct Q4_K {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = true;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    Half dmin;
    uint8_t scales[12];
    uint8_t qs[128];  ///< value 64p + i: low nibble of byte 32p + i, value 64p + 32 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float* min) {
    const uint8_t* qs = b.qs + g / 2 * 32;
    const int shift = g % 2 * 4;
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(qs[i] >> shift & 0xF);
    scale_min_32(b.d, b.dmin, b.scales, g, scale, min);
  }
};

REFLEX_QUANT_END
