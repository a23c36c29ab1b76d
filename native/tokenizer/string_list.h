// A metadata array of strings made random-access, and a hash index over one: no string is
// copied, all are views into the mapping, so the gguf::File must outlive both.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "gguf/gguf.h"

namespace reflex {

/// Hash of a short string: two overlapping words folded by a 64x64->128 bit multiplication
/// (the idea of Wang Yi's wyhash).
uint64_t string_hash(std::string_view s);

/// Where each string of an array lies. Lengths are kept here and not read again from the
/// mapping, which another process may write to.
class StringList {
 public:
  StringList() = default;
  /// Error(tokenizer) where array is no array of strings, or holds more than 4 GiB.
  explicit StringList(const gguf::ArrayView& array);

  int32_t size() const { return count_; }
  size_t longest() const { return longest_; }  ///< bytes
  std::string_view operator[](int32_t i) const {
    return {base_ + begin_[i], begin_[i + 1] - kLengthBytes - begin_[i]};
  }

 private:
  static constexpr uint32_t kLengthBytes = 8;  // the length before each string (GGUF)

  const char* base_ = nullptr;         // the array's first byte
  std::unique_ptr<uint32_t[]> begin_;  // (count + 1): offset of string i's first character
  int32_t count_ = 0;
  size_t longest_ = 0;
};

/// Open addressing from string to index. Of equal strings the last wins, as in a dictionary
/// filled in order.
class StringIndex {
 public:
  /// list must outlive this. Error(tokenizer) where hashes collide so often that the file must
  /// have been made for it.
  explicit StringIndex(const StringList& list);
  int32_t find(std::string_view s) const;  ///< -1 when absent

 private:
  // A slot holds index + 1 in its low bits and, above, bits of the hash that spare most
  // comparisons; 0 is empty.
  struct Free {
    void operator()(uint32_t* p) const;
  };
  void add(int32_t i, uint64_t& probes_left);
  const StringList& list_;
  std::unique_ptr<uint32_t[], Free> slots_;
  uint32_t mask_ = 0;   // slots - 1
  int index_bits_ = 1;  // 1 to 31
};

}  // namespace reflex
