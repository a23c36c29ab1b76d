// Bytes of files -> the page cache, ahead of whoever reads them. Owns: asking whether a file is cold, and the
// threads that keep many reads in flight. Refuses: knowing what the bytes are; it holds no data.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace reflex::gguf {

/// Part of a mapped file.
struct Range {
  int fd = -1;
  uint64_t offset = 0;         ///< of the first byte, in the file
  const void* data = nullptr;  ///< the same byte in the mapping
  size_t bytes = 0;
};

/// Share (0 to 1) of some 48 probed pages that are in the page cache; 1 where nothing can be asked.
double cached_share(const std::vector<Range>& ranges);

/// Bytes of memory that the kernel could give to the page cache now; 0 where it does not tell.
size_t available_memory();

/// Reads the ranges into the page cache, in their order, in threads of its own, until done or destroyed.
class Prefetch {
 public:
  explicit Prefetch(std::vector<Range> ranges);
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;
  /// Blocks until all has been read.
  void wait();

 private:
  struct Piece {
    int fd;
    uint64_t offset;
    size_t bytes;
  };
  void work();

  std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace reflex::gguf
