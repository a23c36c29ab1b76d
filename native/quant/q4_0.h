// Q4_0: 32 values, 4 bits, one scale.            value = d * (q - 8)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q4_0 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[16];  ///< value i: low nibble of byte i, value 16 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float*) {
    for (int i = 0; i < 16; i += 8) {
      const uint64_t x = load_u64(b.qs + i);
      store_u64(q + i, subtract_from_bytes(x & kNibbles, 8));
      store_u64(q + 16 + i, subtract_from_bytes(x >> 4 & kNibbles, 8));
    }
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
