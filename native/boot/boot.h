// Starts the CUDA driver in a thread of its own, so that the hundred milliseconds it takes overlap
// with everything else a cold process does. Owns: the driver library's handle, the primary
// context, the pinned upload ring. Refuses: kernels, weights, anything that needs cuda.h.
//
// Two modules of one process share one boot. The command's first import, `_boot`, starts it; the
// core, `_native`, is linked separately and sees none of `_boot`'s symbols. So `_boot.start()`
// returns a PyCapsule (name kBootCapsule) that holds a reflex_boot*, and whoever imports the core
// hands it over once: `_native.adopt_boot(capsule)` -> reflex::adopt_boot(pointer). Where nobody
// did, the CUDA backend starts a boot itself (without touching the environment).
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

/// How far a boot has come; each step includes those before it.
enum reflex_boot_stage {
  REFLEX_BOOT_STARTED = 0,
  REFLEX_BOOT_DRIVER = 1,   ///< libcuda is loaded
  REFLEX_BOOT_INIT = 2,     ///< cuInit has returned, n_devices is known
  REFLEX_BOOT_CONTEXT = 3,  ///< the primary context is retained
  REFLEX_BOOT_RING = 4,     ///< the ring is pinned; nothing is left to do
};

/// Of reflex_boot::error_code: CUDA_ERROR_OUT_OF_MEMORY.
enum { REFLEX_BOOT_OUT_OF_MEMORY = 2 };

/// Plain data with its own functions, because the reader may be linked apart from the owner.
/// Read a stage's fields after wait() for that stage returned true.
struct reflex_boot {
  uint32_t version;   ///< kBootVersion: a reader refuses any other
  int32_t requested;  ///< device asked for, counted in the devices the user lets us see
  int32_t ordinal;    ///< the same device as the driver counts it (0 where we narrowed the view)
  int32_t narrowed;   ///< 1: CUDA_VISIBLE_DEVICES was set by us to this one device

  // REFLEX_BOOT_DRIVER
  void* driver;  ///< dlopen handle of libcuda.so.1
  // REFLEX_BOOT_INIT
  int32_t n_devices;
  int32_t driver_version;  ///< as cuDriverGetVersion has it, e.g. 13000
  // REFLEX_BOOT_CONTEXT
  int32_t device;  ///< CUdevice
  void* context;   ///< CUcontext, primary; not current on any thread of the reader
  // REFLEX_BOOT_RING
  void* ring;  ///< touched and page-locked, portable
  uint64_t ring_bytes;

  // Set before wait() returns false.
  int32_t error_code;       ///< CUresult, 0 where the failure was not the driver's
  char error_message[256];  ///< one sentence

  /// CLOCK_BOOTTIME milliseconds at which each stage was reached, 0 before.
  double stage_at[5];

  /// Blocks until the stage is reached (true) or the boot has failed before it (false).
  bool (*wait)(struct reflex_boot*, int stage);
};

}  // extern "C"

namespace reflex {

inline constexpr uint32_t kBootVersion = 1;
inline constexpr const char* kBootCapsule = "reflex_boot";

struct BootOptions {
  int32_t device = 0;
  /// Set CUDA_DEVICE_MAX_CONNECTIONS=1, CUDA_DEVICE_MAX_COPY_CONNECTIONS=1 and
  /// CUDA_VISIBLE_DEVICES to the one device, each unless the user has set it: they more than
  /// halve the context's cost. Only for a process that is ours: the command, never the API.
  bool set_environment = false;
  size_t ring_bytes = size_t{32} << 20;
};

/// Start this module's boot; a second call returns the first one's. Never throws, never waits.
reflex_boot* boot_start(const BootOptions& options);

/// The boot that this module started or adopted; null where there is none.
reflex_boot* boot_current();

/// Use a boot that another module of this process started. False where its version is not ours
/// or this module already has a boot of its own.
bool adopt_boot(void* boot);

/// dlopen and cuInit only: no context, no GPU memory. What `reflex hold` does so that the driver
/// keeps the GPU registered. Returns the number of devices, or -1 with a sentence in `message`.
int boot_init_only(char* message, size_t message_bytes);

}  // namespace reflex
