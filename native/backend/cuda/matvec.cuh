// What the products of one row have in common (matvec.cu, matvec_two.cu): x in shared memory, as integers or
// f16, and a lane's share of a unit of weights. Refuses: which tiles a warp reads, and in what order.
#pragma once
#include <type_traits>

#include "backend/cuda/integer_input.cuh"

namespace reflex::cuda {

namespace {

constexpr bool kBulk = kArch >= 900;
constexpr uint32_t kIntUnit = kMatvecUnitBytes, kHalfUnit = kUnit * 2;

template <class T>
constexpr uint32_t unit_bytes() {
  return T::kIntegers ? kIntUnit : kHalfUnit;
}

// ---- x into shared memory ------------------------------------------------------------------

/// Types in small blocks do little per byte: two blocks a multiprocessor hide more than registers do.
/// The others want the registers.
template <class T>
constexpr int kBlocksPerSm = T::kCell == 128 ? 2 : 1;
/// Quads of x a thread asks for before it uses the first.
template <class T>
constexpr int kInputBatch = T::kCell == 128 ? 2 : 4;

/// Asks for a norm's weights ahead of x.
__device__ __forceinline__ void prefetch_norm(const MatvecParams& p) {
  constexpr int kLine = 32;  // floats
  if (p.norm_weight)
    for (int c = threadIdx.x * kLine; c < p.width; c += blockDim.x * kLine) prefetch_line(p.norm_weight + c);
}

/// x [times the norm's weight] to shared memory. The norm's own factor is common to all of x, so it
/// is left for the sums: each warp leaves its share of the squares.
template <class T>
__device__ __forceinline__ void stage_input(const MatvecParams& p, uint8_t* x, float* squares) {
  constexpr int kBatch = kInputBatch<T>;
  const int step = static_cast<int>(blockDim.x) * 4, end = p.n_units * kUnit;
  float sum = 0;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) * 4; first < end; first += kBatch * step) {
    float4 quads[kBatch], weights[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = first + i * step;
      quads[i] = c < p.width ? *reinterpret_cast<const float4*>(p.x + c) : float4{};
      weights[i] =
          p.norm_weight && c < p.width ? *reinterpret_cast<const float4*>(p.norm_weight + c) : float4{};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = first + i * step;
      if (c >= end) break;  // the same for all lanes of a warp
      float v[4] = {quads[i].x, quads[i].y, quads[i].z, quads[i].w};
      if (p.norm_weight) {
        const float4 w = weights[i];
        sum += v[0] * v[0] + v[1] * v[1] + (v[2] * v[2] + v[3] * v[3]);
        v[0] *= w.x, v[1] *= w.y, v[2] *= w.z, v[3] *= w.w;
      }
      uint8_t* unit = x + c / kUnit * unit_bytes<T>();
      if constexpr (T::kIntegers)
        stage_ints<T::kNibbleOrder>(unit, c, v);
      else
        *reinterpret_cast<uint2*>(unit + 2 * x_index(c % kUnit)) = {activation_pair(v[0], v[1]),
                                                                    activation_pair(v[2], v[3])};
    }
  }
  if (!p.norm_weight) return;
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
}

/// What every sum is multiplied with: the norm's factor.
__device__ __forceinline__ float norm_factor(const MatvecParams& p, const float* squares) {
  if (!p.norm_weight) return 1.0f;
  float sum = 0;
#pragma unroll 8
  for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) sum += squares[w];
  return rsqrtf(sum / static_cast<float>(p.width) + p.norm_eps);
}

// ---- products ------------------------------------------------------------------------------

/// What a lane takes of a unit of x: both planes of its 32 values, and {step, sums}.
struct IntInput {
  uint32_t h[8], l[8];
  float4 f;
};
__device__ __forceinline__ IntInput load_ints(const uint8_t* x, int lane) {
  const auto* at = reinterpret_cast<const uint4*>(x + lane % 4 * 16);
  const uint4 h0 = at[0], h1 = at[4], l0 = at[8], l1 = at[12];
  const float4 f = *reinterpret_cast<const float4*>(at + 16);
  return {
      {h0.x, h0.y, h0.z, h0.w, h1.x, h1.y, h1.z, h1.w}, {l0.x, l0.y, l0.z, l0.w, l1.x, l1.y, l1.z, l1.w}, f};
}

/// This lane's share of the sum of row g over unit u of the cell.
template <class T>
__device__ __forceinline__ float int_unit(const uint8_t* cell, int u, const IntInput& in, int lane) {
  const typename T::Bits bits = T::bits(cell, u, lane);
  int hi[2] = {}, lo[2] = {};  // of the first and last 16 values
  const auto quarter = [&](auto p_constant) {
    constexpr int p = decltype(p_constant)::value;
    uint32_t q[2];
    T::template ints<p>(bits, q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hi[p / 2] = __dp4a(static_cast<int>(q[i]), static_cast<int>(in.h[2 * p + i]), hi[p / 2]);
      lo[p / 2] = __dp4a(static_cast<int>(q[i]), static_cast<int>(in.l[2 * p + i]), lo[p / 2]);
    }
  };
  quarter(std::integral_constant<int, 0>{});
  quarter(std::integral_constant<int, 1>{});
  quarter(std::integral_constant<int, 2>{});
  quarter(std::integral_constant<int, 3>{});
  const Factors s = T::factors(cell, u, lane);
  constexpr auto kOffset = static_cast<float>(T::kOffset);
  if constexpr (T::kHalves) {
    const float a = static_cast<float>((hi[0] << 7) + lo[0]) - kOffset * in.f.y;
    const float b = static_cast<float>((hi[1] << 7) + lo[1]) - kOffset * in.f.z;
    return in.f.x * (s.a * a + s.b * b);
  } else {
    float a = static_cast<float>(((hi[0] + hi[1]) << 7) + (lo[0] + lo[1]));
    if constexpr (T::kOffset != 0) a -= kOffset * in.f.w;
    return in.f.x * (T::kHasMin ? s.a * a + s.b * in.f.w : s.a * a);
  }
}

}  // namespace

}  // namespace reflex::cuda
