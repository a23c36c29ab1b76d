// Scalar decode of any tensor type to f32, byte-exact with gguf-py. The reference that every
// faster path is tested against, and the path for types without one.
#pragma once
#include <cstddef>

#include "quant/types.h"

namespace reflex {

/// y (n) = decode(x), n a multiple of the type's block, else Error(invalid_input). Throws Error(unsupported)
/// for types that hold no weights (integers, Q8_1, Q8_K).
void dequantize_row(GgmlType type, const void* x, float* y, size_t n);

/// Whether dequantize_row knows the type.
bool can_dequantize(GgmlType type);

}  // namespace reflex
