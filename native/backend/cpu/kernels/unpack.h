// Packed weights to what the products read: integers in natural order, a scale per block.
#pragma once
#include "backend/cpu/kernels/lanes.h"

REFLEX_ISA_BEGIN

/// Rows of a weight, unpacked: value k of row m is scale[k / block] * (q[k] - kBias) + min[k / block].
struct Unpacked {
  weight_t* q;   ///< (rows, n) with rows ldq apart
  float* scale;  ///< (rows, n / block) with rows lds apart
  float* min;    ///< the same; untouched for types without minimum
  size_t ldq, lds;
};

/// How a type unpacks; block 0: it has no such form.
struct UnpackInfo {
  int32_t block = 0;  ///< 32, or 16 for types with finer scales
  bool has_min = false;
  /// One row of n values. Whole vectors are written: q and scale need room up to a multiple of
  /// kVectorValues and of 16.
  void (*row)(const uint8_t* w, int32_t n, weight_t* q, float* scale, float* min) = nullptr;
  /// One row of n values to f32, each product and sum rounded once (as quant/ defines decoding).
  void (*decode)(const uint8_t* w, int32_t n, float* y) = nullptr;
};

UnpackInfo unpack_info(uint32_t type);

REFLEX_ISA_END
