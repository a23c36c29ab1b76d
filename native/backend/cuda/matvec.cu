// One row: y = W norm(x) [+ bias + residual], or silu(W_gate n(x)) * (W_up n(x)), W in tiles.
// Bound by the bytes of W as long as little else is done, so: every warp streams its cells through a
// ring of its own in shared memory, filled before the kernel waits for its input; quantised weights
// meet x as integers (dp4a), x being 15 bits a value in two planes of bytes with a step per 32, so
// that what rounding costs is a thousandth of what 8 bits would; 16-bit floats go through the
// tensor cores. The code is kept short and its loops rolled: at a few microseconds a launch,
// fetching instructions is what costs. Refuses: more than one row (matmul.cu).
#include "backend/cuda/matvec.cuh"

namespace reflex::cuda {

namespace {

/// Sums of a tile's rows under way in one warp.
template <class T>
struct Sum {
  float lane = 0;     // integers: row g, this lane's values
  float acc[4] = {};  // floats: mma accumulators, all 16 rows of x the same

  __device__ __forceinline__ void add(const uint8_t* cell, const uint8_t* x, int l) {
    if constexpr (T::kIntegers) {
#pragma unroll
      for (int u = 0; u < T::kCell / kUnit; ++u)
        lane += int_unit<T>(cell, u, load_ints(x + u * kIntUnit, l), l);
    } else {
      const auto* at = reinterpret_cast<const uint4*>(x) + l % 4;
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        h2 w[4];
        T::quarter(cell, 0, p, l, {}, w);
        const uint4 a = at[4 * p];
        mma(acc, a.x, 0, a.y, 0, w[0], w[1]);
        mma(acc, a.z, 0, a.w, 0, w[2], w[3]);
      }
    }
  }
  /// Row g's sum, in every lane of row g.
  __device__ __forceinline__ float row(int l, float scale) const {
    if constexpr (T::kIntegers) {
      return warp_sum<4>(lane);
    } else {  // lane t of any row holds rows 2t and 2t + 1
      const int from = l / 4 / 2;
      const float even = __shfl_sync(kFull, acc[0], from), odd = __shfl_sync(kFull, acc[1], from);
      return (l / 4 % 2 ? odd : even) * scale;
    }
  }
};

// ---- the kernel ------------------------------------------------------------------------------

/// A warp's ring: places for cells, where the next goes in and comes out.
struct Ring {
  uint8_t* places;
  uint64_t* full;  ///< kBulk: barriers of the places
  int last;        ///< places - 1, a power of two less one
  int in = 0, out = 0;
  uint32_t phase = 0;  ///< of the barrier at `out`
};

/// The cells this warp reads, in order: those of its share of each of its worker's tiles; with
/// kPair gate and up in turn.
template <class T, bool kPair>
struct Stream {
  const uint8_t* gate;  // this share of the tile now read
  const uint8_t* at;
  ptrdiff_t to_up;  // from gate to up
  size_t tile_step;
  uint32_t cell_step;
  int tile, end, n_workers, mine, left;
  bool up = false;

  __device__ __forceinline__ void issue(Ring& ring, int lane) {
    if (tile < end) {
      uint8_t* to = ring.places + ring.in * T::kBytes;
      if constexpr (kBulk) {
        if (lane == 0) copy_bulk(to, at, T::kBytes, ring.full + ring.in);
      } else {
        constexpr int kQuads = T::kBytes / 16;
#pragma unroll
        for (int i = 0; i < (kQuads + 31) / 32; ++i)
          if (i * 32 + lane < kQuads) copy_quad(to + (i * 32 + lane) * 16, at + (i * 32 + lane) * 16);
      }
      ring.in = (ring.in + 1) & ring.last;
      at += cell_step;
      if (--left == 0) {
        left = mine;
        if (!kPair || up) gate += tile_step, tile += n_workers;
        if (kPair) up = !up;
        at = kPair && up ? gate + to_up : gate;
      }
    }
    if constexpr (!kBulk) copy_commit();
  }
  /// Until the cell at ring.out is there for all lanes; all have then done with the one before it.
  __device__ __forceinline__ void wait(const Ring& ring) const {
    if constexpr (kBulk)
      barrier_wait(ring.full + ring.out, ring.phase);
    else if (ring.last == kMinRing - 1)
      copy_wait<kMinRing - 2>();
    else
      copy_wait<kMaxRing - 2>();
    __syncwarp();
  }
};

/// Tiles [first, end) of one type: what the block does with them. `begin` runs once, when the ring is
/// full and before the first cell is used: it waits for x and stages it.
template <class T, bool kPair, class Begin>
__device__ __forceinline__ void run_tiles(const MatvecParams& p, const TiledPart& base, int first, int end,
                                          uint8_t* x, Ring& ring, float* sums, float* squares, Best& best,
                                          Begin begin) {
  constexpr uint32_t kCellX = T::kCell / kUnit * unit_bytes<T>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, split = p.split;
  const int share = warp & (split - 1), mine = (p.n_cells - share + split - 1) >> p.split_log2;
  Stream<T, kPair> cells;
  cells.gate = cells.at =
      base.tiles + static_cast<size_t>(first - base.first_tile) * base.tile_bytes + share * T::kBytes;
  cells.to_up = kPair ? p.part[1].tiles - p.part[0].tiles : 0;
  cells.tile_step = static_cast<size_t>(p.n_workers) * base.tile_bytes;
  cells.cell_step = split * T::kBytes;
  cells.tile = first;
  cells.end = end;
  cells.n_workers = p.n_workers;
  cells.mine = cells.left = mine;

  // The lanes that write, one a row.
  const int row = split == 1 ? (lane % 4 ? -1 : lane / 4) : share == 0 && lane < kTileRows ? lane : -1;
  const auto part_of = [&](int t) -> const TiledPart& {
    return p.part[kPair ? 0 : t >= p.part[2].first_tile ? 2 : t >= p.part[1].first_tile ? 1 : 0];
  };
  // What a tile adds, asked for before its sum is known.
  const auto residual_of = [&](int t) {
    if (kPair || row < 0 || t >= end) return 0.0f;
    const TiledPart& part = part_of(t);
    const int out = (t - part.first_tile) * kTileRows + row;
    return part.residual && out < part.n_out ? part.residual[out] : 0.0f;
  };
  const uint8_t* x_first = x + share * kCellX;
  const uint8_t* x_at = x_first;
  int left = mine, tile = first, parity = 0;
  bool up = false;
  float factor = 1.0f, gate = 0, residual = 0;
  Sum<T> sum;
#pragma unroll 1
  for (int i = -ring.last; tile < end || i <= 0; ++i) {
    if (i == 0) {
      begin();
      factor = norm_factor(p, squares);
      residual = residual_of(first);
    }
    const bool use = i >= 0 && tile < end;
    if (use) cells.wait(ring);
    cells.issue(ring, lane);
    if (!use) continue;
    sum.add(ring.places + ring.out * T::kBytes, x_at, lane);
    ring.out = (ring.out + 1) & ring.last;
    ring.phase ^= ring.out == 0;
    x_at += split * kCellX;
    if (--left) continue;
    left = mine;
    x_at = x_first;
    float y = sum.row(lane, kPair && up ? p.part[1].scale : base.scale) * factor;
    sum = {};
    if (kPair && !up) {
      gate = y;
      up = true;
      continue;
    }
    up = false;
    const TiledPart& part = part_of(tile);
    const int out = (tile - part.first_tile) * kTileRows + row;
    tile += p.n_workers;
    const float adds = residual;
    residual = residual_of(tile);
    if (split > 1) {
      // [parity][sum or gate][row][warp]: a row's are read together
      float* own = sums + parity * 2 * warps * kTileRows;
      parity ^= 1;
      if (lane % 4 == 0) {
        own[lane / 4 * warps + warp] = y;
        if (kPair) own[(kTileRows + lane / 4) * warps + warp] = gate;
      }
      named_barrier(1 + warp / split, 32 * split);
      if (row < 0) continue;
      y = gate = 0;
#pragma unroll 4
      for (int w = warp; w < warp + split; ++w) {
        y += own[row * warps + w];
        if (kPair) gate += own[(kTileRows + row) * warps + w];
      }
    }
    if (row < 0 || out >= part.n_out) continue;
    if (kPair) {
      if (part.bias) gate += part.bias[out];
      if (p.part[1].bias) y += p.part[1].bias[out];
      y *= silu(gate);
    } else {
      if (part.bias) y += part.bias[out];
      y += adds;
      if (p.best) best = consider(best, y, out);
    }
    part.out[out] = y;
  }
}

/// Tiles [0, end_a) are of type A, the rest of B (a K mix keeps some attn_v in more bits); B's parts
/// begin at part[first_b].
template <class A, class B, bool kPair>
__device__ __forceinline__ void run(const MatvecParams& p) {
  REFLEX_DYNAMIC_SHARED(uint8_t, x);
  __shared__ float squares[32];
  __shared__ Best best_scratch[32];
  constexpr uint32_t kCellBytes = A::kBytes > B::kBytes ? A::kBytes : B::kBytes;
  const uint32_t warps = blockDim.x / 32;
  __shared__ uint64_t full[kMatvecThreads / 32][kMaxRing];
  const int warp = threadIdx.x / 32;
  uint8_t* rings = x + static_cast<uint32_t>(p.n_units) * unit_bytes<A>();
  auto* sums = reinterpret_cast<float*>(rings + warps * (p.ring * kCellBytes));
  Ring ring{rings + warp * (p.ring * kCellBytes), full[warp], p.ring - 1};
  if (kBulk) {
    if (threadIdx.x % 32 < kMaxRing) barrier_init(full[warp] + threadIdx.x % 32);
    barrier_inits_done();
    __syncwarp();
  }
  const int worker = static_cast<int>(blockIdx.x * warps + warp) >> p.split_log2;
  let_next_start();
  Best best{0, -1};
  run_tiles<A, kPair>(p, p.part[0], worker, p.end_a, x, ring, sums, squares, best, [&] {
    prefetch_norm(p);
    wait_for_inputs();
    stage_input<A>(p, x, squares);
    __syncthreads();
  });
  if constexpr (!std::is_same_v<A, B>) {
    static_assert(A::kNibbleOrder == B::kNibbleOrder && A::kIntegers && B::kIntegers && A::kCell == B::kCell);
    __syncthreads();  // the sums' places start over
    const int first = p.begin_b + worker;
    run_tiles<B, false>(p, p.part[p.first_b], first < p.end_a ? first + p.n_workers : first, p.end_b, x, ring,
                        sums, squares, best, [] {});
  }
  if (kPair || !p.best) return;
  best = block_best(best, best_scratch);
  if (threadIdx.x == 0) p.best[blockIdx.x] = best;
}

}  // namespace

#define REFLEX_MATVEC(name, a, b, pair)                                                \
  REFLEX_KERNEL(name, MatvecParams, kMatvecThreads, kBlocksPerSm<Tile<GgmlType::a>>) { \
    run<Tile<GgmlType::a>, Tile<GgmlType::b>, pair>(p);                                \
  }
#define REFLEX_ONE(t) REFLEX_MATVEC(matvec_##t, t, t, false) REFLEX_MATVEC(matvec_pair_##t, t, t, true)
#define REFLEX_TWO(a, b) REFLEX_MATVEC(matvec_##a##_##b, a, b, false)
REFLEX_TILED(REFLEX_ONE)
REFLEX_TILED_PAIRS(REFLEX_TWO)

}  // namespace reflex::cuda
