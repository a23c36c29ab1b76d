// Several rows' experts on tensor cores, by place (moe_params.h): for every block of up to 16 MT places of
// one expert, and 64 NT outputs, products of f16 fragments with that expert's tiles, which the warps decode
// into mma operands as they go, each its NT tiles from a ring of its own. With `pair`, gate and up are
// tiles side by side and silu(gate) * up leaves as fragments; else f32. A sum runs over n_in in one order
// whatever else is in the launch. Refuses: types without tiles (moe_raw.cu), the weighted sum (moe.cu).
#include "backend/cuda/device.cuh"
#include "backend/cuda/moe_params.h"

namespace reflex::cuda {

namespace {

constexpr int kStepQuads = 32, kUnitQuads = kSteps * kStepQuads;  ///< of one mtile

template <class T, int MT>
struct Shape {
  static constexpr int NT = moe_rows_tiles(MT), kUnits = T::kCell / kUnit;
  static constexpr int kSlots = T::kBytes < 2048 ? 3 : 2;  ///< units of x in the ring
  static constexpr int kAhead = kSlots - 1;
  static constexpr int kCells = kUnits == 2 ? 2 : kSlots;  ///< cells per tile in a warp's ring
  static constexpr int kCols = kExpertWarps * NT * kTileRows, kStride = kCols + 8;
  static constexpr uint32_t kX = kSlots * MT * kUnitQuads * 16;
  static_assert(kX + kExpertWarps * NT * kCells * T::kBytes <= moe_rows_ring(MT, T::kCell, T::kBytes));
  static_assert(16 * MT * kStride * 4 <= moe_rows_ring(MT, T::kCell, T::kBytes));
};

/// The block's sums, in shared memory (16 MT rows of stride), to where they go.
__device__ __forceinline__ void emit_pair(const ExpertRowsParams& p, const RowBlock& b, const float* sums,
                                          int stride, int pairs, int first_col) {
#pragma unroll 2
  for (int i = threadIdx.x; i < b.count * pairs; i += kExpertThreads) {
    const int row = i / pairs, c = i % pairs * 2, col = first_col + c;
    if (col >= p.n_out) continue;
    const int at = c / kTileRows * (2 * kTileRows) + c % kTileRows;
    const float2 gate = *reinterpret_cast<const float2*>(sums + row * stride + at);
    const float2 up = *reinterpret_cast<const float2*>(sums + row * stride + at + kTileRows);
    const float y0 = silu(gate.x * p.scale) * (up.x * p.up_scale);
    const float y1 = col + 1 < p.n_out ? silu(gate.y * p.scale) * (up.y * p.up_scale) : 0.0f;
    static_cast<uint32_t*>(p.out)[fragment_index(b.first + row, col, p.out_units) / 2] =
        activation_pair(y0, y1);
  }
}
__device__ __forceinline__ void emit(const ExpertRowsParams& p, const RowBlock& b, const float* sums,
                                     int stride, int cols, int first_col) {
#pragma unroll 2
  for (int i = threadIdx.x; i < b.count * cols; i += kExpertThreads) {
    const int row = i / cols, c = i % cols, col = first_col + c;
    if (col < p.n_out)
      static_cast<float*>(p.out)[static_cast<size_t>(b.first + row) * p.n_out + col] =
          sums[row * stride + c] * p.scale;
  }
}

template <class T, int MT>
__device__ __forceinline__ void run(const ExpertRowsParams& p) {
  using S = Shape<T, MT>;
  constexpr int NT = S::NT, kUnits = S::kUnits, kQuads = T::kBytes / 16;
  REFLEX_DYNAMIC_SHARED(uint8_t, shared);
  auto* x_ring = reinterpret_cast<uint4*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint8_t* cells = shared + S::kX + warp * (NT * S::kCells * T::kBytes);
  wait_for_inputs();
  let_next_start();
  if (static_cast<int>(blockIdx.y) >= *p.n_blocks) return;
  const RowBlock b = p.blocks[blockIdx.y];
  const int slot = p.slot_of ? p.slot_of[b.expert] : b.expert;
  if (slot < 0) return;
  const bool pair = p.pair != 0;
  const int per_warp = pair ? NT / 2 : NT;
  const int first = (blockIdx.x * kExpertWarps + warp) * per_warp, n_units = p.n_cells * kUnits;

  // The warp's tiles; those beyond the last repeat it, and are not stored.
  const uint8_t* tiles[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int tile = min(pair ? first + n / 2 : first + n, p.n_tiles - 1);
    tiles[n] = p.stack + static_cast<size_t>(slot) * p.slot_bytes + (pair && n % 2 ? p.to_up : 0) +
               static_cast<size_t>(tile) * p.tile_bytes + lane * 16;
  }
  const auto fetch_cell = [&](int c) {
    if (c >= p.n_cells) return;
    uint8_t* to = cells + c % S::kCells * (NT * T::kBytes) + lane * 16;
    const uint32_t at = static_cast<uint32_t>(c) * T::kBytes;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < (kQuads + 31) / 32; ++i)
        if (i * 32 + lane < kQuads) copy_quad(to + n * T::kBytes + i * 512, tiles[n] + at + i * 512);
  };
  // Mtiles beyond the expert's own are other rows or none: computed with, not stored.
  const auto* x = static_cast<const uint4*>(p.x) +
                  static_cast<size_t>(b.first / 16) * p.n_units * kUnitQuads + threadIdx.x;
  const auto fetch_x = [&](int i) {
    if (i >= n_units) return;
    uint4* to = x_ring + i % S::kSlots * (MT * kUnitQuads) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < MT; ++m)
      copy_quad(to + m * kUnitQuads, x + (static_cast<size_t>(m) * p.n_units + i) * kUnitQuads);
  };

#pragma unroll
  for (int i = 0; i < S::kAhead; ++i) {
    if (i % kUnits == 0) fetch_cell(i / kUnits);
    fetch_x(i);
    copy_commit();
  }
  float acc[MT][NT][4];
#pragma unroll
  for (int i = 0; i < MT * NT * 4; ++i) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0;

#pragma unroll 1
  for (int i = 0; i < n_units; ++i) {
    copy_wait<S::kAhead - 1>();
    __syncthreads();
    const int next = i + S::kAhead;
    fetch_x(next);
    if (next % kUnits == 0) fetch_cell(next / kUnits);
    copy_commit();
    const uint4* xs = x_ring + i % S::kSlots * (MT * kUnitQuads) + lane;
    const uint8_t* cell = cells + i / kUnits % S::kCells * (NT * T::kBytes);
    const int u = i % kUnits;
    Scales scales[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) scales[n] = T::scales(cell + n * T::kBytes, u, lane);
#pragma unroll MT >= 4 ? 2 : 4
    for (int q = 0; q < 4; ++q) {
      h2 w[NT][4];
#pragma unroll
      for (int n = 0; n < NT; ++n) T::quarter(cell + n * T::kBytes, u, q, lane, scales[n], w[n]);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const uint4 a = xs[m * kUnitQuads + (2 * q + h) * kStepQuads];
#pragma unroll
          for (int n = 0; n < NT; ++n) mma(acc[m][n], a.x, a.y, a.z, a.w, w[n][2 * h], w[n][2 * h + 1]);
        }
    }
  }
  copy_wait<0>();
  __syncthreads();
  auto* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(sums + (16 * m + 8 * h + lane / 4) * S::kStride +
                                   (warp * NT + n) * kTileRows +
                                   2 * (lane % 4)) = {acc[m][n][2 * h], acc[m][n][2 * h + 1]};
  __syncthreads();
  const int first_col = blockIdx.x * kExpertWarps * per_warp * kTileRows;
  if (pair)
    emit_pair(p, b, sums, S::kStride, S::kCols / 4, first_col);
  else
    emit(p, b, sums, S::kStride, S::kCols, first_col);
}

}  // namespace

// grid (groups of tiles, row blocks at most), shared memory moe_rows_ring
#define REFLEX_ROWS(t, mt) \
  REFLEX_KERNEL(moe_rows_##mt##_##t, ExpertRowsParams, kExpertThreads, 1) { run<Tile<GgmlType::t>, mt>(p); }
#define REFLEX_ALL(t) REFLEX_ROWS(t, 1) REFLEX_ROWS(t, 2) REFLEX_ROWS(t, 4)
REFLEX_TILED(REFLEX_ALL)

}  // namespace reflex::cuda
