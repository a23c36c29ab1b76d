// Writes GGUF bytes by hand for the native tests: whatever it is told, sense or nonsense.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gguf/gguf.h"

namespace check {

using reflex::gguf::ValueType;

/// Little-endian bytes in the making.
class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof value);
    std::memcpy(bytes_.data() + at, &value, sizeof value);
    return *this;
  }
  Bytes& text(std::string_view s) {
    put<uint64_t>(s.size());
    bytes_ += s;
    return *this;
  }
  Bytes& raw(std::string_view s) {
    bytes_ += s;
    return *this;
  }
  Bytes& pad(size_t alignment) {
    bytes_.resize((bytes_.size() + alignment - 1) / alignment * alignment);
    return *this;
  }
  size_t size() const { return bytes_.size(); }
  const std::string& str() const { return bytes_; }

 private:
  std::string bytes_;
};

/// One file: entries and tensors in the order given.
class GgufBuilder {
 public:
  uint32_t version = 3;
  size_t alignment = 32;

  /// Key and value type; what follows is the value's bytes.
  Bytes& entry(std::string_view key, ValueType type) {
    ++n_entries_;
    return entries_.text(key).put(static_cast<uint32_t>(type));
  }
  template <class T>
  void scalar(std::string_view key, ValueType type, T value) {
    entry(key, type).put(value);
  }
  void string(std::string_view key, std::string_view value) { entry(key, ValueType::string).text(value); }
  template <class T>
  void array(std::string_view key, ValueType type, const std::vector<T>& values) {
    Bytes& b = head(key, type, values.size());
    for (const T v : values) b.put(v);
  }
  void strings(std::string_view key, const std::vector<std::string>& values) {
    Bytes& b = head(key, ValueType::string, values.size());
    for (const std::string& v : values) b.text(v);
  }
  /// More of the last entry's bytes.
  Bytes& more() { return entries_; }
  /// Data is appended at the next aligned offset.
  void tensor(std::string_view name, uint32_t type, const std::vector<uint64_t>& ne, std::string_view data) {
    data_.pad(alignment);
    tensor_at(name, type, ne, data_.size());
    data_.raw(data);
  }
  void tensor_at(std::string_view name, uint32_t type, const std::vector<uint64_t>& ne, uint64_t offset) {
    ++n_tensors_;
    directory_.text(name).put(static_cast<uint32_t>(ne.size()));
    for (const uint64_t n : ne) directory_.put(n);
    directory_.put(type).put(offset);
  }

  std::string header() const {
    Bytes b;
    b.raw("GGUF").put(version).put(n_tensors_).put(n_entries_).raw(entries_.str()).raw(directory_.str());
    return b.str();
  }
  std::string file() const {
    Bytes b;
    b.raw(header()).pad(alignment).raw(data_.str());
    return b.str();
  }

 private:
  Bytes& head(std::string_view key, ValueType type, uint64_t count) {
    return entry(key, ValueType::array).put(static_cast<uint32_t>(type)).put(count);
  }

  uint64_t n_entries_ = 0, n_tensors_ = 0;
  Bytes entries_, directory_, data_;
};

/// Touches everything that a parsed file gives access to; returns a checksum so that no read
/// can be optimised away. Under a sanitizer this is what finds a view that leaves its buffer.
inline uint64_t touch_everything(const reflex::gguf::File& file) {
  uint64_t sum = file.total_bytes();
  const auto touch = [&sum](const void* p, size_t n) {
    const auto* c = static_cast<const unsigned char*>(p);
    for (size_t i = 0; i < n; ++i) sum = sum * 31 + c[i];
  };
  for (const auto& v : file.metadata()) {
    touch(v.key.data(), v.key.size());
    touch(v.string.data(), v.string.size());
    sum += file.find(v.key) == &v;
    const auto& a = v.array;
    touch(a.data, static_cast<size_t>(a.end - a.data));
    if (v.type != ValueType::array) continue;
    if (a.type == ValueType::string) {
      a.each_string([&](uint64_t, std::string_view s) { touch(s.data(), s.size()); });
    } else if (a.type == ValueType::f32 || a.type == ValueType::f64) {
      for (uint64_t i = 0; i < a.count; ++i) sum += a.as_float(i) > 0;
    } else if (a.type == ValueType::u64) {
      for (uint64_t i = 0; i < a.count; ++i) sum += a.as_uint(i);
    } else if (a.type != ValueType::array) {
      for (uint64_t i = 0; i < a.count; ++i) sum += static_cast<uint64_t>(a.as_int(i)) + (a.as_float(i) > 0);
    }
  }
  for (const auto& t : file.tensors()) {
    touch(t.name.data(), t.name.size());
    touch(t.data, t.nbytes);
    sum += file.find_tensor(t.name) == &t;
  }
  return sum;
}

}  // namespace check
