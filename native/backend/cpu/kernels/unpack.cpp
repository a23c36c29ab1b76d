#include "backend/cpu/kernels/unpack.h"

#include "backend/cpu/kernels/packed_avx512.h"
#include "quant/int8_form.h"

REFLEX_ISA_BEGIN

namespace {

/// Whether a format may give two scales to 32 values.
template <class F>
constexpr bool kFine = false;
template <>
constexpr bool kFine<quant::Q2_K> = true;
template <>
constexpr bool kFine<quant::Q3_K> = true;
template <>
constexpr bool kFine<quant::Q6_K> = true;
template <>
constexpr bool kFine<quant::IQ2_XS> = true;
template <>
constexpr bool kFine<quant::IQ2_S> = true;
template <>
constexpr bool kFine<quant::IQ1_M> = true;
template <>
constexpr bool kFine<quant::NVFP4> = true;

// Any format, through its common int8 form.
template <class F>
void unpack_any(const uint8_t* w, int32_t n, weight_t* q, float* scale, float* min) {
  const auto* b = reinterpret_cast<const typename F::Block*>(w);
  for (int32_t i = 0; i < n; i += F::kValues, ++b)
    for (int g = 0; g < F::kValues / 32; ++g) {
      int8_t values[32];
      float s[2], m[2];
      F::unpack32(*b, g, values, s, m);
      for (int k = 0; k < 32; ++k) q[i + 32 * g + k] = static_cast<weight_t>(values[k] + kBias);
      const int32_t at = i / 32 + g;
      for (int h = 0; h < (kFine<F> ? 2 : 1); ++h) {
        scale[(kFine<F> ? 2 * at : at) + h] = s[h];
        if (F::kHasMin) min[(kFine<F> ? 2 * at : at) + h] = m[h];
      }
    }
}

#if defined(__AVX512VNNI__)
template <class S>
void unpack_source(const uint8_t* w, int32_t n, weight_t* q, float* scale, float* min) {
  constexpr int kGroupValues = 16 * S::kBlock;
  const __m512i lift = _mm512_set1_epi8((char)(kBias - S::kOffset));
  S source(w);
  for (; n > 0; n -= kGroupValues, q += kGroupValues, scale += 16, min += 16, source.next()) {
    _mm512_storeu_ps(scale, source.scales(n / S::kBlock));
    if (S::kHasMin) _mm512_storeu_ps(min, source.mins(n / S::kBlock));
    if (n >= kGroupValues) {
      REFLEX_UNROLL
      for (int c = 0; c < kGroupValues / 64; ++c)
        _mm512_storeu_si512(q + 64 * c, _mm512_add_epi8(source.weights(c), lift));
    } else {
      int c = 0;
      for (; 64 * c + 64 <= n; ++c) _mm512_storeu_si512(q + 64 * c, _mm512_add_epi8(source.weights(c), lift));
      if (n % 64) _mm512_storeu_si512(q + 64 * c, _mm512_add_epi8(source.odd(c), lift));
    }
  }
}
#endif

template <class F>
void decode_any(const uint8_t* w, int32_t n, float* y) {
  quant::decode_row<F>(w, y, static_cast<size_t>(n));
}

}  // namespace

UnpackInfo unpack_info(uint32_t type) {
  UnpackInfo info;
  quant::with_format(type, [&]<class F>() {
    info.block = kFine<F> ? 16 : 32;
    info.has_min = F::kHasMin;
    info.row = unpack_any<F>;
    info.decode = decode_any<F>;
  });
#if defined(__AVX512VNNI__)
  with_source(type, [&]<class S>() {
    static_assert(S::kBlock == 16 || S::kBlock == 32);
    info.row = unpack_source<S>;
  });
#endif
  return info;
}

REFLEX_ISA_END
