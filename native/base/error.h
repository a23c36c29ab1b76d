// Typed errors. Nothing in the core ends the process: every failure travels as an
// Error with a kind, and the message says what was expected, what was found and where.
#pragma once
#include <stdexcept>
#include <string>

namespace reflex {

/// The kinds of the protocol's `error_kind`; append-only, names in error.cpp.
enum class ErrorKind {
  gguf,
  unsupported_architecture,
  cuda,
  out_of_memory,
  tokenizer,
  context_overflow,
  kv_cache,
  lora,
  io,
  invalid_input,
  cancelled,
  busy,
  shutting_down,
  line_too_long,
  unsupported,
  fatal,
  other,
};

/// The protocol's spelling, e.g. "context_overflow".
const char* error_kind_name(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

/// Throws Error(kind, printf-formatted message).
[[noreturn]] void fail(ErrorKind kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

/// printf into a std::string.
std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace reflex
