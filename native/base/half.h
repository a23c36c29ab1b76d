// Half-precision and other small floats, converted bit-exactly in plain C++ so that every
// instruction set agrees. Hot loops use the hardware's own conversions.
#pragma once
#include <bit>
#include <cstdint>

namespace reflex {

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 0x1Fu, man = h & 0x3FFu;
  if (exp == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (man << 13));
  if (exp == 0) {  // zero or subnormal: man * 2^-24, exact in f32
    const float v = static_cast<float>(man) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(v) | sign);
  }
  return std::bit_cast<float>(sign | ((exp + 112) << 23) | (man << 13));
}

/// Round to nearest even; overflow goes to infinity, NaN stays NaN.
inline uint16_t f32_to_f16(float f) {
  const uint32_t x = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>((x >> 16) & 0x8000u);
  const uint32_t a = x & 0x7FFFFFFFu;
  if (a >= 0x7F800000u)
    return static_cast<uint16_t>(sign | 0x7C00u | (a > 0x7F800000u ? 0x200u | ((a >> 13) & 0x3FFu) : 0));
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (a < 0x38800000u) {                             // subnormal in f16: let the f32 adder round
    const float v = std::bit_cast<float>(a) + 0.5f;  // 0.5 has an ulp of 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(v) - 0x3F000000u));
  }
  const uint32_t odd = (a >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xFFFu + odd) >> 13));
}

inline float bf16_to_f32(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }

inline uint16_t f32_to_bf16(float f) {
  const uint32_t x = std::bit_cast<uint32_t>(f);
  if ((x & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((x >> 16) | 64u);
  return static_cast<uint16_t>((x + 0x7FFFu + ((x >> 16) & 1u)) >> 16);
}

}  // namespace reflex
