// The packed types that have a decoder of their own in AVX-512: 64 weights at a time, unsigned, in
// natural order, and the scales of 16 blocks at a time. Feeds both the unpacker (unpack.cpp) and
// the product with one activation row (matvec_i8.cpp), which skips the trip through memory.
//
// A source walks a row by groups of 16 blocks (512 or 256 values):
//   kBlock      weights per scale: 32 or 16
//   kOffset     value = scale * (weight - kOffset) + min
//   kHasMin
//   kFetch      whether asking memory for what comes gains time: for the dense types, whose bytes are
//               worth more work each. Q8_0 is 12% slower for it, the processor's own prefetch is enough
//   weights(c)  values 64 c .. 64 c + 63 of the group, 0 .. 255
//   odd(c)      the same where the row ends after 32: the rest is zero
//   scales(n), mins(n)   of the group's blocks, n of which exist; the rest is zero
//   next()      on to the next group
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
    REFLEX_UNROLL
    for (int i = 0; i < 16; ++i) memcpy(h + i, p + i * kStride, 2);
  } else {
    for (int i = 0; i < n; ++i) memcpy(h + i, p + i * kStride, 2);
  }
  return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)h));
}

/// Formats of one 32-value block after another with a half first.
template <class F>
struct SmallBlocks {
  static constexpr int kBlock = 32;
  static constexpr bool kHasMin = false;
  static constexpr int kBytes = sizeof(typename F::Block);
  const uint8_t* at;
  explicit SmallBlocks(const uint8_t* w) : at(w) {}
  void next() { at += 16 * kBytes; }
  __m512 scales(int n) const { return strided_halves<kBytes>(at, n); }
  __m512 mins(int) const { return _mm512_setzero_ps(); }
};

struct SourceQ8_0 : SmallBlocks<quant::Q8_0> {
  static constexpr int kOffset = 128;
  static constexpr bool kFetch = false;
  using SmallBlocks::SmallBlocks;
  __m512i weights(int c) const {
    const uint8_t* b = at + 2 * c * kBytes + 2;
    const __m256i lo = _mm256_loadu_si256((const __m256i*)b);
    const __m256i hi = _mm256_loadu_si256((const __m256i*)(b + kBytes));
    return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1), _mm512_set1_epi8(-128));
  }
  __m512i odd(int c) const {
    const __m256i lo = _mm256_loadu_si256((const __m256i*)(at + 2 * c * kBytes + 2));
    return _mm512_zextsi256_si512(_mm256_xor_si256(lo, _mm256_set1_epi8(-128)));
  }
};

/// 16 bytes whose low nibbles are values 0..15 and high nibbles 16..31, twice.
static inline __m512i nibbles_twice(__m128i a, __m128i b) {
  const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(a)),
                                       _mm256_broadcastsi128_si256(b), 1);
  return low_nibbles(_mm512_srlv_epi64(v, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0)));
}

struct SourceQ4_0 : SmallBlocks<quant::Q4_0> {
  static constexpr int kOffset = 8;
  static constexpr bool kFetch = true;
  using SmallBlocks::SmallBlocks;
  __m512i weights(int c) const {
    const uint8_t* b = at + 2 * c * kBytes + 2;
    return nibbles_twice(_mm_loadu_si128((const __m128i*)b), _mm_loadu_si128((const __m128i*)(b + kBytes)));
  }
  __m512i odd(int c) const {
    const uint8_t* b = at + 2 * c * kBytes + 2;
    return _mm512_maskz_mov_epi64(0x0F,
                                  nibbles_twice(_mm_loadu_si128((const __m128i*)b), _mm_setzero_si128()));
  }
};

/// Q4_K and Q5_K: 256-value blocks with 6-bit scales and minima, two of them a group.
template <class F>
struct ScaleMinBlocks {
  static constexpr int kBlock = 32;
  static constexpr int kOffset = 0;
  static constexpr bool kHasMin = true;
  static constexpr bool kFetch = true;
  const typename F::Block* at;
  explicit ScaleMinBlocks(const uint8_t* w) : at(reinterpret_cast<const typename F::Block*>(w)) {}
  void next() { at += 2; }

  // The eight 6-bit scales of a block as the bytes of the low word, its minima as the high one's.
  static __m128i unpack_6bit(const uint8_t* scales) {
    const uint32_t a = quant::load_u32(scales), b = quant::load_u32(scales + 4),
                   c = quant::load_u32(scales + 8);
    const uint64_t sc = (a & 0x3F3F3F3Fu) | (uint64_t)((c & 0x0F0F0F0Fu) | (a >> 2 & 0x30303030u)) << 32;
    const uint64_t m = (b & 0x3F3F3F3Fu) | (uint64_t)((c >> 4 & 0x0F0F0F0Fu) | (b >> 2 & 0x30303030u)) << 32;
    return _mm_set_epi64x((int64_t)m, (int64_t)sc);
  }
  static __m512 times(__m128i bytes, float a, float b) {
    const __m512 factor = _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(a), _mm512_set1_ps(b));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) * factor;
  }
  // d * sc of both blocks, eight each.
  __m512 scales(int n) const {
    const __m128i a = unpack_6bit(at[0].scales);
    if (n < 16) return times(_mm_move_epi64(a), quant::to_float(at[0].d), 0);
    const __m128i b = unpack_6bit(at[1].scales);
    return times(_mm_unpacklo_epi64(a, b), quant::to_float(at[0].d), quant::to_float(at[1].d));
  }
  __m512 mins(int n) const {
    const __m128i a = unpack_6bit(at[0].scales);
    if (n < 16) return times(_mm_unpackhi_epi64(a, _mm_setzero_si128()), -quant::to_float(at[0].dmin), 0);
    const __m128i b = unpack_6bit(at[1].scales);
    return times(_mm_unpackhi_epi64(a, b), -quant::to_float(at[0].dmin), -quant::to_float(at[1].dmin));
  }
};

/// 32 bytes: low nibbles, then high nibbles.
static inline __m512i nibbles_64(const uint8_t* p) {
  const __m512i v = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  return low_nibbles(_mm512_srlv_epi64(v, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0)));
}

struct SourceQ4_K : ScaleMinBlocks<quant::Q4_K> {
  using ScaleMinBlocks::ScaleMinBlocks;
  __m512i weights(int c) const { return nibbles_64(at[c / 4].qs + c % 4 * 32); }
  __m512i odd(int c) const { return weights(c); }
};

struct SourceQ5_K : ScaleMinBlocks<quant::Q5_K> {
  using ScaleMinBlocks::ScaleMinBlocks;
  __m512i weights(int c) const {
    const int p = c % 4;
    const __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)at[c / 4].qh));
    const __m512i bit =
        _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << 2 * p)), _mm256_set1_epi8((char)(2 << 2 * p)), 1);
    const __m512i low = nibbles_64(at[c / 4].qs + p * 32);
    return _mm512_mask_add_epi8(low, _mm512_test_epi8_mask(high, bit), low, _mm512_set1_epi8(16));
  }
  __m512i odd(int c) const { return weights(c); }
};

struct SourceQ6_K {
  static constexpr int kBlock = 16;
  static constexpr int kOffset = 32;
  static constexpr bool kHasMin = false;
  static constexpr bool kFetch = true;
  const quant::Q6_K::Block* at;
  explicit SourceQ6_K(const uint8_t* w) : at(reinterpret_cast<const quant::Q6_K::Block*>(w)) {}
  void next() { ++at; }
  __m512i weights(int c) const {
    const int h = c / 2, n = c % 2;
    const __m512i ql = _mm512_loadu_si512(at->ql + 64 * h);
    const __m512i low = low_nibbles(n ? _mm512_srli_epi64(ql, 4) : ql);
    // Bits 2s, 2s + 1 of each byte to 4, 5: s = 2n in the first half, 2n + 1 in the second.
    const __m512i qh = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(at->qh + 32 * h)));
    const __m512i turn =
        n ? _mm512_set_epi64(62, 62, 62, 62, 0, 0, 0, 0) : _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4);
    // low | (turned & 0x30)
    return _mm512_ternarylogic_epi64(low, _mm512_rolv_epi64(qh, turn), _mm512_set1_epi8(0x30), 0xF8);
  }
  __m512i odd(int c) const { return weights(c); }
  __m512 scales(int) const {
    const __m128i s = _mm_loadu_si128((const __m128i*)at->scales);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(s)) * _mm512_set1_ps(quant::to_float(at->d));
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
