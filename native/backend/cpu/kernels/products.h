// The products behind matmul(): each takes what activations.h describes for its form.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/unpack.h"

REFLEX_ISA_BEGIN

/// Weight rows that the tiles take together.
constexpr int32_t kGroup = 6;
/// Weight rows whose results are gathered before they are turned into rows of y: whole groups, and
/// whole vectors.
constexpr int32_t kChunk = 48;
static_assert(kChunk % kGroup == 0 && kChunk % W == 0);

/// Rows of 8-bit activations that matvec_i8 takes at most; more go in tiles.
#if defined(__AVX512VNNI__)
constexpr int32_t kMaxRowsI8 = 4;
#else
constexpr int32_t kMaxRowsI8 = 1;
#endif

/// Up to kMaxRowsI8 activation rows, 8-bit.
void matvec_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end);
#if defined(__AVX512VNNI__)
/// The same for the types with super-blocks that has_super() names.
void matvec_super(const MatmulArgs& a, int32_t begin, int32_t end);
#endif
/// Any number of activation rows, 8-bit.
void matmul_tile_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end);
/// f32 activations; weights of any type.
void matmul_row_f32(const MatmulArgs& a, int32_t begin, int32_t end);
void matmul_tile_f32(const MatmulArgs& a, int32_t begin, int32_t end);

/// Floats between rows of results that have R columns: whole tiles, and an odd number of cache lines
/// so that a column doesn't fall into one set of the cache.
static inline size_t result_stride(int32_t n_rows) {
  return ((static_cast<size_t>(n_rows) + 15) / 16 | 1) * 16;
}

size_t scratch_f32(int32_t n_in, int32_t n_rows);

/// Scratch of an 8-bit product: a group of unpacked rows and its results.
struct ScratchI8 {
  Unpacked u;
  float* out;  ///< (kChunk, R) with rows ldo apart
  size_t ldo;
  size_t bytes;  ///< of all
};

static inline ScratchI8 cut_scratch(uint8_t* p, int32_t n_in, int32_t n_rows) {
  const auto n = static_cast<size_t>(n_in);
  ScratchI8 s{};
  s.u.ldq = (n * sizeof(weight_t) + 63) / 64 * 64 / sizeof(weight_t);
  s.u.lds = (n / 16 + 15) / 16 * 16;
  const size_t scale = kGroup * s.u.ldq * sizeof(weight_t), part = kGroup * s.u.lds * sizeof(float);
  s.u.q = reinterpret_cast<weight_t*>(p);
  s.u.scale = reinterpret_cast<float*>(p + scale);
  s.u.min = reinterpret_cast<float*>(p + scale + part);
  s.out = reinterpret_cast<float*>(p + scale + 2 * part);
  s.ldo = result_stride(n_rows);
  s.bytes = scale + 2 * part + kChunk * s.ldo * sizeof(float);
  return s;
}

REFLEX_ISA_END
