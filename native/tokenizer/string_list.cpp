#include "tokenizer/string_list.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "base/error.h"

namespace reflex {
namespace {

// Odd 64-bit constants: the golden ratio, and the fraction of pi.
constexpr uint64_t kMix0 = 0x9E3779B97F4A7C15ull, kMix1 = 0x243F6A8885A308D3ull;

uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

template <class Word>
uint64_t load(const char* p) {
  Word word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

constexpr uint32_t kMinHeads = 16;
// Strings looked at in one chain; a sound hash makes chains of ten at most.
constexpr int kMaxChain = 1000;

}  // namespace

uint64_t string_hash(std::string_view s) {
  const char* p = s.data();
  size_t n = s.size();
  uint64_t seed = kMix1 ^ n, a, b;
  for (; n > 16; p += 16, n -= 16) seed = fold(load<uint64_t>(p) ^ kMix0, load<uint64_t>(p + 8) ^ seed);
  if (n >= 8) {
    a = load<uint64_t>(p);
    b = load<uint64_t>(p + n - 8);
  } else if (n >= 4) {
    a = load<uint32_t>(p);
    b = load<uint32_t>(p + n - 4);
  } else if (n > 0) {
    a = static_cast<uint64_t>(static_cast<uint8_t>(p[0])) << 16 |
        static_cast<uint64_t>(static_cast<uint8_t>(p[n >> 1])) << 8 | static_cast<uint8_t>(p[n - 1]);
    b = 0;
  } else {
    a = b = 0;
  }
  return fold(a ^ kMix0, b ^ seed);
}

int32_t string_count(const gguf::ArrayView& array) {
  if (array.type != gguf::ValueType::string)
    fail(ErrorKind::tokenizer, "%.*s: expected an array of strings, found one of %s",
         static_cast<int>(array.key.size()), array.key.data(), gguf::value_type_name(array.type));
  // Every string has a length of 8 bytes before it, so this bounds the count as well.
  const uint64_t bytes = static_cast<uint64_t>(array.end - array.data);
  if (bytes > std::numeric_limits<uint32_t>::max() || array.count > bytes / sizeof(uint64_t))
    fail(ErrorKind::tokenizer, "%.*s: %llu strings in %llu bytes, expected less than 4 GiB",
         static_cast<int>(array.key.size()), array.key.data(), static_cast<unsigned long long>(array.count),
         static_cast<unsigned long long>(bytes));
  return static_cast<int32_t>(array.count);
}

std::string_view StringList::operator[](int32_t i) const {
  const std::byte* p = array_.data + begins_[static_cast<size_t>(i / kStride)];
  for (int32_t left = i % kStride;; --left) {
    // Lengths were checked when the file was parsed and are checked again: the mapping is
    // shared, and somebody may have rewritten the file since.
    uint64_t n = 0;
    const uint64_t room = static_cast<uint64_t>(array_.end - p);
    if (room >= kLengthBytes) std::memcpy(&n, p, kLengthBytes);
    if (room < kLengthBytes || n > room - kLengthBytes)
      fail(ErrorKind::tokenizer, "%.*s[%d]: the file was changed after it was opened",
           static_cast<int>(array_.key.size()), array_.key.data(), i);
    p += kLengthBytes;
    if (left == 0) return {reinterpret_cast<const char*>(p), n};
    p += n;
  }
}

void StringIndex::Free::operator()(uint32_t* p) const { std::free(p); }

StringIndex::StringIndex(int32_t size) {
  const uint32_t n = static_cast<uint32_t>(size);
  const uint32_t heads = std::bit_ceil(std::max(n / 4 * 3, kMinHeads));  // chains of one, on average
  mask_ = heads - 1;
  index_mask_ = std::bit_ceil(n + 1) - 1;
  heads_.reset(static_cast<uint32_t*>(std::calloc(heads, sizeof(uint32_t))));  // pages come zeroed
  if (!heads_) throw std::bad_alloc();
  links_ = std::make_unique_for_overwrite<uint32_t[]>(n);
}

int32_t StringIndex::find(std::string_view s, const StringList& list) const {
  const uint64_t hash = string_hash(s);
  const uint32_t tag = static_cast<uint32_t>(hash >> 32) & ~index_mask_;
  uint32_t at = heads_[static_cast<uint32_t>(hash) & mask_];
  for (int looked = 0; at != 0; ++looked) {
    if (looked == kMaxChain)
      fail(ErrorKind::tokenizer, "%d strings of the vocabulary share the hash of '%.*s'", looked,
           static_cast<int>(std::min<size_t>(s.size(), 64)), s.data());
    const int32_t i = static_cast<int32_t>(at) - 1;
    const uint32_t link = links_[i];
    if ((link & ~index_mask_) == tag && list[i] == s) return i;
    at = link & index_mask_;
  }
  return -1;
}

}  // namespace reflex
