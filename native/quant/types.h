// The GGML tensor types as a table: names, ids, block geometry. No decoding here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace reflex {

enum class GgmlType : uint32_t {
#define REFLEX_TYPE(name, id, values, bytes, kind) name = id,
#include "quant/types.def"
#undef REFLEX_TYPE
};

enum class TypeKind : uint8_t {
  plain,   ///< one float per value
  packed,  ///< blocks of quantised weights
  other,   ///< no weights: integers, f64, types for activations
};

struct TypeInfo {
  const char* name;
  GgmlType type;
  uint32_t block_values;  ///< values per block; a row's length must be a multiple
  uint32_t block_bytes;   ///< bytes per block
  TypeKind kind;
};

/// Geometry of a type by its file id; nullptr when the id is unknown.
const TypeInfo* find_type(uint32_t id);

/// Geometry of a known type.
inline const TypeInfo& type_info(GgmlType type) { return *find_type(static_cast<uint32_t>(type)); }

/// Bytes of one row of n values (n a multiple of block_values).
inline size_t row_bytes(GgmlType type, size_t n) {
  const TypeInfo& t = type_info(type);
  return n / t.block_values * t.block_bytes;
}

}  // namespace reflex
