// One row, two tiles a warp at a time: matvec.cu for the types in super-blocks of 256, whose products are
// bound by instructions and by reads of x from shared memory rather than by the bytes of W. Both tiles meet
// the same x, which is read once: two tiles in a row of one matrix, or with kPair a tile of gate and one of
// up. A place of a warp's ring holds a cell of each; one barrier counts both in. Refuses: types whose x is
// f16.
#include "backend/cuda/matvec.cuh"

namespace reflex::cuda {

namespace {

/// A warp's ring: places for two cells, where the next go in and come out.
struct Ring {
  uint8_t* bytes;
  uint64_t* full;  ///< kBulk: barriers of the places
  int places;
  int in = 0, out = 0;
  uint32_t phase = 0;  ///< of the barrier at `out`

  __device__ __forceinline__ int next(int place) const { return place + 1 == places ? 0 : place + 1; }
};

/// Tiles of one type that lie one after the other. An item is two of them; with kPair one, whose second is
/// its match in the other matrix.
struct Run {
  const uint8_t* tiles;
  uint32_t tile_bytes;
  int first_tile;  ///< as the parts count
  int n_tiles, n_items;
};

/// The cells that this warp reads, in order: those of its share of each of its worker's items.
template <class T, bool kPair>
struct Stream {
  const Run& run;
  ptrdiff_t to_up;  // kPair: from gate to up
  uint32_t share_at, cell_step;
  int item, n_workers, mine, left;
  const uint8_t* at;
  ptrdiff_t to_second;

  __device__ __forceinline__ void begin_item() {
    left = mine;
    at = run.tiles + static_cast<size_t>(kPair ? item : 2 * item) * run.tile_bytes + share_at;
    // An odd last tile is its own second, whose sums nobody takes.
    to_second = kPair ? to_up : 2 * item + 1 < run.n_tiles ? static_cast<ptrdiff_t>(run.tile_bytes) : 0;
  }
  __device__ __forceinline__ void issue(Ring& ring, int lane) {
    if (item < run.n_items) {
      uint8_t* to = ring.bytes + ring.in * 2 * T::kBytes;
      if constexpr (kBulk) {
        if (lane == 0) {
          barrier_expect(ring.full + ring.in, 2 * T::kBytes);
          copy_bulk_expected(to, at, T::kBytes, ring.full + ring.in);
          copy_bulk_expected(to + T::kBytes, at + to_second, T::kBytes, ring.full + ring.in);
        }
      } else {
        constexpr int kQuads = T::kBytes / 16;
#pragma unroll 1
        for (int side = 0; side < 2; ++side)
          for (int i = lane; i < kQuads; i += 32)
            copy_quad(to + side * T::kBytes + i * 16, at + side * to_second + i * 16);
      }
      ring.in = ring.next(ring.in);
      at += cell_step;
      if (--left == 0) {
        item += n_workers;
        begin_item();
      }
    }
    if constexpr (!kBulk) copy_commit();
  }
  /// Until the cells at ring.out are there for all lanes; all have then done with those before them.
  __device__ __forceinline__ void wait(const Ring& ring) const {
    if constexpr (kBulk) {
      barrier_wait(ring.full + ring.out, ring.phase);
    } else {
      switch (ring.places) {
        case 2:
          copy_wait<0>();
          break;
        case 3:
          copy_wait<1>();
          break;
        default:
          static_assert(kMaxPlaces == 4);
          copy_wait<2>();
      }
    }
    __syncwarp();
  }
};

/// A run of items: what the block does with it. `begin` runs once, when the ring is full and before the first
/// cells are used: it waits for x and stages it.
template <class T, bool kPair, class Begin>
__device__ __forceinline__ void run_items(const MatvecParams& p, const Run& run, int first, uint8_t* x,
                                          Ring& ring, float* sums, const float* squares, Best& best,
                                          Begin begin) {
  constexpr uint32_t kCellX = T::kCell / kUnit * kIntUnit;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, split = p.split;
  const int share = warp & (split - 1), mine = (p.n_cells - share + split - 1) >> p.split_log2;
  Stream<T, kPair> cells{run};
  cells.to_up = kPair ? p.part[1].tiles - p.part[0].tiles : 0;
  cells.share_at = share * T::kBytes;
  cells.cell_step = split * T::kBytes;
  cells.item = first;
  cells.n_workers = p.n_workers;
  cells.mine = mine;
  cells.begin_item();

  // The lanes that write, one for each of an item's rows: sides of 8, of which kPair has one.
  const int side = split == 1 ? lane % 4 : lane / kTileRows;
  const int row = split == 1 ? lane / 4 : lane % kTileRows;
  const bool writes = (split == 1 || share == 0) && side < (kPair ? 1 : 2);
  const auto tile_of = [&](int item) { return kPair ? item : 2 * item + side; };
  const auto part_of = [&](int tile) -> const TiledPart& {
    const int t = run.first_tile + tile;
    return p.part[kPair ? 0 : t >= p.part[2].first_tile ? 2 : t >= p.part[1].first_tile ? 1 : 0];
  };
  // What an item adds, asked for before its sum is known.
  const auto residual_of = [&](int item) {
    if (kPair || !writes || item >= run.n_items || tile_of(item) >= run.n_tiles) return 0.0f;
    const TiledPart& part = part_of(tile_of(item));
    const int out = (run.first_tile + tile_of(item) - part.first_tile) * kTileRows + row;
    return part.residual && out < part.n_out ? part.residual[out] : 0.0f;
  };
  const uint8_t* x_first = x + share * kCellX;
  const uint8_t* x_at = x_first;
  int left = mine, item = first, parity = 0;
  float factor = 1.0f, residual = 0, a = 0, b = 0;
#pragma unroll 1
  for (int i = 1 - ring.places; item < run.n_items || i <= 0; ++i) {
    if (i == 0) {
      begin();
      factor = norm_factor(p, squares);
      residual = residual_of(first);
    }
    const bool use = i >= 0 && item < run.n_items;
    if (use) cells.wait(ring);
    cells.issue(ring, lane);
    if (!use) continue;
    const uint8_t* cell = ring.bytes + ring.out * 2 * T::kBytes;
#pragma unroll
    for (int u = 0; u < T::kCell / kUnit; ++u) {
      const IntInput in = load_ints(x_at + u * kIntUnit, lane);
      a += int_unit<T>(cell, u, in, lane);
      b += int_unit<T>(cell + T::kBytes, u, in, lane);
    }
    ring.out = ring.next(ring.out);
    ring.phase ^= ring.out == 0;
    x_at += split * kCellX;
    if (--left) continue;
    left = mine;
    x_at = x_first;
    float first_sum = warp_sum<4>(a) * factor, second_sum = warp_sum<4>(b) * factor;
    a = b = 0;
    const int tile = tile_of(item);
    item += p.n_workers;
    const float adds = residual;
    residual = residual_of(item);
    if (split > 1) {
      // [parity][side][row][warp]: a row's are read together
      float* own = sums + parity * 2 * warps * kTileRows;
      parity ^= 1;
      if (lane % 4 == 0) {
        own[lane / 4 * warps + warp] = first_sum;
        own[(kTileRows + lane / 4) * warps + warp] = second_sum;
      }
      named_barrier(1 + warp / split, 32 * split);
      if (!writes) continue;
      first_sum = second_sum = 0;
#pragma unroll 4
      for (int w = warp; w < warp + split; ++w) {
        if (kPair || side == 0) first_sum += own[row * warps + w];
        if (kPair || side == 1) second_sum += own[(kTileRows + row) * warps + w];
      }
    }
    if (!writes || tile >= run.n_tiles) continue;
    const TiledPart& part = part_of(tile);
    const int out = (run.first_tile + tile - part.first_tile) * kTileRows + row;
    if (out >= part.n_out) continue;
    float y = second_sum;
    if (kPair) {
      if (part.bias) first_sum += part.bias[out];
      if (p.part[1].bias) y += p.part[1].bias[out];
      y *= silu(first_sum);
    } else {
      if (side == 0) y = first_sum;
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
  static_assert(A::kIntegers && B::kIntegers && A::kNibbleOrder == B::kNibbleOrder && A::kCell == B::kCell);
  REFLEX_DYNAMIC_SHARED(uint8_t, x);
  __shared__ float squares[32];
  __shared__ Best best_scratch[32];
  constexpr uint32_t kCellBytes = A::kBytes > B::kBytes ? A::kBytes : B::kBytes;
  const uint32_t warps = blockDim.x / 32;
  __shared__ uint64_t full[kMatvecThreads / 32][kMaxPlaces];
  const int warp = threadIdx.x / 32;
  const uint32_t ring_bytes = static_cast<uint32_t>(p.ring) * 2 * kCellBytes;
  uint8_t* rings = x + static_cast<uint32_t>(p.n_units) * kIntUnit;
  auto* sums = reinterpret_cast<float*>(rings + warps * ring_bytes);
  Ring ring{rings + warp * ring_bytes, full[warp], p.ring};
  if (kBulk) {
    if (threadIdx.x % 32 < kMaxPlaces) barrier_init(full[warp] + threadIdx.x % 32);
    barrier_inits_done();
    __syncwarp();
  }
  const int worker = static_cast<int>(blockIdx.x * warps + warp) >> p.split_log2;
  let_next_start();
  Best best{0, -1};
  const Run run_a{p.part[0].tiles, p.part[0].tile_bytes, 0, p.end_a, kPair ? p.end_a : (p.end_a + 1) / 2};
  run_items<A, kPair>(p, run_a, worker, x, ring, sums, squares, best, [&] {
    prefetch_norm(p);
    wait_for_inputs();
    stage_input<A>(p, x, squares);
    __syncthreads();
  });
  if constexpr (!std::is_same_v<A, B>) {
    __syncthreads();  // the sums' places start over
    // Workers go on in turn where the first run's items ended.
    const TiledPart& part = p.part[p.first_b];
    const int n_tiles = p.end_b - p.end_a, over = run_a.n_items % p.n_workers;
    const Run run_b{part.tiles, part.tile_bytes, p.end_a, n_tiles, (n_tiles + 1) / 2};
    run_items<B, false>(p, run_b, worker >= over ? worker - over : worker - over + p.n_workers, x, ring, sums,
                        squares, best, [] {});
  }
  if (kPair || !p.best) return;
  best = block_best(best, best_scratch);
  if (threadIdx.x == 0) p.best[blockIdx.x] = best;
}

}  // namespace

#define REFLEX_MATVEC(name, a, b, pair) \
  REFLEX_KERNEL(name, MatvecParams, kMatvecThreads, 1) { run<Tile<GgmlType::a>, Tile<GgmlType::b>, pair>(p); }
#define REFLEX_ONE(t) \
  REFLEX_MATVEC(matvec_two_##t, t, t, false) REFLEX_MATVEC(matvec_two_pair_##t, t, t, true)
#define REFLEX_TWO(a, b) REFLEX_MATVEC(matvec_two_##a##_##b, a, b, false)
REFLEX_TILED_256(REFLEX_ONE)
REFLEX_TILED_PAIRS(REFLEX_TWO)

}  // namespace reflex::cuda
