// y[r] = W x[r] in f32: --exact, and weights that are floats. Weights are brought to f32 a few rows
// at a time in cache; the activations are rows (few) or tiles of W rows side by side.
#include "backend/cpu/kernels/activations.h"
#include "backend/cpu/kernels/products.h"
#include "backend/cpu/kernels/type_ids.h"

REFLEX_ISA_BEGIN

namespace {

/// Values summed before they join the running sum: bounds the error of long rows.
constexpr int32_t kRun = 256;

void decode_floats(uint32_t type, const uint8_t* w, int32_t n, float* y) {
  if (type == kTypeF32) {
    memcpy(y, w, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const auto* h = reinterpret_cast<const uint16_t*>(w);
  int32_t i = 0;
  for (; i + W <= n; i += W) store(y + i, type == kTypeF16 ? load_f16(h + i) : load_bf16(h + i));
  if (i == n) return;
  uint16_t part[W] = {};
  memcpy(part, w + static_cast<size_t>(i) * 2, static_cast<size_t>(n - i) * 2);
  float t[W];
  store(t, type == kTypeF16 ? load_f16(part) : load_bf16(part));
  memcpy(y + i, t, static_cast<size_t>(n - i) * sizeof(float));
}

void decode(uint32_t type, const UnpackInfo& info, const uint8_t* w, int32_t n, float* y) {
  if (info.decode)
    info.decode(w, n, y);
  else
    decode_floats(type, w, n, y);
}

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

// M weight rows against one tile: out (M, W) with rows ldo apart.
template <int M>
void tile_kernel(const float* w, int32_t n, const float* x, float* out, size_t ldo) {
  vf total[M] = {};
  for (int32_t k0 = 0; k0 < n; k0 += kRun) {
    const int32_t k1 = n - k0 < kRun ? n : k0 + kRun;
    vf s[M] = {};
    for (int32_t k = k0; k < k1; ++k) {
      const vf xk = load(x + k * W);
      REFLEX_UNROLL
      for (int m = 0; m < M; ++m) s[m] = fma(splat(w[m * n + k]), xk, s[m]);
    }
    REFLEX_UNROLL
    for (int m = 0; m < M; ++m) total[m] += s[m];
  }
  REFLEX_UNROLL
  for (int m = 0; m < M; ++m) store(out + static_cast<size_t>(m) * ldo, total[m]);
}

}  // namespace

size_t scratch_f32(int32_t n_in, int32_t n_rows) {
  return (static_cast<size_t>(n_in) * kGroup + kChunk * result_stride(n_rows)) * sizeof(float);
}

void matmul_row_f32(const MatmulArgs& a, int32_t begin, int32_t end) {
  const UnpackInfo info = unpack_info(a.type);
  const auto n = static_cast<size_t>(a.n_in);
  auto* row = reinterpret_cast<float*>(a.scratch);
  for (int32_t j = begin; j < end; ++j) {
    decode(a.type, info, a.w + static_cast<size_t>(j) * a.row_bytes, a.n_in, row);
    for (int32_t r = 0; r < a.n_rows; ++r)
      a.y[static_cast<size_t>(r) * a.ldy + static_cast<size_t>(j - begin)] =
          dot(row, reinterpret_cast<const float*>(a.act) + static_cast<size_t>(r) * n, a.n_in);
  }
}

void matmul_tile_f32(const MatmulArgs& a, int32_t begin, int32_t end) {
  const UnpackInfo info = unpack_info(a.type);
  const auto n = static_cast<size_t>(a.n_in);
  const size_t ldo = result_stride(a.n_rows);
  auto* w = reinterpret_cast<float*>(a.scratch);
  float* out = w + n * kGroup;
  for (int32_t c = begin; c < end; c += kChunk) {
    const int32_t rows = end - c < kChunk ? end - c : kChunk;
    for (int32_t g = 0; g < rows; g += kGroup) {
      const int32_t group = rows - g < kGroup ? rows - g : kGroup;
      for (int32_t m = 0; m < group; ++m)
        decode(a.type, info, a.w + static_cast<size_t>(c + g + m) * a.row_bytes, a.n_in,
               w + static_cast<size_t>(m) * n);
      // Past `group` these are rows of an earlier group, or of nothing: computed, never stored.
      for (int32_t r = 0; r < a.n_rows; r += W)
        tile_kernel<kGroup>(w, a.n_in, reinterpret_cast<const float*>(a.act) + static_cast<size_t>(r) * n,
                            out + static_cast<size_t>(g) * ldo + r, ldo);
    }
    transpose_block(out, ldo, rows, a.n_rows, a.y + (c - begin), a.ldy);
  }
}

REFLEX_ISA_END
