#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace emulator {

namespace {

constexpr size_t kPage = 4096, kAlign = 256;  // the card's alignment
constexpr unsigned char kCanary = 0xA5, kFresh = 0xFF;
// Filling touches every page: beyond, an allocation is left as zeros that cost nothing.
constexpr size_t kMostFilled = size_t{256} << 20;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

uintptr_t Memory::allocate(size_t bytes) {
  const size_t size = round_up(std::max<size_t>(bytes, 1), kAlign), pages = round_up(size, kPage);
  if (size > limit_ - std::min(limit_, used_)) return 0;
  const size_t mapped = pages + 2 * kPage;
  void* p = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0;
  auto* mapping = static_cast<char*>(p);
  if (mprotect(mapping + kPage, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, mapped);
    return 0;
  }
  char* at = mapping + kPage + pages - size;
  if (size <= kMostFilled) std::memset(mapping + kPage, kFresh, pages);
  std::memset(at + bytes, kCanary, size - bytes);
  blocks_[reinterpret_cast<uintptr_t>(at)] = {bytes, mapping, mapped};
  used_ += size;
  return reinterpret_cast<uintptr_t>(at);
}

bool Memory::free(uintptr_t at, std::string& problem) {
  const auto it = blocks_.find(at);
  if (it == blocks_.end()) return false;
  const Block& b = it->second;
  const auto* behind = reinterpret_cast<const unsigned char*>(at) + b.bytes;
  const size_t size = round_up(std::max<size_t>(b.bytes, 1), kAlign);
  if (std::any_of(behind, behind + (size - b.bytes), [](unsigned char c) { return c != kCanary; }))
    problem = "an allocation of " + std::to_string(b.bytes) + " bytes was written beyond its end";
  munmap(b.mapping, b.mapped);
  used_ -= size;
  blocks_.erase(it);
  return true;
}

bool Memory::holds(uintptr_t at, size_t bytes) const {
  auto it = blocks_.upper_bound(at);
  if (it == blocks_.begin()) return false;
  --it;
  return at + bytes <= it->first + it->second.bytes;
}

bool Memory::pin(uintptr_t at, size_t bytes) {
  if (pinned(at, bytes) != Pinned::none) return false;
  pinned_[at] = bytes;
  return true;
}

bool Memory::unpin(uintptr_t at) { return pinned_.erase(at) != 0; }

Memory::Pinned Memory::pinned(uintptr_t at, size_t bytes) const {
  auto it = pinned_.upper_bound(at);
  if (it != pinned_.begin()) {
    const auto& [begin, size] = *std::prev(it);
    if (at + bytes <= begin + size) return Pinned::all;
    if (at < begin + size) return Pinned::part;
  }
  return it != pinned_.end() && it->first < at + bytes ? Pinned::part : Pinned::none;
}

}  // namespace emulator
