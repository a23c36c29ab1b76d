#include "backend/cpu/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/error.h"

namespace reflex::cpu {

Region::~Region() {
  if (data_) munmap(data_, capacity_);
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(capacity_, other.capacity_);
  return *this;
}

bool Region::reserve(size_t bytes) {
  if (data_ || bytes == 0) return bytes <= capacity_;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return false;
  // A huge page per buffer would touch a hundred times what a short prompt needs.
  madvise(p, bytes, MADV_NOHUGEPAGE);
  data_ = static_cast<uint8_t*>(p);
  capacity_ = bytes;
  return true;
}

bool Region::grow(size_t bytes) {
  if (bytes <= capacity_) return true;
  if (!data_) return reserve(bytes);
  void* p = mremap(data_, capacity_, bytes, MREMAP_MAYMOVE);
  if (p == MAP_FAILED) return false;
  data_ = static_cast<uint8_t*>(p);
  capacity_ = bytes;
  return true;
}

uint64_t available_memory() {
  std::FILE* f = std::fopen("/proc/meminfo", "re");
  if (!f) return 0;
  char line[256];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof line, f))
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  std::fclose(f);
  return kib * 1024;
}

void advise_pages(const void* data, size_t bytes, int advice) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = begin / page * page;
  madvise(reinterpret_cast<void*>(first), begin + bytes - first, advice);
}

void ensure(Region& region, size_t bytes, const char* what) {
  if (!region.grow(bytes))
    fail(ErrorKind::out_of_memory, "%s: needs %zu bytes, the system has %llu available", what, bytes,
         static_cast<unsigned long long>(available_memory()));
}

}  // namespace reflex::cpu
