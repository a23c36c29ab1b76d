// In place of CUDA's header of the name: half precision and the vector types, as plain C++.
#pragma once
#include <cstdint>

#include "base/half.h"

struct __half {
  uint16_t bits;
  __half() = default;
  __half(float f) : bits(reflex::f32_to_f16(f)) {}
  operator float() const { return reflex::f16_to_f32(bits); }
};
inline float __half2float(__half h) { return h; }
inline __half __float2half_rn(float f) { return f; }
inline __half __float2half(float f) { return f; }
inline __half __ushort_as_half(uint16_t bits) {
  __half h;
  h.bits = bits;
  return h;
}
inline uint16_t __half_as_ushort(__half h) { return h.bits; }

// Aligned as the card's vector loads want them: the build checks every access (CMakeLists.txt).
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
