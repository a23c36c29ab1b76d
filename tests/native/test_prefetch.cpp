// Reading ahead: a file that was dropped from the page cache comes back into it, and a cold one is told from
// a warm one.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "gguf/prefetch.h"

using namespace reflex;

namespace {

constexpr size_t kBytes = size_t{9} << 20;

/// A file of kBytes on disk, mapped, unlinked.
struct Scratch {
  int fd = -1;
  void* data = MAP_FAILED;
  Scratch() {
    std::string name = "reflex-prefetch-XXXXXX";  // here, not in /tmp, which may be memory
    fd = mkstemp(name.data());
    if (fd < 0) return;
    unlink(name.c_str());
    const std::vector<char> bytes(kBytes, 7);
    if (write(fd, bytes.data(), kBytes) == static_cast<ssize_t>(kBytes) && fsync(fd) == 0)
      data = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  }
  ~Scratch() {
    if (data != MAP_FAILED) munmap(data, kBytes);
    if (fd >= 0) close(fd);
  }
};

TEST(prefetch_brings_a_dropped_file_back) {
  const Scratch file;
  CHECK(file.data != MAP_FAILED);
  const std::vector<gguf::Range> ranges = {
      {file.fd, 0, file.data, kBytes / 2},
      {file.fd, kBytes / 2, static_cast<char*>(file.data) + kBytes / 2, kBytes - kBytes / 2}};
  posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED);
  if (gguf::cached_share(ranges) > 0.5) return;  // a file system that keeps its pages
  gguf::Prefetch prefetch(ranges);
  prefetch.wait();
  double share = 0;
  for (int i = 0; i < 12000 && share < 1; ++i) {  // what was asked for is on its way, a minute at most
    share = gguf::cached_share(ranges);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK_EQ(share, 1.0);
}

TEST(prefetch_may_be_dropped_at_once) {
  const Scratch file;
  CHECK(file.data != MAP_FAILED);
  gguf::Prefetch prefetch({{file.fd, 0, file.data, kBytes}});
}

TEST(nothing_to_ask_about_counts_as_cached) {
  CHECK_EQ(gguf::cached_share({}), 1.0);
  CHECK(gguf::available_memory() > 0);
}

}  // namespace
