// Integer dot products of this instruction set: a vector of W 32-bit lanes, each adding
// kStep products at once.
//
// avx512vnni: bytes, weights unsigned (q + kBias) against signed activations (vpdpbusd);
// avx2 and x86 portable: pairs of 16-bit integers (pmaddwd); elsewhere: one 32-bit product.
#pragma once
#include "backend/cpu/kernels/simd.h"

REFLEX_ISA_BEGIN

#if defined(__AVX512VNNI__)
constexpr int kStep = 4;    ///< values per lane
constexpr int kBias = 128;  ///< added to a weight to make it unsigned
typedef int8_t act_t;
typedef uint8_t weight_t;
#elif defined(__SSE2__)
constexpr int kStep = 2;
constexpr int kBias = 0;
typedef int16_t act_t;
typedef int16_t weight_t;
#else
constexpr int kStep = 1;
constexpr int kBias = 0;
typedef int32_t act_t;
typedef int32_t weight_t;
#endif

static_assert(sizeof(act_t) * kStep == 4 && sizeof(weight_t) * kStep == 4);

/// Values of a whole vector.
constexpr int kVectorValues = W * kStep;

static inline vi load_i(const void* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store_i(void* p, vi v) { memcpy(p, &v, sizeof v); }

/// acc[lane] += sum over the lane's kStep values of weight * activation
static inline vi dot_step(vi acc, vi weights, vi acts) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, (__m512i)acts);
#elif defined(__AVX2__)
  return acc + (vi)_mm256_madd_epi16((__m256i)weights, (__m256i)acts);
#elif defined(__SSE2__)
  return acc + (vi)_mm_madd_epi16((__m128i)weights, (__m128i)acts);
#else
  return acc + weights * acts;
#endif
}

/// L consecutive lanes from memory, repeated W / L times.
template <int L>
static inline vi broadcast(const weight_t* p) {
  static_assert(L == 1 || L == 2 || L == 4);
  typedef int64_t pairs __attribute__((vector_size(W * 4)));
  if constexpr (L == 1) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return splat_i(x);
  } else if constexpr (L == 2) {
    int64_t x;
    memcpy(&x, p, sizeof x);
    return (vi)(x - pairs{});
  } else {
#if defined(__AVX512F__)
    return (vi)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
#else
    return load_i(p);
#endif
  }
}

/// The lanes, each of which fits, as bytes.
static inline void store_i8(int8_t* p, vi v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  typedef int8_t bytes __attribute__((vector_size(W)));
  const bytes b = __builtin_convertvector(v, bytes);
  memcpy(p, &b, sizeof b);
#endif
}

static inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

REFLEX_ISA_END
