// The packed types that have a decoder of their own in AVX-512: 64 weights at a time, unsigned, in
// natural order, and the scales of 16 blocks at a time. Feeds both the unpacker (unpack.cpp) and
// the product with one activation row (matvec_i8.cpp), which skips the trip through memory.
//
// A source of a row:
//   kBlock      weights per scale: 32 or 16
//   kOffset     value = scale * (weight - kOffset) + min
//   kHasMin
//   weights(j)  values 64 j .. 64 j + 63, 0 .. 255
//   odd(j)      the same where the row ends after 32: the rest is zero
//   scales(g), mins(g)   of blocks 16 g .. 16 g + 15; what lies past the row is zero
// Layouts are those of quant/<type>.h.
#pragma once
#include "backend/cpu/kernels/lanes.h"
#include "backend/cpu/kernels/type_ids.h"

#if defined(__AVX512VNNI__)

#include "quant/formats.h"

REFLEX_ISA_BEGIN

static inline __m512i low_nibbles(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(0x0F)); }

/// Halves at p, p + stride, ... (n of them, at most 16) as floats; the rest zero.
template <int kStride>
static inline __m512 strided_halves(const uint8_t* p, int n) {
  alignas(32) uint16_t h[16] = {};
  if (n >= 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) memcpy(h + i, p + i * kStride, 2);
  } else {
    for (int i = 0; i < n; ++i) memcpy(h + i, p + i * kStride, 2);
  }
  return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)h));
}

/// Formats of one 32-value block after another with a half first: rows of n values.
template <class F>
struct SmallBlocks {
  static constexpr int kBlock = 32;
  static constexpr int kBytes = sizeof(typename F::Block);
  const uint8_t* row;
  int blocks;
  SmallBlocks(const uint8_t* w, int32_t n) : row(w), blocks(n / 32) {}
  __m512 scales(int g) const {
    const int left = blocks - 16 * g;
    return strided_halves<kBytes>(row + 16 * g * kBytes, left < 16 ? left : 16);
  }
};

struct SourceQ8_0 : SmallBlocks<quant::Q8_0> {
  static constexpr int kOffset = 128;
  static constexpr bool kHasMin = false;
  using SmallBlocks::SmallBlocks;
  __m512i weights(int j) const {
    const uint8_t* b = row + 2 * j * kBytes + 2;
    const __m256i lo = _mm256_loadu_si256((const __m256i*)b);
    const __m256i hi = _mm256_loadu_si256((const __m256i*)(b + kBytes));
    return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1), _mm512_set1_epi8(-128));
  }
  __m512i odd(int j) const {
    const __m256i lo = _mm256_loadu_si256((const __m256i*)(row + 2 * j * kBytes + 2));
    return _mm512_zextsi256_si512(_mm256_xor_si256(lo, _mm256_set1_epi8(-128)));
  }
  __m512 mins(int) const { return _mm512_setzero_ps(); }
};

/// 16 bytes whose low nibbles are values 0..15 and high nibbles 16..31, twice.
static inline __m512i nibbles_twice(__m128i a, __m128i b) {
  const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(a)),
                                       _mm256_broadcastsi128_si256(b), 1);
  return low_nibbles(_mm512_srlv_epi64(v, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)));
}

struct SourceQ4_0 : SmallBlocks<quant::Q4_0> {
  static constexpr int kOffset = 8;
  static constexpr bool kHasMin = false;
  using SmallBlocks::SmallBlocks;
  __m512i weights(int j) const {
    const uint8_t* b = row + 2 * j * kBytes + 2;
    return nibbles_twice(_mm_loadu_si128((const __m128i*)b), _mm_loadu_si128((const __m128i*)(b + kBytes)));
  }
  __m512i odd(int j) const {
    const uint8_t* b = row + 2 * j * kBytes + 2;
    return _mm512_maskz_mov_epi64(0x0F,
                                  nibbles_twice(_mm_loadu_si128((const __m128i*)b), _mm_setzero_si128()));
  }
  __m512 mins(int) const { return _mm512_setzero_ps(); }
};

/// Q4_K and Q5_K: rows of 256-value blocks with 6-bit scales and minima.
template <class F>
struct ScaleMinBlocks {
  static constexpr int kBlock = 32;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true;
  const typename F::Block* row;
  int blocks;  // of 256
  ScaleMinBlocks(const uint8_t* w, int32_t n)
      : row(reinterpret_cast<const typename F::Block*>(w)), blocks(n / 256) {}

  // The eight 6-bit scales of a block as the bytes of the first word, its minima as the second's.
  static __m128i unpack_6bit(const uint8_t* scales) {
    const uint32_t a = quant::load_u32(scales), b = quant::load_u32(scales + 4),
                   c = quant::load_u32(scales + 8);
    const uint64_t sc = (a & 0x3F3F3F3Fu) | (uint64_t)((c & 0x0F0F0F0Fu) | (a >> 2 & 0x30303030u)) << 32;
    const uint64_t m = (b & 0x3F3F3F3Fu) | (uint64_t)((c >> 4 & 0x0F0F0F0Fu) | (b >> 2 & 0x30303030u)) << 32;
    return _mm_set_epi64x((int64_t)m, (int64_t)sc);
  }
  static __m512 two(float a, float b) {
    return _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(a), _mm512_set1_ps(b));
  }
  // d * sc of blocks 2g and 2g + 1, eight each.
  __m512 scales(int g) const {
    const auto& a = row[2 * g];
    if (2 * g + 1 >= blocks)
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_move_epi64(unpack_6bit(a.scales)))) *
             _mm512_set1_ps(quant::to_float(a.d));
    const auto& b = row[2 * g + 1];
    const __m128i sc = _mm_unpacklo_epi64(unpack_6bit(a.scales), unpack_6bit(b.scales));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sc)) * two(quant::to_float(a.d), quant::to_float(b.d));
  }
  __m512 mins(int g) const {
    const auto& a = row[2 * g];
    if (2 * g + 1 >= blocks) {
      const __m128i m = _mm_unpackhi_epi64(unpack_6bit(a.scales), _mm_setzero_si128());
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(m)) * _mm512_set1_ps(-quant::to_float(a.dmin));
    }
    const auto& b = row[2 * g + 1];
    const __m128i m = _mm_unpackhi_epi64(unpack_6bit(a.scales), unpack_6bit(b.scales));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(m)) *
           two(-quant::to_float(a.dmin), -quant::to_float(b.dmin));
  }
};

/// 32 bytes: low nibbles, then high nibbles.
static inline __m512i nibbles_64(const uint8_t* p) {
  const __m512i v = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  return low_nibbles(_mm512_srlv_epi64(v, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0)));
}

struct SourceQ4_K : ScaleMinBlocks<quant::Q4_K> {
  using ScaleMinBlocks::ScaleMinBlocks;
  __m512i weights(int j) const { return nibbles_64(row[j / 4].qs + j % 4 * 32); }
  __m512i odd(int j) const { return weights(j); }
};

struct SourceQ5_K : ScaleMinBlocks<quant::Q5_K> {
  using ScaleMinBlocks::ScaleMinBlocks;
  __m512i weights(int j) const {
    const int p = j % 4;
    const __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)row[j / 4].qh));
    const __m512i bit =
        _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << 2 * p)), _mm256_set1_epi8((char)(2 << 2 * p)), 1);
    const __m512i low = nibbles_64(row[j / 4].qs + p * 32);
    return _mm512_mask_add_epi8(low, _mm512_test_epi8_mask(high, bit), low, _mm512_set1_epi8(16));
  }
  __m512i odd(int j) const { return weights(j); }
};

struct SourceQ6_K {
  static constexpr int kBlock = 16;
  static constexpr int kOffset = 32;
  static constexpr bool kHasMin = false;
  const quant::Q6_K::Block* row;
  SourceQ6_K(const uint8_t* w, int32_t) : row(reinterpret_cast<const quant::Q6_K::Block*>(w)) {}
  __m512i weights(int j) const {
    const quant::Q6_K::Block& b = row[j / 4];
    const int h = j % 4 / 2, n = j % 2;
    const __m512i ql = _mm512_loadu_si512(b.ql + 64 * h);
    const __m512i low = low_nibbles(n ? _mm512_srli_epi64(ql, 4) : ql);
    // Bits 2s, 2s + 1 of each byte to 4, 5: s = 2n in the first half, 2n + 1 in the second.
    const __m512i qh = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(b.qh + 32 * h)));
    const __m512i turn =
        n ? _mm512_set_epi64(62, 62, 62, 62, 0, 0, 0, 0) : _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4);
    // low | (turned & 0x30)
    return _mm512_ternarylogic_epi64(low, _mm512_rolv_epi64(qh, turn), _mm512_set1_epi8(0x30), 0xF8);
  }
  __m512i odd(int j) const { return weights(j); }
  __m512 scales(int g) const {
    const __m128i s = _mm_loadu_si128((const __m128i*)row[g].scales);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(s)) * _mm512_set1_ps(quant::to_float(row[g].d));
  }
  __m512 mins(int) const { return _mm512_setzero_ps(); }
};

/// Calls use.template operator()<Source>() for a type that has one; false otherwise.
template <class Use>
static inline bool with_source(uint32_t type, Use&& use) {
  switch (type) {
    case kTypeQ4_0:
      return use.template operator()<SourceQ4_0>(), true;
    case kTypeQ8_0:
      return use.template operator()<SourceQ8_0>(), true;
    case kTypeQ4_K:
      return use.template operator()<SourceQ4_K>(), true;
    case kTypeQ5_K:
      return use.template operator()<SourceQ5_K>(), true;
    case kTypeQ6_K:
      return use.template operator()<SourceQ6_K>(), true;
    default:
      return false;
  }
}

REFLEX_ISA_END

#endif
