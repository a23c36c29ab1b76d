#include "backend/cuda/upload_crew.h"

#include <atomic>
#include <cstring>

namespace reflex::cuda {

namespace {

constexpr size_t kPage = 4096;

/// The boot's ring serves one crew at a time.
std::atomic<bool> boot_ring_taken{false};

}  // namespace

void UploadSeat::open(const Device& device) {
  const Driver& cu = device.cu;
  if (!stream) cu.check(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "an upload stream");
  for (CUevent& e : copied)
    if (!e) cu.check(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), "an upload event");
}

CUevent UploadSeat::take_event(const Device& device) {
  CUevent e = nullptr;
  if (spare.empty()) {
    device.cu.check(device.cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), "an upload event");
    return e;
  }
  e = spare.back();
  spare.pop_back();
  return e;
}

UploadCrew::UploadCrew(Device& device, int n_threads, int n_helpers)
    : device_(device), n_helpers_(n_helpers) {
  reflex_boot* boot = device.boot();
  if (!boot->wait(boot, REFLEX_BOOT_RING)) fail(ErrorKind::cuda, "%s", boot->error_message);
  slot_bytes_ = boot->ring_bytes / static_cast<size_t>(n_threads * kUploadSlots) & ~(kPage - 1);
  const size_t per_thread = slot_bytes_ * kUploadSlots;
  staging_ = DeviceBuffer(device, per_thread * static_cast<size_t>(n_threads), "the upload's staging memory");
  auto* ring = static_cast<char*>(boot->ring);
  has_boot_ring_ = !boot_ring_taken.exchange(true);
  if (!has_boot_ring_) {
    own_ring_ = PinnedBuffer(device, boot->ring_bytes, "the upload's ring");
    ring = own_ring_.at<char>();
  }
  seats_.resize(static_cast<size_t>(n_threads));
  for (int t = 0; t < n_threads; ++t) {
    UploadSeat& s = seats_[static_cast<size_t>(t)];
    s.index = t;
    s.slots = ring + per_thread * static_cast<size_t>(t);
    s.staging = staging_.address() + per_thread * static_cast<size_t>(t);
  }
}

UploadCrew::~UploadCrew() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  begun_.notify_all();
  for (std::thread& t : threads_) t.join();
  device_.enter_quietly();
  const Driver& cu = device_.cu;
  for (UploadSeat& s : seats_) {
    for (CUevent e : s.copied)
      if (e) cu.cuEventDestroy(e);
    for (CUevent e : s.spare) cu.cuEventDestroy(e);
    if (s.stream) cu.cuStreamDestroy(s.stream);
  }
  if (has_boot_ring_) boot_ring_taken = false;
}

void UploadCrew::stand_by(int spare_events) {
  stood_by_ = true;
  spare_events_ = spare_events;
  start_threads();
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return running_ == 0; });
}

void UploadCrew::begin(Work work, std::function<void()> help) {
  {
    std::lock_guard lock(mutex_);
    work_ = std::move(work);
    help_ = std::move(help);
    ++round_;
    running_ = size() + (help_ ? n_helpers_ : 0);
  }
  begun_.notify_all();
  if (threads_.empty()) start_threads();
}

bool UploadCrew::end() noexcept {
  {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return running_ == 0; });
    work_ = {};
    help_ = {};
  }
  device_.enter_quietly();
  bool good = true;
  for (const UploadSeat& s : seats_)
    if (s.stream) good &= device_.cu.cuStreamSynchronize(s.stream) == CUDA_SUCCESS;
  return good;
}

void UploadCrew::start_threads() {
  if (!threads_.empty()) return;
  if (stood_by_) running_ = size();
  for (int t = 0; t < size() + n_helpers_; ++t)
    threads_.emplace_back([this, t, n = spare_events_] { run(t, n); });
}

/// One thread's life: its seat opened ahead where the crew stands by, then whatever work there is.
void UploadCrew::run(int t, int spare_events) noexcept {
  const bool helper = t >= size();
  const Driver& cu = device_.cu;
  if (stood_by_ && !helper) {
    UploadSeat& s = seats_[static_cast<size_t>(t)];
    try {
      device_.enter();
      s.open(device_);
      while (static_cast<int>(s.spare.size()) < spare_events) {
        CUevent e = nullptr;
        cu.check(cu.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING), "an upload event");
        s.spare.push_back(e);
      }
      // The first copy and the first record of a stream set up more than those after it.
      std::memset(s.slots, 0, kPage);
      cu.check(cu.cuMemcpyHtoDAsync(s.staging, s.slots, kPage, s.stream), "an upload");
      cu.check(cu.cuEventRecord(s.copied[0], s.stream), "an upload");
      cu.check(cu.cuStreamSynchronize(s.stream), "an upload");
    } catch (...) {
      // Whoever works with this seat opens it again, and is told.
    }
    std::lock_guard lock(mutex_);
    if (--running_ == 0) ended_.notify_all();
  }
  for (uint64_t done = 0;;) {
    Work work;
    std::function<void()> help;
    {
      std::unique_lock lock(mutex_);
      begun_.wait(lock, [&] { return stop_ || round_ != done; });
      if (stop_) return;
      done = round_;
      if (helper && !help_) continue;
      if (helper)
        help = help_;
      else
        work = work_;
    }
    if (helper)
      help();
    else
      work(seats_[static_cast<size_t>(t)]);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) ended_.notify_all();
  }
}

}  // namespace reflex::cuda
