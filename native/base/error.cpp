#include "base/error.h"

#include <cstdarg>
#include <cstdio>

namespace reflex {

const char* error_kind_name(ErrorKind kind) {
  static const char* const names[] = {
      "gguf",
      "unsupported_architecture",
      "cuda",
      "out_of_memory",
      "tokenizer",
      "context_overflow",
      "kv_cache",
      "lora",
      "io",
      "invalid_input",
      "cancelled",
      "busy",
      "shutting_down",
      "line_too_long",
      "unsupported",
      "fatal",
      "other",
  };
  static_assert(sizeof(names) / sizeof(names[0]) == static_cast<size_t>(ErrorKind::other) + 1);
  return names[static_cast<size_t>(kind)];
}

namespace {
std::string vformat(const char* format, va_list args) {
  va_list copy;
  va_copy(copy, args);
  const int n = std::vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  if (n < 0) return format;
  std::string out(static_cast<size_t>(n), '\0');
  std::vsnprintf(out.data(), static_cast<size_t>(n) + 1, format, args);
  return out;
}
}  // namespace

std::string format(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string out = vformat(format, args);
  va_end(args);
  return out;
}

void fail(ErrorKind kind, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string message = vformat(format, args);
  va_end(args);
  throw Error(kind, message);
}

}  // namespace reflex
