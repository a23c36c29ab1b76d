// One GPU in use by this process: context, facts, kernels by name, memory that frees itself.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "backend/cuda/driver.h"
#include "boot/boot.h"

namespace reflex::cuda {

class UploadCrew;
class PinnedBuffer;

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

class Device {
 public:
  /// Waits for the context. Error(cuda) says in a sentence why there is none, or that the GPU is
  /// older than every kernel image.
  explicit Device(reflex_boot* boot);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver cu;
  const std::string& name() const { return name_; }
  int sm_count() const { return sm_count_; }
  int capability() const { return capability_; }  ///< e.g. 90
  size_t total_memory() const { return total_memory_; }
  /// Largest dynamic shared memory of a block.
  uint32_t max_shared() const { return max_shared_; }
  bool can_register_read_only() const { return read_only_register_; }
  /// Kernels may start before their predecessor has ended (programmatic dependent launch).
  bool overlaps_launches() const { return capability_ >= 90; }
  reflex_boot* boot() const { return boot_; }

  /// Make the context current on the calling thread.
  void enter() const;
  /// The same for destructors, which cannot throw.
  void enter_quietly() const noexcept;
  /// The kernel `name` of the image (.cu file) `image`, loaded when first asked for.
  CUfunction kernel(const char* image, const std::string& name);

  // What a worker without a model gets ready for the one that will come (standby.cpp).
  void keep(std::unique_ptr<UploadCrew> crew);
  /// A crew that was kept; null where there is none of so many threads (one of another size is let go).
  std::unique_ptr<UploadCrew> take_crew(int n_threads);
  /// Pinned memory for small buffers, so that none has to be registered while weights come.
  void keep_pinned(size_t bytes);
  /// Some of it, for good; null where none or not as much is left.
  void* take_pinned(size_t bytes);
  size_t kernels_loaded();

  struct Launch {
    CUstream stream = nullptr;
    bool overlap = false;  ///< may start before the kernel before it has ended
  };
  template <class Params>
  void launch(CUfunction f, Grid grid, uint32_t threads, uint32_t shared, const Launch& how,
              const Params& p) {
    void* args[] = {const_cast<Params*>(&p)};
    launch_raw(f, grid, threads, shared, how, args);
  }

 private:
  void read_facts();
  CUmodule module_of(const char* image);
  void launch_raw(CUfunction f, Grid grid, uint32_t threads, uint32_t shared, const Launch& how, void** args);

  reflex_boot* boot_;
  CUcontext context_ = nullptr;
  CUdevice device_ = 0;
  std::string name_;
  int sm_count_ = 0, capability_ = 0;
  size_t total_memory_ = 0;
  uint32_t max_shared_ = 0;
  bool read_only_register_ = false;
  std::mutex mutex_;  // of all below
  std::vector<CUmodule> modules_;
  std::unordered_map<std::string, CUfunction> kernels_;
  std::unique_ptr<UploadCrew> crew_;
  std::unique_ptr<PinnedBuffer> pinned_;
  size_t pinned_used_ = 0;
};

/// Device memory, freed with its owner.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  /// `what` names the use where there is no room: Error(out_of_memory) with need and have.
  DeviceBuffer(Device& device, size_t bytes, const char* what, bool zeroed = false);
  /// Zeros, for work on `stream` after this and for no other; waits for nothing.
  static DeviceBuffer zeros(Device& device, size_t bytes, const char* what, CUstream stream);
  DeviceBuffer(DeviceBuffer&& o) noexcept { swap(o); }
  DeviceBuffer& operator=(DeviceBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  ~DeviceBuffer();
  void swap(DeviceBuffer& o) noexcept {
    std::swap(device_, o.device_);
    std::swap(address_, o.address_);
    std::swap(bytes_, o.bytes_);
  }
  CUdeviceptr address() const { return address_; }
  size_t bytes() const { return bytes_; }
  template <class T = void>
  T* at(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(address_ + byte_offset);
  }
  explicit operator bool() const { return address_ != 0; }

 private:
  Device* device_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
};

/// Pinned host memory that kernels read and write in place.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(Device& device, size_t bytes, const char* what);
  PinnedBuffer(PinnedBuffer&& o) noexcept { swap(o); }
  PinnedBuffer& operator=(PinnedBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  ~PinnedBuffer();
  void swap(PinnedBuffer& o) noexcept {
    std::swap(device_, o.device_);
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(registered_, o.registered_);
  }
  size_t bytes() const { return bytes_; }
  /// Unified addressing: the same pointer on both sides.
  template <class T = void>
  T* at(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + byte_offset);
  }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool registered_ = false;  // by us: else it is the device's
};

}  // namespace reflex::cuda
