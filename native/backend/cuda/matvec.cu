// One row: y = W norm(x) [+ bias + residual], or silu(W_gate n(x)) * (W_up n(x)), W in tiles.
// Bound by the bytes of W: every warp streams cells, three of them in flight, and the tensor cores
// take the multiplications off its hands. Refuses: more than one row (matmul_few.cu).
#include <type_traits>

#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

// What a block asks for ahead of its inputs, per worker.
constexpr uint32_t kMaxPrefetch = 32u << 10;

struct Shared {
  uint4* x;    ///< f16 activations, 16 quads a unit, x_index order
  float* sum;  ///< [2][2][warps][8]: parity, part of a pair, warp, row
};

/// acc[0] + acc[1] += unit of W times the same unit of x. The 16 rows of the product are all x.
template <class T, int u>
__device__ __forceinline__ void multiply_unit(const typename T::Raw& raw, const uint4* x, int lane,
                                              float (&acc)[2][4]) {
  const Scales scales = T::template scales<u>(raw, lane);
  const int t = lane % 4;
#define REFLEX_QUARTER(p)                      \
  {                                            \
    h2 w[4];                                   \
    T::template quarter<u, p>(raw, scales, w); \
    const uint4 a = x[(p)*4 + t];              \
    mma(acc[0], a.x, 0, a.y, 0, w[0], w[1]);   \
    mma(acc[1], a.z, 0, a.w, 0, w[2], w[3]);   \
  }
  REFLEX_QUARTER(0)
  REFLEX_QUARTER(1)
  REFLEX_QUARTER(2)
  REFLEX_QUARTER(3)
#undef REFLEX_QUARTER
}

/// Writes row j of a tile. `second`: the up sum where the pair is a swiglu.
__device__ __forceinline__ void emit(const MatvecParams& p, const TiledPart& part, int row, float sum,
                                     float second) {
  if (row >= part.n_out) return;
  float y = sum * part.scale + (part.bias ? part.bias[row] : 0.0f);
  if (p.epilogue == Epilogue::swiglu) {
    const TiledPart& up = p.part[1];
    y = silu(y) * (second * up.scale + (up.bias ? up.bias[row] : 0.0f));
  } else if (part.residual) {
    y += part.residual[row];
  }
  part.out[row] = y;
}

/// A worker (the `split` warps that share tiles) takes every n_workers-th tile of the part.
template <class T>
__device__ __forceinline__ void run_part(const MatvecParams& p, const TiledPart& part, const Shared& s,
                                         int worker, int n_workers, int share, int& parity) {
  constexpr int kUnits = T::kCell / kUnit;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, split = p.split;
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int n_cells = part.n_cells, n_virtual = pair ? 2 * n_cells : n_cells;
  int tile = part.first_tile + worker - part.first_tile % n_workers;
  if (tile < part.first_tile) tile += n_workers;
  if (tile >= part.end_tile) return;

  // Cell v of a tile: of gate for v < n_cells, else of up.
  const auto address = [&](int at_tile, int v) {
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

  typename T::Raw raw[3];
  load_next(raw[0]);
  load_next(raw[1]);
  for (; tile < part.end_tile; tile += n_workers) {
    float acc[2][4] = {}, gate[2] = {};
    for (int v = share; v < n_virtual; v += split) {
      load_next(raw[2]);
      if (v >= n_cells && v - split < n_cells) {
        gate[0] = acc[0][0] + acc[1][0];
        gate[1] = acc[0][1] + acc[1][1];
        for (int i = 0; i < 4; ++i) acc[0][i] = acc[1][i] = 0;
      }
      const uint4* x = s.x + static_cast<size_t>(v >= n_cells ? v - n_cells : v) * kUnits * 16;
      multiply_unit<T, 0>(raw[0], x, lane, acc);
      if constexpr (kUnits == 2) multiply_unit<T, 1>(raw[0], x + 16, lane, acc);
      raw[0] = raw[1];
      raw[1] = raw[2];
    }
    // Lane t < 4 holds rows 2t and 2t + 1 (every lane of column t does).
    float sum[2] = {acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]};
    const int row = (tile - part.first_tile) * kTileRows;
    if (split == 1) {
      if (lane < 4)
        for (int i = 0; i < 2; ++i) emit(p, part, row + 2 * lane + i, pair ? gate[i] : sum[i], sum[i]);
      continue;
    }
    // Two sets of sums, so that one barrier a tile is enough.
    float* sums = s.sum + parity * 2 * warps * 8;
    parity ^= 1;
    if (lane < 4)
      for (int i = 0; i < 2; ++i) {
        sums[warp * 8 + 2 * lane + i] = pair ? gate[i] : sum[i];
        if (pair) sums[(warps + warp) * 8 + 2 * lane + i] = sum[i];
      }
    named_barrier(1 + warp / split, 32 * split);
    if (share == 0 && lane < 8) {
      float total = 0, second = 0;
      for (int w = warp; w < warp + split; ++w) {
        total += sums[w * 8 + lane];
        if (pair) second += sums[(warps + w) * 8 + lane];
      }
      emit(p, part, row + lane, total, second);
    }
  }
}

/// x, normed where there is a weight, to f16 in shared memory.
__device__ __forceinline__ void stage_input(const MatvecParams& p, uint4* x_shared, float* scratch) {
  const int padded = p.n_units * kUnit;
  auto* out = reinterpret_cast<uint2*>(x_shared);
  float factor = 1.0f;
  if (p.norm_weight) {
    float squares = 0;
    for (int c = threadIdx.x * 4; c < p.width; c += static_cast<int>(blockDim.x) * 4) {
      const float4 v = *reinterpret_cast<const float4*>(p.x + c);
      squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    }
    factor = rsqrtf(block_sum(squares, scratch) / static_cast<float>(p.width) + p.norm_eps);
  }
  for (int c = threadIdx.x * 4; c < padded; c += static_cast<int>(blockDim.x) * 4) {
    float4 v = {0, 0, 0, 0};
    if (c < p.width) {
      v = *reinterpret_cast<const float4*>(p.x + c);
      if (p.norm_weight) {
        const float4 w = *reinterpret_cast<const float4*>(p.norm_weight + c);
        v = {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
      }
    }
    out[(c / kUnit * kUnit + x_index(c % kUnit)) / 4] = {activation_pair(v.x, v.y),
                                                         activation_pair(v.z, v.w)};
  }
}

__device__ __forceinline__ void prefetch_weights(const MatvecParams& p, int worker) {
  for (int i = 0; i < p.n_parts; ++i) {
    const TiledPart& part = p.part[i];
    const int tile = p.epilogue == Epilogue::swiglu ? worker : worker - part.first_tile;
    if (tile < 0 || tile >= part.end_tile - part.first_tile) continue;
    const uint32_t bytes = part.tile_bytes < kMaxPrefetch ? part.tile_bytes : kMaxPrefetch;
    prefetch_l2(part.tiles + static_cast<size_t>(tile) * part.tile_bytes, bytes);
  }
}

/// Parts are of type A, or of either type (a K mix keeps some attn_v in more bits).
template <class A, class B>
__device__ __forceinline__ void run(const MatvecParams& p) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ float scratch[32];
  const Shared s{reinterpret_cast<uint4*>(shared),
                 reinterpret_cast<float*>(shared + static_cast<size_t>(p.n_units) * kUnit * 2)};
  const int warp = threadIdx.x / 32, per_block = blockDim.x / 32 / p.split;
  const int worker = blockIdx.x * per_block + warp / p.split, share = warp % p.split;
  let_next_start();
  if (share == 0 && threadIdx.x % 32 == 0) prefetch_weights(p, worker);
  wait_for_inputs();
  stage_input(p, s.x, scratch);
  __syncthreads();
  int parity = 0;
  const int n_parts = p.epilogue == Epilogue::swiglu ? 1 : p.n_parts, n_workers = gridDim.x * per_block;
  for (int i = 0; i < n_parts; ++i) {
    const TiledPart& part = p.part[i];
    if (std::is_same_v<A, B> || part.type == p.part[0].type)
      run_part<A>(p, part, s, worker, n_workers, share, parity);
    else
      run_part<B>(p, part, s, worker, n_workers, share, parity);
  }
}

}  // namespace

#define REFLEX_MATVEC(name, a, b)                                 \
  extern "C" __global__ void __launch_bounds__(kMatvecThreads, 1) \
      matvec_##name(const __grid_constant__ MatvecParams p) {     \
    run<Tile<GgmlType::a>, Tile<GgmlType::b>>(p);                 \
  }
#define REFLEX_ONE(t) REFLEX_MATVEC(t, t, t)
#define REFLEX_TWO(a, b) REFLEX_MATVEC(a##_##b, a, b)
REFLEX_TILED(REFLEX_ONE)
REFLEX_TILED_PAIRS(REFLEX_TWO)

}  // namespace reflex::cuda
