// Many rows: y (R, n_out) = x (R, n_in) W^T, W in tiles, x as f16 fragments. Bound by arithmetic:
// a block makes 16 MT rows by 64 NT outputs, its 8 warps share the rows' fragments through a ring in
// shared memory, and each decodes its own NT tiles straight into mma operands: W never goes
// through shared memory. Refuses: norms, parts of more than one type.
#include "backend/cuda/matmul_emit.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = kManyThreads / 32;
constexpr int kStepQuads = 32, kUnitQuads = kSteps * kStepQuads;  ///< of one mtile

template <class T, int MT, int NT>
struct Block {
  float acc[MT][NT][4];
  typename T::Raw raw[NT];
  const uint8_t* cell[NT];  ///< of the raw now held

  /// Values 8p .. 8p+7 of every lane in unit u. The last quarter of a cell frees the raw registers,
  /// so the next cell's loads are under way during its multiplications.
  template <int u, int p>
  __device__ __forceinline__ void quarter(const uint4* x, const Scales (&scales)[NT], int lane, bool more) {
    h2 w[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      T::template quarter<u, p>(raw[n], scales[n], w[n]);
      if constexpr (p == 3 && (u + 1) * kUnit == T::kCell) {
        cell[n] += T::kBytes;
        if (more) T::load(raw[n], cell[n], lane);
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
  __device__ __forceinline__ void unit(const uint4* x, int lane, bool more) {
    Scales scales[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) scales[n] = T::template scales<u>(raw[n], lane);
    quarter<u, 0>(x, scales, lane, more);
    quarter<u, 1>(x, scales, lane, more);
    quarter<u, 2>(x, scales, lane, more);
    quarter<u, 3>(x, scales, lane, more);
  }
};

/// Which part a group of tiles belongs to, and its number there.
__device__ __forceinline__ int find_part(const MatmulParams& p, int tiles_per_group, int& group) {
  if (p.epilogue == Epilogue::swiglu) return 0;
  int i = 0;
  for (; i + 1 < p.n_parts; ++i) {
    const int tiles = p.part[i].end_tile - p.part[i].first_tile;
    const int groups = (tiles + tiles_per_group - 1) / tiles_per_group;
    if (group < groups) break;
    group -= groups;
  }
  return i;
}

template <class T, int MT, int NT>
__device__ __forceinline__ void run(const MatmulParams& p) {
  extern __shared__ __align__(16) uint4 ring[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int per_warp = pair ? NT / 2 : NT;
  int group = blockIdx.y;
  const TiledPart& part = p.part[find_part(p, kWarps * per_warp, group)];
  const int n_tiles = part.end_tile - part.first_tile, first = (group * kWarps + warp) * per_warp;

  Block<T, MT, NT> b;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const bool second = pair && n % 2;
    const int tile = min(pair ? first + n / 2 : first + n, n_tiles - 1);
    b.cell[n] = (second ? p.part[1].tiles : part.tiles) + static_cast<size_t>(tile) * part.tile_bytes;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) b.acc[m][n][i] = 0;
  }
  let_next_start();
#pragma unroll
  for (int n = 0; n < NT; ++n) T::load(b.raw[n], b.cell[n], lane);
  wait_for_inputs();

  // Unit i of this block's rows lies in slot i % stages of the ring, one copy group per unit.
  const auto* x =
      static_cast<const uint4*>(p.x) + static_cast<size_t>(blockIdx.x) * MT * p.n_units * kUnitQuads;
  const auto fetch = [&](int i) {
    if (i < p.n_units) {
      uint4* to = ring + (i % p.stages) * MT * kUnitQuads + threadIdx.x;
      const uint4* from = x + static_cast<size_t>(i) * kUnitQuads + threadIdx.x;
#pragma unroll
      for (int m = 0; m < MT; ++m)
        copy_quad(to + m * kUnitQuads, from + static_cast<size_t>(m) * p.n_units * kUnitQuads);
    }
    copy_commit();
  };
  constexpr int kUnits = T::kCell / kUnit;
  for (int i = 0; i < p.stages - 1; ++i) fetch(i);
  const auto ready = [&](int i) {
    if (p.stages >= 3)
      copy_wait<1>();
    else
      copy_wait<0>();
    __syncthreads();
    fetch(i + p.stages - 1);
    return ring + (i % p.stages) * MT * kUnitQuads;
  };
  for (int i = 0; i < p.n_units; i += kUnits) {
    const bool more = i + kUnits < p.n_units;
    b.template unit<0>(ready(i), lane, more);
    if constexpr (kUnits == 2) b.template unit<1>(ready(i + 1), lane, more);
  }

  const int row = blockIdx.x * MT * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < NT; n += 1) {
    if (pair && n % 2) continue;
    const int tile = pair ? first + n / 2 : first + n;
    if (tile >= n_tiles) continue;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* up = b.acc[m][NT > 1 ? (n | 1) : 0];
        emit(p, part, row + 16 * m + 8 * h, tile * kTileRows + 2 * (lane % 4), b.acc[m][n][2 * h],
             b.acc[m][n][2 * h + 1], up[2 * h], up[2 * h + 1]);
      }
  }
}

}  // namespace

#define REFLEX_MANY(t, mt, nt)                                                \
  extern "C" __global__ void __launch_bounds__(kManyThreads, 1)               \
      matmul_many_##mt##x##nt##_##t(const __grid_constant__ MatmulParams p) { \
    run<Tile<GgmlType::t>, mt, nt>(p);                                        \
  }
#define REFLEX_ALL(t) REFLEX_MANY(t, 8, 4) REFLEX_MANY(t, 4, 2) REFLEX_MANY(t, 4, 1)
REFLEX_TILED_MANY(REFLEX_ALL)

}  // namespace reflex::cuda
