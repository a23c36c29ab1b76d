// CUDA's own words, for device code that the host's compiler compiles: qualifiers, indices, shuffles, votes,
// atomics, conversions and functions. One thread of the host runs all threads of all blocks, so atomics are
// plain and fences nothing. A word that is missing here is added here.
#pragma once
#include <math.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator/block.h"

#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
// All of it in one place, so that every block finds it filled with NaNs.
#define __shared__ static __attribute__((section("emulated_shared")))

// ---- warps -----------------------------------------------------------------------------------

namespace emulator {

inline void shuffle(Lane* lanes, uint32_t mask) {
  for (int i = 0; i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    const int from = lanes[i].source;
    // What a lane that takes no part would give is undefined.
    if (from >= 0 && from < kWarp && (mask >> from & 1))
      std::memcpy(lanes[i].out, lanes[from].in, sizeof lanes[i].out);
    else
      std::memset(lanes[i].out, 0xFF, sizeof lanes[i].out);
  }
}

template <class T>
T shuffled(const char* what, uint32_t mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(Lane::in) && std::is_trivially_copyable_v<T>);
  Lane& lane = lane_slot();
  std::memcpy(lane.in, &value, sizeof value);
  lane.source = source;
  exchange(what, mask, shuffle);
  std::memcpy(&value, lane_slot().out, sizeof value);
  return value;
}

/// The lanes of the mask that gave true.
inline uint32_t vote(const char* what, uint32_t mask, bool value) {
  Lane& lane = lane_slot();
  lane.in[0] = value;
  exchange(what, mask, [](Lane* lanes, uint32_t all) {
    uint32_t set = 0;
    for (int i = 0; i < kWarp; ++i)
      if (all >> i & 1) set |= lanes[i].in[0] << i;
    for (int i = 0; i < kWarp; ++i) lanes[i].out[0] = set, lanes[i].out[1] = all;
  });
  return lane_slot().out[0];
}

}  // namespace emulator

inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu) {
  emulator::exchange("__syncwarp", mask, [](emulator::Lane*, uint32_t) {});
}
template <class T>
T __shfl_sync(uint32_t mask, T v, int from, int width = 32) {
  const int lane = emulator::lane_id();
  return emulator::shuffled("__shfl_sync", mask, v, lane / width * width + (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int by, int width = 32) {
  const int lane = emulator::lane_id(), from = lane ^ by;
  return emulator::shuffled("__shfl_xor_sync", mask, v, from / width > lane / width ? lane : from);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, int by, int width = 32) {
  const int lane = emulator::lane_id();
  return emulator::shuffled("__shfl_down_sync", mask, v, lane % width + by < width ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, int by, int width = 32) {
  const int lane = emulator::lane_id();
  return emulator::shuffled("__shfl_up_sync", mask, v, lane % width >= by ? lane - by : lane);
}
inline uint32_t __ballot_sync(uint32_t mask, bool v) { return emulator::vote("__ballot_sync", mask, v); }
inline bool __any_sync(uint32_t mask, bool v) { return emulator::vote("__any_sync", mask, v) != 0; }
inline bool __all_sync(uint32_t mask, bool v) {
  return emulator::vote("__all_sync", mask, v) == emulator::lane_slot().out[1];
}
inline uint32_t __activemask() = delete;  // whatever the lanes' order makes it: no kernel may rely on it

// ---- blocks ----------------------------------------------------------------------------------

inline void __syncthreads() { emulator::block_barrier(); }
inline int __syncthreads_or(int v) { return emulator::block_barrier(v != 0) != 0; }
inline int __syncthreads_count(int v) { return emulator::block_barrier(v != 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(uint32_t) { emulator::yield(); }

// ---- memory ----------------------------------------------------------------------------------

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}

/// *p = f(*p); what was there.
template <class T, class F>
T emulated_atomic(T* p, F f) {
  const T before = *p;
  *p = f(before);
  return before;
}
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return static_cast<T>(x + v); });
}
template <class T>
T atomicSub(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return static_cast<T>(x - v); });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return x < v ? v : x; });
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return v < x ? v : x; });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return x | v; });
}
template <class T>
T atomicAnd(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return x & v; });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T) { return v; });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return emulated_atomic(p, [&](T x) { return x == expected ? v : x; });
}
template <class T>
T atomicInc(T* p, std::type_identity_t<T> limit) {
  return emulated_atomic(p, [&](T x) { return x >= limit ? T{0} : x + 1; });
}

// ---- arithmetic --------------------------------------------------------------------------------

template <class A, class B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(uint32_t x) { return static_cast<float>(x); }
inline unsigned long long __double2ull_rn(double x) {
  return static_cast<unsigned long long>(std::nearbyint(x));
}
inline unsigned long long __double2ull_ru(double x) { return static_cast<unsigned long long>(std::ceil(x)); }
inline unsigned long long __double2ull_rd(double x) { return static_cast<unsigned long long>(std::floor(x)); }

inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(uint32_t x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __ffsll(unsigned long long x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __clz(uint32_t x) { return std::countl_zero(x); }
inline uint32_t __brev(uint32_t x) {
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t n) {
  return n & 31 ? hi << (n & 31) | lo >> (32 - (n & 31)) : hi;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = selector >> (4 * i) & 0xF;
    auto byte = static_cast<uint32_t>(both >> (8 * (s & 7)) & 0xFF);
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;  // the byte's sign, eight times
    r |= byte << (8 * i);
  }
  return r;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int8_t>(static_cast<uint32_t>(a) >> (8 * i)) *
         static_cast<int8_t>(static_cast<uint32_t>(b) >> (8 * i));
  return c;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xFF) * (b >> (8 * i) & 0xFF);
  return c;
}
