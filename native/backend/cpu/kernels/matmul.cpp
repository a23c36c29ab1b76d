// y[r] = W x[r]: forms of activations and the choice of product.
#include "backend/cpu/kernels/matmul.h"

#include "backend/cpu/kernels/simd.h"

REFLEX_ISA_BEGIN

namespace {

constexpr uint32_t kTypeF32 = 0;

// Four accumulators over whole vectors, then the tail: the same order for every row.
float dot(const float* a, const float* b, int32_t n) {
  vf s[4] = {};
  int32_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; ++k) s[k] = fma(load(a + i + k * W), load(b + i + k * W), s[k]);
  for (; i + W <= n; i += W) s[0] = fma(load(a + i), load(b + i), s[0]);
  float t = sum((s[0] + s[1]) + (s[2] + s[3]));
  for (; i < n; ++i) t += a[i] * b[i];
  return t;
}

}  // namespace

Form choose_form(uint32_t, int32_t, int32_t, bool) { return Form::row_f32; }

size_t act_bytes(Form, int32_t n_in, int32_t n_rows) {
  return static_cast<size_t>(n_in) * static_cast<size_t>(n_rows) * sizeof(float);
}

int32_t act_unit(Form) { return 1; }

void prepare(Form, const float* x, size_t ldx, int32_t n_in, int32_t, int32_t begin, int32_t end,
             uint8_t* act) {
  const size_t row = static_cast<size_t>(n_in) * sizeof(float);
  for (int32_t r = begin; r < end; ++r)
    memcpy(act + static_cast<size_t>(r) * row, x + static_cast<size_t>(r - begin) * ldx, row);
}

const uint8_t* act_row(Form, const uint8_t* act, int32_t n_in, int32_t r) {
  return act + static_cast<size_t>(r) * static_cast<size_t>(n_in) * sizeof(float);
}

size_t matmul_scratch(int32_t n_in, int32_t) { return static_cast<size_t>(n_in) * sizeof(float); }

void matmul(const MatmulArgs& a, int32_t begin, int32_t end) {
  const auto n = static_cast<size_t>(a.n_in);
  for (int32_t j = begin; j < end; ++j) {
    const uint8_t* w = a.w + static_cast<size_t>(j) * a.row_bytes;
    auto* row = reinterpret_cast<float*>(a.scratch);
    if (a.type == kTypeF32)
      memcpy(row, w, n * sizeof(float));
    else
      a.decode(a.type, w, row, n);
    for (int32_t r = 0; r < a.n_rows; ++r)
      a.y[static_cast<size_t>(r) * a.ldy + static_cast<size_t>(j - begin)] =
          dot(row, reinterpret_cast<const float*>(a.act) + static_cast<size_t>(r) * n, a.n_in);
  }
}

REFLEX_ISA_END
