#include "gguf/string_walk.h"

#include <cstring>

namespace reflex::gguf {

namespace {

constexpr int kPlaces = 4;
// Where so many lengths in a row are below this a string is taken to begin: a length read a byte too early or
// too late is 256 times as large, or has its string's first character on top.
constexpr uint64_t kLikelyLength = 256;
constexpr int kLikelyStrings = 4;

/// Passes over the string at p; false, p as it is, where it does not end before `end`.
inline bool pass(const std::byte*& p, const std::byte* end) {
  uint64_t n = 0;
  const auto left = static_cast<uint64_t>(end - p);
  if (left < kStringLengthBytes) [[unlikely]]
    return false;
  std::memcpy(&n, p, kStringLengthBytes);
  if (n > left - kStringLengthBytes) [[unlikely]]
    return false;
  p += kStringLengthBytes + n;
  return true;
}

/// Over strings that begin before `stop`, `count` at most; adds to what is passed.
void walk(StringWalk& w, const std::byte* stop, const std::byte* end, uint64_t count) {
  const std::byte* p = w.at;
  uint64_t i = 0;
  while (i < count && p < stop && pass(p, end)) ++i;
  w = {p, w.passed + i};
}

const std::byte* likely_string(const std::byte* from, const std::byte* stop, const std::byte* end) {
  for (const std::byte* p = from; p < stop; ++p) {
    const std::byte* q = p;
    int n = 0;
    for (; n < kLikelyStrings; ++n) {
      const std::byte* before = q;
      if (!pass(q, end) || static_cast<uint64_t>(q - before) >= kStringLengthBytes + kLikelyLength) break;
    }
    if (n == kLikelyStrings) return p;
  }
  return stop;
}

/// One round: places `apart` from each other, the first exact. What is joined up to is in w.
void walk_places(StringWalk& w, const std::byte* end, uint64_t count, uint64_t apart) {
  const std::byte *first[kPlaces], *stop[kPlaces];
  StringWalk place[kPlaces];
  for (int k = 0; k < kPlaces; ++k) {
    const std::byte* begin = w.at + static_cast<uint64_t>(k) * apart;
    stop[k] = begin + apart;
    first[k] = k == 0 ? begin : likely_string(begin, stop[k], end);
    place[k] = {first[k], 0};
  }
  // In registers: the loads of the four do not wait for each other.
  const std::byte *a = first[0], *b = first[1], *c = first[2], *d = first[3];
  uint64_t steps = 0;
  while (a < stop[0] && b < stop[1] && c < stop[2] && d < stop[3]) {
    const std::byte *a1 = a, *b1 = b, *c1 = c, *d1 = d;
    if (!pass(a1, end) || !pass(b1, end) || !pass(c1, end) || !pass(d1, end)) [[unlikely]]
      break;
    a = a1, b = b1, c = c1, d = d1;
    ++steps;
  }
  place[0] = {a, steps}, place[1] = {b, steps}, place[2] = {c, steps}, place[3] = {d, steps};
  for (int k = 0; k < kPlaces; ++k) {
    walk(place[k], stop[k], end, count);
    if (first[k] != w.at || place[k].passed > count - w.passed) return;
    w = {place[k].at, w.passed + place[k].passed};
  }
}

}  // namespace

StringWalk walk_strings(const std::byte* begin, const std::byte* end, uint64_t count, uint64_t apart) {
  StringWalk w{begin, 0};
  const uint64_t round = apart * kPlaces;
  // As long as a round's strings can be among those asked for, of which each takes 8 bytes and more.
  while (static_cast<uint64_t>(end - w.at) > round + kStringLengthBytes &&
         (count - w.passed) * kStringLengthBytes > round) {
    const uint64_t before = w.passed;
    walk_places(w, end, count, apart);
    if (w.passed == before) break;
  }
  walk(w, end, end, count - w.passed);
  return w;
}

}  // namespace reflex::gguf
