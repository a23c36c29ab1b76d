// Q2_0: 64 values, 2 bits, one scale.            value = d * (q - 1)
// (GGML_TYPE_Q2_0 of ggml.h, block_q2_0 of ggml-common.h; ggml-org/llama.cpp pull request 24448.)
// Files from before that change hold 128 values in 34 bytes under the same id: their tensors end
// before this layout says they do.
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct Q2_0 {
  static constexpr int kValues = 64;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[16];  ///< value i: bits 2 * (i % 4).. of byte i / 4
  };

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    for (int i = 0; i < 4; ++i)
      store_u64(q + 8 * i, subtract_from_bytes(spread_pairs(load_u16(b.qs + 8 * g + 2 * i)), 1));
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
