#include "boot/boot.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"

namespace reflex {

namespace {

// The driver's types, spelled here because boot is built where there is no cuda.h too.
using Result = int;
using Device = int;
using Context = void*;

// cuda.h: CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
constexpr unsigned kRegisterFlags = 1u | 2u;
constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;
constexpr Result kErrorNoDevice = 100;  // CUDA_ERROR_NO_DEVICE
// A context with one connection and without kernels, on the cards seen so far: some hundred MiB.
constexpr const char* kContextNeeds = "some hundred MiB are needed";

struct DriverCalls {
  Result (*init)(unsigned);
  Result (*device_count)(int*);
  Result (*driver_version)(int*);
  Result (*device_get)(Device*, int);
  Result (*bus_id)(char*, int, Device);
  Result (*retain)(Context*, Device);
  Result (*set_current)(Context);
  Result (*host_register)(void*, size_t, unsigned);
  Result (*error_string)(Result, const char**);

  bool load(void* lib) {
    const auto get = [lib](const char* name, auto& slot) {
      void* p = dlsym(lib, name);
      std::memcpy(&slot, &p, sizeof p);
      return p != nullptr;
    };
    return get("cuInit", init) && get("cuDeviceGetCount", device_count) &&
           get("cuDriverGetVersion", driver_version) && get("cuDeviceGet", device_get) &&
           get("cuDeviceGetPCIBusId", bus_id) && get("cuDevicePrimaryCtxRetain", retain) &&
           get("cuCtxSetCurrent", set_current) && get("cuMemHostRegister_v2", host_register) &&
           get("cuGetErrorString", error_string);
  }
};

struct Boot {
  reflex_boot shared{};
  size_t ring_bytes = 0;
  std::mutex mutex;
  std::condition_variable changed;
  int stage = REFLEX_BOOT_STARTED;
  bool failed = false;
  DriverCalls calls{};

  void reach(int s) {
    shared.stage_at[s] = now_ms();
    {
      std::lock_guard lock(mutex);
      stage = s;
    }
    changed.notify_all();
  }

  void fail(Result code, const char* doing) {
    const char* text = nullptr;
    if (code && calls.error_string) calls.error_string(code, &text);
    shared.error_code = code;
    std::snprintf(shared.error_message, sizeof shared.error_message, "%s%s%s", doing, text ? ": " : "",
                  text ? text : "");
    {
      std::lock_guard lock(mutex);
      failed = true;
    }
    changed.notify_all();
  }

  bool wait(int s) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stage >= s || failed; });
    return stage >= s;
  }
};

// Never freed: its thread may outlive main(), and a cold command leaves by _exit.
Boot* own_boot = nullptr;
reflex_boot* current = nullptr;
std::mutex current_mutex;

bool wait_shared(reflex_boot* b, int stage) {
  // One boot per module: the pointer can only be ours.
  return own_boot && b == &own_boot->shared && own_boot->wait(stage);
}

/// "N of its M MiB are free" of the card on a PCI bus, by NVML: the driver itself tells only whoever has a
/// context. "" where NVML is missing.
std::string card_memory(const char* bus) {
  void* lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!lib) return {};
  int (*start)() = nullptr;
  int (*find)(const char*, void**) = nullptr;
  int (*tell)(void*, unsigned long long*) = nullptr;
  const auto get = [lib](const char* name, auto& slot) {
    void* p = dlsym(lib, name);
    std::memcpy(&slot, &p, sizeof p);
    return p != nullptr;
  };
  if (!get("nvmlInit_v2", start) || !get("nvmlDeviceGetHandleByPciBusId_v2", find) ||
      !get("nvmlDeviceGetMemoryInfo", tell))
    return {};
  void* card = nullptr;
  unsigned long long memory[3] = {};  // nvmlMemory_t: total, free, used
  if (start() || find(bus, &card) || tell(card, memory)) return {};
  return std::to_string(memory[1] >> 20) + " of its " + std::to_string(memory[0] >> 20) + " MiB are free";
}

void* map_ring(size_t bytes) {
  // Room to begin on a huge page: one fault per 2 MiB instead of 512, where the kernel gives them.
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kHugePage - 1) & ~(kHugePage - 1);
  auto* ring = reinterpret_cast<char*>(begin);
  madvise(ring, bytes, MADV_HUGEPAGE);
  return ring;
}

void run(Boot* b) {
  void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!lib) return b->fail(0, "there is no NVIDIA driver here (libcuda.so.1 is not found)");
  if (!b->calls.load(lib)) return b->fail(0, "libcuda.so.1 is too old: it lacks a call that is needed");
  b->shared.driver = lib;
  b->reach(REFLEX_BOOT_DRIVER);

  // Faulted in while the driver starts, pinned once there is a context: registering touched memory
  // costs a seventh of allocating pinned memory.
  auto* ring = static_cast<char*>(map_ring(b->ring_bytes));
  std::thread touch([&] {
    if (ring)
      for (size_t i = 0; i < b->ring_bytes; i += kPage) ring[i] = 1;
  });
  struct Join {
    std::thread& t;
    ~Join() {
      if (t.joinable()) t.join();
    }
  } join{touch};

  const DriverCalls& cu = b->calls;
  if (Result r = cu.init(0)) return b->fail(r, "the NVIDIA driver does not start (cuInit)");
  int n = 0;
  if (Result r = cu.device_count(&n)) return b->fail(r, "cuDeviceGetCount");
  cu.driver_version(&b->shared.driver_version);
  b->shared.n_devices = n;
  b->reach(REFLEX_BOOT_INIT);
  if (n == 0) return b->fail(kErrorNoDevice, "the NVIDIA driver sees no GPU");
  if (b->shared.ordinal < 0 || b->shared.ordinal >= n)
    return b->fail(0, "no such CUDA device: the driver sees fewer (CUDA_VISIBLE_DEVICES narrows them)");

  if (Result r = cu.device_get(&b->shared.device, b->shared.ordinal)) return b->fail(r, "cuDeviceGet");
  if (Result r = cu.retain(&b->shared.context, b->shared.device)) {
    std::string doing = "no context on the GPU (cuDevicePrimaryCtxRetain)";
    char bus[64] = "";
    if (r == REFLEX_BOOT_OUT_OF_MEMORY && cu.bus_id(bus, sizeof bus, b->shared.device) == 0) {
      const std::string have = card_memory(bus);
      doing += std::string(": ") + kContextNeeds + ", " + (have.empty() ? "less is free" : have);
    }
    return b->fail(r, doing.c_str());
  }
  if (Result r = cu.set_current(b->shared.context)) return b->fail(r, "cuCtxSetCurrent");
  b->reach(REFLEX_BOOT_CONTEXT);

  touch.join();
  if (!ring) return b->fail(0, "no memory for the upload ring");
  if (Result r = cu.host_register(ring, b->ring_bytes, kRegisterFlags))
    return b->fail(r, "the upload ring cannot be page-locked (cuMemHostRegister)");
  b->shared.ring = ring;
  b->shared.ring_bytes = b->ring_bytes;
  b->reach(REFLEX_BOOT_RING);
}

void set_environment(reflex_boot& b) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0);
  setenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "1", 0);
  if (!getenv("CUDA_VISIBLE_DEVICES")) {
    setenv("CUDA_VISIBLE_DEVICES", std::to_string(b.requested).c_str(), 0);
    b.narrowed = 1;
    b.ordinal = 0;
  }
}

}  // namespace

reflex_boot* boot_start(const BootOptions& options) {
  std::lock_guard lock(current_mutex);
  if (current) return current;
  auto* b = new Boot;
  b->shared.version = kBootVersion;
  b->shared.requested = b->shared.ordinal = options.device;
  b->shared.wait = wait_shared;
  b->shared.stage_at[REFLEX_BOOT_STARTED] = now_ms();
  b->ring_bytes = options.ring_bytes;
  if (options.set_environment) set_environment(b->shared);
  own_boot = b;
  current = &b->shared;
  std::thread(run, b).detach();
  return current;
}

reflex_boot* boot_current() {
  std::lock_guard lock(current_mutex);
  return current;
}

bool adopt_boot(void* boot) {
  auto* other = static_cast<reflex_boot*>(boot);
  std::lock_guard lock(current_mutex);
  if (!other || other->version != kBootVersion) return false;
  if (current) return current == other;
  current = other;
  return true;
}

int boot_init_only(char* message, size_t message_bytes) {
  void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  DriverCalls cu{};
  int n = 0;
  if (!lib || !cu.load(lib)) {
    std::snprintf(message, message_bytes, "there is no NVIDIA driver here (libcuda.so.1 is not found)");
    return -1;
  }
  Result r = cu.init(0);
  if (!r) r = cu.device_count(&n);
  if (r) {
    const char* text = nullptr;
    cu.error_string(r, &text);
    std::snprintf(message, message_bytes, "the NVIDIA driver does not start (cuInit): %s", text ? text : "?");
    return -1;
  }
  return n;
}

}  // namespace reflex
