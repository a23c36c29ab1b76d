// Q5_0: 32 values, 5 bits, one scale.            value = d * (q - 16)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

/// The 32 five-bit numbers of a Q5_0 or Q5_1 block, less n: qs holds value i in the low nibble of
/// byte i and value 16 + i in its high nibble; bit i of qh (little-endian) is value i's fifth bit.
REFLEX_HD void unpack_5bit(const uint8_t* qh, const uint8_t* qs, uint64_t n, int8_t* __restrict__ q) {
  for (int i = 0; i < 2; ++i) {
    const uint64_t x = load_u64(qs + 8 * i);
    const uint64_t low = (x & kNibbles) | spread_bits(qh[i]) << 4;
    const uint64_t high = (x >> 4 & kNibbles) | spread_bits(qh[2 + i]) << 4;
    store_u64(q + 8 * i, subtract_from_bytes(low, n));
    store_u64(q + 16 + 8 * i, subtract_from_bytes(high, n));
  }
}

struct Q5_0 {
  static constexpr int kValues = 32;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    Half d;
    uint8_t qh[4];
    uint8_t qs[16];
  };

  REFLEX_HD static void unpack32(const Block& b, int, int8_t* __restrict__ q, float* scale, float*) {
    unpack_5bit(b.qh, b.qs, 16, q);
    scale[0] = scale[1] = to_float(b.d);
  }
};

REFLEX_QUANT_END
