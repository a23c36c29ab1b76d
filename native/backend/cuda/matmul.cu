// Several rows: y (R, n_out) = x (R, n_in) W^T [+ bias + residual], or silu(gate) * up, W in tiles, x
// as f16 fragments. A block makes 16 MT rows by 64 NT outputs: its 8 warps share the rows'
// fragments through a ring in shared memory, and each has a ring of its own for the cells of its NT
// tiles, which it decodes into mma operands as it goes. Where that makes too few blocks, several
// share one by splitting n_in; the last to finish adds up what all have left, in order. Loops are
// rolled and results leave through shared memory: unrolled, most of a launch went on instructions
// that ran once. Refuses: norms (rows_to_fragments has done them), parts of more than one type.
#include "backend/cuda/matmul_emit.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kMatmulThreads / 32;
constexpr int kStepQuads = 32, kUnitQuads = kSteps * kStepQuads;  ///< of one mtile
constexpr bool kAsync = kArch >= 800;

template <class T, int MT>
struct Shape {
  static constexpr int NT = matmul_tiles(MT), kUnits = T::kCell / kUnit;
  static constexpr int kSlots = matmul_slots(kAsync, T::kBytes);  ///< units of x in the ring
  static constexpr int kAhead = kSlots - 1;
  static constexpr int kCells = kUnits == 2 ? 2 : kSlots;  ///< cells per tile in a warp's ring
  static constexpr int kCols = kWarps * NT * kTileRows, kStride = kCols + 8;
  static constexpr uint32_t kX = kSlots * MT * kUnitQuads * 16;
  static_assert(kX + kWarps * NT * kCells * T::kBytes <= matmul_ring(kAsync, MT, T::kCell, T::kBytes));
  static_assert(16 * MT * kStride * 4 <= matmul_ring(kAsync, MT, T::kCell, T::kBytes));
};

/// Which part a group of tiles belongs to, and its number there.
__device__ __forceinline__ int find_part(const MatmulParams& p, int tiles_per_group, int& group) {
  if (p.epilogue == Epilogue::swiglu) return 0;
  int i = 0;
#pragma unroll 1
  for (; i + 1 < p.n_parts; ++i) {
    const int groups = (p.part[i].end_tile - p.part[i].first_tile + tiles_per_group - 1) / tiles_per_group;
    if (group < groups) break;
    group -= groups;
  }
  return i;
}

/// The block's sums, now in shared memory (16 MT rows of kStride), to the outputs; with several splits
/// through the workspace, and only by the last to come.
template <int MT, int kCols, int kStride>
__device__ __forceinline__ void finish(const MatmulParams& p, const TiledPart& part, float* sums,
                                       int first_row, int first_col) {
  __shared__ bool last;
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int splits = gridDim.z;
  constexpr int kRows = 16 * MT, kValues = kRows * kCols;
  if (splits > 1) {
    const size_t block = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    float* workspace = p.workspace + block * splits * kValues;
    float* mine = workspace + static_cast<size_t>(blockIdx.z) * kValues;
#pragma unroll 2
    for (int i = threadIdx.x * 4; i < kValues; i += kMatmulThreads * 4)
      *reinterpret_cast<float4*>(mine + i) =
          *reinterpret_cast<const float4*>(sums + i / kCols * kStride + i % kCols);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(p.tickets + block, 1u) == static_cast<uint32_t>(splits) - 1;
      if (last) p.tickets[block] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    // Many loads under way at once, added in the order of the splits.
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int first = threadIdx.x * 4; first < kValues; first += kAtOnce * kMatmulThreads * 4) {
      float4 all[kAtOnce] = {};
#pragma unroll 2
      for (int s = 0; s < splits; ++s)
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = first + k * kMatmulThreads * 4;
          if (i >= kValues) break;
          const float4 v =
              __ldcg(reinterpret_cast<const float4*>(workspace + static_cast<size_t>(s) * kValues + i));
          all[k].x += v.x, all[k].y += v.y, all[k].z += v.z, all[k].w += v.w;
        }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * kMatmulThreads * 4;
        if (i < kValues) *reinterpret_cast<float4*>(sums + i / kCols * kStride + i % kCols) = all[k];
      }
    }
    __syncthreads();
  }
  const int rows = min(kRows, p.n_rows - first_row);
  constexpr int kPairs = kCols / 2;
  if (pair) {
    // gate and up are tiles side by side; two outputs a thread
#pragma unroll 2
    for (int i = threadIdx.x; i < rows * (kPairs / 2); i += kMatmulThreads) {
      const int row = i / (kPairs / 2), c = i % (kPairs / 2) * 2,
                at = c / kTileRows * (2 * kTileRows) + c % kTileRows;
      const float2 gate = *reinterpret_cast<const float2*>(sums + row * kStride + at);
      const float2 up = *reinterpret_cast<const float2*>(sums + row * kStride + at + kTileRows);
      emit_pair(p, first_row + row, first_col + c, gate, up);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * kPairs; i += kMatmulThreads) {
      const int row = i / kPairs, c = i % kPairs * 2;
      emit(part, first_row + row, first_col + c, *reinterpret_cast<const float2*>(sums + row * kStride + c));
    }
  }
}

template <class T, int MT>
__device__ __forceinline__ void run(const MatmulParams& p) {
  using S = Shape<T, MT>;
  constexpr int NT = S::NT, kUnits = S::kUnits, kQuads = T::kBytes / 16;
  REFLEX_DYNAMIC_SHARED(uint8_t, shared);
  auto* x_ring = reinterpret_cast<uint4*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint8_t* cells = shared + S::kX + warp * (NT * S::kCells * T::kBytes);
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int per_warp = pair ? NT / 2 : NT;
  int group = blockIdx.y;
  const TiledPart& part = p.part[find_part(p, kWarps * per_warp, group)];
  const int n_tiles = part.end_tile - part.first_tile, first = (group * kWarps + warp) * per_warp;
  const int first_cell = blockIdx.z * p.cells_per_split,
            n_cells = min(p.cells_per_split, part.n_cells - first_cell);
  const int n_units = n_cells * kUnits;

  // The warp's tiles; those beyond the last repeat it, and are not stored.
  const uint8_t* tiles[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const bool second = pair && n % 2;
    const int tile = min(pair ? first + n / 2 : first + n, n_tiles - 1);
    tiles[n] = (second ? p.part[1].tiles : part.tiles) + static_cast<size_t>(tile) * part.tile_bytes +
               static_cast<uint32_t>(first_cell) * T::kBytes + lane * 16;
  }
  const auto fetch_cell = [&](int c) {
    if (c >= n_cells) return;
    uint8_t* to = cells + c % S::kCells * (NT * T::kBytes) + lane * 16;
    const uint32_t at = static_cast<uint32_t>(c) * T::kBytes;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < (kQuads + 31) / 32; ++i)
        if (i * 32 + lane < kQuads) copy_quad(to + n * T::kBytes + i * 512, tiles[n] + at + i * 512);
  };
  const auto* x = static_cast<const uint4*>(p.x) +
                  (static_cast<size_t>(blockIdx.x) * MT * p.n_units + first_cell * kUnits) * kUnitQuads +
                  threadIdx.x;
  const auto fetch_x = [&](int i) {
    if (i >= n_units) return;
    uint4* to = x_ring + i % S::kSlots * (MT * kUnitQuads) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < MT; ++m)
      copy_quad(to + m * kUnitQuads, x + (static_cast<size_t>(m) * p.n_units + i) * kUnitQuads);
  };

#pragma unroll
  for (int i = 0; i < S::kAhead; i += kUnits) fetch_cell(i / kUnits);
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < S::kAhead; ++i) {
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
  // Not before: blocks of the next kernel would crowd the multiprocessors that have none of ours.
  let_next_start();
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
  finish<MT, S::kCols, S::kStride>(p, part, sums, blockIdx.x * MT * 16,
                                   group * kWarps * per_warp * kTileRows);
}

}  // namespace

// grid (ceil(rows / 16 mt), groups of tiles, splits), shared memory matmul_ring
#define REFLEX_MATMUL(t, mt) \
  REFLEX_KERNEL(matmul_##mt##_##t, MatmulParams, kMatmulThreads, 1) { run<Tile<GgmlType::t>, mt>(p); }
#define REFLEX_ALL(t) REFLEX_MATMUL(t, 1) REFLEX_MATMUL(t, 2) REFLEX_MATMUL(t, 4) REFLEX_MATMUL(t, 8)
REFLEX_TILED(REFLEX_ALL)

}  // namespace reflex::cuda
