// The experts of one row, weights in tiles. moe_gate_up: hidden[k] = silu(gate x) * up x for each expert
// chosen; moe_down: their weighted sum, in the order of the experts, whatever warp was first.
// Bound by the bytes of the experts: a warp asks for its first batch of cells before x is staged, and
// moe_down before its input is there at all (which experts it needs was known a kernel earlier).
// Quantised weights meet x as integers, 15 bits a value in two planes of bytes, as in matvec.cu; 16-bit
// floats in f32. Refuses: more than one row (moe_rows.cu), types without tiles (moe_raw.cu).
#include "backend/cuda/moe_one.cuh"

namespace reflex::cuda {

namespace {

template <class T>
__device__ __forceinline__ void down(const DownParams& p) {
  constexpr int kBatch = batch<T>();
  REFLEX_DYNAMIC_SHARED(uint8_t, x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = 1 << p.split_log2;
  const int n_jobs = p.n_used << p.split_log2;
  // [job][row]
  auto* sums =
      reinterpret_cast<float*>(x + static_cast<uint32_t>(p.n_used * p.n_units) * Packed<T>::kUnitBytes);
  const auto units_of = [&](int job, int tile) {
    const int e = p.ids[job >> p.split_log2];
    const uint8_t* at = p.stack + static_cast<size_t>(p.slot_of ? p.slot_of[e] : e) * p.slot_bytes +
                        static_cast<size_t>(tile) * p.tile_bytes;
    return Units<T>(at, job & (split - 1), p.split_log2, p.n_cells);
  };
  Packed<T> w[kBatch];
  const auto fetch = [&](const Units<T>& units, int i) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) units.load(w[j], i + j, lane);
  };
  // The kernel before has seen the choice complete before it let this one start.
  if (warp < n_jobs) fetch(units_of(warp, blockIdx.x), 0);
  wait_for_inputs();
  let_next_start();
  const uint32_t x_bytes = static_cast<uint32_t>(p.n_units) * Packed<T>::kUnitBytes;
  for (int k = 0; k < p.n_used; ++k)
    stage<T>(p.hidden + static_cast<size_t>(k) * p.n_hidden, p.n_hidden, p.n_units, x + k * x_bytes);
  __syncthreads();
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.n_tiles; tile += gridDim.x) {
#pragma unroll 1
    for (int job = warp; job < n_jobs; job += kExpertWarps) {
      const Units<T> units = units_of(job, tile);
      const uint8_t* own = x + (job >> p.split_log2) * x_bytes;
      if (job != warp || tile != static_cast<int>(blockIdx.x)) fetch(units, 0);
      float sum = 0;
#pragma unroll 1
      for (int i = 0; i < units.n; i += kBatch) {
        if (i > 0) fetch(units, i);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (i + j < units.n) sum += w[j].dot(units.x_of(own, i + j), lane);
      }
      sum = warp_sum<4>(sum);
      if (lane % 4 == 0) sums[job * kTileRows + lane / 4] = sum;
    }
    __syncthreads();
    const int row = tile * kTileRows + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kTileRows && row < p.width) {
      float y = 0;
      for (int k = 0; k < p.n_used; ++k) {
        float s = 0;
        for (int part = 0; part < split; ++part)
          s += sums[((k << p.split_log2) + part) * kTileRows + threadIdx.x];
        y += p.weights[k] * s;
      }
      p.out[row] = y + (p.residual ? p.residual[row] : 0.0f);
    }
    __syncthreads();
  }
}

}  // namespace

// moe_gate_up: shared memory n_cells units of x; moe_down: n_used * n_units units and n_used << split_log2
// tiles' sums.
#define REFLEX_EXPERT(t)                                                                             \
  REFLEX_KERNEL(moe_gate_up_##t, GateUpParams, kExpertThreads, 2) { gate_up<Tile<GgmlType::t>>(p); } \
  REFLEX_KERNEL(moe_down_##t, DownParams, kExpertThreads, 2) { down<Tile<GgmlType::t>>(p); }
REFLEX_TILED(REFLEX_EXPERT)

}  // namespace reflex::cuda
