// bytes of one file -> its metadata and tensor directory, as views. Owns every check of what a
// single file says; joining the parts of a split model is split.h's, typed access gguf.cpp's.
#pragma once
#include <string>
#include <vector>

#include "gguf/gguf.h"

namespace reflex::gguf {

// Limits on what a file may claim. Generous against every known file, and named in messages.
inline constexpr uint64_t kMaxKeyBytes = 65535;        ///< GGUF specification
inline constexpr uint64_t kMaxTensorNameBytes = 1024;  ///< the specification says 64
inline constexpr uint64_t kMaxMetadata = 1 << 16;      ///< entries (known files: below 100)
inline constexpr uint64_t kMaxTensors = 1 << 20;       ///< (known files: below 3,000)
inline constexpr int kMaxArrayDepth = 4;               ///< arrays of arrays of ...
inline constexpr uint64_t kDefaultAlignment = 32;      ///< GGUF specification
inline constexpr uint64_t kMinAlignment = 8;           ///< GGUF specification
inline constexpr uint64_t kMaxAlignment = 1 << 24;

struct Parsed {
  uint32_t version = 0;
  std::vector<Value> metadata;      ///< in file order
  std::vector<uint32_t> by_key;     ///< metadata's indices, sorted by key; keys are unique
  std::vector<TensorInfo> tensors;  ///< in file order; they neither overlap nor leave the file
};

/// Parse one file. `file` names it in messages. Touches the header only, never tensor data.
/// Throws Error(gguf).
Parsed parse_part(const std::string& file, const std::byte* data, uint64_t size);

/// The entry called key, nullptr when absent.
const Value* find_value(const Parsed& parsed, std::string_view key);

/// Bytes of one element; 0 for string and array, whose elements vary.
uint32_t value_bytes(ValueType type);

/// A scalar integer's value when it is not negative; nullopt when it is, or is no integer.
std::optional<uint64_t> uint_value(const Value& value);

/// What a value is, for messages: "i32 -3", "f32 nan", "string 'abc'", "array of 5 x u8".
std::string describe(const Value& value);

}  // namespace reflex::gguf
