#include "boot/floor.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace reflex {

namespace {

using Result = int;
using Stream = void*;
using DevicePtr = unsigned long long;

constexpr size_t kSlotBytes = size_t{2} << 20;
constexpr int kSlotsPerThread = 2;  // one is filled while the other is on its way

struct CopyCalls {
  Result (*set_current)(void*);
  Result (*alloc)(DevicePtr*, size_t);
  Result (*stream_create)(Stream*, unsigned);
  Result (*stream_synchronize)(Stream);
  Result (*copy)(DevicePtr, const void*, size_t, Stream);

  bool load(void* lib) {
    const auto get = [lib](const char* name, auto& slot) {
      void* p = dlsym(lib, name);
      std::memcpy(&slot, &p, sizeof p);
      return p != nullptr;
    };
    return get("cuCtxSetCurrent", set_current) && get("cuMemAlloc_v2", alloc) &&
           get("cuStreamCreate", stream_create) && get("cuStreamSynchronize", stream_synchronize) &&
           get("cuMemcpyHtoDAsync_v2", copy);
  }
};

struct Mapping {
  const char* data = nullptr;
  size_t bytes = 0;
  explicit Mapping(const char* path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    struct stat st {};
    if (fstat(fd, &st) == 0 && st.st_size > 0) {
      void* p = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
      if (p != MAP_FAILED) data = static_cast<const char*>(p), bytes = static_cast<size_t>(st.st_size);
    }
    close(fd);
  }
  ~Mapping() {
    if (data) munmap(const_cast<char*>(data), bytes);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
};

/// Slot after slot of the file through `ring`, which is this thread's own kSlotsPerThread slots.
Result copy_slots(const CopyCalls& cu, void* context, const Mapping& file, char* ring, DevicePtr card,
                  std::atomic<size_t>& next) {
  if (Result r = cu.set_current(context)) return r;
  Stream streams[kSlotsPerThread];
  for (Stream& s : streams)
    if (Result r = cu.stream_create(&s, 1 /* CU_STREAM_NON_BLOCKING */)) return r;
  for (int slot = 0;; slot = (slot + 1) % kSlotsPerThread) {
    const size_t begin = next.fetch_add(kSlotBytes);
    if (begin >= file.bytes) break;
    const size_t n = std::min(kSlotBytes, file.bytes - begin);
    char* pinned = ring + static_cast<size_t>(slot) * kSlotBytes;
    if (Result r = cu.stream_synchronize(streams[slot])) return r;
    std::memcpy(pinned, file.data + begin, n);
    if (Result r = cu.copy(card + begin, pinned, n, streams[slot])) return r;
  }
  for (Stream s : streams)
    if (Result r = cu.stream_synchronize(s)) return r;
  return 0;
}

}  // namespace

bool boot_floor(reflex_boot* boot, const char* path, int threads, BootFloor& out, char* message,
                size_t message_bytes) {
  const auto no = [&](const char* what, Result r) {
    if (r)
      std::snprintf(message, message_bytes, "%s (CUDA error %d)", what, r);
    else
      std::snprintf(message, message_bytes, "%s", what);
    return false;
  };
  const Mapping file(path);
  if (!file.data) return no((std::string(path) + ": cannot be read, or is empty").c_str(), 0);
  if (!boot->wait(boot, REFLEX_BOOT_RING)) return no(boot->error_message, 0);
  CopyCalls cu{};
  if (!cu.load(boot->driver)) return no("libcuda.so.1 is too old: it lacks a call that is needed", 0);
  if (Result r = cu.set_current(boot->context)) return no("cuCtxSetCurrent", r);
  DevicePtr card = 0;
  if (Result r = cu.alloc(&card, file.bytes)) return no("no room on the card for the file", r);

  const auto most = static_cast<int>(boot->ring_bytes / (kSlotBytes * kSlotsPerThread));
  const int n = std::clamp(threads, 1, most);
  std::atomic<size_t> next{0};
  std::vector<Result> results(static_cast<size_t>(n));
  std::vector<std::thread> pool;
  for (int i = 0; i < n; ++i)
    pool.emplace_back([&, i] {
      char* ring = static_cast<char*>(boot->ring) + static_cast<size_t>(i) * kSlotsPerThread * kSlotBytes;
      results[static_cast<size_t>(i)] = copy_slots(cu, boot->context, file, ring, card, next);
    });
  for (std::thread& t : pool) t.join();
  for (const Result r : results)
    if (r) return no("the copy to the card failed", r);
  const double start = boot->stage_at[REFLEX_BOOT_STARTED];
  out = {boot->stage_at[REFLEX_BOOT_INIT] - start, boot->stage_at[REFLEX_BOOT_CONTEXT] - start,
         now_ms() - start, file.bytes};
  return true;
}

}  // namespace reflex
