#include "tokenizer/string_list.h"

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

constexpr uint32_t kMinSlots = 16;
// Mean slots looked at per insertion; a sound hash needs about two at most.
constexpr uint64_t kMaxMeanProbes = 64;

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

StringList::StringList(const gguf::ArrayView& array) {
  if (array.type != gguf::ValueType::string)
    fail(ErrorKind::tokenizer, "%.*s: expected an array of strings, found one of %s",
         static_cast<int>(array.key.size()), array.key.data(), gguf::value_type_name(array.type));
  // Every string has a length of 8 bytes before it, so this bounds the count as well.
  const uint64_t bytes = static_cast<uint64_t>(array.end - array.data);
  if (bytes > std::numeric_limits<uint32_t>::max() - kLengthBytes || array.count > bytes / kLengthBytes)
    fail(ErrorKind::tokenizer, "%.*s: %llu strings in %llu bytes, expected less than 4 GiB",
         static_cast<int>(array.key.size()), array.key.data(), static_cast<unsigned long long>(array.count),
         static_cast<unsigned long long>(bytes));
  base_ = reinterpret_cast<const char*>(array.data);
  count_ = static_cast<int32_t>(array.count);
  begin_ = std::make_unique_for_overwrite<uint32_t[]>(array.count + 1);
  begin_[0] = kLengthBytes;
  array.each_string([this](uint64_t i, std::string_view s) {
    begin_[i + 1] = begin_[i] + static_cast<uint32_t>(s.size()) + kLengthBytes;
    if (s.size() > longest_) longest_ = s.size();
  });
}

void StringIndex::Free::operator()(uint32_t* p) const { std::free(p); }

StringIndex::StringIndex(const StringList& list) : list_(list) {
  const uint32_t n = static_cast<uint32_t>(list.size());
  const uint32_t wanted = n + n / 2 + n / 8;  // at most 0.62 full
  const uint32_t slots = std::bit_ceil(wanted < kMinSlots ? kMinSlots : wanted);
  mask_ = slots - 1;
  index_bits_ = std::bit_width(n) ? std::bit_width(n) : 1;
  // calloc: zero pages, touched as needed.
  slots_.reset(static_cast<uint32_t*>(std::calloc(slots, sizeof(uint32_t))));
  if (!slots_) throw std::bad_alloc();
  uint64_t probes_left = (n + kMinSlots) * kMaxMeanProbes;
  for (int32_t i = 0; i < list.size(); ++i) add(i, probes_left);
}

void StringIndex::add(int32_t i, uint64_t& probes_left) {
  const std::string_view s = list_[i];
  const uint64_t hash = string_hash(s);
  const uint32_t tag = static_cast<uint32_t>(hash >> 32) >> index_bits_ << index_bits_;
  const uint32_t index_mask = (1u << index_bits_) - 1;
  uint32_t at = static_cast<uint32_t>(hash) & mask_;
  while (const uint32_t slot = slots_[at]) {
    if (((slot ^ tag) & ~index_mask) == 0 && list_[static_cast<int32_t>(slot & index_mask) - 1] == s) break;
    at = (at + 1) & mask_;
    if (--probes_left == 0)
      fail(ErrorKind::tokenizer, "the vocabulary's strings collide in their hashes, up to '%.*s' at index %d",
           static_cast<int>(s.size() < 64 ? s.size() : 64), s.data(), i);
  }
  slots_[at] = tag | (static_cast<uint32_t>(i) + 1);
}

int32_t StringIndex::find(std::string_view s) const {
  const uint64_t hash = string_hash(s);
  const uint32_t tag = static_cast<uint32_t>(hash >> 32) >> index_bits_ << index_bits_;
  const uint32_t index_mask = (1u << index_bits_) - 1;
  for (uint32_t at = static_cast<uint32_t>(hash) & mask_; const uint32_t slot = slots_[at];
       at = (at + 1) & mask_) {
    if (((slot ^ tag) & ~index_mask) != 0) continue;
    const int32_t i = static_cast<int32_t>(slot & index_mask) - 1;
    if (list_[i] == s) return i;
  }
  return -1;
}

}  // namespace reflex
