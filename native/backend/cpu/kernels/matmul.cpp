// y[r] = W x[r]: which form of activations, which product.
#include "backend/cpu/kernels/matmul.h"

#include "backend/cpu/kernels/products.h"
#include "backend/cpu/kernels/super_rows.h"
#include "backend/cpu/kernels/type_ids.h"

REFLEX_ISA_BEGIN

namespace {
/// Rows up to which f32 activations stay rows: beyond, a tile shares each weight among W of them.
constexpr int32_t kMaxRowsF32 = 4;

/// Whether matvec_super() takes the type.
bool has_super([[maybe_unused]] uint32_t type, [[maybe_unused]] int32_t n_in) {
#if defined(__AVX512VNNI__)
  return (type == kTypeQ4_K || type == kTypeQ5_K || type == kTypeQ6_K) && n_in % kSuperBlock == 0;
#else
  return false;
#endif
}
}  // namespace

Form choose_form(uint32_t type, int32_t n_in, int32_t n_rows, bool exact) {
  if (exact || unpack_info(type).block == 0 || n_in % 32 != 0)
    return n_rows <= kMaxRowsF32 ? Form::row_f32 : Form::tile_f32;
  if (n_rows > kMaxRowsI8) return Form::tile_i8;
  return has_super(type, n_in) ? Form::row_super : Form::row_i8;
}

size_t matmul_scratch(int32_t n_in, int32_t n_rows) {
  const size_t a = cut_scratch(nullptr, n_in, n_rows).bytes, b = scratch_f32(n_in, n_rows);
  return a > b ? a : b;
}

void matmul(const MatmulArgs& a, int32_t begin, int32_t end) {
  switch (a.form) {
    case Form::row_i8:
      return matvec_i8(a, unpack_info(a.type), begin, end);
    case Form::row_super:
#if defined(__AVX512VNNI__)
      return matvec_super(a, begin, end);
#else
      return;  // choose_form() gives it to no type
#endif
    case Form::tile_i8:
      return matmul_tile_i8(a, unpack_info(a.type), begin, end);
    case Form::row_f32:
      return matmul_row_f32(a, begin, end);
    case Form::tile_f32:
      return matmul_tile_f32(a, begin, end);
  }
}

REFLEX_ISA_END
