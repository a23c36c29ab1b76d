// A super-block of Q4_K, Q5_K or Q6_K in registers: its weights, unsigned, and its scales.
//
// Each lane of a product belongs to one scale. Weights are turned, by 16 or by 4 bytes, as they are
// loaded, so that two products add up as integers before they are scaled; the activations lie in the same
// order (super_rows.h). A super-block then takes two conversions and scalings instead of four. Layouts are
// those of quant/<type>.h.
#pragma once
#include "backend/cpu/kernels/super_rows.h"

#if defined(__AVX512VNNI__)

#include "quant/formats.h"

REFLEX_ISA_BEGIN

/// Nibbles of a Q4_K or Q5_K block: lane p of 128 bits is of values 64 p .. 64 p + 63, `first` holding 16
/// low nibbles from 64 p and 16 high ones from 64 p + 32, `second` the 16 after each.
struct NibbleLanes {
  __m512i first, second;
  explicit NibbleLanes(const uint8_t* qs) {
    const __m512i a = _mm512_loadu_si512(qs), b = _mm512_loadu_si512(qs + 64);
    first = _mm512_shuffle_i64x2(a, b, 0x88);
    second = _mm512_shuffle_i64x2(a, b, 0xDD);
  }
};

/// a | (b & c)
static inline __m512i or_and(__m512i a, __m512i b, __m512i c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0xF8);
}

/// Weights of the even and of the odd blocks of 32, for the halves of a record's pairs.
struct PairsQ4_K {
  typedef quant::Q4_K::Block Block;
  static constexpr bool kShifted = true;  ///< odd weights stay in their high nibble: 16 times as large
  __m512i even[2], odd[2];
  explicit PairsQ4_K(const Block& b) {
    const NibbleLanes q(b.qs);
    const __m512i low = _mm512_set1_epi8(0x0F);
    even[0] = _mm512_and_si512(q.first, low);
    even[1] = _mm512_and_si512(q.second, low);
    odd[0] = _mm512_andnot_si512(low, q.first);
    odd[1] = _mm512_andnot_si512(low, q.second);
  }
};

struct PairsQ5_K {
  typedef quant::Q5_K::Block Block;
  static constexpr bool kShifted = false;
  __m512i even[2], odd[2];
  explicit PairsQ5_K(const Block& b) {
    const NibbleLanes q(b.qs);
    split(q.first, b.qh, even[0], odd[0]);
    split(q.second, b.qh + 16, even[1], odd[1]);
  }
  static void split(__m512i nibbles, const uint8_t* qh, __m512i& even, __m512i& odd) {
    const __m512i low = _mm512_set1_epi8(0x0F), fifth = _mm512_set1_epi8(0x10);
    const __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)qh));
    // In lane p, bit 2 p of each byte to bit 4 for the even block, bit 2 p + 1 for the odd one.
    const __m512i turn_even = _mm512_set_epi64(62, 62, 0, 0, 2, 2, 4, 4);
    const __m512i turn_odd = _mm512_set_epi64(61, 61, 63, 63, 1, 1, 3, 3);
    even = or_and(_mm512_and_si512(nibbles, low), _mm512_rolv_epi64(high, turn_even), fifth);
    odd = or_and(_mm512_and_si512(_mm512_srli_epi64(nibbles, 4), low), _mm512_rolv_epi64(high, turn_odd),
                 fifth);
  }
};

/// The scales and minima of up to four Q4_K or Q5_K blocks, two of them a pair of sixteen numbers.
class PairScales {
 public:
  template <class Block>
  PairScales(const Block* b, int n) : heads_(load_heads(b, n)) {
    // Words of a head: d and dmin, a, b, c. Scales are a & 63, then (c & 15) | (a >> 6) << 4; minima the
    // same of b and of the high nibbles of c.
    const __m512i turn = _mm512_set4_epi32(4, 0, 0, 0);
    const __m512i keep = _mm512_set4_epi32(0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F);
    const __m512i top = _mm512_set4_epi32(0x30303030, 0, 0x30303030, 0);
    const __m512i acbc = _mm512_shuffle_epi32(heads_, (_MM_PERM_ENUM)0xED);
    const __m512i _a_b = _mm512_shuffle_epi32(heads_, (_MM_PERM_ENUM)0x84);
    const __m512i six =
        or_and(_mm512_and_si512(_mm512_srlv_epi32(acbc, turn), keep), _mm512_srli_epi32(_a_b, 2), top);
    six_ = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 6, 4, 3, 1, 2, 0), six);
  }
  /// d * sc and dmin * m of blocks 2 * PAIR and 2 * PAIR + 1.
  template <int PAIR>
  void get(__m512& scale, __m512& min) const {
    // A head's first two halves, for eight lanes each: d of both, dmin of both.
    const __m512i first = _mm512_set_epi32(0x90009, 0x90009, 0x90009, 0x90009, 0x10001, 0x10001, 0x10001,
                                           0x10001, 0x80008, 0x80008, 0x80008, 0x80008, 0, 0, 0, 0);
    const __m512i halves =
        _mm512_permutexvar_epi16(_mm512_add_epi16(first, _mm512_set1_epi16(16 * PAIR)), heads_);
    scale = numbers<2 * PAIR>() * _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    min = numbers<2 * PAIR + 1>() * _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }

 private:
  template <class Block>
  static __m512i load_heads(const Block* b, int n) {
    const auto head = [&](int i) { return _mm_loadu_si128((const __m128i*)(b + i)); };
    __m512i h = _mm512_zextsi128_si512(head(0));
    if (n > 1) h = _mm512_inserti32x4(h, head(1), 1);
    if (n > 2) h = _mm512_inserti32x4(h, head(2), 2);
    if (n > 3) h = _mm512_inserti32x4(h, head(3), 3);
    return h;
  }
  template <int PART>
  __m512 numbers() const {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(six_, PART)));
  }
  __m512i heads_;  ///< a block's first 16 bytes in each lane of 128 bits
  __m512i six_;    ///< bytes: 16 scales, 16 minima of the first pair, then of the second
};

/// Weights of a Q6_K block, 0 .. 63, in the order of a record's quarters: `low` are blocks 0..3 and 8..11
/// of 16, `high` blocks 4..7 and 12..15.
struct QuartersQ6_K {
  typedef quant::Q6_K::Block Block;
  __m512i low[2], high[2];
  explicit QuartersQ6_K(const Block& b) {
    const __m512i ql0 = _mm512_loadu_si512(b.ql), ql1 = _mm512_loadu_si512(b.ql + 64);
    const __m512i qh0 = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)b.qh));
    const __m512i qh1 = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(b.qh + 32)));
    split(_mm512_unpacklo_epi32(ql0, ql1), _mm512_unpacklo_epi32(qh0, qh1), low[0], high[0]);
    split(_mm512_unpackhi_epi32(ql0, ql1), _mm512_unpackhi_epi32(qh0, qh1), low[1], high[1]);
  }
  static void split(__m512i ql, __m512i qh, __m512i& low, __m512i& high) {
    const __m512i nibble = _mm512_set1_epi8(0x0F), top = _mm512_set1_epi8(0x30);
    // Two bits of each byte to bits 4 and 5: of the first 32 values bits 0 and 4, of the next 32 bits 2, 6.
    const __m512i turn_low = _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4);
    const __m512i turn_high = _mm512_set_epi64(62, 62, 62, 62, 0, 0, 0, 0);
    low = or_and(_mm512_and_si512(ql, nibble), _mm512_rolv_epi64(qh, turn_low), top);
    high = or_and(_mm512_and_si512(_mm512_srli_epi64(ql, 4), nibble), _mm512_rolv_epi64(qh, turn_high), top);
  }
  /// d * sc of the 16 blocks.
  static __m512 scales(const Block& b) {
    uint16_t d;
    memcpy(&d, &b.d, sizeof d);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)b.scales))) *
           _mm512_cvtph_ps(_mm256_set1_epi16((short)d));
  }
};

REFLEX_ISA_END

#endif
