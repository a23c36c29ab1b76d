#include "backend/cpu/kernels/activations.h"

REFLEX_ISA_BEGIN

namespace {

/// 32 values to 8 bits: q (32), the scale; NaN where a value is not finite.
float quantize_block(const float* x, int8_t* q) {
  constexpr int kVectors = kQuantBlock / W;
  vf v[kVectors], top{}, poison{};
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load(x + i * W);
    top = max(max(v[i], -v[i]), top);
    poison += v[i] * 0.0f;
  }
  const float largest = max_lane(top);
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  for (int i = 0; i < kVectors; ++i) store_i8(q + i * W, (vi)(v[i] * inverse + magic) - (vi)magic);
  return largest / 127.0f + sum(poison);
}

float sum_of(const int8_t* q, int32_t n) {
  int32_t s = 0;
  for (int32_t i = 0; i < n; ++i) s += q[i];
  return static_cast<float>(s);
}

void prepare_row_i8(const float* x, int32_t n, uint8_t* record) {
  const RowLayout at(n);
  auto* q = reinterpret_cast<act_t*>(record);
  auto* scale = reinterpret_cast<float*>(record + at.scale);
  auto* total32 = reinterpret_cast<float*>(record + at.total32);
  auto* total16 = reinterpret_cast<float*>(record + at.total16);
  for (int32_t b = 0; b < n / kQuantBlock; ++b) {
    int8_t block[kQuantBlock];
    scale[b] = quantize_block(x + b * kQuantBlock, block);
    const float first = sum_of(block, kHalfBlock), second = sum_of(block + kHalfBlock, kHalfBlock);
    total32[b] = scale[b] * (first + second);
    total16[2 * b] = scale[b] * first;
    total16[2 * b + 1] = scale[b] * second;
    for (int i = 0; i < kQuantBlock; ++i) q[b * kQuantBlock + i] = block[i];
  }
}

// One row's lanes of a tile: q and scale of lane `first` and the L - 1 after it.
template <int L>
void place_row(const float* x, int32_t n, int first, uint8_t* tile) {
  constexpr int kRun = L * kStep;  // values of this row in one vector
  auto* q = reinterpret_cast<act_t*>(tile) + first * kStep;
  auto* scale = reinterpret_cast<float*>(tile + TileLayout(n, L).scale) + first;
  for (int32_t b = 0; b < n / kQuantBlock; ++b, scale += W) {
    int8_t block[kQuantBlock];
    const float s = quantize_block(x + b * kQuantBlock, block);
    for (int l = 0; l < L; ++l) scale[l] = s;
    act_t values[kQuantBlock];
    for (int i = 0; i < kQuantBlock; ++i) values[i] = block[i];
    for (int i = 0; i < kQuantBlock; i += kRun, q += kVectorValues)
      memcpy(q, values + i, kRun * sizeof(act_t));
  }
}

// The sums of each lane over its blocks, from the q and scale that are in place.
void place_sums(int32_t n, int lanes, uint8_t* tile) {
  const TileLayout at(n, lanes);
  const int per_half = kHalfBlock / (lanes * kStep);  // vectors in a half block
  weight_t ones[kVectorValues];
  for (weight_t& one : ones) one = 1;
  const vi each = load_i(ones);
  const auto put = [&](size_t part, int32_t index, auto v) {
    memcpy(tile + part + static_cast<size_t>(index) * sizeof v, &v, sizeof v);
  };
  const uint8_t* q = tile;
  for (int32_t b = 0; b < n / kQuantBlock; ++b) {
    vi half[2] = {};
    for (vi& h : half)
      for (int i = 0; i < per_half; ++i, q += sizeof(vi)) h = dot_step(h, each, load_i(q));
    const vf scale = (vf)load_i(tile + at.scale + static_cast<size_t>(b) * sizeof(vf));
    put(at.start32, b, (half[0] + half[1]) * -kBias);
    put(at.total32, b, scale * to_float(half[0] + half[1]));
    for (int h = 0; h < 2; ++h) {
      put(at.start16, 2 * b + h, half[h] * -kBias);
      put(at.total16, 2 * b + h, scale * to_float(half[h]));
    }
  }
}

template <int L>
void place_rows(const float* x, size_t ldx, int32_t n, int32_t rows, uint8_t* tile) {
  if (rows * L < W) memset(tile, 0, TileLayout(n, L).stride);
  for (int32_t r = 0; r < rows; ++r) place_row<L>(x + static_cast<size_t>(r) * ldx, n, r * L, tile);
}

void prepare_tile_i8(const float* x, size_t ldx, int32_t n, int32_t rows, uint8_t* tile) {
  const int lanes = lanes_for(rows);
  if (lanes == 1)
    place_rows<1>(x, ldx, n, rows, tile);
  else if (lanes == 2)
    place_rows<2>(x, ldx, n, rows, tile);
  else
    place_rows<4>(x, ldx, n, rows, tile);
  place_sums(n, lanes, tile);
}

void prepare_tile_f32(const float* x, size_t ldx, int32_t n, int32_t rows, float* tile) {
  int32_t k = 0;
  for (; k + W <= n; k += W) {
    vf v[W] = {};
    for (int32_t r = 0; r < rows; ++r) v[r] = load(x + static_cast<size_t>(r) * ldx + k);
    transpose(v);
    for (int i = 0; i < W; ++i) store(tile + (k + i) * W, v[i]);
  }
  for (; k < n; ++k)
    for (int32_t r = 0; r < W; ++r) tile[k * W + r] = r < rows ? x[static_cast<size_t>(r) * ldx + k] : 0.0f;
}

/// Bytes from one full tile to the next.
size_t tile_stride(Form form, int32_t n) {
  return form == Form::tile_i8 ? TileLayout(n, 1).stride : static_cast<size_t>(n) * W * sizeof(float);
}

}  // namespace

size_t act_bytes(Form form, int32_t n_in, int32_t n_rows) {
  const auto n = static_cast<size_t>(n_in), rows = static_cast<size_t>(n_rows);
  const size_t tiles = (rows + W - 1) / W;
  switch (form) {
    case Form::row_f32:
      return n * rows * sizeof(float);
    case Form::row_i8:
      return RowLayout(n_in).stride * rows;
    default:
      return tile_stride(form, n_in) * tiles;
  }
}

int32_t act_unit(Form form) { return form == Form::tile_f32 || form == Form::tile_i8 ? W : 1; }

void prepare(Form form, const float* x, size_t ldx, int32_t n_in, int32_t n_rows, int32_t begin, int32_t end,
             uint8_t* act) {
  const int32_t unit = act_unit(form);
  for (int32_t r = begin; r < end; r += unit, x += static_cast<size_t>(unit) * ldx) {
    const int32_t rows = tile_rows(r, n_rows);
    const auto at = static_cast<size_t>(r);
    switch (form) {
      case Form::row_f32:
        memcpy(act + at * static_cast<size_t>(n_in) * sizeof(float), x,
               static_cast<size_t>(n_in) * sizeof(float));
        break;
      case Form::row_i8:
        prepare_row_i8(x, n_in, act + at * RowLayout(n_in).stride);
        break;
      case Form::tile_i8:
        prepare_tile_i8(x, ldx, n_in, rows, act + at / W * tile_stride(form, n_in));
        break;
      case Form::tile_f32:
        prepare_tile_f32(x, ldx, n_in, rows,
                         reinterpret_cast<float*>(act + at / W * tile_stride(form, n_in)));
        break;
    }
  }
}

const uint8_t* act_row(Form form, const uint8_t* act, int32_t n_in, int32_t r) {
  const size_t stride =
      form == Form::row_i8 ? RowLayout(n_in).stride : static_cast<size_t>(n_in) * sizeof(float);
  return act + static_cast<size_t>(r) * stride;
}

REFLEX_ISA_END
