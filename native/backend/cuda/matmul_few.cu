// A few rows: y (R, n_out) = x (R, n_in) W^T for R up to 64, W in tiles, x as f16 fragments.
// Still bound by the bytes of W, so it works like matvec.cu: warps stream cells and split a tile's
// sum between them; a decoded quarter serves every 16 rows. Refuses: norms (rows_to_fragments has
// done them), parts of more than one type, more rows (matmul_many.cu).
#include "backend/cuda/matmul_emit.cuh"

namespace reflex::cuda {

namespace {

template <int M>
struct Sums {
  float v[M][4];  ///< (row 16m + g, out 2t) (.., 2t + 1) (row 16m + g + 8, 2t) (.., 2t + 1)
};

template <class T, int u, int M>
__device__ __forceinline__ void multiply_unit(const typename T::Raw& raw, const uint4* x, size_t mtile_quads,
                                              int lane, Sums<M>& acc) {
  const Scales scales = T::template scales<u>(raw, lane);
#define REFLEX_QUARTER(q)                                                     \
  {                                                                           \
    h2 w[4];                                                                  \
    T::template quarter<u, q>(raw, scales, w);                                \
    _Pragma("unroll") for (int m = 0; m < M; ++m) {                           \
      const uint4 a = __ldg(x + m * mtile_quads + (2 * (q)) * 32 + lane);     \
      const uint4 b = __ldg(x + m * mtile_quads + (2 * (q) + 1) * 32 + lane); \
      mma(acc.v[m], a.x, a.y, a.z, a.w, w[0], w[1]);                          \
      mma(acc.v[m], b.x, b.y, b.z, b.w, w[2], w[3]);                          \
    }                                                                         \
  }
  REFLEX_QUARTER(0)
  REFLEX_QUARTER(1)
  REFLEX_QUARTER(2)
  REFLEX_QUARTER(3)
#undef REFLEX_QUARTER
}

/// The sums of `split` warps, kept in shared memory as [warp][m * 4 + i][lane], to the outputs.
template <int M>
__device__ __forceinline__ void finish_tile(const MatmulParams& p, const TiledPart& part, int col,
                                            float* shared, int worker_warp, int share, const Sums<M>& first,
                                            const Sums<M>& second) {
  const int lane = threadIdx.x % 32, split = p.split, row = lane / 4;
  const bool pair = p.epilogue == Epilogue::swiglu;
  if (split == 1) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        emit(p, part, 16 * m + 8 * h + row, col, first.v[m][2 * h], first.v[m][2 * h + 1], second.v[m][2 * h],
             second.v[m][2 * h + 1]);
    return;
  }
  constexpr int kValues = M * 4;
  const int sets = pair ? 2 : 1;
  float* mine = shared + static_cast<size_t>(worker_warp + share) * sets * kValues * 32 + lane;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    mine[i * 32] = first.v[i / 4][i % 4];
    if (pair) mine[(kValues + i) * 32] = second.v[i / 4][i % 4];
  }
  named_barrier(1 + worker_warp / split, 32 * split);
  for (int i = share; i < M * 2; i += split) {  // pair i: m = i / 2, half i % 2
    float s[2] = {}, up[2] = {};
    for (int w = worker_warp; w < worker_warp + split; ++w) {
      const float* from = shared + (static_cast<size_t>(w) * sets * kValues + 2 * i) * 32 + lane;
      for (int k = 0; k < 2; ++k) {
        s[k] += from[k * 32];
        if (pair) up[k] += from[(kValues + k) * 32];
      }
    }
    emit(p, part, 16 * (i / 2) + 8 * (i % 2) + row, col, s[0], s[1], up[0], up[1]);
  }
  named_barrier(1 + worker_warp / split, 32 * split);
}

template <class T, int M>
__device__ __forceinline__ void run_part(const MatmulParams& p, const TiledPart& part, float* shared,
                                         int worker, int n_workers, int share) {
  constexpr int kUnits = T::kCell / kUnit;
  const int lane = threadIdx.x % 32, split = p.split, worker_warp = threadIdx.x / 32 - share;
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int n_cells = part.n_cells, n_virtual = pair ? 2 * n_cells : n_cells;
  int tile = part.first_tile + worker - part.first_tile % n_workers;
  if (tile < part.first_tile) tile += n_workers;
  if (tile >= part.end_tile) return;

  const auto address = [&](int at_tile, int v) {  // cell v: of gate for v < n_cells, else of up
    const bool second = v >= n_cells;
    const uint8_t* tiles = second ? p.part[1].tiles : part.tiles;
    return tiles + static_cast<size_t>(at_tile - part.first_tile) * part.tile_bytes +
           static_cast<size_t>(second ? v - n_cells : v) * T::kBytes;
  };
  int load_tile = tile, load_v = share;
  const auto load_next = [&](typename T::Raw& raw) {
    if (load_tile >= part.end_tile) return;
    T::load(raw, address(load_tile, load_v), lane);
    load_v += split;
    if (load_v >= n_virtual) {
      load_v = share;
      load_tile += n_workers;
    }
  };

  const auto* x = static_cast<const uint4*>(p.x);
  const size_t mtile_quads = static_cast<size_t>(p.n_units) * kSteps * 32;
  typename T::Raw raw[2];
  load_next(raw[0]);
  for (; tile < part.end_tile; tile += n_workers) {
    Sums<M> acc = {}, gate = {};
    for (int v = share; v < n_virtual; v += split) {
      load_next(raw[1]);
      if (v >= n_cells && v - split < n_cells) {
        gate = acc;
        acc = {};
      }
      const uint4* at = x + static_cast<size_t>(v >= n_cells ? v - n_cells : v) * kUnits * kSteps * 32;
      multiply_unit<T, 0, M>(raw[0], at, mtile_quads, lane, acc);
      if constexpr (kUnits == 2) multiply_unit<T, 1, M>(raw[0], at + kSteps * 32, mtile_quads, lane, acc);
      raw[0] = raw[1];
    }
    const int col = (tile - part.first_tile) * kTileRows + 2 * (lane % 4);
    if (!pair) gate = acc;
    finish_tile<M>(p, part, col, shared, worker_warp, share, gate, acc);
  }
}

template <class T, int M>
__device__ __forceinline__ void run(const MatmulParams& p) {
  extern __shared__ __align__(16) float shared_sums[];
  const int warp = threadIdx.x / 32, per_block = blockDim.x / 32 / p.split;
  const int worker = blockIdx.x * per_block + warp / p.split, share = warp % p.split;
  const int n_parts = p.epilogue == Epilogue::swiglu ? 1 : p.n_parts, n_workers = gridDim.x * per_block;
  let_next_start();
  if (share == 0 && threadIdx.x % 32 == 0)
    for (int i = 0; i < p.n_parts; ++i) {
      const TiledPart& part = p.part[i];
      const int tile = p.epilogue == Epilogue::swiglu ? worker : worker - part.first_tile;
      if (tile >= 0 && tile < part.end_tile - part.first_tile)
        prefetch_l2(part.tiles + static_cast<size_t>(tile) * part.tile_bytes,
                    min(part.tile_bytes, 32u << 10));
    }
  wait_for_inputs();
  for (int i = 0; i < n_parts; ++i) {
    run_part<T, M>(p, p.part[i], shared_sums, worker, n_workers, share);
  }
}

}  // namespace

#define REFLEX_FEW(t, m)                                             \
  extern "C" __global__ void __launch_bounds__(few_threads(m), 1)    \
      matmul_few_##m##_##t(const __grid_constant__ MatmulParams p) { \
    run<Tile<GgmlType::t>, m>(p);                                    \
  }
#define REFLEX_ALL(t) REFLEX_FEW(t, 1) REFLEX_FEW(t, 2) REFLEX_FEW(t, 4)
REFLEX_TILED(REFLEX_ALL)

}  // namespace reflex::cuda
