// The CUDA backend: which device, and that it is there.
#include "backend/backend.h"

#include <mutex>

#include "backend/cuda/images.h"
#include "backend/cuda/program.h"
#include "backend/cuda/standby.h"

namespace reflex {

namespace cuda {

namespace {

/// The boot for a device: the command's, where it started one, else our own, which leaves the
/// environment alone.
reflex_boot* boot_for(int index) {
  reflex_boot* boot = boot_current();
  if (!boot) {
    BootOptions options;
    options.device = index;
    boot = boot_start(options);
  }
  if (boot->requested != index)
    fail(ErrorKind::cuda, "this process was started for CUDA device %d: device %d needs a process of its own",
         boot->requested, index);
  return boot;
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int index) : boot_(boot_for(index)) {
    if (!boot_->wait(boot_, REFLEX_BOOT_INIT)) fail(ErrorKind::cuda, "%s", boot_->error_message);
    if (boot_->ordinal >= boot_->n_devices)
      fail(ErrorKind::cuda, "there is no CUDA device %d: the driver sees %d", index, boot_->n_devices);
  }

  const char* name() const override { return "cuda"; }

  std::string description() const override {
    const Device& d = *device();
    return format("CUDA %s, compute capability %d.%d, %.0f GiB, kernels for %s", d.name().c_str(),
                  d.capability() / 10, d.capability() % 10, static_cast<double>(d.total_memory()) / (1 << 30),
                  kImageArchs);
  }

  std::vector<std::pair<std::string, double>> start_stages() const override {
    static const char* const names[] = {"start", "driver", "init", "context", "ring"};
    std::vector<std::pair<std::string, double>> stages;
    for (int i = 0; i < 5; ++i)
      if (boot_->stage_at[i] > 0) stages.emplace_back(names[i], boot_->stage_at[i]);
    return stages;
  }

  std::unique_ptr<Program> compile(Plan plan, const ProgramOptions& options) override {
    check_plan(plan);  // needs no GPU: a wrong plan is told even before there is a context
    return std::make_unique<CudaProgram>(device(), std::move(plan), options);
  }

 private:
  std::shared_ptr<Device> device() const {
    std::lock_guard lock(mutex_);
    if (!device_) device_ = Standby::of_process().take(boot_);
    if (!device_) device_ = std::make_shared<Device>(boot_);
    device_->enter();
    return device_;
  }

  reflex_boot* boot_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<Device> device_;
};

}  // namespace

}  // namespace cuda

bool cuda_built() { return true; }

CudaImages cuda_images() { return {cuda::kImageArchs, cuda::kNvccVersion}; }

int cuda_device_count() {
  reflex_boot* boot = boot_current();
  if (!boot) boot = boot_start({});
  return boot->wait(boot, REFLEX_BOOT_INIT) ? boot->n_devices : 0;
}

void stand_by_cuda(int device_index, const ProgramOptions& options) {
  cuda::Standby::of_process().prepare(cuda::boot_for(device_index), options);
}

std::unique_ptr<Backend> make_cuda_backend(int device_index) {
  return std::make_unique<cuda::CudaBackend>(device_index);
}

}  // namespace reflex
