// Q5_0: 32 values, 5 bits, one scale.            value = d * (q - 16)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

/// The 32 five-bit numbers of a Q5_0 or Q5_1 block: qs holds value i in the low nibble of byte i
/// and value 16 + i in its high nibble; bit i of qh (little-endian) is value i's fifth bit.
REFLEX_HD void unpack_5bit(const uint8_t* qh, const uint8_t* qs, int8_t* __restrict__ q) {
  uint8_t high[32];
  for (int i = 0; i < 4; ++i) store_u64(high + 8 * i, spread_bits(qh[i]));
  for (int i = 0; i < 16; ++i) {
    q[i] = static_cast<int8_t>((qs[i] & 0xF) | high[i] << 4);
    q[16 + i] = static_cast<int8_t>(qs[i] >> 4 | high[16 + i] << 4);
  }
}

struct Q5_0 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = false;

  struct Block {
    Half d;
    uint8_t qh[4];
    uint8_t qs[16];
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float*) {
    unpack_5bit(b.qh, b.qs, q);
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(q[i] - 16);
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
