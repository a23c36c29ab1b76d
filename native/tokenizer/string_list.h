// A metadata array of strings made random-access, and a hash index over one: no string is
// copied, all are views into the mapping, so the gguf::File must outlive both.
//
// Both are filled on the cold path, where a fresh page costs about a microsecond and a walk over
// 151,936 strings half a millisecond: so one walk fills everything, and little memory is touched.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"

namespace reflex {

/// Number of strings. Error(tokenizer) where array is no array of strings, or takes 4 GiB or more.
int32_t string_count(const gguf::ArrayView& array);

class StringList {
 public:
  /// Walks the array once; visit(index, string) sees each. Fails as string_count does.
  template <class Visit>
  StringList(const gguf::ArrayView& array, Visit&& visit) : array_(array), count_(string_count(array)) {
    begins_.reserve(static_cast<size_t>(count_) / kStride + 1);
    array.each_string([&](uint64_t i, std::string_view s) {
      if (i % kStride == 0) begins_.push_back(offset_of(s));
      if (s.size() > longest_) longest_ = s.size();
      visit(static_cast<int32_t>(i), s);
    });
  }

  int32_t size() const { return count_; }
  size_t longest() const { return longest_; }  ///< bytes
  /// String i, 0 <= i < size(): a walk over at most kStride lengths.
  std::string_view operator[](int32_t i) const;
  /// One more walk over all: visit(index, string).
  template <class Visit>
  void each(Visit&& visit) const {
    array_.each_string([&](uint64_t i, std::string_view s) { visit(static_cast<int32_t>(i), s); });
  }

 private:
  static constexpr int32_t kStride = 16;
  static constexpr size_t kLengthBytes = 8;  // the length before each string (GGUF)
  uint32_t offset_of(std::string_view s) const {
    return static_cast<uint32_t>(s.data() - reinterpret_cast<const char*>(array_.data) - kLengthBytes);
  }

  gguf::ArrayView array_;
  std::vector<uint32_t> begins_;  // [i]: where the length of string i * kStride lies
  int32_t count_ = 0;
  size_t longest_ = 0;
};

/// Hash of a short string: two overlapping words folded by a 64x64->128 bit multiplication
/// (the idea of Wang Yi's wyhash).
uint64_t string_hash(std::string_view s);

/// A hash index from string to its place in a list. Of equal strings the last added wins, as in
/// a dictionary filled in order.
///
/// Chained: a chain's head is replaced without a look at it, so that no insertion waits for
/// memory or mispredicts a branch (half the time of linear probing for 151,387 merges).
class StringIndex {
 public:
  /// For the strings of a list of this length.
  explicit StringIndex(int32_t size);
  void add(int32_t i, std::string_view s) {
    const uint64_t hash = string_hash(s);
    uint32_t& head = heads_[static_cast<uint32_t>(hash) & mask_];
    links_[i] = (static_cast<uint32_t>(hash >> 32) & ~index_mask_) | head;
    head = static_cast<uint32_t>(i) + 1;
  }
  /// -1 when absent. Error(tokenizer) where so many strings share a hash that the file must
  /// have been made for it.
  int32_t find(std::string_view s, const StringList& list) const;

 private:
  struct Free {
    void operator()(uint32_t* p) const;
  };
  std::unique_ptr<uint32_t[], Free> heads_;  // (mask_ + 1): index + 1 of a chain's first string, or 0
  // (size) what follows string i, as heads_ has it, in the low bits; above, bits of i's own
  // hash, which spare most comparisons.
  std::unique_ptr<uint32_t[]> links_;
  uint32_t mask_;        // heads - 1
  uint32_t index_mask_;  // the low bits of a link
};

}  // namespace reflex
