// The common int8 form, to which every packed type unpacks without loss:
//
//   q      (n)       int8
//   scale  (n / 16)  f32, one per 16 values
//   min    (n / 16)  f32, one per 16 values, only where the type has an offset (has_min);
//                    signed so that it adds
//   value[i] = scale[i / 16] * q[i] + min[i / 16]      without "+ min" where !has_min
//
// Rounding the product and then the sum to f32 gives dequantize_row's bits exactly: it is how
// dequantize_row is defined. A fused multiply-add differs from that by at most half an ulp of
// the product. |q| <= 128, and <= 127 for all types but Q8_0, whose -128 a file may hold.
//
//   type                      q                        scale                  min
//   Q8_0                      q, -128..127             d                      -
//   Q4_0, Q5_0                q - 8, q - 16            d                      -
//   Q4_1, Q5_1                q, 0..15, 0..31          d                      m
//   Q2_K, Q4_K, Q5_K          q, 0..3, 0..15, 0..31    d * sc                 -(dmin * m)
//   Q3_K, Q6_K                q - 4, q - 32            d * sc                 -
//   IQ4_NL, IQ4_XS            table, -127..113         d, d * sc              -
//   IQ2_*, IQ3_*              signed grid, |q| <= 62   d * (sc + 1/2) / 4 ..  -
//   IQ1_S, IQ1_M              8 * grid +- 1, |q| <= 9  d * (2 sc + 1) / 8     -
//   TQ1_0, TQ2_0, Q1_0, Q2_0  -1..1, ..2, +-1, -1..2   d                      -
//   MXFP4, NVFP4              doubled e2m1, |q| <= 12  half of 2^e, half ue4m3  -
//
// This header is compiled for each instruction set in that set's namespace (block.h): where
// REFLEX_ISA is defined, `quant::Q4_K` and the functions below are that set's own.
#pragma once
#include "quant/formats.h"

// Advice to the vectorisers. The groups of a block unroll, so that shifts become constants. The
// loop that multiplies 16 values out must be vectorised itself: unrolled first (gcc), or left for
// the loop around it (clang), it takes four times as long.
#if defined(__clang__) || defined(__CUDACC__)
#define REFLEX_UNROLL_8 _Pragma("unroll")
#else
#define REFLEX_UNROLL_8 _Pragma("GCC unroll 8")
#endif
#if defined(__CUDACC__)
#define REFLEX_INNER_LOOP _Pragma("unroll")
#define REFLEX_OUTER_LOOP
#elif defined(__clang__)
#define REFLEX_INNER_LOOP _Pragma("clang loop unroll(disable)")
#define REFLEX_OUTER_LOOP _Pragma("clang loop vectorize(disable)")
#else
#define REFLEX_INNER_LOOP _Pragma("GCC unroll 1")
#define REFLEX_OUTER_LOOP
#endif

REFLEX_QUANT_BEGIN

/// One block: q (kValues), scale and min (kValues / 16 each).
template <class F>
REFLEX_HD void unpack_block(const typename F::Block& b, int8_t* __restrict__ q, float* __restrict__ scale,
                            float* __restrict__ min) {
  REFLEX_UNROLL_8
  for (int g = 0; g < F::kValues / 32; ++g)
    F::unpack32(b, g, q + 32 * g, scale + 2 * g, F::kHasMin ? min + 2 * g : min);
}

/// y (16) = scale * q + min, each operation rounded once; without "+ min" where !F::kHasMin.
template <class F>
REFLEX_HD void multiply_out_16(const int8_t* __restrict__ q, float scale, float min, float* __restrict__ y) {
  REFLEX_INNER_LOOP
  for (int i = 0; i < 16; ++i) {
#if defined(__CUDA_ARCH__)  // nvcc would fuse them
    const float product = __fmul_rn(scale, static_cast<float>(q[i]));
    y[i] = F::kHasMin ? __fadd_rn(product, min) : product;
#else
    const float product = scale * static_cast<float>(q[i]);
    y[i] = F::kHasMin ? product + min : product;
#endif
  }
}

/// Values 32g .. 32g+31 of a block as f32: y (32).
template <class F>
REFLEX_HD void decode32(const typename F::Block& b, int g, float* __restrict__ y) {
  int8_t q[32];
  float scale[2], min[2];
  F::unpack32(b, g, q, scale, min);
  for (int k = 0; k < 2; ++k)
    multiply_out_16<F>(q + 16 * k, scale[k], F::kHasMin ? min[k] : 0.0f, y + 16 * k);
}

/// n values of a row, n a multiple of F::kValues; min may be null where !F::kHasMin.
template <class F>
inline void unpack_row(const void* row, int8_t* __restrict__ q, float* __restrict__ scale,
                       float* __restrict__ min, size_t n) {
  const auto* b = static_cast<const typename F::Block*>(row);
  for (size_t i = 0; i < n; i += F::kValues, ++b)
    unpack_block<F>(*b, q + i, scale + i / 16, F::kHasMin ? min + i / 16 : min);
}

/// n values of a row as f32, n a multiple of F::kValues.
template <class F>
inline void decode_row(const void* row, float* __restrict__ y, size_t n) {
  // By way of memory: from there the multiplication vectorises, whatever the unpacking did.
  constexpr size_t kChunk = 256;
  static_assert(kChunk % F::kValues == 0);
  int8_t q[kChunk];
  float scale[kChunk / 16], min[kChunk / 16];
  const auto* b = static_cast<const typename F::Block*>(row);
  for (size_t at = 0; at < n; at += kChunk, b += kChunk / F::kValues) {
    const size_t here = n - at < kChunk ? n - at : kChunk;
    unpack_row<F>(b, q, scale, min, here);
    REFLEX_OUTER_LOOP
    for (size_t i = 0; i < here; i += 16)
      multiply_out_16<F>(q + i, scale[i / 16], F::kHasMin ? min[i / 16] : 0.0f, y + at + i);
  }
}

/// Calls use.template operator()<F>() for the packed type of that GGML id and returns true;
/// false where the id has no int8 form.
template <class Use>
inline bool with_format(uint32_t type, Use&& use) {
  switch (type) {
#define REFLEX_TYPE(name, id, values, bytes, kind) \
  REFLEX_IF_##kind(case id : use.template operator()<name>(); return true;)
#include "quant/types.def"
#undef REFLEX_TYPE
    default:
      return false;
  }
}

inline bool has_int8_form(uint32_t type) {
  return with_format(type, [&]<class F>() {});
}

/// Whether the type's values have an offset; false for types without an int8 form.
inline bool has_min(uint32_t type) {
  bool yes = false;
  with_format(type, [&]<class F>() { yes = F::kHasMin; });
  return yes;
}

/// unpack_row for a type known at run time; false, and nothing written, where it has no int8 form.
inline bool unpack_int8(uint32_t type, const void* row, int8_t* q, float* scale16, float* min16, size_t n) {
  return with_format(type, [&]<class F>() { unpack_row<F>(row, q, scale16, min16, n); });
}

REFLEX_QUANT_END
