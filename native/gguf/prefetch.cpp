#include "gguf/prefetch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <system_error>

namespace reflex::gguf {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kProbes = 48;                    // a system call each
constexpr size_t kPieceBytes = size_t{16} << 20;  // one thread's at a time, in order
constexpr size_t kReadBytes = size_t{1} << 20;
constexpr int kThreads = 4;

/// The same file with a read-ahead window of its own.
int open_again(int fd) {
  return ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
}

}  // namespace

double cached_share(const std::vector<Range>& ranges) {
  size_t total = 0;
  for (const Range& r : ranges) total += r.bytes;
  const size_t step = std::max(kPage, total / kProbes);
  size_t probes = 0, cached = 0, at = step / 2;  // of the next probe, from the range's begin
  for (const Range& r : ranges) {
    for (; at < r.bytes; at += step) {
      unsigned char in_core = 0;
      const auto page = (reinterpret_cast<uintptr_t>(r.data) + at) & ~(kPage - 1);
      if (mincore(reinterpret_cast<void*>(page), 1, &in_core) != 0) return 1.0;  // no mapping
      ++probes;
      cached += in_core & 1;
    }
    at -= r.bytes;
  }
  return probes ? static_cast<double>(cached) / static_cast<double>(probes) : 1.0;
}

size_t available_memory() {
  std::FILE* f = std::fopen("/proc/meminfo", "re");
  if (!f) return 0;
  char line[128];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof line, f))
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  std::fclose(f);
  return static_cast<size_t>(kib) << 10;
}

Prefetch::Prefetch(std::vector<Range> ranges) {
  for (const Range& r : ranges)
    for (size_t at = 0; at < r.bytes; at += kPieceBytes)
      pieces_.push_back({r.fd, r.offset + at, std::min(kPieceBytes, r.bytes - at)});
  for (int t = 0; t < kThreads && static_cast<size_t>(t) < pieces_.size(); ++t) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      break;  // the reader faults the pages in itself, only later
    }
  }
}

Prefetch::~Prefetch() {
  stop_ = true;
  wait();
}

void Prefetch::wait() {
  for (std::thread& t : threads_)
    if (t.joinable()) t.join();
}

// Read, not readahead(2): that fills the cache with single pages, which make every later mapping of the file
// two to three times as slow to touch as the large folios that reading in order leaves.
void Prefetch::work() {
  std::vector<char> scratch(kReadBytes);
  int of = -1, fd = -1;
  for (;;) {
    const size_t i = next_.fetch_add(1);
    if (i >= pieces_.size()) break;
    const Piece& p = pieces_[i];
    if (p.fd != of) {
      if (fd >= 0) ::close(fd);
      fd = open_again(of = p.fd);
    }
    size_t at = 0;
    while (fd >= 0 && at < p.bytes && !stop_) {
      const ssize_t n =
          ::pread(fd, scratch.data(), std::min(kReadBytes, p.bytes - at), static_cast<off_t>(p.offset + at));
      if (n <= 0) break;  // whoever needs the bytes will meet the error
      at += static_cast<size_t>(n);
    }
    if (stop_) break;
  }
  if (fd >= 0) ::close(fd);
}

}  // namespace reflex::gguf
