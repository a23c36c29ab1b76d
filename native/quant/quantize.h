// Scalar encode of f32 rows to the simple types, bit-exact with gguf-py's quants.quantize on
// finite values. For tools and tests; the other types' encoders live in gguf-py and llama.cpp.
#pragma once
#include <cstddef>

#include "quant/types.h"

namespace reflex {

/// y (row_bytes(type, n)) = encode(x (n)), n a multiple of the type's block, else
/// Error(invalid_input). Error(unsupported) for types other than F32, F16, BF16, Q8_0, Q4_0.
void quantize_row(GgmlType type, const float* x, void* y, size_t n);

}  // namespace reflex
