// Several rows: y (R, n_out) = x (R, n_in) W^T [+ bias + residual], or silu(gate) * up, W in tiles, x
// as f16 fragments. A block makes 16 MT rows by 64 NT outputs: its 8 warps share the rows'
// fragments through a ring in shared memory, and each decodes its own NT tiles straight into mma
// operands, so W never goes through shared memory. Where that makes too few blocks, several share
// one by splitting n_in; the last to finish adds up what all have left, in order.
// Refuses: norms (rows_to_fragments has done them), parts of more than one type.
#include "backend/cuda/matmul_emit.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kMatmulThreads / 32;
constexpr int kStepQuads = 32, kUnitQuads = kSteps * kStepQuads;  ///< of one mtile

template <class T, int MT, int NT>
struct Block {
  static constexpr bool kAhead = MT <= 2;  ///< registers for a second cell
  float acc[MT][NT][4];
  typename T::Raw raw[NT], next[kAhead ? NT : 1];
  const uint8_t* cell[NT];  ///< the next to load

  __device__ __forceinline__ void load(typename T::Raw& r, int n, int lane) {
    T::load(r, cell[n], lane);
    cell[n] += T::kBytes;
  }
  __device__ __forceinline__ void begin(int lane, int n_cells) {
#pragma unroll
    for (int n = 0; n < NT; ++n) load(raw[n], n, lane);
    if constexpr (kAhead)
      if (n_cells > 1) {
#pragma unroll
        for (int n = 0; n < NT; ++n) load(next[n], n, lane);
      }
  }

  /// Values 8p .. 8p+7 of every lane in unit u. The last quarter of a cell frees the raw registers,
  /// so later cells' loads are under way during its multiplications.
  template <int u, int p>
  __device__ __forceinline__ void quarter(const uint4* x, const Scales (&scales)[NT], int lane,
                                          int cells_left) {
    h2 w[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      T::template quarter<u, p>(raw[n], scales[n], w[n]);
      if constexpr (p == 3 && (u + 1) * kUnit == T::kCell) {
        if constexpr (kAhead) {
          raw[n] = next[n];
          if (cells_left > 2) load(next[n], n, lane);
        } else {
          if (cells_left > 1) load(raw[n], n, lane);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint4 a = x[m * kUnitQuads + (2 * p + h) * kStepQuads + lane];
#pragma unroll
        for (int n = 0; n < NT; ++n) mma(acc[m][n], a.x, a.y, a.z, a.w, w[n][2 * h], w[n][2 * h + 1]);
      }
  }

  template <int u>
  __device__ __forceinline__ void unit(const uint4* x, int lane, int cells_left) {
    Scales scales[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) scales[n] = T::template scales<u>(raw[n], lane);
    quarter<u, 0>(x, scales, lane, cells_left);
    quarter<u, 1>(x, scales, lane, cells_left);
    quarter<u, 2>(x, scales, lane, cells_left);
    quarter<u, 3>(x, scales, lane, cells_left);
  }

  /// Leaves this block's sums in the workspace. True in the last of `splits` blocks to do so, whose
  /// own are then everybody's.
  __device__ __forceinline__ bool merge(float* workspace, uint32_t* ticket, int split, int splits,
                                        bool* last) {
    constexpr int kValues = MT * NT * 4;
    float* mine = workspace + static_cast<size_t>(split) * kValues * kMatmulThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kValues; ++i) mine[i * kMatmulThreads] = acc[i / 4 / NT][i / 4 % NT][i % 4];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *last = atomicAdd(ticket, 1u) == static_cast<uint32_t>(splits) - 1;
      if (*last) *ticket = 0;
    }
    __syncthreads();
    if (!*last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0;
    for (int s = 0; s < splits; ++s) {
      const float* from = workspace + static_cast<size_t>(s) * kValues * kMatmulThreads + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        acc[i / 4 / NT][i / 4 % NT][i % 4] += __ldcg(from + i * kMatmulThreads);
    }
    return true;
  }
};

/// Which part a group of tiles belongs to, and its number there.
__device__ __forceinline__ int find_part(const MatmulParams& p, int tiles_per_group, int& group) {
  if (p.epilogue == Epilogue::swiglu) return 0;
  int i = 0;
  for (; i + 1 < p.n_parts; ++i) {
    const int groups = (p.part[i].end_tile - p.part[i].first_tile + tiles_per_group - 1) / tiles_per_group;
    if (group < groups) break;
    group -= groups;
  }
  return i;
}

template <class T, int MT, int NT>
__device__ __forceinline__ void run(const MatmulParams& p) {
  constexpr int kUnits = T::kCell / kUnit, kStages = matmul_stages(MT);
  extern __shared__ __align__(16) uint4 ring[];
  __shared__ bool last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int per_warp = pair ? NT / 2 : NT, split = blockIdx.z;
  int group = blockIdx.y;
  const TiledPart& part = p.part[find_part(p, kWarps * per_warp, group)];
  const int n_tiles = part.end_tile - part.first_tile, first = (group * kWarps + warp) * per_warp;
  const int first_cell = split * p.cells_per_split,
            n_cells = min(p.cells_per_split, part.n_cells - first_cell);

  Block<T, MT, NT> b;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const bool second = pair && n % 2;
    const int tile = min(pair ? first + n / 2 : first + n, n_tiles - 1);
    b.cell[n] = (second ? p.part[1].tiles : part.tiles) + static_cast<size_t>(tile) * part.tile_bytes +
                static_cast<uint32_t>(first_cell) * T::kBytes;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) b.acc[m][n][i] = 0;
  }
  let_next_start();
  b.begin(lane, n_cells);
  wait_for_inputs();

  // Unit i of this block's rows lies in slot i % kStages of the ring, one copy group per unit.
  const int n_units = n_cells * kUnits;
  const auto* x = static_cast<const uint4*>(p.x) +
                  (static_cast<size_t>(blockIdx.x) * MT * p.n_units + first_cell * kUnits) * kUnitQuads;
  const auto fetch = [&](int i) {
    if (i < n_units) {
      uint4* to = ring + (i % kStages) * MT * kUnitQuads + threadIdx.x;
      const uint4* from = x + static_cast<size_t>(i) * kUnitQuads + threadIdx.x;
#pragma unroll
      for (int m = 0; m < MT; ++m)
        copy_quad(to + m * kUnitQuads, from + static_cast<size_t>(m) * p.n_units * kUnitQuads);
    }
    copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
  const auto ready = [&](int i) {
    copy_wait<kStages - 2>();
    __syncthreads();
    fetch(i + kStages - 1);
    return ring + (i % kStages) * MT * kUnitQuads;
  };
  for (int c = 0; c < n_cells; ++c) {
    b.template unit<0>(ready(c * kUnits), lane, n_cells - c);
    if constexpr (kUnits == 2) b.template unit<1>(ready(c * kUnits + 1), lane, n_cells - c);
  }
  if (gridDim.z > 1) {
    const size_t at = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    float* workspace = p.workspace + at * gridDim.z * (MT * NT * 4 * kMatmulThreads);
    if (!b.merge(workspace, p.tickets + at, split, gridDim.z, &last)) return;
  }

  const int row = blockIdx.x * MT * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    if (pair && n % 2) continue;
    const int tile = pair ? first + n / 2 : first + n;
    if (tile >= n_tiles) continue;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* up = b.acc[m][n | 1];
        emit(p, part, row + 16 * m + 8 * h, tile * kTileRows + 2 * (lane % 4), b.acc[m][n][2 * h],
             b.acc[m][n][2 * h + 1], up[2 * h], up[2 * h + 1]);
      }
  }
}

}  // namespace

// grid (ceil(rows / 16 mt), groups of tiles, splits), shared memory for the ring
#define REFLEX_MATMUL(t, mt, nt)                                  \
  extern "C" __global__ void __launch_bounds__(kMatmulThreads, 1) \
      matmul_##mt##_##t(const __grid_constant__ MatmulParams p) { \
    run<Tile<GgmlType::t>, mt, nt>(p);                            \
  }
#define REFLEX_ALL(t)                  \
  REFLEX_MATMUL(t, 1, matmul_tiles(1)) \
  REFLEX_MATMUL(t, 2, matmul_tiles(2)) \
  REFLEX_MATMUL(t, 4, matmul_tiles(4)) REFLEX_MATMUL(t, 8, matmul_tiles(8))
REFLEX_TILED(REFLEX_ALL)

}  // namespace reflex::cuda
