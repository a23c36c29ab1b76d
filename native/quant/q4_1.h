// Q4_1: 32 values, 4 bits, scale and minimum.    value = d * q + m
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q4_1 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = true;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    Half m;
    uint8_t qs[16];  ///< value i: low nibble of byte i, value 16 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float* min) {
    for (int i = 0; i < 16; i += 8) {
      const uint64_t x = load_u64(b.qs + i);
      store_u64(q + i, x & kNibbles);
      store_u64(q + 16 + i, x >> 4 & kNibbles);
    }
    scale[0] = scale[1] = to_float(b.d);
    min[0] = min[1] = to_float(b.m);
  }
};

REFLEX_QUANT_END
