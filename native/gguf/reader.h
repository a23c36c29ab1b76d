// A bounds-checked cursor over the header of one GGUF file. Every read is checked against the
// bytes that are there before they are touched; a failure is Error(gguf) that names the file,
// the key or tensor being read, and the offset. It knows no GGUF structure beyond strings.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace reflex::gguf {

/// Metadata and tensor directory must end within this: the largest known files need about
/// 20 MiB, and a hostile one must not buy minutes of parsing.
inline constexpr uint64_t kMaxHeaderBytes = uint64_t{256} << 20;

/// A name as it may appear in a message: quoted, control and broken bytes escaped, cut short.
std::string quoted(std::string_view text);

/// Whether text is well-formed UTF-8 (no surrogates, no overlong forms).
bool is_utf8(std::string_view text);

class Reader {
 public:
  Reader(const std::string& file, const std::byte* data, uint64_t size)
      : file_(file), data_(data), size_(size), limit_(size < kMaxHeaderBytes ? size : kMaxHeaderBytes) {}

  uint64_t pos() const { return pos_; }
  const std::byte* here() const { return data_ + pos_; }
  uint64_t remaining() const { return limit_ - pos_; }

  /// What is being read now, for messages: subject("key", name), subject("tensor", name).
  void subject(const char* kind, std::string_view name) {
    kind_ = kind;
    name_ = name;
  }

  /// The next little-endian T. `what` names it should it be missing.
  template <class T>
  T read(const char* what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, data_ + pos_, sizeof value);
    pos_ += sizeof value;
    return value;
  }

  /// A length-prefixed string of at most max bytes, as a view.
  std::string_view string(uint64_t max, const char* what);

  /// Passes over count elements of `bytes` each (bytes > 0); the product may wrap.
  void skip(uint64_t count, uint64_t bytes, const char* what);

  /// Passes over count length-prefixed strings, checking each.
  void skip_strings(uint64_t count);

  /// Throws unless count elements of at least min_bytes each can still follow.
  void expect_room(uint64_t count, uint64_t min_bytes, const char* what) const;

  /// Throws Error(gguf) "<file>: <subject>, offset <at>: <message>".
  [[noreturn]] void fail_at(uint64_t at, const char* format, ...) const __attribute__((format(printf, 3, 4)));

 private:
  void need(uint64_t bytes, const char* what) const {
    if (bytes > limit_ - pos_) [[unlikely]]
      truncated(bytes, what);
  }
  [[noreturn]] void truncated(uint64_t bytes, const char* what) const;

  const std::string& file_;
  const std::byte* data_;  // (size_)
  uint64_t size_;
  uint64_t limit_;  // of the header: min(size_, kMaxHeaderBytes)
  uint64_t pos_ = 0;
  const char* kind_ = nullptr;
  std::string_view name_;
};

}  // namespace reflex::gguf
