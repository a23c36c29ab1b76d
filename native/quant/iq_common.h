// What the IQ2 and IQ3 types share: signs, and rows of a grid spread to bytes.
#pragma once
#include "quant/iq_grids.h"

REFLEX_QUANT_BEGIN

/// Eight signs stored as seven bits: the eighth makes the number of minus signs even.
REFLEX_HD uint32_t signs_of_7_bits(uint32_t bits) {
  uint32_t parity = bits ^ bits >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return bits | (parity & 1) << 7;
}

/// Eight grid values 8, 25, 43 from the row's 2-bit codes 0, 1, 2.
REFLEX_HD uint64_t iq2_values(uint32_t row) {
  const uint64_t code = spread_pairs(row);
  return 8 * kOnes + 17 * code + (code >> 1 & kOnes);
}

/// Eight IQ3_XXS grid values 4, 12, .. 52, 62 from the nibbles 0..7 of two rows.
REFLEX_HD uint64_t iq3xxs_values(uint32_t row_a, uint32_t row_b) {
  const uint64_t code = spread_nibbles(row_a) | static_cast<uint64_t>(spread_nibbles(row_b)) << 32;
  const uint64_t is_7 = code & code >> 1 & code >> 2 & kOnes;
  return 4 * kOnes + 8 * code + 2 * is_7;
}

/// Eight IQ3_S grid values 1, 3, .. 15 from the nibbles 0..7 of two rows.
REFLEX_HD uint64_t iq3s_values(uint32_t row_a, uint32_t row_b) {
  const uint64_t code = spread_nibbles(row_a) | static_cast<uint64_t>(spread_nibbles(row_b)) << 32;
  return kOnes + 2 * code;
}

/// Eight q of IQ1_S or IQ1_M: 8 * (grid value + delta), grid value -1, 0, 1, delta +-1/8.
REFLEX_HD uint64_t iq1_values(uint32_t row, bool negative_delta) {
  return subtract_from_bytes(8 * spread_pairs(row), negative_delta ? 9 : 7);
}

REFLEX_QUANT_END
