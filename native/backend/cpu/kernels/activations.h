// Activations as the products of this instruction set read them.
//
// row_i8: per row a record of
//     q       (n) int8
//     scale   (n / 32) f32
//     total   (n / 32), then (n / 16) f32: scale * the sum of q over the block
// tile_i8: rows in tiles of T = W / L, L lanes of a vector each; the last tile of a pass may be
//   narrower (tile_rows). A tile holds, lane for lane,
//     q       (n / (L * kStep)) vectors of kStep values a lane
//     scale   (n / 32) vectors
//     start   (n / 32), then (n / 16) vectors: -kBias * the lane's sum of q over the block
//     total   (n / 32), then (n / 16) vectors: scale * the lane's sum of q
// row_f32: rows as they are. tile_f32: tiles of W rows, value k of row r at [k * W + r].
//
// Values are rounded to 8 bits per 32 with scale = max |x| / 127; a block with an infinity or a NaN
// gets a NaN scale, so that it shows.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/lanes.h"

REFLEX_ISA_BEGIN

constexpr int32_t kQuantBlock = 32;  ///< activations per scale
constexpr int32_t kHalfBlock = 16;   ///< weights per scale, of the finer types
constexpr int kMaxLanes = 4;         ///< of one row in a tile

// A row's lanes of a vector must lie within the finest block.
static_assert(kMaxLanes * kStep <= kHalfBlock && kMaxLanes <= W);

/// Where a row_i8 record keeps its parts, for n values a row.
struct RowLayout {
  size_t scale, total32, total16, stride;  ///< bytes, each a multiple of a cache line
  explicit RowLayout(int32_t n) {
    const auto blocks = static_cast<size_t>(n / kQuantBlock);
    scale = (static_cast<size_t>(n) * sizeof(act_t) + 63) / 64 * 64;
    total32 = scale + (blocks * sizeof(float) + 63) / 64 * 64;
    total16 = total32 + (blocks * sizeof(float) + 63) / 64 * 64;
    stride = total16 + (2 * blocks * sizeof(float) + 63) / 64 * 64;
  }
};

/// Where a tile_i8 tile keeps its parts, for L lanes a row.
struct TileLayout {
  size_t scale, start32, start16, total32, total16, stride;  ///< bytes
  TileLayout(int32_t n, int lanes) {
    const size_t vector = sizeof(vi), blocks = static_cast<size_t>(n / kQuantBlock);
    scale = static_cast<size_t>(n / (lanes * kStep)) * vector;
    start32 = scale + blocks * vector;
    start16 = start32 + blocks * vector;
    total32 = start16 + 2 * blocks * vector;
    total16 = total32 + blocks * vector;
    stride = total16 + 2 * blocks * vector;
  }
};

/// Lanes a row takes in a tile of `rows` rows: as many as leave no row out.
static inline int lanes_for(int32_t rows) {
  int lanes = 1;
  while (lanes < kMaxLanes && rows * lanes * 2 <= W) lanes *= 2;
  return lanes;
}

/// Rows of the tile that starts at row `begin` of R.
static inline int32_t tile_rows(int32_t begin, int32_t n_rows) {
  return n_rows - begin < W ? n_rows - begin : W;
}

size_t act_bytes(Form form, int32_t n_in, int32_t n_rows);
int32_t act_unit(Form form);
void prepare(Form form, const float* x, size_t ldx, int32_t n_in, int32_t n_rows, int32_t begin, int32_t end,
             uint8_t* act);
const uint8_t* act_row(Form form, const uint8_t* act, int32_t n_in, int32_t r);

REFLEX_ISA_END
