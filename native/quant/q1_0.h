// Q1_0: 128 values, one bit, one scale.          value = bit ? d : -d
// (GGML_TYPE_Q1_0 of ggml.h, block_q1_0 of ggml-common.h.)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q1_0 {
  static constexpr int kValues = 128;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[16];  ///< value i: bit i % 8 of byte i / 8
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    for (int i = 0; i < 4; ++i) store_u64(q + 8 * i, negate_bytes(kOnes, ~b.qs[4 * g + i] & 0xFFu));
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
