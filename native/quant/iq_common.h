// What the IQ2 and IQ3 types share: signs, and rows of a grid spread to bytes.
#pragma once
#include "quant/iq_grids.h"

#if !defined(__CUDACC__) && defined(__AVX2__)
#include <immintrin.h>
#endif

REFLEX_QUANT_BEGIN

/// 32 signs of 28 bits: of every seven an eighth makes the number of minus signs even.
REFLEX_HD uint32_t signs_of_28_bits(uint32_t bits) {
  const uint32_t sevens =
      (bits & 0x7F) | (bits << 1 & 0x7F00) | (bits << 2 & 0x7F0000) | (bits << 3 & 0x7F000000);
  uint32_t parity = sevens ^ (sevens >> 4 & 0x0F0F0F0F);  // in each byte, down to its lowest bit
  parity ^= parity >> 2 & 0x3F3F3F3F;
  parity ^= parity >> 1 & 0x7F7F7F7F;
  return sevens | (parity & 0x01010101) << 7;
}

/// q (32) = the bytes of four words of eight (each 1..127), those negated whose bit is set.
REFLEX_HD void store_signed(const uint64_t (&magnitudes)[4], uint32_t signs, int8_t* __restrict__ q) {
#if !defined(__CUDACC__) && defined(__AVX2__)
  // Put together in registers: four stores and a load of all would wait for each other.
  const auto word = [&](int i) { return static_cast<long long>(magnitudes[i]); };
  const __m256i m = _mm256_set_epi64x(word(3), word(2), word(1), word(0));
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i result = _mm256_mask_sub_epi8(m, signs, _mm256_setzero_si256(), m);
#else
  // Byte j takes byte j / 8 of the signs and keeps bit j % 8 of it; -1 where that is set.
  const __m256i of_byte = _mm256_setr_epi64x(0, kOnes, 2 * kOnes, 3 * kOnes);
  const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(signs)), of_byte);
  const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
  const __m256i result = _mm256_sub_epi8(_mm256_xor_si256(m, negative), negative);
#endif
  memcpy(q, &result, sizeof result);
#else
  for (int i = 0; i < 4; ++i) store_u64(q + 8 * i, negate_bytes(magnitudes[i], signs >> 8 * i & 0xFF));
#endif
}

/// Eight grid values 8, 25, 43 from the row's 2-bit codes 0, 1, 2.
REFLEX_HD uint64_t iq2_values(uint32_t row) {
  const uint64_t code = spread_pairs(row);
  return 8 * kOnes + (code << 4 | code) + (code >> 1 & kOnes);
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
