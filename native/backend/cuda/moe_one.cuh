// One row against an expert's tiles, and gate and up of every expert chosen: shared by moe_one.cu and
// moe_one_limited.cu. Bound by the bytes of the experts: a warp asks for its first batch of cells before x is
// staged. Quantised weights meet x as integers, 15 bits a value in two planes of bytes, as in matvec.cu;
// 16-bit floats in f32.
#pragma once
#include "backend/cuda/clamp.cuh"
#include "backend/cuda/integer_input.cuh"
#include "backend/cuda/moe_params.h"

namespace reflex::cuda {

inline constexpr uint32_t kIntUnit = 320, kFloatUnit = kUnit * 4;
static_assert(kFloatUnit <= kDotUnitBytes);

/// What a lane holds of one unit: its 32 values of row g.
template <class T, bool kInts = T::kIntegers>
struct Packed {
  static constexpr uint32_t kUnitBytes = kIntUnit;
  typename T::Bits bits;
  Factors factors;

  __device__ __forceinline__ void load(const uint8_t* cell, int u, int lane) {
    bits = T::bits(cell, u, lane);
    factors = T::factors(cell, u, lane);
  }
  __device__ __forceinline__ float dot(const uint8_t* x, int lane) const {
    const auto* at = reinterpret_cast<const uint4*>(x + lane % 4 * 16);
    const uint4 h0 = at[0], h1 = at[4], l0 = at[8], l1 = at[12];
    const float4 f = *reinterpret_cast<const float4*>(at + 16);
    const uint32_t h[8] = {h0.x, h0.y, h0.z, h0.w, h1.x, h1.y, h1.z, h1.w};
    const uint32_t l[8] = {l0.x, l0.y, l0.z, l0.w, l1.x, l1.y, l1.z, l1.w};
    int hi[2] = {}, lo[2] = {};  // of the first and last 16 values
    quarter<0>(h, l, hi, lo);
    quarter<1>(h, l, hi, lo);
    quarter<2>(h, l, hi, lo);
    quarter<3>(h, l, hi, lo);
    constexpr auto kOffset = static_cast<float>(T::kOffset);
    if constexpr (T::kHalves) {
      const float a = static_cast<float>((hi[0] << 7) + lo[0]) - kOffset * f.y;
      const float b = static_cast<float>((hi[1] << 7) + lo[1]) - kOffset * f.z;
      return f.x * (factors.a * a + factors.b * b);
    } else {
      float a = static_cast<float>(((hi[0] + hi[1]) << 7) + (lo[0] + lo[1]));
      if constexpr (T::kOffset != 0) a -= kOffset * f.w;
      return f.x * (T::kHasMin ? factors.a * a + factors.b * f.w : factors.a * a);
    }
  }

 private:
  template <int p>
  __device__ __forceinline__ void quarter(const uint32_t* h, const uint32_t* l, int* hi, int* lo) const {
    uint32_t q[2];
    T::template ints<p>(bits, q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hi[p / 2] = __dp4a(static_cast<int>(q[i]), static_cast<int>(h[2 * p + i]), hi[p / 2]);
      lo[p / 2] = __dp4a(static_cast<int>(q[i]), static_cast<int>(l[2 * p + i]), lo[p / 2]);
    }
  }
};

/// 16-bit floats. A unit of x is 128 f32.
template <class T>
struct Packed<T, false> {
  static constexpr uint32_t kUnitBytes = kFloatUnit;
  h2 w[4][4];

  __device__ __forceinline__ void load(const uint8_t* cell, int u, int lane) {
#pragma unroll
    for (int p = 0; p < 4; ++p) T::quarter(cell, u, p, lane, {}, w[p]);
  }
  __device__ __forceinline__ float dot(const uint8_t* x, int lane) const {
    const auto* at = reinterpret_cast<const float4*>(x) + lane % 4 * 8;
    float sum = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float4 a = at[2 * p], b = at[2 * p + 1];
      const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum += f16_value(w[p][i] & 0xFFFF) * v[2 * i] + f16_value(w[p][i] >> 16) * v[2 * i + 1];
    }
    return sum * (1.0f / T::kScale);
  }
};

/// n_units units of x (width, zero beyond) to shared memory, by the whole block.
template <class T>
__device__ __forceinline__ void stage(const float* x, int width, int n_units, uint8_t* to) {
#pragma unroll 1
  for (int c = threadIdx.x * 4; c < n_units * kUnit; c += kExpertThreads * 4) {
    float v[4] = {};
    if (c + 3 < width) {
      const float4 quad = *reinterpret_cast<const float4*>(x + c);
      v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w;
    }
    uint8_t* unit = to + c / kUnit * Packed<T>::kUnitBytes;
    if constexpr (T::kIntegers)
      stage_ints<T::kNibbleOrder>(unit, c, v);
    else
      *reinterpret_cast<float4*>(unit + c % kUnit * 4) = {v[0], v[1], v[2], v[3]};
  }
}

/// Units that are asked for at once: more of the small ones.
template <class T>
constexpr int batch() {
  return !T::kIntegers ? 1 : sizeof(Packed<T>) > 32 ? 2 : 4;
}

/// This warp's units of a tile: those of cells share, share + split, ...
template <class T>
struct Units {
  static constexpr int kPerCell = T::kCell / kUnit;
  const uint8_t* tile;
  int share, split_log2, n;  ///< n units in all

  __device__ __forceinline__ Units(const uint8_t* tile, int share, int split_log2, int n_cells)
      : tile(tile),
        share(share),
        split_log2(split_log2),
        n(((n_cells - share + (1 << split_log2) - 1) >> split_log2) * kPerCell) {}
  __device__ __forceinline__ int cell(int i) const { return share + (i / kPerCell << split_log2); }
  __device__ __forceinline__ void load(Packed<T>& p, int i, int lane) const {
    if (i < n) p.load(tile + static_cast<uint32_t>(cell(i)) * T::kBytes, i % kPerCell, lane);
  }
  __device__ __forceinline__ const uint8_t* x_of(const uint8_t* x, int i) const {
    return x + (cell(i) * kPerCell + i % kPerCell) * Packed<T>::kUnitBytes;
  }
};

/// What is kept of an expert's gate and up.
__device__ __forceinline__ float gated(const GateUpParams&, float gate, float up) { return silu(gate) * up; }
__device__ __forceinline__ float gated(const LimitedGateUpParams& p, float gate, float up) {
  return clamped_silu(gate, up, p.limit);
}

template <class T, class P>
__device__ __forceinline__ void gate_up(const P& p) {
  constexpr int kBatch = batch<T>();
  REFLEX_DYNAMIC_SHARED(uint8_t, x);
  __shared__ float sums[2][kExpertWarps][kTileRows];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = 1 << p.split_log2;
  const int share = warp & (split - 1), per_block = kExpertWarps >> p.split_log2;
  const int n_items = p.n_used * p.n_tiles;
  wait_for_inputs();
  let_next_start();  // not before: moe_down relies on the choice being there when it starts
  bool staged = false;
#pragma unroll 1
  for (int first = blockIdx.x * per_block; first < n_items; first += gridDim.x * per_block) {
    const int item = min(first + (warp >> p.split_log2), n_items - 1);  // those beyond repeat the last
    const int k = item / p.n_tiles, tile = item - k * p.n_tiles, e = p.ids[k];
    const uint8_t* at = p.stack + static_cast<size_t>(p.slot_of ? p.slot_of[e] : e) * p.slot_bytes +
                        static_cast<size_t>(tile) * p.tile_bytes;
    const Units<T> gates(at, share, p.split_log2, p.n_cells),
        ups(at + p.to_up, share, p.split_log2, p.n_cells);
    Packed<T> g[kBatch], u[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) gates.load(g[j], j, lane), ups.load(u[j], j, lane);
    if (!staged) {
      stage<T>(p.x, p.width, p.n_cells * Units<T>::kPerCell, x);
      staged = true;
    }
    __syncthreads();  // also: the sums of the round before have been read
    float gate = 0, up = 0;
#pragma unroll 1
    for (int i = 0; i < gates.n; i += kBatch) {
      if (i > 0)
#pragma unroll
        for (int j = 0; j < kBatch; ++j) gates.load(g[j], i + j, lane), ups.load(u[j], i + j, lane);
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (i + j < gates.n) {
          const uint8_t* unit = gates.x_of(x, i + j);
          gate += g[j].dot(unit, lane);
          up += u[j].dot(unit, lane);
        }
    }
    gate = warp_sum<4>(gate);
    up = warp_sum<4>(up);
    if (lane % 4 == 0) sums[0][warp][lane / 4] = gate, sums[1][warp][lane / 4] = up;
    __syncthreads();
    // One lane a row adds the shares up.
    const int row = tile * kTileRows + lane;
    if (share || lane >= kTileRows || row >= p.n_hidden || first + (warp >> p.split_log2) >= n_items)
      continue;
    gate = up = 0;
    for (int w = warp; w < warp + split; ++w) gate += sums[0][w][lane], up += sums[1][w][lane];
    p.hidden[static_cast<size_t>(k) * p.n_hidden + row] = gated(p, gate, up);
  }
}

}  // namespace reflex::cuda
