// bytes -> metadata and tensor directory, without copying: every string, array and tensor is
// a view into the mapping. Everything is checked before it is used; hostile files give
// Error(gguf) naming key or tensor and file offset. This room never touches a kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "quant/types.h"

namespace reflex::gguf {

/// Value types by file id (GGUF specification).
enum class ValueType : uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};
const char* value_type_name(ValueType type);

/// An array's elements where they lie in the file (unaligned). Strings are walked, not indexed.
struct ArrayView {
  ValueType type{};
  uint64_t count = 0;
  const std::byte* data = nullptr;  ///< first element
  const std::byte* end = nullptr;   ///< one past the last element's bytes
  std::string_view key;             ///< whose value it is, for messages
  uint64_t offset = 0;              ///< of the first element in its file, for messages

  /// Walk an array of strings: f(index, string_view). Error(gguf) when it holds another type.
  /// Parsing has checked every length; they are checked again here (one compare each) because
  /// the mapping is shared and somebody may have rewritten the file since.
  template <class F>
  void each_string(F&& f) const {
    expect_strings();
    const std::byte* p = data;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t n = 0;
      const uint64_t left = static_cast<uint64_t>(end - p);
      if (left >= 8) __builtin_memcpy(&n, p, 8);
      if (left < 8 || n > left - 8) changed(i);
      f(i, std::string_view(reinterpret_cast<const char*>(p + 8), n));
      p += 8 + n;
    }
  }

  // Element i of a numeric or bool array, as the wider type. Error(gguf) where i >= count, where
  // the elements are of another kind, and where the value does not fit.
  int64_t as_int(uint64_t i) const;    ///< integers and bools
  uint64_t as_uint(uint64_t i) const;  ///< integers and bools, not negative
  double as_float(uint64_t i) const;   ///< floats (NaN and Inf as they stand), integers, bools

 private:
  void expect_strings() const;
  [[noreturn]] void changed(uint64_t i) const;
};

/// One metadata entry, a view into the mapping.
struct Value {
  std::string_view key;
  ValueType type{};
  const std::byte* data = nullptr;  ///< the scalar's bytes; for string and array see below
  std::string_view string;          ///< type == string
  ArrayView array;                  ///< type == array (nested arrays: elements opaque)
  uint64_t offset = 0;              ///< of the value in its file, for messages
};

struct TensorInfo {
  std::string_view name;
  GgmlType type{};
  uint32_t n_dims = 0;
  uint64_t ne[4] = {1, 1, 1, 1};  ///< ne[0] is the row length (fastest)
  uint32_t part = 0;              ///< index into File::part
  uint64_t offset = 0;            ///< absolute, in that part's file
  uint64_t nbytes = 0;
  const std::byte* data = nullptr;
};

struct Part {
  std::string path;
  const std::byte* data = nullptr;
  size_t size = 0;
  int fd = -1;  ///< open while the File lives, for loaders that read instead of map
};

/// Parsed metadata and tensors of one model (one file or all parts of a split one).
class File {
 public:
  /// Open path; when it is one part of a split model, all parts are opened (from any part).
  static std::unique_ptr<File> open(const std::string& path);
  /// Parse bytes that somebody else owns (tests, fuzzing). Never split.
  static std::unique_ptr<File> parse(const void* data, size_t size, const std::string& name);
  ~File();

  uint32_t version() const;
  const std::vector<Part>& parts() const;
  const std::vector<Value>& metadata() const;      ///< the first part's, in file order
  const std::vector<TensorInfo>& tensors() const;  ///< in file order, part by part
  uint64_t total_bytes() const;                    ///< of all parts' files

  /// Error(io) when a part has shrunk since it was opened. Touching a mapping beyond its file's
  /// end ends the process (SIGBUS; of a command with a line that says so: lost_file.h), so loaders
  /// call this (one fstat a part) before they read the tensors. It narrows the window and cannot
  /// close it: replace model files by renaming a new one over the old, never by writing or
  /// truncating in place.
  void check_size() const;

  const Value* find(std::string_view key) const;  ///< nullptr when absent
  const TensorInfo* find_tensor(std::string_view name) const;

  // Typed access. An entry of the wrong type or out of range is Error(gguf) naming the key,
  // what was expected and what was found; the optional forms return nullopt when absent.
  uint64_t require_uint(std::string_view key) const;
  double require_float(std::string_view key) const;  ///< finite, f32 or f64
  std::string_view require_string(std::string_view key) const;
  const ArrayView& require_array(std::string_view key) const;
  std::optional<uint64_t> get_uint(std::string_view key) const;  ///< any non-negative integer type
  std::optional<double> get_float(std::string_view key) const;   ///< finite
  std::optional<bool> get_bool(std::string_view key) const;
  std::optional<std::string_view> get_string(std::string_view key) const;
  const ArrayView* get_array(std::string_view key) const;  ///< nullptr when absent

 private:
  File();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reflex::gguf
