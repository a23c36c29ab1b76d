// The threads that copy weights to the card, and what each holds: a stream, its slots of the pinned ring, as
// much staging memory on the card, events. A load makes its own, or finds one that was got ready while there
// was no model (standby.cpp). Owns all of these, and the boot's ring meanwhile. Refuses: what is copied, and
// in which order (load.h).
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/cuda/device.h"

namespace reflex::cuda {

inline constexpr int kUploadSlots = 2;  // per thread: one filling while the other is copied

/// What one of the threads works with.
struct UploadSeat {
  int index = 0;
  CUstream stream = nullptr;
  char* slots = nullptr;              ///< (kUploadSlots, slot_bytes) of the ring
  CUdeviceptr staging = 0;            ///< the same on the card
  CUevent copied[kUploadSlots] = {};  ///< a slot's bytes have left it
  std::vector<CUevent> spare;         ///< made ahead, for whoever records

  /// Its stream and events, where it has none yet.
  void open(const Device& device);
  /// A new event, or one made ahead; the caller destroys it.
  CUevent take_event(const Device& device);
};

class UploadCrew {
 public:
  using Work = std::function<void(UploadSeat&)>;

  /// `helpers`: threads without a seat, for what can be done beside. Waits for the ring to be pinned. Starts
  /// no thread. Error(out_of_memory), Error(cuda).
  UploadCrew(Device& device, int n_threads, int n_helpers);
  ~UploadCrew();
  UploadCrew(const UploadCrew&) = delete;
  UploadCrew& operator=(const UploadCrew&) = delete;

  int size() const { return static_cast<int>(seats_.size()); }
  int helpers() const { return n_helpers_; }
  size_t slot_bytes() const { return slot_bytes_; }

  /// Threads that wait with open seats, `spare_events` each, over which something has gone to the card once.
  /// What a seat cannot have the work will be told when it opens it again.
  void stand_by(int spare_events);
  /// Each thread runs `work` once, each helper `help`; neither may throw. Not before end() of the last.
  void begin(Work work, std::function<void()> help = {});
  /// Waits until all have returned and what they put on their streams is over. False: a stream has failed,
  /// and the crew is of no use any more.
  bool end() noexcept;
  /// Whether it was got ready without a load; such a one may serve several.
  bool stood_by() const { return stood_by_; }

 private:
  void start_threads();
  void run(int t, int spare_events) noexcept;

  Device& device_;
  size_t slot_bytes_ = 0;
  const int n_helpers_;
  bool has_boot_ring_ = false, stood_by_ = false;
  int spare_events_ = 0;
  PinnedBuffer own_ring_;  // where another load has the boot's
  DeviceBuffer staging_;   // (threads, kUploadSlots, slot)
  std::vector<UploadSeat> seats_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable begun_, ended_;
  Work work_;
  std::function<void()> help_;
  uint64_t round_ = 0;  // of work
  int running_ = 0;
  bool stop_ = false;
};

}  // namespace reflex::cuda
