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
  const float scale = largest / 127.0f + sum(poison);
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  for (int i = 0; i < kVectors; ++i) {
    const vi n = (vi)(v[i] * inverse + magic) - (vi)magic;
    for (int k = 0; k < W; ++k) q[i * W + k] = static_cast<int8_t>(n[k]);
  }
  return scale;
}

int32_t sum_block(const int8_t* q, int32_t n) {
  int32_t s = 0;
  for (int32_t i = 0; i < n; ++i) s += q[i];
  return s;
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
    const int32_t first = sum_block(block, kHalfBlock), second = sum_block(block + kHalfBlock, kHalfBlock);
    total32[b] = scale[b] * static_cast<float>(first + second);
    total16[2 * b] = scale[b] * static_cast<float>(first);
    total16[2 * b + 1] = scale[b] * static_cast<float>(second);
    for (int i = 0; i < kQuantBlock; ++i) q[b * kQuantBlock + i] = block[i];
  }
}

// One row's lanes of a tile: lane `first` and the lanes - 1 after it.
void prepare_tile_row(const float* x, int32_t n, int lanes, int first, uint8_t* tile) {
  const TileLayout at(n, lanes);
  auto* q = reinterpret_cast<act_t*>(tile);
  const auto part = [&](size_t offset) { return reinterpret_cast<float*>(tile + offset); };
  const auto part_i = [&](size_t offset) { return reinterpret_cast<int32_t*>(tile + offset); };
  const int run = lanes * kStep;  // values of this row in one vector
  for (int32_t b = 0; b < n / kQuantBlock; ++b) {
    int8_t block[kQuantBlock];
    const float scale = quantize_block(x + b * kQuantBlock, block);
    act_t* to = q + static_cast<size_t>(b * kQuantBlock / run) * kVectorValues + first * kStep;
    for (int i = 0; i < kQuantBlock; i += run, to += kVectorValues)
      for (int k = 0; k < run; ++k) to[k] = block[i + k];
    for (int l = 0; l < lanes; ++l) {
      int32_t half[2] = {};
      for (int i = 0; i < kQuantBlock; i += run)
        half[i / kHalfBlock] += sum_block(block + i + l * kStep, kStep);
      const int lane = first + l;
      part(at.scale)[b * W + lane] = scale;
      part_i(at.start32)[b * W + lane] = -kBias * (half[0] + half[1]);
      part(at.total32)[b * W + lane] = scale * static_cast<float>(half[0] + half[1]);
      for (int h = 0; h < 2; ++h) {
        part_i(at.start16)[(2 * b + h) * W + lane] = -kBias * half[h];
        part(at.total16)[(2 * b + h) * W + lane] = scale * static_cast<float>(half[h]);
      }
    }
  }
}

void prepare_tile_i8(const float* x, size_t ldx, int32_t n, int32_t rows, uint8_t* tile) {
  const int lanes = lanes_for(rows);
  const int wide = W / lanes;
  if (rows < wide) memset(tile, 0, TileLayout(n, lanes).stride);
  for (int32_t r = 0; r < rows; ++r)
    prepare_tile_row(x + static_cast<size_t>(r) * ldx, n, lanes, r * lanes, tile);
}

void prepare_tile_f32(const float* x, size_t ldx, int32_t n, int32_t rows, float* tile) {
  for (int32_t r = 0; r < W; ++r)
    for (int32_t k = 0; k < n; ++k)
      tile[k * W + r] = r < rows ? x[static_cast<size_t>(r) * ldx + static_cast<size_t>(k)] : 0.0f;
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
