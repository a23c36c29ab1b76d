// Vectors of W floats for the instruction set at hand: what the kernels need, nothing more.
// Arithmetic uses the compilers' vector types (gcc and clang agree on them), so a kernel is
// written once; only what the language cannot say (fma, f16, permutes) is per set.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "backend/cpu/kernels/isa_namespace.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

REFLEX_ISA_BEGIN

#if defined(__AVX512F__)
constexpr int W = 16;  ///< lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

static inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf splat(float x) { return x - vf{}; }
static inline vi splat_i(int32_t x) { return x - vi{}; }

/// a * b + c; fused where the set has it.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

static inline vf max(vf a, vf b) { return a > b ? a : b; }
static inline vf min(vf a, vf b) { return a < b ? a : b; }

#if defined(__SSE2__)
static inline float fold_sum(__m128 v) {
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
static inline float fold_max(__m128 v) {
  v = _mm_max_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps(v, v, 1)));
}
#endif

/// Sum of the lanes, in halves: the same tree on every run.
static inline float sum(vf v) {
#if defined(__AVX512F__)
  const __m256 h = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
  return fold_sum(_mm256_castps256_ps128(h) + _mm256_extractf128_ps(h, 1));
#elif defined(__AVX2__)
  return fold_sum(_mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1));
#elif defined(__SSE2__)
  return fold_sum(v);
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

/// Largest of the lanes, none of which is NaN.
static inline float max_lane(vf v) {
#if defined(__AVX512F__)
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return fold_max(_mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
#elif defined(__AVX2__)
  return fold_max(_mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
#elif defined(__SSE2__)
  return fold_max(v);
#else
  float m = v[0];
  for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// ---- W x W blocks ---------------------------------------------------------------------------

#if defined(__clang__)
#define REFLEX_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define REFLEX_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

/// a and b lane by lane in turn: the first halves of both, the second halves of both.
static inline vf interleave_first(vf a, vf b) {
#if defined(__AVX512F__)
  return REFLEX_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return REFLEX_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return REFLEX_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
static inline vf interleave_second(vf a, vf b) {
#if defined(__AVX512F__)
  return REFLEX_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  return REFLEX_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return REFLEX_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

/// Rows become columns. Each stage interleaves row i with row i + W / 2; log2(W) of them transpose.
static inline void transpose(vf (&r)[W]) {
  for (int stage = 1; stage < W; stage *= 2) {
    vf t[W];
    for (int i = 0; i < W / 2; ++i) {
      t[2 * i] = interleave_first(r[i], r[i + W / 2]);
      t[2 * i + 1] = interleave_second(r[i], r[i + W / 2]);
    }
    for (int i = 0; i < W; ++i) r[i] = t[i];
  }
}

/// Lane i of the result is the sum of r[i]'s lanes: the stages of transpose(), adding as they go.
static inline vf sums_of(vf (&r)[W]) {
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) r[i] = interleave_first(r[i], r[i + n]) + interleave_second(r[i], r[i + n]);
  return r[0];
}

/// y[c * ldy + r] = x[r * ldx + c] for r < rows, c < columns. x must be readable in whole W x W
/// blocks.
static inline void transpose_block(const float* x, size_t ldx, int32_t rows, int32_t columns, float* y,
                                   size_t ldy) {
  for (int32_t r = 0; r < rows; r += W)
    for (int32_t c = 0; c < columns; c += W) {
      vf v[W];
      for (int i = 0; i < W; ++i) v[i] = load(x + static_cast<size_t>(r + i) * ldx + c);
      transpose(v);
      const int32_t down = rows - r < W ? rows - r : W, across = columns - c < W ? columns - c : W;
      for (int i = 0; i < across; ++i) {
        float* to = y + static_cast<size_t>(c + i) * ldy + r;
        if (down == W)
          store(to, v[i]);
        else
          memcpy(to, &v[i], static_cast<size_t>(down) * sizeof(float));
      }
    }
}

// ---- half floats: W of them to and from floats -------------------------------------------

#if !defined(__AVX512F__) && !defined(__AVX2__) && !defined(__aarch64__)
static inline float half_to_float(uint16_t h) {
  // Shift into place and rescale by 2^112: subnormals come out exact; then inf and NaN.
  uint32_t bits = (uint32_t)(h & 0x7FFFu) << 13;
  float f;
  memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  memcpy(&bits, &f, 4);
  if ((h & 0x7C00u) == 0x7C00u) bits = 0x7F800000u | ((uint32_t)(h & 0x3FFu) << 13);
  bits |= (uint32_t)(h & 0x8000u) << 16;
  memcpy(&f, &bits, 4);
  return f;
}
static inline uint16_t float_to_half(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  const uint32_t sign = (x >> 16) & 0x8000u, a = x & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
  if (a >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
  if (a < 0x38800000u) {  // subnormal in f16: 0.5 has an ulp of 2^-24, the adder rounds
    float v;
    memcpy(&v, &a, 4);
    v += 0.5f;
    uint32_t b;
    memcpy(&b, &v, 4);
    return (uint16_t)(sign | (b - 0x3F000000u));
  }
  return (uint16_t)(sign | ((a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13));
}
#endif

static inline vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  float16x4_t h;
  memcpy(&h, p, sizeof h);
  return vcvt_f32_f16(h);
#else
  vf v;
  for (int i = 0; i < W; ++i) {
    uint16_t h;
    memcpy(&h, p + i, 2);
    v[i] = half_to_float(h);
  }
  return v;
#endif
}

static inline void store_f16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const float16x4_t h = vcvt_f16_f32(v);
  memcpy(p, &h, sizeof h);
#else
  for (int i = 0; i < W; ++i) {
    const uint16_t h = float_to_half(v[i]);
    memcpy(p + i, &h, 2);
  }
#endif
}

static inline vf load_bf16(const uint16_t* p) {
  uint16_t h[W];
  memcpy(h, p, sizeof h);
  vi bits;
  for (int i = 0; i < W; ++i) bits[i] = (int32_t)((uint32_t)h[i] << 16);
  return (vf)bits;
}

// ---- e^x ---------------------------------------------------------------------------------

/// e^x to about 1 ulp; 0 below -87.3 (no subnormals), inf above 88.7.
/// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial to r^7; 2^n in two steps.
static inline vf exp(vf x) {
  const vf low = splat(-87.33654f), high = splat(88.72283f);
  const vf c = min(max(x, low), high);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = fma(c, splat(1.44269504f), magic) - magic;
  vf r = fma(n, splat(-0.693359375f), c);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p * r, r, r) + 1.0f;
  // 2^n as 2^(n/2) * 2^(n - n/2): n reaches 128, one above the largest exponent.
  const vi k = (vi)(n + magic) - (vi)magic;
  const vi half = k >> 1;
  const vf s1 = (vf)((half + 127) << 23), s2 = (vf)((k - half + 127) << 23);
  const vf y = p * s1 * s2;
  const vf inf = splat(__builtin_inff());
  return x < low ? vf{} : (x > high ? inf : (x == x ? y : x));
}

REFLEX_ISA_END
