// The emulated card's memory and what of the host's is pinned. Every allocation lies between two unmapped
// pages, is filled with NaNs, and what rounds it up to the card's alignment is marked and looked at again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace emulator {

class Memory {
 public:
  explicit Memory(size_t limit) : limit_(limit) {}

  /// The address, or 0 where no room is left.
  uintptr_t allocate(size_t bytes);
  /// False where nothing begins there. `problem` says what was written behind it, if anything was.
  bool free(uintptr_t at, std::string& problem);
  /// Whether [at, at + bytes) lies in one allocation.
  bool holds(uintptr_t at, size_t bytes) const;
  size_t used() const { return used_; }
  size_t limit() const { return limit_; }

  /// False where part of the range is pinned already.
  bool pin(uintptr_t at, size_t bytes);
  bool unpin(uintptr_t at);
  enum class Pinned { none, part, all };
  /// How much of the range one pinned range holds.
  Pinned pinned(uintptr_t at, size_t bytes) const;

 private:
  struct Block {
    size_t bytes;  // as asked for
    char* mapping;
    size_t mapped;
  };
  size_t limit_, used_ = 0;
  std::map<uintptr_t, Block> blocks_;
  std::map<uintptr_t, size_t> pinned_;
};

}  // namespace emulator
