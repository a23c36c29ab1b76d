// The products behind matmul(): each takes what activations.h describes for its form.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/unpack.h"

REFLEX_ISA_BEGIN

/// Weight rows that tile_i8 and tile_f32 take together.
constexpr int32_t kGroup = 6;

/// One activation row, 8-bit.
void matvec_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end);
/// Any number of activation rows, 8-bit.
void matmul_tile_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end);
/// f32 activations; weights of any type.
void matmul_row_f32(const MatmulArgs& a, int32_t begin, int32_t end);
void matmul_tile_f32(const MatmulArgs& a, int32_t begin, int32_t end);

size_t scratch_f32(int32_t n_in);

/// Scratch of an 8-bit product: a group of unpacked rows and its results.
struct ScratchI8 {
  Unpacked u;
  float* out;    ///< (kGroup, 2 W)
  size_t bytes;  ///< of all
};

static inline ScratchI8 cut_scratch(uint8_t* p, int32_t n_in) {
  const auto n = static_cast<size_t>(n_in);
  ScratchI8 s{};
  s.u.ldq = (n * sizeof(weight_t) + 63) / 64 * 64 / sizeof(weight_t);
  s.u.lds = (n / 16 + 15) / 16 * 16;
  const size_t scale = kGroup * s.u.ldq * sizeof(weight_t), part = kGroup * s.u.lds * sizeof(float);
  s.u.q = reinterpret_cast<weight_t*>(p);
  s.u.scale = reinterpret_cast<float*>(p + scale);
  s.u.min = reinterpret_cast<float*>(p + scale + part);
  s.out = reinterpret_cast<float*>(p + scale + 2 * part);
  s.bytes = scale + 2 * part + kGroup * 2 * W * sizeof(float);
  return s;
}

REFLEX_ISA_END
