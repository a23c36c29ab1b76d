// Passes over an array of strings that nobody has indexed. Each string's place is known only from the one
// before, so a plain walk waits for one load after the other. A long array is walked in several places at
// once instead, each from where a string seems to begin, and what a place has found counts only where the
// walk from the array's start comes to that very string. Refuses: judging what it finds (reader.h), and
// threads: the walk is over before one would have started, and a busy machine may start it much later.
#pragma once
#include <cstddef>
#include <cstdint>

namespace reflex::gguf {

/// Bytes of the length before each string.
inline constexpr uint64_t kStringLengthBytes = 8;

struct StringWalk {
  const std::byte* at;  ///< behind the last string passed
  uint64_t passed;      ///< fewer than asked for: the string at `at` does not end before the end
};

/// From `begin` over `count` strings, none of which may reach past `end`. apart: bytes between two places
/// that are walked at once (tests: nothing but time depends on it).
StringWalk walk_strings(const std::byte* begin, const std::byte* end, uint64_t count,
                        uint64_t apart = 32 << 10);

}  // namespace reflex::gguf
