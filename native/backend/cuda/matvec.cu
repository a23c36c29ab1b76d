// One row: y = W norm(x) [+ bias + residual], or silu(W_gate n(x)) * (W_up n(x)), W in tiles.
// Bound by the bytes of W as long as little else is issued: quantised weights meet x as integers
// (dp4a), x being 15 bits per value in two planes of bytes with a scale per 32, so that what rounding
// costs is a thousandth of what 8 bits would. 16-bit floats go through the tensor cores. Weights of
// the first cells are on their way before the kernel waits for its input.
// Refuses: more than one row (matmul.cu).
#include <type_traits>

#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

constexpr int kHold = 4;            ///< quads of x a thread keeps between norm and staging
constexpr int kPlane = 127 * 128;   ///< largest |x| as an integer: hi * 128 + lo, both bytes
constexpr uint32_t kIntUnit = 320;  ///< bytes of shared memory per unit: planes and factors
constexpr uint32_t kHalfUnit = kUnit * 2;

template <class T>
constexpr uint32_t unit_bytes() {
  return T::kIntegers ? kIntUnit : kHalfUnit;
}

// ---- x into shared memory ------------------------------------------------------------------

/// Four values from c as integers. A unit is [plane][16-byte half][lane t][16] and then per lane
/// {step, sum of the first 16, of the last 16, of all 32}; eight threads make a lane's 32 values.
template <bool kNibbleOrder>
__device__ __forceinline__ void stage_ints(uint8_t* unit, int c, float4 v) {
  // As bits, the magnitude of a NaN is the largest of all: it reaches every sum.
  uint32_t top = max(max(__float_as_uint(fabsf(v.x)), __float_as_uint(fabsf(v.y))),
                     max(__float_as_uint(fabsf(v.z)), __float_as_uint(fabsf(v.w))));
#pragma unroll
  for (int m = 1; m < 8; m *= 2) top = max(top, __shfl_xor_sync(kFull, top, m));
  const float largest = __uint_as_float(top), per_step = largest > 0 ? kPlane / largest : 0.0f;
  const int q[4] = {__float2int_rn(v.x * per_step), __float2int_rn(v.y * per_step),
                    __float2int_rn(v.z * per_step), __float2int_rn(v.w * per_step)};
  uint32_t hi = 0, lo = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int h = (q[i] + 64) >> 7;
    hi |= (static_cast<uint32_t>(h) & 0xFF) << 8 * i;
    lo |= (static_cast<uint32_t>(q[i] - (h << 7)) & 0xFF) << 8 * i;
  }
  const int word = c % 32 / 4, t = c % kUnit / 32;
  if constexpr (kNibbleOrder) {  // of 8 values: 0 4 1 5 to the even word, 2 6 3 7 to the odd one
    const uint32_t other_hi = __shfl_xor_sync(kFull, hi, 1), other_lo = __shfl_xor_sync(kFull, lo, 1);
    hi = word % 2 ? __byte_perm(other_hi, hi, 0x7362) : __byte_perm(hi, other_hi, 0x5140);
    lo = word % 2 ? __byte_perm(other_lo, lo, 0x7362) : __byte_perm(lo, other_lo, 0x5140);
  }
  uint8_t* at = unit + word / 4 * 64 + t * 16 + word % 4 * 4;
  *reinterpret_cast<uint32_t*>(at) = hi;
  *reinterpret_cast<uint32_t*>(at + 128) = lo;
  int sum = q[0] + q[1] + q[2] + q[3];
  sum += __shfl_xor_sync(kFull, sum, 1);
  sum += __shfl_xor_sync(kFull, sum, 2);
  const int last = __shfl_xor_sync(kFull, sum, 4);
  if (word == 0)
    *reinterpret_cast<float4*>(unit + 256 + t * 16) = {
        largest / kPlane, static_cast<float>(sum), static_cast<float>(last), static_cast<float>(sum + last)};
}

template <class T>
__device__ __forceinline__ void stage(uint8_t* x, int c, float4 v) {
  uint8_t* unit = x + c / kUnit * unit_bytes<T>();
  if constexpr (T::kIntegers)
    stage_ints<T::kNibbleOrder>(unit, c, v);
  else
    *reinterpret_cast<uint2*>(unit + 2 * x_index(c % kUnit)) = {activation_pair(v.x, v.y),
                                                                activation_pair(v.z, v.w)};
}

/// What of the norm's weight a thread will need; before the wait, since it is constant.
struct Held {
  float4 weight[kHold];
};
__device__ __forceinline__ bool fits_held(const MatvecParams& p) {
  return p.n_units * kUnit <= kHold * 4 * static_cast<int>(blockDim.x);
}
__device__ __forceinline__ float4 quad_at(const float* p, int c, int width) {
  return c < width ? *reinterpret_cast<const float4*>(p + c) : float4{0, 0, 0, 0};
}
__device__ __forceinline__ float4 scaled(float4 v, float f, float4 w) {
  return {v.x * f * w.x, v.y * f * w.y, v.z * f * w.z, v.w * f * w.w};
}
__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w); }

template <class T>
__device__ __forceinline__ void stage_input(const MatvecParams& p, const Held& held, uint8_t* x,
                                            float* scratch) {
  const int padded = p.n_units * kUnit, first = threadIdx.x * 4, step = blockDim.x * 4;
  if (!p.norm_weight) {
    for (int c = first; c < padded; c += step) stage<T>(x, c, quad_at(p.x, c, p.width));
    return;
  }
  const float mean = 1.0f / static_cast<float>(p.width);
  float sum = 0;
  if (fits_held(p)) {
    float4 v[kHold];
#pragma unroll
    for (int i = 0; i < kHold; ++i) v[i] = quad_at(p.x, first + i * step, p.width);
#pragma unroll
    for (int i = 0; i < kHold; ++i) sum += squares(v[i]);
    const float factor = rsqrtf(block_sum(sum, scratch) * mean + p.norm_eps);
#pragma unroll
    for (int i = 0; i < kHold; ++i)
      if (first + i * step < padded) stage<T>(x, first + i * step, scaled(v[i], factor, held.weight[i]));
    return;
  }
  for (int c = first; c < padded; c += step) sum += squares(quad_at(p.x, c, p.width));
  const float factor = rsqrtf(block_sum(sum, scratch) * mean + p.norm_eps);
  for (int c = first; c < padded; c += step)
    stage<T>(x, c, scaled(quad_at(p.x, c, p.width), factor, quad_at(p.norm_weight, c, p.width)));
}

// ---- products ------------------------------------------------------------------------------

/// This lane's share of the sum of row g over unit u of the cell.
template <class T, int u>
__device__ __forceinline__ float int_unit(const typename T::Raw& raw, const uint8_t* x, int lane) {
  const auto* at = reinterpret_cast<const uint4*>(x + u * kIntUnit + lane % 4 * 16);
  const uint4 h0 = at[0], h1 = at[4], l0 = at[8], l1 = at[12];
  const float4 f = *reinterpret_cast<const float4*>(at + 16);
  const uint32_t h[8] = {h0.x, h0.y, h0.z, h0.w, h1.x, h1.y, h1.z, h1.w};
  const uint32_t l[8] = {l0.x, l0.y, l0.z, l0.w, l1.x, l1.y, l1.z, l1.w};
  int hi[2] = {}, lo[2] = {};  // of the first and last 16 values
  const auto quarter = [&](auto p_constant) {
    constexpr int p = decltype(p_constant)::value;
    uint32_t q[2];
    T::template ints<u, p>(raw, q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hi[p / 2] = __dp4a(static_cast<int>(q[i]), static_cast<int>(h[2 * p + i]), hi[p / 2]);
      lo[p / 2] = __dp4a(static_cast<int>(q[i]), static_cast<int>(l[2 * p + i]), lo[p / 2]);
    }
  };
  quarter(std::integral_constant<int, 0>{});
  quarter(std::integral_constant<int, 1>{});
  quarter(std::integral_constant<int, 2>{});
  quarter(std::integral_constant<int, 3>{});
  const Factors s = T::template factors<u>(raw, lane);
  constexpr auto kOffset = static_cast<float>(T::kOffset);
  if constexpr (T::kHalves) {
    const float a = static_cast<float>((hi[0] << 7) + lo[0]) - kOffset * f.y;
    const float b = static_cast<float>((hi[1] << 7) + lo[1]) - kOffset * f.z;
    return f.x * (s.a * a + s.b * b);
  } else {
    float a = static_cast<float>(((hi[0] + hi[1]) << 7) + (lo[0] + lo[1]));
    if constexpr (T::kOffset != 0) a -= kOffset * f.w;
    return f.x * (T::kHasMin ? s.a * a + s.b * f.w : s.a * a);
  }
}

/// Sums of a tile's rows under way in one warp.
template <class T>
struct Sum {
  float lane = 0;        // integers: row g, this lane's values
  float acc[2][4] = {};  // floats: mma accumulators, all 16 rows of x the same

  __device__ __forceinline__ void add(const typename T::Raw& raw, const uint8_t* x, int l) {
    if constexpr (T::kIntegers) {
      lane += int_unit<T, 0>(raw, x, l);
      if constexpr (T::kCell == 2 * kUnit) lane += int_unit<T, 1>(raw, x, l);
    } else {
      const auto* at = reinterpret_cast<const uint4*>(x) + l % 4;
      const Scales none{};
      const auto quarter = [&](auto p_constant) {
        constexpr int p = decltype(p_constant)::value;
        h2 w[4];
        T::template quarter<0, p>(raw, none, w);
        const uint4 a = at[4 * p];
        mma(acc[0], a.x, 0, a.y, 0, w[0], w[1]);
        mma(acc[1], a.z, 0, a.w, 0, w[2], w[3]);
      };
      quarter(std::integral_constant<int, 0>{});
      quarter(std::integral_constant<int, 1>{});
      quarter(std::integral_constant<int, 2>{});
      quarter(std::integral_constant<int, 3>{});
    }
  }
  /// Row g's sum, in every lane of row g.
  __device__ __forceinline__ float row(int l, float scale) const {
    if constexpr (T::kIntegers) {
      return warp_sum<4>(lane);
    } else {
      const float even = (acc[0][0] + acc[1][0]) * scale, odd = (acc[0][1] + acc[1][1]) * scale;
      const int g = l / 4;  // lane t of any row holds rows 2t and 2t + 1
      const float e = __shfl_sync(kFull, even, g / 2), o = __shfl_sync(kFull, odd, g / 2);
      return g % 2 ? o : e;
    }
  }
};

// ---- the kernel ------------------------------------------------------------------------------

__device__ __forceinline__ const TiledPart& part_of(const MatvecParams& p, int tile) {
  return p.part[tile >= p.part[2].first_tile ? 2 : tile >= p.part[1].first_tile ? 1 : 0];
}

/// The cells this warp reads, in order: those of its share of each of its worker's tiles, for a
/// swiglu gate and up in turn.
template <class T>
struct Cells {
  const MatvecParams& p;
  int end, share, mine, lane;
  int tile, left = 0;
  bool up = false;
  const uint8_t* at = nullptr;

  __device__ __forceinline__ Cells(const MatvecParams& params, int first, int last, int share_of_split,
                                   int n_mine, int lane_of_warp)
      : p(params), end(last), share(share_of_split), mine(n_mine), lane(lane_of_warp), tile(first) {
    begin_tile();
  }
  __device__ __forceinline__ void begin_tile() {
    if (tile >= end) return;
    const bool pair = p.epilogue == Epilogue::swiglu;
    const TiledPart& part = pair ? p.part[up] : part_of(p, tile);
    const int local = pair ? tile : tile - part.first_tile;
    at = part.tiles + static_cast<size_t>(local) * part.tile_bytes + static_cast<uint32_t>(share * T::kBytes);
    left = mine;
  }
  __device__ __forceinline__ void load(typename T::Raw& raw) {
    if (tile >= end) return;
    T::load(raw, at, lane);
    at += p.split * T::kBytes;
    if (--left) return;
    if (p.epilogue == Epilogue::swiglu) up = !up;
    if (!up) tile += p.n_workers;
    begin_tile();
  }
};

template <class T>
struct Range {
  const MatvecParams& p;
  int first, last;  // tiles
  int share, mine;
  Cells<T> cells;
  typename T::Raw raw[3];

  __device__ __forceinline__ Range(const MatvecParams& params, int first_tile, int last_tile)
      : p(params),
        first(first_tile),
        last(last_tile),
        share((threadIdx.x / 32) & (params.split - 1)),
        mine((params.n_cells - share + params.split - 1) / params.split),
        cells(params, first_tile, last_tile, share, mine, threadIdx.x % 32) {
    cells.load(raw[0]);
    cells.load(raw[1]);
  }

  __device__ __forceinline__ float sum_tile(const uint8_t* x, float scale) {
    constexpr uint32_t kCellBytes = T::kCell / kUnit * unit_bytes<T>();
    const int lane = threadIdx.x % 32;
    const uint8_t* at = x + static_cast<uint32_t>(share) * kCellBytes;
    Sum<T> sum;
    for (int i = 0; i < mine; ++i) {
      cells.load(raw[2]);
      sum.add(raw[0], at, lane);
      at += static_cast<uint32_t>(p.split) * kCellBytes;
      raw[0] = raw[1];
      raw[1] = raw[2];
    }
    return sum.row(lane, scale);
  }

  /// sums: [2][2][warps][8] parity, part of a pair, warp, row
  __device__ __forceinline__ void run(const uint8_t* x, float* sums, int& parity, Best& best) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, split = p.split;
    const bool pair = p.epilogue == Epilogue::swiglu;
    // The lanes that write: one a row.
    const int row = split == 1 ? (lane % 4 ? -1 : lane / 4) : share == 0 && lane < kTileRows ? lane : -1;
    for (int tile = first; tile < last; tile += p.n_workers) {
      const TiledPart& part = pair ? p.part[0] : part_of(p, tile);
      const int out = (tile - part.first_tile) * kTileRows + row;
      const bool writes = row >= 0 && out < part.n_out;
      const float residual = writes && part.residual ? part.residual[out] : 0.0f;
      float y = sum_tile(x, part.scale), up = pair ? sum_tile(x, p.part[1].scale) : 0.0f;
      if (split > 1) {
        float* mine_sums = sums + parity * 2 * warps * kTileRows;
        parity ^= 1;
        if (lane % 4 == 0) {
          mine_sums[warp * kTileRows + lane / 4] = y;
          if (pair) mine_sums[(warps + warp) * kTileRows + lane / 4] = up;
        }
        named_barrier(1 + warp / split, 32 * split);
        if (row < 0) continue;
        y = up = 0;
        for (int w = warp; w < warp + split; ++w) {
          y += mine_sums[w * kTileRows + row];
          if (pair) up += mine_sums[(warps + w) * kTileRows + row];
        }
      }
      if (!writes) continue;
      if (part.bias) y += part.bias[out];
      if (pair) {
        if (p.part[1].bias) up += p.part[1].bias[out];
        y = silu(y) * up;
      }
      y += residual;
      part.out[out] = y;
      best = consider(best, y, out);
    }
  }
};

/// Tiles [0, end_a) are of type A, the rest of B (a K mix keeps some attn_v in more bits).
template <class A, class B>
__device__ __forceinline__ void run(const MatvecParams& p) {
  extern __shared__ __align__(16) uint8_t x[];
  __shared__ float scratch[32];
  __shared__ Best best_scratch[32];
  static_assert(unit_bytes<A>() <= kMatvecUnitBytes);
  auto* sums = reinterpret_cast<float*>(x + static_cast<uint32_t>(p.n_units) * unit_bytes<A>());
  const int worker = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) / p.split;
  let_next_start();
  Range<A> a(p, worker, p.end_a);
  Held held;
  if (p.norm_weight && fits_held(p)) {
#pragma unroll
    for (int i = 0; i < kHold; ++i)
      held.weight[i] = quad_at(p.norm_weight, (threadIdx.x + i * blockDim.x) * 4, p.width);
  }
  wait_for_inputs();
  stage_input<A>(p, held, x, scratch);
  __syncthreads();
  int parity = 0;
  Best best{0, -1};
  a.run(x, sums, parity, best);
  if constexpr (!std::is_same_v<A, B>) {
    static_assert(A::kNibbleOrder == B::kNibbleOrder && A::kIntegers && B::kIntegers && A::kCell == B::kCell);
    const int first = p.begin_b + worker;
    Range<B> b(p, first < p.end_a ? first + p.n_workers : first, p.end_b);
    b.run(x, sums, parity, best);
  }
  if (!p.best) return;
  best = block_best(best, best_scratch);
  if (threadIdx.x == 0) p.best[blockIdx.x] = best;
}

}  // namespace

#define REFLEX_MATVEC(name, a, b)                              \
  extern "C" __global__ void __launch_bounds__(kMatvecThreads) \
      matvec_##name(const __grid_constant__ MatvecParams p) {  \
    run<Tile<GgmlType::a>, Tile<GgmlType::b>>(p);              \
  }
#define REFLEX_ONE(t) REFLEX_MATVEC(t, t, t)
#define REFLEX_TWO(a, b) REFLEX_MATVEC(a##_##b, a, b)
REFLEX_TILED(REFLEX_ONE)
REFLEX_TILED_PAIRS(REFLEX_TWO)

}  // namespace reflex::cuda
