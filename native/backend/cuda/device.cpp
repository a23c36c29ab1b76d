#include "backend/cuda/device.h"

#include <sys/mman.h>

#include <cstring>

#include "backend/cuda/images.h"
#include "backend/cuda/upload_crew.h"

namespace reflex::cuda {

namespace {

constexpr double kMiB = 1048576.0;
// Without asking, a block has 48 KiB.
constexpr uint32_t kDefaultShared = 48u << 10;
constexpr size_t kPinnedUnit = 4096;
constexpr size_t kPinnedPart = 256;  // of the memory that a device keeps for small buffers

Driver open_driver(reflex_boot* boot) {
  if (!boot->wait(boot, REFLEX_BOOT_CONTEXT))
    fail(boot->error_code == REFLEX_BOOT_OUT_OF_MEMORY ? ErrorKind::out_of_memory : ErrorKind::cuda, "%s",
         boot->error_message);
  Driver cu;
  cu.load(boot->driver);
  return cu;
}

}  // namespace

Device::Device(reflex_boot* boot)
    : cu(open_driver(boot)),
      boot_(boot),
      context_(static_cast<CUcontext>(boot->context)),
      device_(boot->device) {
  enter();
  read_facts();
  modules_.assign(kImageCount, nullptr);
}

// The primary context belongs to boot and outlives us.
Device::~Device() {
  crew_.reset();
  pinned_.reset();
  cu.cuCtxSetCurrent(context_);
  for (CUmodule m : modules_)
    if (m) cu.cuModuleUnload(m);
}

void Device::read_facts() {
  const auto get = [&](CUdevice_attribute a) {
    int v = 0;
    cu.check(cu.cuDeviceGetAttribute(&v, a, device_), "cuDeviceGetAttribute");
    return v;
  };
  char name[128] = "";
  cu.check(cu.cuDeviceGetName(name, sizeof name, device_), "cuDeviceGetName");
  name_ = name;
  sm_count_ = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  capability_ = 10 * get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  max_shared_ = static_cast<uint32_t>(get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
  read_only_register_ = get(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) != 0;
  cu.check(cu.cuDeviceTotalMem(&total_memory_, device_), "cuDeviceTotalMem");
}

void Device::enter_quietly() const noexcept { cu.cuCtxSetCurrent(context_); }

void Device::enter() const { cu.check(cu.cuCtxSetCurrent(context_), "cuCtxSetCurrent"); }

CUmodule Device::module_of(const char* image) {
  for (size_t i = 0; i < kImageCount; ++i) {
    if (std::strcmp(kImages[i].name, image) != 0) continue;
    if (modules_[i]) return modules_[i];
    const CUresult r = cu.cuModuleLoadData(&modules_[i], kImages[i].begin);
    if (r == CUDA_ERROR_INVALID_IMAGE || r == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
      fail(ErrorKind::cuda,
           "the NVIDIA driver (CUDA %d.%d) is too old for this build's kernels on %s: nvcc %s made them",
           boot_->driver_version / 1000, boot_->driver_version % 1000 / 10, name_.c_str(), kNvccVersion);
    if (r == CUDA_ERROR_NO_BINARY_FOR_GPU)
      fail(ErrorKind::cuda, "%s has compute capability %d.%d, and this build has kernels for %s only",
           name_.c_str(), capability_ / 10, capability_ % 10, kImageArchs);
    cu.check(r, image);
    return modules_[i];
  }
  fail(ErrorKind::cuda, "this build has no kernel image '%s'", image);
}

CUfunction Device::kernel(const char* image, const std::string& name) {
  std::lock_guard lock(mutex_);
  const auto found = kernels_.find(name);
  if (found != kernels_.end()) return found->second;
  CUfunction f = nullptr;
  cu.check(cu.cuModuleGetFunction(&f, module_of(image), name.c_str()), name.c_str());
  int fixed = 0;
  cu.check(cu.cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f), "cuFuncGetAttribute");
  if (max_shared_ > kDefaultShared)
    cu.check(cu.cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   static_cast<int>(max_shared_) - fixed),
             name.c_str());
  kernels_.emplace(name, f);
  return f;
}

void Device::keep(std::unique_ptr<UploadCrew> crew) {
  std::lock_guard lock(mutex_);
  crew_ = std::move(crew);
}

std::unique_ptr<UploadCrew> Device::take_crew(int n_threads) {
  std::unique_ptr<UploadCrew> crew;
  {
    std::lock_guard lock(mutex_);
    crew = std::move(crew_);
  }
  if (crew && crew->size() != n_threads) crew.reset();
  return crew;
}

void Device::keep_pinned(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (pinned_) return;
  }
  auto memory = std::make_unique<PinnedBuffer>(*this, bytes, "pinned memory");
  std::lock_guard lock(mutex_);
  if (!pinned_) pinned_ = std::move(memory);
}

void* Device::take_pinned(size_t bytes) {
  std::lock_guard lock(mutex_);
  bytes = (bytes + kPinnedPart - 1) / kPinnedPart * kPinnedPart;
  if (!pinned_ || pinned_->bytes() - pinned_used_ < bytes) return nullptr;
  pinned_used_ += bytes;
  return pinned_->at(pinned_used_ - bytes);
}

size_t Device::kernels_loaded() {
  std::lock_guard lock(mutex_);
  return kernels_.size();
}

void Device::launch_raw(CUfunction f, Grid grid, uint32_t threads, uint32_t shared, const Launch& how,
                        void** args) {
  CUlaunchConfig config{};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shared;
  config.hStream = how.stream;
  CUlaunchAttribute overlap{};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = how.overlap ? 1 : 0;
  cu.check(cu.cuLaunchKernelEx(&config, f, args, nullptr), "kernel launch");
}

DeviceBuffer::DeviceBuffer(Device& device, size_t bytes, const char* what, bool zeroed) {
  if (bytes == 0) return;
  const Driver& cu = device.cu;
  const CUresult r = cu.cuMemAlloc(&address_, bytes);
  if (r == CUDA_ERROR_OUT_OF_MEMORY) {
    size_t free_bytes = 0, total = 0;
    cu.cuMemGetInfo(&free_bytes, &total);
    fail(ErrorKind::out_of_memory, "%s: %.0f MiB are needed on %s, %.0f of its %.0f MiB are free", what,
         static_cast<double>(bytes) / kMiB, device.name().c_str(), static_cast<double>(free_bytes) / kMiB,
         static_cast<double>(total) / kMiB);
  }
  cu.check(r, what);
  device_ = &device;
  bytes_ = bytes;
  if (!zeroed) return;
  // Our streams do not wait for the default one.
  CUresult z = cu.cuMemsetD8Async(address_, 0, bytes, nullptr);
  if (z == CUDA_SUCCESS) z = cu.cuStreamSynchronize(nullptr);
  if (z == CUDA_SUCCESS) return;
  cu.cuMemFree(address_);
  cu.raise(z, what);
}

DeviceBuffer DeviceBuffer::zeros(Device& device, size_t bytes, const char* what, CUstream stream) {
  DeviceBuffer b(device, bytes, what);
  if (bytes) device.cu.check(device.cu.cuMemsetD8Async(b.address_, 0, bytes, stream), what);
  return b;
}

DeviceBuffer::~DeviceBuffer() {
  if (!address_) return;
  device_->enter_quietly();
  device_->cu.cuMemFree(address_);
}

// Anonymous memory, touched by the kernel at once, then registered: cheaper than cuMemHostAlloc.
PinnedBuffer::PinnedBuffer(Device& device, size_t bytes, const char* what) {
  if ((data_ = device.take_pinned(bytes))) {
    device_ = &device;
    bytes_ = bytes;
    return;
  }
  bytes = (bytes + kPinnedUnit - 1) / kPinnedUnit * kPinnedUnit;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED)
    fail(ErrorKind::out_of_memory, "%s: %.0f MiB of host memory cannot be had", what,
         static_cast<double>(bytes) / kMiB);
  const CUresult r =
      device.cu.cuMemHostRegister(p, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (r != CUDA_SUCCESS) {
    munmap(p, bytes);
    device.cu.raise(r, what);
  }
  device_ = &device;
  data_ = p;
  bytes_ = bytes;
  registered_ = true;
}

PinnedBuffer::~PinnedBuffer() {
  if (!registered_) return;
  device_->enter_quietly();
  device_->cu.cuMemHostUnregister(data_);
  munmap(data_, bytes_);
}

}  // namespace reflex::cuda
