// The cold half of the cursor, and the string walk that parsing time goes into.
#include "gguf/reader.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

#include "base/error.h"
#include "gguf/string_walk.h"

namespace reflex::gguf {

namespace {

/// Longest stretch of a name that a message repeats, bytes.
constexpr size_t kMaxQuoted = 96;

/// Bytes of the well-formed UTF-8 sequence at text[i] (Unicode 15, table 3-7); 0 when broken.
size_t utf8_length(std::string_view text, size_t i) {
  const auto at = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u; };
  const auto tail = [&](size_t k) { return (at(k) & 0xC0u) == 0x80u; };
  const unsigned a = at(i), b = at(i + 1);
  if (a < 0x80) return 1;
  if (a < 0xC2 || a > 0xF4 || !tail(i + 1)) return 0;
  if (a < 0xE0) return 2;
  if (!tail(i + 2)) return 0;
  if (a < 0xF0) return (a == 0xE0 && b < 0xA0) || (a == 0xED && b > 0x9F) ? 0 : 3;
  if (!tail(i + 3)) return 0;
  return (a == 0xF0 && b < 0x90) || (a == 0xF4 && b > 0x8F) ? 0 : 4;
}

}  // namespace

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t n = utf8_length(text, i);
    if (n == 0) return false;
    i += n;
  }
  return true;
}

std::string quoted(std::string_view text) {
  std::string out = "'";
  size_t i = 0;
  while (i < text.size() && i < kMaxQuoted) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const size_t n = utf8_length(text, i);
    // U+0080 to U+009F are control characters too: terminals act on them.
    const bool c1 = n == 2 && c == 0xC2 && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (n == 0 || c < 0x20 || c == 0x7F || c1) {
      out += format("\\x%02x", c);
      ++i;
    } else {
      out += text.substr(i, n);
      i += n;
    }
  }
  out += i < text.size() ? "...'" : "'";
  return out;
}

std::string_view Reader::string(uint64_t max, const char* what) {
  const uint64_t at = pos_;
  const uint64_t n = read<uint64_t>(what);
  if (n > max)
    fail_at(at, "%s: expected at most %" PRIu64 " bytes, found a length of %" PRIu64, what, max, n);
  need(n, what);
  const std::string_view text(reinterpret_cast<const char*>(data_ + pos_), n);
  pos_ += n;
  return text;
}

void Reader::expect_room(uint64_t count, uint64_t min_bytes, const char* what) const {
  if (count > remaining() / min_bytes)
    fail_at(pos_, "%" PRIu64 " %s cannot fit in the %" PRIu64 " bytes that follow", count, what, remaining());
}

void Reader::skip(uint64_t count, uint64_t bytes, const char* what) {
  expect_room(count, bytes, what);
  pos_ += count * bytes;
}

void Reader::skip_strings(uint64_t count) {
  expect_room(count, kStringLengthBytes, "strings");
  const std::byte* const begin = data_ + pos_;
  const std::byte* const end = data_ + limit_;
  const StringWalk walk = walk_strings(begin, end, count);
  pos_ += static_cast<uint64_t>(walk.at - begin);
  if (walk.passed == count) return;
  uint64_t n = 0;
  const auto left = static_cast<uint64_t>(end - walk.at);
  if (left >= sizeof n) std::memcpy(&n, walk.at, sizeof n);
  fail_at(pos_,
          "element %" PRIu64 " of %" PRIu64 ": a string of %" PRIu64 " bytes runs past the end (%" PRIu64
          " bytes are left)",
          walk.passed, count, n, left);
}

void Reader::truncated(uint64_t bytes, const char* what) const {
  if (limit_ < size_ && bytes <= size_ - pos_)
    fail_at(pos_, "%s: the header does not end within its limit of %" PRIu64 " bytes", what, kMaxHeaderBytes);
  fail_at(pos_, "%s: expected %" PRIu64 " bytes, but the file of %" PRIu64 " bytes has only %" PRIu64 " left",
          what, bytes, size_, size_ - pos_);
}

void Reader::fail_at(uint64_t at, const char* format_, ...) const {
  char message[1024];
  va_list args;
  va_start(args, format_);
  std::vsnprintf(message, sizeof message, format_, args);
  va_end(args);
  const std::string subject = kind_ ? std::string(kind_) + " " + quoted(name_) + ", " : std::string();
  fail(ErrorKind::gguf, "%s: %soffset %" PRIu64 ": %s", file_.c_str(), subject.c_str(), at, message);
}

}  // namespace reflex::gguf
