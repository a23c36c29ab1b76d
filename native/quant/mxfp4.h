// MXFP4: 32 values, e2m1 floats, one power of two (OCP Microscaling Formats v1.0).
//                                                value = 2^(e - 127) / 2 * (2 * e2m1)
#pragma once
#include "quant/nibble_table.h"

REFLEX_QUANT_BEGIN

// The 16 values of e2m1, doubled to be integers; the scale is halved instead.
constexpr uint64_t kE2m1Low = table_word(0, 1, 2, 3, 4, 6, 8, 12);
constexpr uint64_t kE2m1High = table_word(0, -1, -2, -3, -4, -6, -8, -12);

struct MXFP4 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    uint8_t e;       ///< e8m0: the scale's exponent; 255, a NaN by the standard, is 2^128 / 2 here as in ggml
    uint8_t qs[16];  ///< value i: low nibble of byte i, value 16 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float*) {
    lookup_nibbles<16, kE2m1Low, kE2m1High>(b.qs, q);
    // 2^(e - 128); the first two are subnormal in f32.
    const uint32_t e = b.e;
    scale[0] = scale[1] = float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
};

REFLEX_QUANT_END
