// What every block header shares: where its code lives, how it reads little-endian fields that
// may lie anywhere, and the conversions that all types need. No table and no loop over rows.
//
// A block header is compiled many times: once for the room itself, once per instruction set of
// the CPU backend (which defines REFLEX_ISA), and by nvcc. Everything in it is inside
// REFLEX_QUANT_BEGIN .. REFLEX_QUANT_END, an inline namespace of the set's name, so that one
// program holds them side by side and the linker never swaps one for another. For the same
// reason a block header includes nothing that defines inline functions elsewhere.
//
// The shape of a block header, e.g. q4_k.h:
//
//   struct Q4_K {
//     static constexpr int kValues = 256;    // as in types.def
//     static constexpr bool kHasMin = true;  // whether values have an offset
//     static constexpr int kScaleEvery = 32; // 32: the two scales of 32 values are always equal; or 16
//     struct Block { ... };                  // the bytes of the file, alignment 1
//     // values 32g .. 32g+31 of the block, in the common int8 form (int8_form.h):
//     //   value[i] = scale[i / 16] * q[i] + min[i / 16]    (without + min where !kHasMin)
//     static void unpack32(const Block& b, int g, int8_t* q, float* scale, float* min);
//   };
//
// Every type decodes from that one function: the sum and the product above, each rounded once,
// give gguf-py's bits.
//
// On the CPU a block may start at any address; on the GPU a block of an even size at an even one.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(REFLEX_ISA)
#define REFLEX_QUANT_SET REFLEX_ISA
#elif defined(__CUDACC__)
#define REFLEX_QUANT_SET cuda
#else
#define REFLEX_QUANT_SET baseline
#endif

#define REFLEX_QUANT_BEGIN  \
  namespace reflex::quant { \
  inline namespace REFLEX_QUANT_SET {
#define REFLEX_QUANT_END \
  }                      \
  }

/// Functions of a block: inlined everywhere, and on the GPU too where nvcc compiles them.
#if defined(__CUDACC__)
#define REFLEX_HD __host__ __device__ __forceinline__
#else
#define REFLEX_HD inline __attribute__((always_inline))
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "GGUF is little-endian and its blocks are used in place");

REFLEX_QUANT_BEGIN

/// An IEEE half as it lies in a block. Bytes, because no block of a file has a promised alignment.
struct Half {
  uint8_t bytes[2];
};

#if defined(__CUDA_ARCH__)  // a memcpy from an unknown alignment is byte by byte there
REFLEX_HD uint32_t load_u16(const void* p) { return *static_cast<const uint16_t*>(p); }
REFLEX_HD uint32_t load_u32(const void* p) {
  const auto* half = static_cast<const uint16_t*>(p);
  return half[0] | static_cast<uint32_t>(half[1]) << 16;
}
REFLEX_HD uint64_t load_u64(const void* p) {
  const auto* word = static_cast<const uint8_t*>(p);
  return load_u32(word) | static_cast<uint64_t>(load_u32(word + 4)) << 32;
}
#else
REFLEX_HD uint32_t load_u16(const void* p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
REFLEX_HD uint32_t load_u32(const void* p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
REFLEX_HD uint64_t load_u64(const void* p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
#endif

REFLEX_HD void store_u64(void* p, uint64_t v) { memcpy(p, &v, sizeof v); }

REFLEX_HD float float_of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/// The half's value, exactly, subnormals included; NaN stays NaN.
REFLEX_HD float to_float(const Half& h) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(static_cast<unsigned short>(load_u16(&h))));
#elif defined(__F16C__) && !defined(__CUDACC__)
  return _cvtsh_ss(static_cast<uint16_t>(load_u16(&h)));
#elif defined(__aarch64__)
  __fp16 v;
  memcpy(&v, &h, sizeof v);
  return v;
#else
  const uint32_t bits = load_u16(&h), exponent = bits & 0x7C00u, mantissa = bits & 0x3FFu;
  const uint32_t sign = (bits & 0x8000u) << 16;
  if (exponent == 0x7C00u) return float_of_bits(sign | 0x7F800000u | mantissa << 13);
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;  // exact in f32
  const float normal = float_of_bits(((bits & 0x7FFFu) << 13) + (112u << 23));
  const float magnitude = exponent ? normal : subnormal;
  return sign ? -magnitude : magnitude;
#endif
}

// ---- eight bytes at a time in a 64-bit word ------------------------------------------------

constexpr uint64_t kOnes = 0x0101010101010101u;     ///< a one in every byte
constexpr uint64_t kNibbles = 0x0F0F0F0F0F0F0F0Fu;  ///< the low nibble of every byte

/// Byte j of the result is bit j of `bits` (8 bits), 0 or 1.
REFLEX_HD uint64_t spread_bits(uint32_t bits) {
  const uint64_t own = (bits * kOnes) & 0x8040201008040201u;  // byte j keeps its bit j
  return ((own + 0x7F * kOnes) >> 7) & kOnes;                 // any bit set -> 1; no byte carries
}

/// Byte j of the result is the 2-bit field j of `fields` (16 bits).
REFLEX_HD uint64_t spread_pairs(uint32_t fields) {
  uint64_t x = fields;
  x = (x | x << 24) & 0x000000FF000000FFu;
  x = (x | x << 12) & 0x000F000F000F000Fu;
  return (x | x << 6) & 0x0303030303030303u;
}

/// Byte j of the result is the 4-bit field j of `fields` (16 bits).
REFLEX_HD uint32_t spread_nibbles(uint32_t fields) {
  const uint32_t x = (fields | fields << 8) & 0x00FF00FFu;
  return (x | x << 4) & 0x0F0F0F0Fu;
}

/// Each byte minus n, as int8; the bytes are below 128 and n is at most 128.
REFLEX_HD uint64_t subtract_from_bytes(uint64_t bytes, uint64_t n) {
  return (bytes + (128 - n) * kOnes) ^ 128 * kOnes;  // lent 128, so that no byte borrows, and taken back
}

/// The bytes of `magnitudes` (each 1..127), those negated whose bit in `signs` is set.
REFLEX_HD uint64_t negate_bytes(uint64_t magnitudes, uint32_t signs) {
  const uint64_t ones = spread_bits(signs);
  return (magnitudes ^ ones * 0xFF) + ones;  // ~m + 1 in each; m >= 1, so no byte carries
}

REFLEX_QUANT_END
