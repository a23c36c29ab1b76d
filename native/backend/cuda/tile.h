// The layout of weights on the card, and how a warp decodes it. Owns: where each bit of a GGUF
// block goes (repack) and how it comes back as f16 (decode). Refuses: memory, launches.
// Plain C++ for both sides, so that a host test holds it against dequantize_row.
//
// A matrix W (n_out, n_in) is cut into tiles of 8 rows; a tile is a run of cells, a cell is 8 rows
// by 128 values (256 for the K types) and holds exactly the bytes of its blocks, reordered so that
// each of a warp's 32 lanes reads 16 bytes at a time and the warp reads 512 in a row.
// Lane l = 4g + t owns, of every unit of 128 values, row g's values 32t .. 32t+31: one block of a
// 32-value type, so one scale. That ownership is also the fragment of mma.m16n8k16 (B operand,
// n = g) if step s of the unit's 8 takes from every lane its values 4s .. 4s+3. The order of the
// sum over n_in is free, so activations are stored in that order (x_index below) and no value
// moves between lanes.
// Rows beyond n_out and values beyond n_in are stored as zero blocks.
#pragma once
#include "quant/block.h"
#include "quant/types.h"

#if !defined(__CUDA_ARCH__)
#include "base/half.h"
#endif

namespace reflex::cuda {

inline constexpr int kTileRows = 8;
inline constexpr int kUnit = 128;  ///< values per row and unit
inline constexpr int kSteps = 8;   ///< mma steps (16 values) per unit

/// Quantised weights are decoded times this, activations kept times kXScale: f16 then holds
/// weights from 1e-6 to 1e3 and activations up to 1e6 without loss that matters.
inline constexpr float kWScale = 64.0f;
inline constexpr float kXScale = 1.0f / 16.0f;

// ---- two halves in a word --------------------------------------------------------------

using h2 = uint32_t;  ///< f16x2: low half first

#if defined(__CUDA_ARCH__)
REFLEX_HD h2 h2_add(h2 a, h2 b) {
  h2 r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
REFLEX_HD h2 h2_mul(h2 a, h2 b) {
  h2 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
REFLEX_HD h2 h2_fma(h2 a, h2 b, h2 c) {
  h2 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
REFLEX_HD uint32_t f16_bits(float f) {
  unsigned short r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f));
  return r;
}
REFLEX_HD float f16_value(uint32_t bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<unsigned short>(bits)));
  return f;
}
/// low = a, high = b
REFLEX_HD h2 h2_of(float a, float b) {
  h2 r;
  asm("{ .reg .f16 x, y; cvt.rn.f16.f32 x, %1; cvt.rn.f16.f32 y, %2; mov.b32 %0, {x, y}; }"
      : "=r"(r)
      : "f"(a), "f"(b));
  return r;
}
/// Byte i of the result is byte (selector nibble i) of the eight in a, b.
REFLEX_HD uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
#else
REFLEX_HD uint32_t f16_bits(float f) { return f32_to_f16(f); }
REFLEX_HD float f16_value(uint32_t bits) { return f16_to_f32(static_cast<uint16_t>(bits)); }
REFLEX_HD h2 h2_of(float a, float b) { return f16_bits(a) | f16_bits(b) << 16; }
REFLEX_HD h2 h2_fma(h2 a, h2 b, h2 c) {
  const float lo = f16_value(a & 0xFFFF) * f16_value(b & 0xFFFF) + f16_value(c & 0xFFFF);
  const float hi = f16_value(a >> 16) * f16_value(b >> 16) + f16_value(c >> 16);
  return h2_of(lo, hi);
}
REFLEX_HD h2 h2_mul(h2 a, h2 b) { return h2_fma(a, b, 0x80008000u); }
REFLEX_HD h2 h2_add(h2 a, h2 b) { return h2_fma(a, 0x3C003C00u, b); }
REFLEX_HD uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return r;
}
#endif

REFLEX_HD h2 h2_both(float f) { return f16_bits(f) * 0x10001u; }

struct alignas(16) Quad {
  uint32_t v[4];
};

#if defined(__CUDA_ARCH__)
REFLEX_HD Quad load_quad(const uint8_t* p) { return *reinterpret_cast<const Quad*>(p); }
REFLEX_HD uint32_t load_word(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
REFLEX_HD uint32_t load_short(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
#else
REFLEX_HD Quad load_quad(const uint8_t* p) {
  Quad q;
  memcpy(&q, p, sizeof q);
  return q;
}
REFLEX_HD uint32_t load_word(const uint8_t* p) { return quant::load_u32(p); }
REFLEX_HD uint32_t load_short(const uint8_t* p) { return quant::load_u16(p); }
#endif
/// word rotated left by n, any n
REFLEX_HD uint32_t rotate_left(uint32_t word, int n) { return word << (n & 31) | word >> (-n & 31); }

// ---- activations -----------------------------------------------------------------------

/// Where value c of a unit lies in one row's 128 f16, for lanes that read 8 (steps 2p and 2p+1).
REFLEX_HD int x_index(int c) {
  const int t = c / 32, s = c % 32 / 4;
  return s / 2 * 32 + t * 8 + s % 2 * 4 + c % 4;
}

/// Where (row, c) lies in a matrix of f16 stored as mma A fragments: 16 rows by `units` units are
/// [unit][step][lane][8], a lane's 16 bytes being (g, k0..1) (g+8, k0..1) (g, k2..3) (g+8, k2..3).
REFLEX_HD size_t fragment_index(int row, int c, int units) {
  const int rr = row % 16, g = rr % 8, hi = rr / 8;
  const int unit = c / kUnit, cc = c % kUnit, t = cc / 32, s = cc % 32 / 4, i = cc % 4;
  const size_t block =
      (static_cast<size_t>(row / 16) * static_cast<size_t>(units) + static_cast<size_t>(unit)) * kSteps +
      static_cast<size_t>(s);
  return (block * 32 + static_cast<size_t>(g * 4 + t)) * 8 + static_cast<size_t>(i / 2 * 4 + hi * 2 + i % 2);
}

// ---- decoding the small fields ------------------------------------------------------------

inline constexpr uint32_t kMagic = 0x64006400u;  ///< f16 1024 twice: 1024 | q is 1024 + q for q < 1024
inline constexpr uint32_t kMagicByte = 0x64646464u;
inline constexpr h2 kSixteenth = 0x2C002C00u;

// Eight 4-bit fields of a word, field i (of 8) at bit 4(i/2) + 16(i%2), so that a mask leaves a
// pair of neighbours as two halves.
REFLEX_HD constexpr int nibble_shift(int i) { return i / 2 * 4 + i % 2 * 16; }

// Which byte of a word's low-nibble half (v & 0x0F0F0F0F) or high-nibble half a field is in: the low
// half holds values 0 4 1 5 of the 8, the high half 2 6 3 7. The bits above the nibbles follow that
// order, so that one shift puts them over the bytes.
REFLEX_HD constexpr int field_byte(int i) { return i / 4 + i % 2 * 2; }
REFLEX_HD constexpr int field_half(int i) { return i / 2 % 2; }

// Fifth bits of 32 values: of value 8k + i at bit 8 * byte + 2k + half.
REFLEX_HD constexpr int bit_shift(int i) { return 8 * field_byte(i % 8) + 2 * (i / 8) + field_half(i % 8); }
/// The fifth bits of half `half` of word k, at bit 4 of each byte (mask 0x10101010).
REFLEX_HD uint32_t fifth_bits(uint32_t word, int k, int half) { return rotate_left(word, 4 - 2 * k - half); }

// Fifth and sixth bits of 16 values: of value 8k + i (k = 0, 1) at bit 8 * byte + 4k + 2 * half.
REFLEX_HD constexpr int pair_shift(int i) {
  return 8 * field_byte(i % 8) + 4 * (i / 8) + 2 * field_half(i % 8);
}
/// Those of half `half` of word k at bit 4 of each byte (mask 0x30303030).
REFLEX_HD uint32_t sixth_bits(uint32_t word, int k, int half) {
  return rotate_left(word, 4 - 4 * k - 2 * half);
}

/// The four pairs of a word of 4-bit fields as f16, q - offset, exactly. `high(half)` gives the bits
/// above the fields over the bytes of that half, kept by kHighMask (of one byte).
template <uint32_t kHighMask, class High>
REFLEX_HD void nibble_pairs(uint32_t word, h2 minus_1024_offset, h2 minus_64_offset, High high, h2* q) {
  constexpr uint32_t kLow = kHighMask * 0x10001u, kHigh = kLow << 4;
  for (int e = 0; e < 2; ++e) {
    const uint32_t w = e ? word >> 8 : word;
    uint32_t lo = (w & 0x000F000Fu) | kMagic, hi = (w & 0x00F000F0u) | kMagic;
    if (kHighMask) {
      lo |= (e ? high(0) >> 8 : high(0)) & kLow;
      hi |= (e ? high(1) >> 4 : high(1) << 4) & kHigh;
    }
    q[2 * e] = h2_add(lo, minus_1024_offset);
    q[2 * e + 1] = h2_fma(hi, kSixteenth, minus_64_offset);
  }
}

/// The same fields as bytes: halves 0 and 1 of the word.
template <uint32_t kHighMask, class High>
REFLEX_HD void nibble_bytes(uint32_t word, High high, uint32_t* bytes) {
  constexpr uint32_t kMask = kHighMask * 0x01010101u;
  bytes[0] = word & 0x0F0F0F0Fu;
  bytes[1] = word >> 4 & 0x0F0F0F0Fu;
  if (kHighMask) {
    bytes[0] |= high(0) & kMask;
    bytes[1] |= high(1) & kMask;
  }
}

/// Adding 128 to a byte is flipping its sign bit.
inline constexpr uint32_t kSignBits = 0x80808080u;

/// Four signed bytes, given with 128 added, as two pairs of f16.
REFLEX_HD void byte_pairs(uint32_t biased, h2* q) {
  constexpr h2 kMinus1152 = 0xE480E480u;
  q[0] = h2_add(permute(biased, kMagicByte, 0x4140), kMinus1152);
  q[1] = h2_add(permute(biased, kMagicByte, 0x4342), kMinus1152);
}

/// -(1024 + offset) and -(64 + offset), exact for offset <= 32.
template <int kOffset>
struct Minus {
  static constexpr h2 k1024 = (0xE400u + kOffset) * 0x10001u;
  static constexpr h2 k64 = (0xD400u + kOffset * 16u) * 0x10001u;
};

// ---- raw blocks, as the repack reads them ---------------------------------------------------

/// Eight rows of raw blocks. A byte outside the matrix reads as zero.
struct RawRows {
  const uint8_t* base;  ///< first of the tile's rows
  size_t row_bytes;
  int n_rows;  ///< of the 8 that exist
  int block_bytes, n_blocks;

  REFLEX_HD uint32_t byte(int g, int block, int offset) const {
    if (g >= n_rows || block >= n_blocks) return 0;
    return base[static_cast<size_t>(g) * row_bytes +
                static_cast<size_t>(block) * static_cast<size_t>(block_bytes) + static_cast<size_t>(offset)];
  }
  REFLEX_HD uint32_t half(int g, int block, int offset) const {
    return byte(g, block, offset) | byte(g, block, offset + 1) << 8;
  }
  REFLEX_HD uint32_t word(int g, int block, int offset) const {
    return half(g, block, offset) | half(g, block, offset + 2) << 16;
  }
};

/// value(i) for the 8 values 8k.. of a lane, as a word of 4-bit fields
template <class Value>
REFLEX_HD uint32_t pack_nibbles(int k, Value value) {
  uint32_t w = 0;
  for (int i = 0; i < 8; ++i) w |= (value(8 * k + i) & 0xF) << nibble_shift(i);
  return w;
}
template <class Value>
REFLEX_HD uint32_t pack_bits(Value value) {
  uint32_t w = 0;
  for (int i = 0; i < 32; ++i) w |= (value(i) & 1) << bit_shift(i);
  return w;
}
template <class Value>
REFLEX_HD uint32_t pack_pairs(int half, Value value) {
  uint32_t w = 0;
  for (int i = 0; i < 16; ++i) w |= (value(16 * half + i) & 3) << pair_shift(i);
  return w;
}

// ---- the types --------------------------------------------------------------------------
//
// Tile<T>, a cell being in memory that is aligned to 16 bytes (shared memory, on the card):
//   kCell, kBytes     values per row and bytes of a cell
//   scales            what unit u of the cell multiplies and adds, as pairs of f16
//   quarter           values 8p .. 8p+7 of the lane's 32 in unit u: four pairs of f16, times kScale
//   word              word w (of kBytes / 4) of cell c, from the raw rows
// and, where kIntegers, the same values as integers with their scales in f32, for dp4a:
//   Bits, bits        what a lane has of unit u
//   ints<p>           values 8p .. 8p+7 as two words of signed bytes; kNibbleOrder: 0 4 1 5, 2 6 3 7
//   factors           value = a * (q - kOffset) [+ b]; kHalves: a of the first 16 values, b of the last

template <GgmlType T>
struct Tile {
  static constexpr bool kTiled = false;
};

struct Scales {
  h2 a, b;
};

struct Factors {
  float a, b;
};

struct TileTraits {
  static constexpr bool kTiled = true, kIntegers = true, kNibbleOrder = false, kHasMin = false,
                        kHalves = false;
  static constexpr int kOffset = 0;
};
struct TileOf32 : TileTraits {
  static constexpr int kCell = 128;
  static constexpr float kScale = kWScale;
};
struct TileOf256 : TileTraits {
  static constexpr int kCell = 256;
  static constexpr float kScale = kWScale;
};

/// F16 and BF16: 4 quads a lane. Cell: quad j of lane l at 512 j + 16 l.
template <bool kBf16>
struct TileFloat16 : TileOf32 {
  static constexpr bool kIntegers = false;
  static constexpr int kBytes = 2048;
  static constexpr float kScale = kBf16 ? kWScale : 1.0f;
  REFLEX_HD static Scales scales(const uint8_t*, int, int) { return {}; }
  REFLEX_HD static void quarter(const uint8_t* cell, int, int p, int lane, const Scales&, h2* w) {
    const Quad q = load_quad(cell + 512 * p + 16 * lane);
    for (int i = 0; i < 4; ++i)
      w[i] = kBf16 ? h2_of(quant::float_of_bits(q.v[i] << 16) * kWScale,
                           quant::float_of_bits(q.v[i] & 0xFFFF0000u) * kWScale)
                   : q.v[i];
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    const int j = w / 128, lane = w % 128 / 4, k = w % 4;
    const int block = cell * 128 + lane % 4 * 32 + 8 * j + 2 * k;  // a "block" is one value
    return rows.half(lane / 4, block, 0) | rows.half(lane / 4, block + 1, 0) << 16;
  }
};
template <>
struct Tile<GgmlType::F16> : TileFloat16<false> {};
template <>
struct Tile<GgmlType::BF16> : TileFloat16<true> {};

/// Q8_0. Cell: quad j of lane l at 512 j + 16 l, scales at 1024 + 2 l.
template <>
struct Tile<GgmlType::Q8_0> : TileOf32 {
  static constexpr int kBytes = 1088;
  struct Bits {
    Quad q[2];
  };
  REFLEX_HD static Bits bits(const uint8_t* cell, int, int lane) {
    return {{load_quad(cell + 16 * lane), load_quad(cell + 512 + 16 * lane)}};
  }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    q[0] = b.q[p / 2].v[p % 2 * 2];
    q[1] = b.q[p / 2].v[p % 2 * 2 + 1];
  }
  REFLEX_HD static Factors factors(const uint8_t* cell, int, int lane) {
    return {f16_value(load_short(cell + 1024 + 2 * lane)), 0};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    return {h2_both(factors(cell, u, lane).a * kWScale), 0};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int, int p, int lane, const Scales& s, h2* w) {
    const uint8_t* at = cell + p / 2 * 512 + 16 * lane + p % 2 * 8;
    byte_pairs(load_word(at) ^ kSignBits, w);
    byte_pairs(load_word(at + 4) ^ kSignBits, w + 2);
    for (int i = 0; i < 4; ++i) w[i] = h2_mul(w[i], s.a);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w >= 256) {
      const int a = 2 * (w - 256), b = a + 1;
      return rows.half(a / 4, cell * 4 + a % 4, 0) | rows.half(b / 4, cell * 4 + b % 4, 0) << 16;
    }
    const int j = w / 128, lane = w % 128 / 4, k = w % 4;
    return rows.word(lane / 4, cell * 4 + lane % 4, 2 + 16 * j + 4 * k);
  }
};

// Q4_0, Q4_1, Q5_0, Q5_1: value i < 16 is the low nibble of byte i, i >= 16 the high one of byte
// i - 16. Cell: quads at 16 l; then, where there are fifth bits, a word each; then d or d and m.
template <bool kFifth, bool kMin>
struct TileNibble32 : TileOf32 {
  static constexpr int kBits = 512, kScales = kFifth ? 640 : 512;  ///< offsets in the cell
  static constexpr int kBytes = kScales + (kMin ? 128 : 64);
  static constexpr int kRawBits = kMin ? 4 : 2, kRawQs = kRawBits + (kFifth ? 4 : 0);
  static constexpr int kOffset = kMin ? 0 : kFifth ? 16 : 8;
  static constexpr bool kNibbleOrder = true, kHasMin = kMin;
  struct Bits {
    Quad q;
    uint32_t high;
  };
  REFLEX_HD static uint32_t high_bits(const uint8_t* cell, int lane) {
    return kFifth ? load_word(cell + kBits + 4 * lane) : 0;
  }
  REFLEX_HD static Bits bits(const uint8_t* cell, int, int lane) {
    return {load_quad(cell + 16 * lane), high_bits(cell, lane)};
  }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    nibble_bytes<kFifth ? 0x10u : 0u>(
        b.q.v[p], [&](int half) { return fifth_bits(b.high, p, half); }, q);
  }
  REFLEX_HD static Factors factors(const uint8_t* cell, int, int lane) {
    if (!kMin) return {f16_value(load_short(cell + kScales + 2 * lane)), 0};
    const uint32_t d = load_word(cell + kScales + 4 * lane);
    return {f16_value(d & 0xFFFF), f16_value(d >> 16)};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    const Factors f = factors(cell, u, lane);
    return {h2_both(f.a * kWScale), h2_both(f.b * kWScale)};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int, int p, int lane, const Scales& s, h2* w) {
    const uint32_t high = high_bits(cell, lane);
    nibble_pairs<kFifth ? 0x10u : 0u>(
        load_word(cell + 16 * lane + 4 * p), Minus<kOffset>::k1024, Minus<kOffset>::k64,
        [&](int half) { return fifth_bits(high, p, half); }, w);
    for (int i = 0; i < 4; ++i) w[i] = kMin ? h2_fma(w[i], s.a, s.b) : h2_mul(w[i], s.a);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w < 128) {
      const int lane = w / 4, block = cell * 4 + lane % 4;
      return pack_nibbles(w % 4,
                          [&](int i) { return rows.byte(lane / 4, block, kRawQs + i % 16) >> (i / 16 * 4); });
    }
    if (kFifth && w < 160) {
      const int lane = w - 128;
      const uint32_t bits = rows.word(lane / 4, cell * 4 + lane % 4, kRawBits);
      return pack_bits([&](int i) { return bits >> i; });
    }
    const int i = w - kScales / 4;
    if (kMin) return rows.word(i / 4, cell * 4 + i % 4, 0);
    const int a = 2 * i, b = a + 1;
    return rows.half(a / 4, cell * 4 + a % 4, 0) | rows.half(b / 4, cell * 4 + b % 4, 0) << 16;
  }
};
template <>
struct Tile<GgmlType::Q4_0> : TileNibble32<false, false> {};
template <>
struct Tile<GgmlType::Q4_1> : TileNibble32<false, true> {};
template <>
struct Tile<GgmlType::Q5_0> : TileNibble32<true, false> {};
template <>
struct Tile<GgmlType::Q5_1> : TileNibble32<true, true> {};

// Q4_K, Q5_K: unit u of a 256-value block holds its groups 4u .. 4u+3, lane t's 32 values being
// group 4u + t. Cell: quad of unit u at 512 u + 16 l; fifth bits, a word per unit, at 1024 + 8 l;
// then each row's 16 bytes of d, dmin and the twelve packed scale bytes as they are.
template <bool kFifth>
struct TileK45 : TileOf256 {
  static constexpr bool kNibbleOrder = true, kHasMin = true;
  static constexpr int kHeader = kFifth ? 1280 : 1024;
  static constexpr int kBytes = kHeader + 128;
  static constexpr int kRawQs = kFifth ? 48 : 16;  ///< after the header, Q5_K has 32 bytes of fifth bits
  struct Bits {
    Quad q;
    uint32_t high;
  };
  REFLEX_HD static uint32_t high_bits(const uint8_t* cell, int u, int lane) {
    return kFifth ? load_word(cell + 1024 + 8 * lane + 4 * u) : 0;
  }
  REFLEX_HD static Bits bits(const uint8_t* cell, int u, int lane) {
    return {load_quad(cell + 512 * u + 16 * lane), high_bits(cell, u, lane)};
  }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    nibble_bytes<kFifth ? 0x10u : 0u>(
        b.q.v[p], [&](int half) { return fifth_bits(b.high, p, half); }, q);
  }
  /// d * scale and -dmin * minimum of the lane's group
  REFLEX_HD static Factors factors(const uint8_t* cell, int u, int lane) {
    const Quad h = load_quad(cell + kHeader + lane / 4 * 16);
    const int shift = lane % 4 * 8;
    const uint32_t a = h.v[1] >> shift, b = h.v[2] >> shift, c = h.v[3] >> shift;
    const uint32_t sc = u ? (c & 0xF) | (a >> 2 & 0x30) : a & 0x3F;
    const uint32_t mn = u ? (c >> 4 & 0xF) | (b >> 2 & 0x30) : b & 0x3F;
    return {f16_value(h.v[0] & 0xFFFF) * static_cast<float>(sc),
            -f16_value(h.v[0] >> 16) * static_cast<float>(mn)};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    const Factors f = factors(cell, u, lane);
    return {h2_both(f.a * kWScale), h2_both(f.b * kWScale)};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int u, int p, int lane, const Scales& s, h2* w) {
    const uint32_t high = high_bits(cell, u, lane);
    nibble_pairs<kFifth ? 0x10u : 0u>(
        load_word(cell + 512 * u + 16 * lane + 4 * p), Minus<0>::k1024, Minus<0>::k64,
        [&](int half) { return fifth_bits(high, p, half); }, w);
    for (int i = 0; i < 4; ++i) w[i] = h2_fma(w[i], s.a, s.b);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w < 256) {
      const int lane = w % 128 / 4, group = w / 128 * 4 + lane % 4;
      return pack_nibbles(w % 4, [&](int i) {
        return rows.byte(lane / 4, cell, kRawQs + group / 2 * 32 + i) >> (group % 2 * 4);
      });
    }
    if (kFifth && w < 320) {
      const int lane = (w - 256) / 2, group = (w - 256) % 2 * 4 + lane % 4;
      return pack_bits([&](int i) { return rows.byte(lane / 4, cell, 16 + i) >> group; });
    }
    const int i = w - kHeader / 4;
    return rows.word(i / 4, cell, i % 4 * 4);
  }
};
template <>
struct Tile<GgmlType::Q4_K> : TileK45<false> {};
template <>
struct Tile<GgmlType::Q5_K> : TileK45<true> {};

/// Q6_K. Cell: low nibbles of unit u at 512 u + 16 l; high pairs, two words per unit, at
/// 1024 + 16 l; four scale bytes of a lane at 1536 + 4 l; d of row g at 1664 + 2 g.
template <>
struct Tile<GgmlType::Q6_K> : TileOf256 {
  static constexpr bool kNibbleOrder = true, kHalves = true;
  static constexpr int kOffset = 32;
  static constexpr int kBytes = 1680;
  struct Bits {
    Quad q;
    uint32_t high[2];
  };
  REFLEX_HD static uint32_t high_bits(const uint8_t* cell, int u, int e, int lane) {
    return load_word(cell + 1024 + 16 * lane + 8 * u + 4 * e);
  }
  REFLEX_HD static Bits bits(const uint8_t* cell, int u, int lane) {
    return {load_quad(cell + 512 * u + 16 * lane),
            {high_bits(cell, u, 0, lane), high_bits(cell, u, 1, lane)}};
  }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    nibble_bytes<0x30u>(
        b.q.v[p], [&](int half) { return sixth_bits(b.high[p / 2], p % 2, half); }, q);
  }
  REFLEX_HD static Factors factors(const uint8_t* cell, int u, int lane) {  // of the first and last 16 values
    const float d = f16_value(load_short(cell + 1664 + lane / 4 * 2));
    const uint32_t s = load_short(cell + 1536 + 4 * lane + 2 * u);
    return {d * static_cast<float>(static_cast<int8_t>(s)),
            d * static_cast<float>(static_cast<int8_t>(s >> 8))};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    const Factors f = factors(cell, u, lane);
    return {h2_both(f.a * kWScale), h2_both(f.b * kWScale)};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int u, int p, int lane, const Scales& s, h2* w) {
    const uint32_t high = high_bits(cell, u, p / 2, lane);
    nibble_pairs<0x30u>(
        load_word(cell + 512 * u + 16 * lane + 4 * p), Minus<32>::k1024, Minus<32>::k64,
        [&](int half) { return sixth_bits(high, p % 2, half); }, w);
    for (int i = 0; i < 4; ++i) w[i] = h2_mul(w[i], p < 2 ? s.a : s.b);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w < 256) {
      const int lane = w % 128 / 4, group = w / 128 * 4 + lane % 4;  // 32 values: group 4h + 2n + p of 64h..
      return pack_nibbles(w % 4, [&](int i) {
        return rows.byte(lane / 4, cell, group / 4 * 64 + group % 2 * 32 + i) >> (group % 4 / 2 * 4);
      });
    }
    if (w < 384) {
      const int lane = (w - 256) / 4, group = (w - 256) % 4 / 2 * 4 + lane % 4;
      return pack_pairs(w % 2, [&](int i) {
        return rows.byte(lane / 4, cell, 128 + group / 4 * 32 + i) >> (group % 4 * 2);
      });
    }
    if (w < 416) {
      const int lane = w - 384, t = lane % 4;
      return rows.half(lane / 4, cell, 192 + 2 * t) | rows.half(lane / 4, cell, 192 + 8 + 2 * t) << 16;
    }
    const int g = 2 * (w - 416);
    return rows.half(g, cell, 208) | rows.half(g + 1, cell, 208) << 16;
  }
};

// IQ4_NL, IQ4_XS: a 4-bit index into 16 values (ggml-common.h, kvalues_iq4nl), looked up four at a
// time with byte permutes; fields lie in order, value i at bit 4 i. The table has 128 added, less kAdd.
template <uint32_t kAdd>
REFLEX_HD uint32_t iq4_bytes(uint32_t fields16) {
  constexpr uint32_t k0 = 0x3F2D1801u ^ kAdd, k1 = 0x766A5D4Fu ^ kAdd;  // -127 -104 -83 -65, -49 -35 -22 -10
  constexpr uint32_t k2 = 0xA6998D81u ^ kAdd, k3 = 0xF1D9C5B5u ^ kAdd;  // 1 13 25 38, 53 69 89 113
  const uint32_t low3 = fields16 & 0x7777u;
  const uint32_t a = permute(k0, k1, low3), b = permute(k2, k3, low3);
  return permute(a, b, 0x3210u | (fields16 & 0x8888u) >> 1);
}
/// The eight values of a word: as f16, and as bytes.
REFLEX_HD void iq4_pairs(uint32_t fields, h2* q) {
  byte_pairs(iq4_bytes<0>(fields), q);
  byte_pairs(iq4_bytes<0>(fields >> 16), q + 2);
}
REFLEX_HD void iq4_words(uint32_t fields, uint32_t* q) {
  q[0] = iq4_bytes<kSignBits>(fields);
  q[1] = iq4_bytes<kSignBits>(fields >> 16);
}

template <class Byte>
REFLEX_HD uint32_t pack_in_order(int k, Byte value) {
  uint32_t w = 0;
  for (int i = 0; i < 8; ++i) w |= (value(8 * k + i) & 0xF) << 4 * i;
  return w;
}

/// Cell: quads at 16 l, scales at 512 + 2 l.
template <>
struct Tile<GgmlType::IQ4_NL> : TileOf32 {
  static constexpr int kBytes = 576;
  struct Bits {
    Quad q;
  };
  REFLEX_HD static Bits bits(const uint8_t* cell, int, int lane) { return {load_quad(cell + 16 * lane)}; }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    iq4_words(b.q.v[p], q);
  }
  REFLEX_HD static Factors factors(const uint8_t* cell, int, int lane) {
    return {f16_value(load_short(cell + 512 + 2 * lane)), 0};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    return {h2_both(factors(cell, u, lane).a * kWScale), 0};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int, int p, int lane, const Scales& s, h2* w) {
    iq4_pairs(load_word(cell + 16 * lane + 4 * p), w);
    for (int i = 0; i < 4; ++i) w[i] = h2_mul(w[i], s.a);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w < 128) {
      const int lane = w / 4, block = cell * 4 + lane % 4;
      return pack_in_order(w % 4,
                           [&](int i) { return rows.byte(lane / 4, block, 2 + i % 16) >> (i / 16 * 4); });
    }
    const int a = 2 * (w - 128), b = a + 1;
    return rows.half(a / 4, cell * 4 + a % 4, 0) | rows.half(b / 4, cell * 4 + b % 4, 0) << 16;
  }
};

// MXFP4: doubled e2m1 (quant/mxfp4.h), looked up in the same way, the table's bytes with their sign bit
// flipped where kFlip says; the scale, 2^(e - 128), is a byte.
template <uint32_t kFlip>
REFLEX_HD uint32_t e2m1_bytes(uint32_t fields16) {
  constexpr uint32_t k0 = 0x03020100u ^ kFlip, k1 = 0x0C080604u ^ kFlip;  // 0 1 2 3, 4 6 8 12
  constexpr uint32_t k2 = 0xFDFEFF00u ^ kFlip, k3 = 0xF4F8FAFCu ^ kFlip;  // 0 -1 -2 -3, -4 -6 -8 -12
  const uint32_t low3 = fields16 & 0x7777u;
  const uint32_t a = permute(k0, k1, low3), b = permute(k2, k3, low3);
  return permute(a, b, 0x3210u | (fields16 & 0x8888u) >> 1);
}

/// Cell: quads at 16 l, exponents at 512 + l.
template <>
struct Tile<GgmlType::MXFP4> : TileOf32 {
  static constexpr int kBytes = 544;
  struct Bits {
    Quad q;
  };
  REFLEX_HD static Bits bits(const uint8_t* cell, int, int lane) { return {load_quad(cell + 16 * lane)}; }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    q[0] = e2m1_bytes<0>(b.q.v[p]);
    q[1] = e2m1_bytes<0>(b.q.v[p] >> 16);
  }
  REFLEX_HD static Factors factors(const uint8_t* cell, int, int lane) {
    const uint32_t e = cell[512 + lane];
    return {quant::float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    return {h2_both(factors(cell, u, lane).a * kWScale), 0};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int, int p, int lane, const Scales& s, h2* w) {
    const uint32_t fields = load_word(cell + 16 * lane + 4 * p);
    byte_pairs(e2m1_bytes<kSignBits>(fields), w);
    byte_pairs(e2m1_bytes<kSignBits>(fields >> 16), w + 2);
    for (int i = 0; i < 4; ++i) w[i] = h2_mul(w[i], s.a);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w < 128) {
      const int lane = w / 4, block = cell * 4 + lane % 4;
      return pack_in_order(w % 4,
                           [&](int i) { return rows.byte(lane / 4, block, 1 + i % 16) >> (i / 16 * 4); });
    }
    uint32_t four = 0;  // exponents of a row's four blocks
    for (int t = 0; t < 4; ++t) four |= rows.byte(w - 128, cell * 4 + t, 0) << 8 * t;
    return four;
  }
};

/// Cell: quad of unit u at 512 u + 16 l, then each row's 8 bytes d, scales_h, scales_l as they are.
template <>
struct Tile<GgmlType::IQ4_XS> : TileOf256 {
  static constexpr int kBytes = 1088;
  struct Bits {
    Quad q;
  };
  REFLEX_HD static Bits bits(const uint8_t* cell, int u, int lane) {
    return {load_quad(cell + 512 * u + 16 * lane)};
  }
  template <int p>
  REFLEX_HD static void ints(const Bits& b, uint32_t* q) {
    iq4_words(b.q.v[p], q);
  }
  REFLEX_HD static Factors factors(const uint8_t* cell, int u, int lane) {
    const int group = 4 * u + lane % 4;
    const uint32_t d = load_word(cell + 1024 + lane / 4 * 8), low = load_word(cell + 1028 + lane / 4 * 8);
    const uint32_t scale = (low >> 4 * group & 0xF) | (d >> (16 + 2 * group) & 3) << 4;
    return {f16_value(d & 0xFFFF) * (static_cast<float>(scale) - 32.0f), 0};
  }
  REFLEX_HD static Scales scales(const uint8_t* cell, int u, int lane) {
    return {h2_both(factors(cell, u, lane).a * kWScale), 0};
  }
  REFLEX_HD static void quarter(const uint8_t* cell, int u, int p, int lane, const Scales& s, h2* w) {
    iq4_pairs(load_word(cell + 512 * u + 16 * lane + 4 * p), w);
    for (int i = 0; i < 4; ++i) w[i] = h2_mul(w[i], s.a);
  }
  REFLEX_HD static uint32_t word(const RawRows& rows, int cell, int w) {
    if (w < 256) {
      const int lane = w % 128 / 4, group = w / 128 * 4 + lane % 4;
      return pack_in_order(
          w % 4, [&](int i) { return rows.byte(lane / 4, cell, 8 + 16 * group + i % 16) >> (i / 16 * 4); });
    }
    const int i = w - 256;
    return rows.word(i / 2, cell, i % 2 * 4);
  }
};

/// The types that have a tile, for tables: REFLEX_TILED(M) expands M(type) for each.
#define REFLEX_TILED(M) \
  M(F16) M(BF16) M(Q4_0) M(Q4_1) M(Q5_0) M(Q5_1) M(Q8_0) M(Q4_K) M(Q5_K) M(Q6_K) M(IQ4_NL) M(IQ4_XS) M(MXFP4)

/// Those in super-blocks of 256.
#define REFLEX_TILED_256(M) M(Q4_K) M(Q5_K) M(Q6_K) M(IQ4_XS)

/// The pairs of types that q and k, and v, have in common mixes, first the type of q: one launch for all.
#define REFLEX_TILED_PAIRS(M) M(Q4_K, Q6_K) M(Q5_K, Q6_K) M(Q4_K, Q5_K)

#define REFLEX_CHECK_TILE(type) \
  static_assert(Tile<GgmlType::type>::kTiled && Tile<GgmlType::type>::kBytes % 16 == 0);
REFLEX_TILED(REFLEX_CHECK_TILE)
#undef REFLEX_CHECK_TILE

}  // namespace reflex::cuda
