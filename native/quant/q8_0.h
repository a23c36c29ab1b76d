// Q8_0: 32 values, 8 bits, one scale.            value = d * q
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q8_0 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    int8_t qs[32];
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float*) {
    memcpy(q, b.qs, sizeof b.qs);
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
