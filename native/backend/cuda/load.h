// Moves weights from the file to the card while the first pass already runs. Owns: the choice of how to
// read, what its threads (upload_crew.h) do, the repack, and readiness: weights come in groups, in the order
// they are computed with, and a step waits for its own group only. On-demand groups (experts) come when they
// are asked for, ahead of all else, and where so wanted the rest behind. Refuses: deciding what is needed and
// where it lies (residence.h).
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "backend/backend.h"
#include "backend/cuda/device.h"
#include "backend/cuda/upload_crew.h"

namespace reflex::cuda {

/// Bytes that go to one place on the card.
struct LoadItem {
  const char* name = "";
  const void* data = nullptr;  ///< in the mapping, or in memory of ours
  size_t bytes = 0;
  int fd = -1;  ///< -1: memory of ours
  uint64_t offset = 0;
  CUdeviceptr dest = 0;
  bool in_slot = false;    ///< an expert's
  size_t slot_offset = 0;  ///< of an expert's item: from where its slot begins
  int group = 0;
  // A matrix that is repacked on its way (tile.h); else the bytes are copied as they are.
  bool tiled = false;
  GgmlType type = GgmlType::F32;
  int64_t n_in = 0, n_out = 0;
  int32_t n_cells = 0;
  uint32_t tile_bytes = 0;
  /// Writes `data` (memory of ours), by the thread that copies it; null: it is there.
  const std::function<void()>* make = nullptr;
};

enum class LoadMode { ring, map, direct, read };

/// How a load is to be done.
struct LoadOptions {
  std::string mode;            ///< "" chooses; Error(invalid_input) where it names none
  int threads = 0;             ///< 0: as many as the mode is best with
  bool in_page_cache = false;  ///< the file is: its pages may be mapped ahead of the copies
};

/// The threads that a load takes, and those that may help it: `from_file` where anything is read from one.
struct LoadThreads {
  LoadMode mode = LoadMode::ring;
  int copying = 1, helping = 0;
};
LoadThreads load_threads(const Device& device, const LoadOptions& options, bool from_file);

/// What a load is made of: items in the order of their groups, which come in three runs.
struct LoadList {
  std::vector<LoadItem> items;
  int n_groups = 1;
  int deferred_group = 1;    ///< from here on groups are read only once wanted
  int on_demand_group = 1;   ///< from here on one by one, as they are asked for
  bool rest_behind = false;  ///< on-demand groups that nobody asks for come too, once stream_rest() says so
};

class Loader {
 public:
  /// Starts at once, with a crew that the device kept or one of its own.
  Loader(Device& device, LoadList list, const LoadOptions& options);
  ~Loader();

  /// Asked now and then by require() and finish() while they wait: true ends them with Error(cancelled).
  /// Empty: never.
  void set_interrupt(std::function<bool()> interrupt) { interrupt_ = std::move(interrupt); }
  /// Work put on `stream` after this sees the group. Blocks until its copies are issued; throws
  /// what stopped the load.
  void require(int group, CUstream stream);
  /// A coming pass needs the deferred groups.
  void want_deferred();
  /// These on-demand groups come next. Nothing happens to those that were asked for before and have come.
  void hurry(std::span<const int> groups);
  /// The on-demand group's next copy goes to `slot`: it is forgotten where it was. Not while it comes.
  void place(int group, CUdeviceptr slot);
  /// As require(), for on-demand groups that were hurried.
  void require_all(std::span<const int> groups, CUstream stream);
  /// From here on on-demand groups that nobody asked for come too, where the list says so.
  void stream_rest();
  /// Everything is on the card, the rest that comes behind as well. Deferred groups count once wanted.
  void finish();
  LoadStatus status();
  /// finish() would not wait: no step needs to ask for its group any more.
  bool complete() const { return complete_.load(std::memory_order_acquire); }
  LoadMode mode() const { return mode_; }

 private:
  struct Chunk {
    int item;
    size_t offset, bytes;       // in the item
    int64_t first_row, n_rows;  // tiled
  };
  struct Group {
    int remaining = 0;          // chunks not yet issued
    std::vector<CUevent> last;  // per thread: after its latest chunk of the group
    bool waited = false;        // the compute stream has it
  };
  struct OnDemand {
    int first_chunk = 0, n_chunks = 0;
    bool asked = false;
  };
  struct Worker;

  void find_mappings();
  void cut_chunks();
  void work(UploadSeat& seat) noexcept;
  void run_worker(Worker& w);
  void map_ahead() noexcept;
  bool next_to_map(size_t* chunk);
  bool next_chunk(Worker& w, int* chunk);
  bool take_locked(int* chunk);
  bool has_work_locked();
  void ask_locked(size_t on_demand, std::deque<int>& queue);
  void skip_asked_locked();
  bool on_demand(int group) const { return group >= list_.on_demand_group; }
  bool all_here_locked();
  void upload(Worker& w, const Chunk& c);
  void copy_through_slot(Worker& w, const Chunk& c, CUdeviceptr to);
  void copy_from_mapping(Worker& w, const Chunk& c, CUdeviceptr to);
  const char* fill_slot(Worker& w, const LoadItem& item, const Chunk& c, char* slot);
  void repack(Worker& w, const LoadItem& item, const Chunk& c, CUdeviceptr from);
  void register_piece(uintptr_t piece);
  void publish(Worker& w, const Chunk& c);
  void rethrow_locked();
  template <class Ready>
  void wait_locked(std::unique_lock<std::mutex>& lock, Ready ready);

  Device& device_;
  LoadList list_;
  LoadMode mode_ = LoadMode::ring;
  int n_threads_ = 1;
  size_t slot_bytes_ = 0;
  std::vector<Chunk> chunks_;
  size_t first_deferred_chunk_ = 0, first_on_demand_chunk_ = 0;
  CUfunction repack_ = nullptr;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::function<bool()> interrupt_;

  std::atomic<size_t> done_bytes_{0};
  size_t total_bytes_ = 0, deferred_bytes_ = 0, on_demand_bytes_ = 0;
  std::atomic<bool> complete_{false};
  mutable std::mutex mutex_;
  std::condition_variable work_, changed_;  // for the threads here; for those who wait for them
  std::vector<Group> groups_;
  std::vector<OnDemand> on_demand_;
  size_t next_ = 0, next_rest_ = 0;  // chunk; on-demand group
  size_t mapped_ahead_ = 0;          // chunks before this are mapped, or are being
  std::deque<int> urgent_, behind_;  // chunks of on-demand groups
  std::exception_ptr error_;
  bool stop_ = false, wanted_ = false, rest_ = false;
  bool fresh_ = true;  // something has come since all were idle that is no fetch of a step's
  int idle_ = 0;       // threads that have nothing to do and whose copies have ended
  double finished_at_ = 0;
  // "map": pieces of the mapping that are pinned now
  std::mutex pin_mutex_;
  std::map<uintptr_t, size_t> pinned_;
  std::map<int, std::pair<uintptr_t, uintptr_t>> mapped_;  // by fd: pages that items lie in
  std::unique_ptr<UploadCrew> crew_;                       // last: its threads work with all of the above
};

}  // namespace reflex::cuda
