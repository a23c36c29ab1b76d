// IQ4_NL: 32 values, 4-bit indices into a fixed non-linear table, one scale.
//                                                value = d * table[q]
#pragma once
#include "quant/nibble_table.h"

REFLEX_QUANT_BEGIN

// The 16 levels: kvalues of IQ4_NL in gguf-py's quants.py.
constexpr uint64_t kIq4Low = table_word(-127, -104, -83, -65, -49, -35, -22, -10);
constexpr uint64_t kIq4High = table_word(1, 13, 25, 38, 53, 69, 89, 113);

struct IQ4_NL {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qs[16];  ///< value i: low nibble of byte i, value 16 + i: its high nibble
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float*) {
    lookup_nibbles<16, kIq4Low, kIq4High>(b.qs, q);
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
