// 8-bit activations for the products with super-blocks of 256 weights (matvec_super.cpp).
//
// row_super: per row a record of
//     pairs     (n) int8, 256 at a time: of values 64 p to 64 p + 63 the 16 numbered q lie in vector q, at
//               16 p: the order in which a vector holds the nibbles of Q4_K and Q5_K
//     quarters  (n) int8, 256 at a time: dwords of values 0..63 and 128..191 in turn, then of 64..127 and
//               192..255: the order of Q6_K's
//     scale     (n / 32) f32; shifted: the same, each second one a 16th; scale16: (n / 16), each twice
//     total32   (n / 32), total16 (n / 16): scale * the sum of q over the block
// Values are rounded as in the other forms (activations.h).
#pragma once
#include "backend/cpu/kernels/activations.h"

REFLEX_ISA_BEGIN

constexpr int32_t kSuperBlock = 256;

/// Where a row_super record keeps its parts, for n values a row.
struct SuperLayout {
  size_t quarters, scale, shifted, scale16, total32, total16, stride;  ///< bytes, multiples of a cache line
  explicit SuperLayout(int32_t n) {
    // A super-block's 8 floats fill half a line: the odd one's other half is never read.
    const auto values = static_cast<size_t>(n), per32 = (values / 8 + 63) / 64 * 64;
    quarters = values;
    scale = quarters + values;
    shifted = scale + per32;
    scale16 = shifted + per32;
    total32 = scale16 + values / 4;
    total16 = total32 + per32;
    stride = total16 + values / 4;
  }
};

REFLEX_ISA_END
