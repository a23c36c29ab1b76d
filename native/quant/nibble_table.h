// Sixteen-entry tables of int8, looked up by the nibbles of a block (IQ4_NL, IQ4_XS, MXFP4, NVFP4).
#pragma once
#include "quant/block.h"

#if !defined(__CUDACC__) && defined(__SSSE3__)
#include <immintrin.h>
#elif !defined(__CUDACC__) && defined(__aarch64__)
#include <arm_neon.h>
#endif

REFLEX_QUANT_BEGIN

/// Eight table entries in a word, the first in the low byte.
constexpr uint64_t table_word(int a, int b, int c, int d, int e, int f, int g, int h) {
  const int from_the_top[] = {h, g, f, e, d, c, b, a};
  uint64_t word = 0;
  for (const int v : from_the_top) word = word << 8 | (static_cast<uint64_t>(v) & 0xFF);
  return word;
}

#if defined(__CUDACC__)
/// The entries of four nibbles (16 bits), as four bytes.
template <uint64_t kLow, uint64_t kHigh>
__device__ __forceinline__ uint32_t lookup_4_nibbles(uint32_t nibbles) {
  const uint32_t within = nibbles & 0x7777u;
  const uint32_t low = __byte_perm(static_cast<uint32_t>(kLow), static_cast<uint32_t>(kLow >> 32), within);
  const uint32_t high = __byte_perm(static_cast<uint32_t>(kHigh), static_cast<uint32_t>(kHigh >> 32), within);
  return __byte_perm(low, high, 0x3210u + ((nibbles & 0x8888u) >> 1));
}
#endif

/// q[i] = table[low nibble of qs[i]], q[kBytes + i] = table[its high nibble]; kBytes 8 or 16.
template <int kBytes, uint64_t kLow, uint64_t kHigh>
REFLEX_HD void lookup_nibbles(const uint8_t* qs, int8_t* __restrict__ q) {
  static_assert(kBytes == 8 || kBytes == 16);
#if defined(__CUDA_ARCH__)
  for (int i = 0; i < kBytes; i += 4) {
    const uint32_t first = lookup_4_nibbles<kLow, kHigh>(qs[i] | qs[i + 1] << 8);
    const uint32_t second = lookup_4_nibbles<kLow, kHigh>(qs[i + 2] | qs[i + 3] << 8);
    const uint32_t even = __byte_perm(first, second, 0x6420), odd = __byte_perm(first, second, 0x7531);
    memcpy(q + i, &even, 4);
    memcpy(q + kBytes + i, &odd, 4);
  }
#elif !defined(__CUDACC__) && defined(__SSSE3__)
  const __m128i table = _mm_set_epi64x(static_cast<long long>(kHigh), static_cast<long long>(kLow));
  const __m128i nibble = _mm_set1_epi8(0xF);
  if constexpr (kBytes == 16) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qs));
    const __m128i low = _mm_and_si128(x, nibble), high = _mm_and_si128(_mm_srli_epi16(x, 4), nibble);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm_shuffle_epi8(table, low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm_shuffle_epi8(table, high));
  } else {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(qs));
    const __m128i both = _mm_and_si128(_mm_unpacklo_epi64(x, _mm_srli_epi16(x, 4)), nibble);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm_shuffle_epi8(table, both));
  }
#elif !defined(__CUDACC__) && defined(__aarch64__)
  const int8x16_t table = vreinterpretq_s8_u64(vcombine_u64(vcreate_u64(kLow), vcreate_u64(kHigh)));
  for (int i = 0; i < kBytes; i += 8) {
    const uint8x8_t x = vld1_u8(qs + i);
    vst1_s8(q + i, vqtbl1_s8(table, vand_u8(x, vdup_n_u8(0xF))));
    vst1_s8(q + kBytes + i, vqtbl1_s8(table, vshr_n_u8(x, 4)));
  }
#else
  int8_t table[16];
  store_u64(table, kLow);
  store_u64(table + 8, kHigh);
  for (int i = 0; i < kBytes; ++i) {
    q[i] = table[qs[i] & 0xF];
    q[kBytes + i] = table[qs[i] >> 4];
  }
#endif
}

REFLEX_QUANT_END
