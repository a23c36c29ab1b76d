#include "backend/cuda/load.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "backend/cuda/params.h"
#include "backend/cuda/tile.h"
#include "base/clock.h"

namespace reflex::cuda {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPiece = size_t{16} << 20;      // of a mapping, pinned at once
constexpr size_t kMapPiece = size_t{256} << 10;  // mapped at once ahead of the copies
// The first chunks, and the last, are this part of a slot: the link has something to move before a whole slot
// has been filled, and no thread fills one when the others have ended.
constexpr size_t kRampParts = 4;
constexpr int kRingThreads = 8, kDirectThreads = 16, kMapThreads = 2, kMostThreads = 32;
// Cores for the pass, the tokenizer, the interpreter and the rest of the machine.
constexpr int kOtherThreads = 4, kMostHelpers = 4;
// How often whoever waits for weights asks whether he still should.
constexpr std::chrono::milliseconds kInterruptEvery{1};
// Below this many cores, pinning the mapping beats copying it (measured: docs/performance.md).
constexpr int kRingMinCores = 6;
constexpr int kRepackThreads = 256;
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

/// Whether the way to read is left to us.
bool chooses(const std::string& mode) { return mode.empty() || mode == "auto"; }

uintptr_t page_floor(const void* p) { return reinterpret_cast<uintptr_t>(p) & ~(kPage - 1); }

}  // namespace

struct Loader::Worker {
  UploadSeat* seat = nullptr;
  CUevent latest = nullptr;  // after the last on-demand chunk so far
  bool used[kUploadSlots] = {};
  int next_slot = 0;
  std::map<int, int> direct_fds;  // "direct": the file opened past the page cache, -1 where it cannot be
};

LoadThreads load_threads(const Device& device, const LoadOptions& options, bool from_file) {
  const int cores = usable_cores();
  LoadThreads t;
  const std::string& mode = options.mode;
  if (mode == "ring")
    t.mode = LoadMode::ring;
  else if (mode == "map")
    t.mode = LoadMode::map;
  else if (mode == "direct")
    t.mode = LoadMode::direct;
  else if (mode == "read")
    t.mode = LoadMode::read;
  else if (!chooses(mode))
    fail(ErrorKind::invalid_input, "load mode: expected auto, ring, map, read or direct, found '%s'",
         mode.c_str());
  else
    t.mode = from_file && cores < kRingMinCores ? LoadMode::map : LoadMode::ring;
  if (t.mode == LoadMode::map && (!from_file || !device.can_register_read_only())) t.mode = LoadMode::ring;
  // Reads wait, so they may outnumber the cores; copies may not.
  t.copying = t.mode == LoadMode::direct
                  ? kDirectThreads
                  : std::min(cores, t.mode == LoadMode::map ? kMapThreads : kRingThreads);
  if (options.threads > 0) t.copying = std::min(options.threads, kMostThreads);
  t.helping = std::clamp(cores - t.copying - kOtherThreads, 0, kMostHelpers);
  return t;
}

Loader::Loader(Device& device, LoadList list, const LoadOptions& options)
    : device_(device), list_(std::move(list)) {
  const bool from_file =
      std::any_of(list_.items.begin(), list_.items.end(), [](const LoadItem& i) { return i.fd >= 0; });
  const LoadThreads threads = load_threads(device, options, from_file);
  mode_ = threads.mode;
  n_threads_ = threads.copying;
  if (mode_ == LoadMode::map) find_mappings();
  crew_ = device.take_crew(n_threads_);
  if (!crew_) crew_ = std::make_unique<UploadCrew>(device, n_threads_, 0);
  // A crew that stood by is a worker's, which stays: it will want the head, so nothing waits for the first
  // pass to say so.
  wanted_ = crew_->stood_by();
  slot_bytes_ = crew_->slot_bytes();
  groups_.resize(static_cast<size_t>(list_.n_groups));
  for (int g = 0; g < list_.on_demand_group; ++g)
    groups_[static_cast<size_t>(g)].last.assign(static_cast<size_t>(n_threads_), nullptr);
  on_demand_.resize(static_cast<size_t>(list_.n_groups - list_.on_demand_group));
  cut_chunks();
  repack_ = device.kernel("repack", "repack");
  for (int t = 0; t < n_threads_; ++t) {
    auto& w = *workers_.emplace_back(std::make_unique<Worker>());
    if (!on_demand_.empty())
      device.cu.check(device.cu.cuEventCreate(&w.latest, CU_EVENT_DISABLE_TIMING), "an upload event");
  }
  const bool helped = options.in_page_cache && mode_ == LoadMode::ring && crew_->helpers() > 0;
  try {
    crew_->begin([this](UploadSeat& seat) { work(seat); },
                 helped ? [this] { map_ahead(); } : std::function<void()>());
  } catch (...) {  // a thread cannot be had: those that can are told to return
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    throw;
  }
}

Loader::~Loader() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  changed_.notify_all();
  const bool usable = crew_->end();
  device_.enter_quietly();
  const Driver& cu = device_.cu;
  for (auto& w : workers_) {
    if (w->latest) cu.cuEventDestroy(w->latest);
    for (auto [fd, direct] : w->direct_fds)
      if (direct >= 0) close(direct);
  }
  for (Group& g : groups_)
    for (CUevent e : g.last)
      if (e) cu.cuEventDestroy(e);
  for (auto [at, bytes] : pinned_) cu.cuMemHostUnregister(reinterpret_cast<void*>(at));
  if (usable && crew_->stood_by()) device_.keep(std::move(crew_));  // the load has failed: another may come
}

/// "map": the pages of each file that are pinned, piece by piece.
void Loader::find_mappings() {
  for (const LoadItem& i : list_.items) {
    if (i.fd < 0) continue;
    const uintptr_t begin = page_floor(i.data);
    const uintptr_t end = page_floor(static_cast<const char*>(i.data) + i.bytes + kPage - 1);
    auto [it, fresh] = mapped_.try_emplace(i.fd, begin, end);
    if (!fresh) it->second = {std::min(it->second.first, begin), std::max(it->second.second, end)};
  }
}

// No chunk is larger than a slot (less what "direct" reads around it); tiled ones are whole tiles.
void Loader::cut_chunks() {
  const size_t room = slot_bytes_ - 2 * kPage, threads = static_cast<size_t>(n_threads_);
  size_t last_item = 0;  // of those that come without being asked for one by one
  for (size_t k = 0; k < list_.items.size(); ++k)
    if (!on_demand(list_.items[k].group)) last_item = k;
  for (size_t k = 0; k < list_.items.size(); ++k) {
    const LoadItem& item = list_.items[k];
    total_bytes_ += item.bytes;
    if (on_demand(item.group))
      on_demand_bytes_ += item.bytes;
    else if (item.group >= list_.deferred_group)
      deferred_bytes_ += item.bytes;
    const size_t stride = item.tiled ? row_bytes(item.type, static_cast<size_t>(item.n_in)) : 1;
    size_t rows = room / stride;
    if (item.tiled) rows = rows / kTileRows * kTileRows;
    if (rows == 0)
      fail(ErrorKind::unsupported, "tensor '%s': 8 rows of %zu bytes do not fit the upload's slots of %zu",
           item.name, stride, room);
    const size_t n = item.tiled ? static_cast<size_t>(item.n_out) : item.bytes;
    const size_t unit = item.tiled ? kTileRows : kPage;
    const size_t small = std::max(unit, rows / kRampParts / unit * unit);
    if (chunks_.size() < threads && !on_demand(item.group) && !item.make) rows = small;
    const size_t body = k == last_item ? (n - std::min(n, threads * small)) / unit * unit : n;
    // Pieces of one size: a full one and a sliver would cost as many calls and fill the threads unevenly.
    const size_t pieces = std::max<size_t>(1, (body + rows - 1) / rows);
    rows = std::min(rows, ((body + pieces - 1) / pieces + unit - 1) / unit * unit);
    const int first_chunk = static_cast<int>(chunks_.size());
    for (size_t r = 0, take = 0; r < n; r += take) {
      take = r < body ? std::min(rows, body - r) : std::min(small, n - r);
      chunks_.push_back({static_cast<int>(k), r * stride, take * stride, static_cast<int64_t>(r),
                         static_cast<int64_t>(take)});
      if (!on_demand(item.group)) ++groups_[static_cast<size_t>(item.group)].remaining;
    }
    if (item.group < list_.deferred_group) first_deferred_chunk_ = chunks_.size();
    if (!on_demand(item.group)) {
      first_on_demand_chunk_ = chunks_.size();
      continue;
    }
    OnDemand& o = on_demand_[static_cast<size_t>(item.group - list_.on_demand_group)];
    const int end = static_cast<int>(chunks_.size());
    if (o.n_chunks == 0) o.first_chunk = first_chunk;
    o.n_chunks = end - o.first_chunk;
  }
}

void Loader::work(UploadSeat& seat) noexcept {
  Worker& w = *workers_[static_cast<size_t>(seat.index)];
  w.seat = &seat;
  try {
    run_worker(w);
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
  changed_.notify_all();
}

void Loader::run_worker(Worker& w) {
  device_.enter();
  w.seat->open(device_);
  int i = 0;
  while (next_chunk(w, &i)) {
    const Chunk& c = chunks_[static_cast<size_t>(i)];
    upload(w, c);
    publish(w, c);
  }
}

/// The next chunk to load. A thread that finds none waits for its copies to end and then for work.
bool Loader::next_chunk(Worker& w, int* chunk) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (stop_ || error_) return false;
    if (take_locked(chunk)) return true;
    lock.unlock();
    device_.cu.check(device_.cu.cuStreamSynchronize(w.seat->stream), "loading the weights");
    lock.lock();
    if (stop_ || error_) return false;
    if (has_work_locked()) continue;
    if (++idle_ == n_threads_) {
      if (!complete_ && all_here_locked()) complete_.store(true, std::memory_order_release);
      if (fresh_) finished_at_ = now_ms();
      fresh_ = false;
      changed_.notify_all();
    }
    work_.wait(lock, [&] { return stop_ || error_ || has_work_locked(); });
    --idle_;
  }
}

/// A helper's work: the pages of what the others copy next are put into the mapping's page table. Half of the
/// time of copying a fresh mapping goes into that (docs/performance.md).
void Loader::map_ahead() noexcept {
  size_t i = 0;
  while (next_to_map(&i)) {
    const Chunk& c = chunks_[i];
    const LoadItem& item = list_.items[static_cast<size_t>(c.item)];
    if (item.fd < 0) continue;
    const uintptr_t end = reinterpret_cast<uintptr_t>(item.data) + c.offset + c.bytes;
    for (uintptr_t at = page_floor(static_cast<const char*>(item.data) + c.offset); at < end; at += kMapPiece)
      if (madvise(reinterpret_cast<void*>(at), std::min<size_t>(kMapPiece, end - at), kPopulateRead) != 0)
        return;  // a kernel before 5.14; or the file has shrunk, which the copy will find
  }
}

/// The next chunk that no thread has begun; waits for the deferred ones to be wanted.
bool Loader::next_to_map(size_t* chunk) {
  std::unique_lock lock(mutex_);
  const auto end = [&] { return wanted_ ? first_on_demand_chunk_ : first_deferred_chunk_; };
  const auto ahead = [&] { return std::max(mapped_ahead_, next_ + static_cast<size_t>(n_threads_)); };
  work_.wait(lock, [&] { return stop_ || error_ || wanted_ || ahead() < end(); });
  if (stop_ || error_ || ahead() >= end()) return false;
  *chunk = ahead();
  mapped_ahead_ = *chunk + 1;
  return true;
}

/// What a step waits for, then what comes before it in the file's order, then what nobody asked for.
bool Loader::take_locked(int* chunk) {
  if (!urgent_.empty()) {
    *chunk = urgent_.front();
    urgent_.pop_front();
    return true;
  }
  if (next_ < (wanted_ ? first_on_demand_chunk_ : first_deferred_chunk_)) {
    *chunk = static_cast<int>(next_++);
    fresh_ = true;
    return true;
  }
  if (!rest_) return false;
  skip_asked_locked();
  if (behind_.empty() && next_rest_ < on_demand_.size()) ask_locked(next_rest_, behind_);
  if (behind_.empty()) return false;
  *chunk = behind_.front();
  behind_.pop_front();
  fresh_ = true;
  return true;
}

bool Loader::has_work_locked() {
  skip_asked_locked();
  return !urgent_.empty() || next_ < (wanted_ ? first_on_demand_chunk_ : first_deferred_chunk_) ||
         (rest_ && (!behind_.empty() || next_rest_ < on_demand_.size()));
}

void Loader::skip_asked_locked() {
  while (next_rest_ < on_demand_.size() && on_demand_[next_rest_].asked) ++next_rest_;
}

void Loader::ask_locked(size_t i, std::deque<int>& queue) {
  OnDemand& o = on_demand_[i];
  o.asked = true;
  groups_[i + static_cast<size_t>(list_.on_demand_group)].remaining = o.n_chunks;
  for (int c = o.first_chunk; c < o.first_chunk + o.n_chunks; ++c) queue.push_back(c);
}

/// Nothing will ever come that is not there; asked by a thread when all are idle.
bool Loader::all_here_locked() {
  skip_asked_locked();
  return next_ == first_on_demand_chunk_ &&
         (on_demand_.empty() || (rest_ && next_rest_ == on_demand_.size()));
}

void Loader::upload(Worker& w, const Chunk& c) {
  const LoadItem& item = list_.items[static_cast<size_t>(c.item)];
  const CUdeviceptr staging = w.seat->staging + static_cast<size_t>(w.next_slot) * slot_bytes_;
  const CUdeviceptr to = item.tiled ? staging : item.dest + c.offset;
  // Experts lie scattered: pinning pieces around them would cost more than copying them.
  if (mode_ == LoadMode::map && item.fd >= 0 && !on_demand(item.group))
    copy_from_mapping(w, c, to);
  else
    copy_through_slot(w, c, to);
  if (item.tiled) repack(w, item, c, staging);
  w.next_slot = (w.next_slot + 1) % kUploadSlots;
}

void Loader::copy_through_slot(Worker& w, const Chunk& c, CUdeviceptr to) {
  const Driver& cu = device_.cu;
  const int k = w.next_slot;
  if (w.used[k]) cu.check(cu.cuEventSynchronize(w.seat->copied[k]), "loading the weights");
  const LoadItem& item = list_.items[static_cast<size_t>(c.item)];
  const char* from = fill_slot(w, item, c, w.seat->slots + static_cast<size_t>(k) * slot_bytes_);
  cu.check(cu.cuMemcpyHtoDAsync(to, from, c.bytes, w.seat->stream), "loading the weights");
  cu.check(cu.cuEventRecord(w.seat->copied[k], w.seat->stream), "loading the weights");
  w.used[k] = true;
}

/// The chunk's bytes, somewhere in the slot.
const char* Loader::fill_slot(Worker& w, const LoadItem& item, const Chunk& c, char* slot) {
  const char* from = static_cast<const char*>(item.data) + c.offset;
  if (item.make) (*item.make)();
  if (item.fd < 0 || (mode_ != LoadMode::direct && mode_ != LoadMode::read)) {
    std::memcpy(slot, from, c.bytes);
    return slot;
  }
  auto [it, fresh] = w.direct_fds.try_emplace(item.fd, -1);
  if (fresh && mode_ == LoadMode::direct) {
    const std::string path = "/proc/self/fd/" + std::to_string(item.fd);
    it->second = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  }
  const uint64_t begin = item.offset + c.offset, first = begin & ~(kPage - 1);
  const size_t ahead = begin - first, want = ahead + c.bytes;
  size_t got = 0;
  while (got < want) {
    const bool direct = it->second >= 0 && got % kPage == 0;
    // A direct read is whole pages; the last may end with the file.
    const size_t ask = direct ? (want - got + kPage - 1) & ~(kPage - 1) : want - got;
    const ssize_t n = pread(direct ? it->second : item.fd, slot + got, ask, static_cast<off_t>(first + got));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && direct && errno == EINVAL) {  // a file system that refuses
      close(it->second);
      it->second = -1;
      continue;
    }
    if (n <= 0)
      fail(ErrorKind::io, "tensor '%s': reading %zu bytes at offset %llu: %s", item.name, c.bytes,
           static_cast<unsigned long long>(begin), n < 0 ? std::strerror(errno) : "the file ends there");
    got += static_cast<size_t>(n);
  }
  return slot + ahead;
}

/// Straight from the page cache, which the driver pins piece by piece.
void Loader::copy_from_mapping(Worker& w, const Chunk& c, CUdeviceptr to) {
  const Driver& cu = device_.cu;
  const LoadItem& item = list_.items[static_cast<size_t>(c.item)];
  auto at = reinterpret_cast<uintptr_t>(item.data) + c.offset;
  const uintptr_t end = at + c.bytes, lowest = mapped_.at(item.fd).first,
                  highest = mapped_.at(item.fd).second;
  while (at < end) {  // one copy must not cross two pieces
    const uintptr_t piece = lowest + (at - lowest) / kPiece * kPiece,
                    piece_end = std::min(piece + kPiece, highest);
    {
      std::lock_guard lock(pin_mutex_);
      if (!pinned_.contains(piece)) {
        cu.check(cu.cuMemHostRegister(reinterpret_cast<void*>(piece), piece_end - piece,
                                      CU_MEMHOSTREGISTER_READ_ONLY | CU_MEMHOSTREGISTER_PORTABLE),
                 "pinning the file's mapping");
        pinned_.emplace(piece, piece_end - piece);
      }
    }
    const size_t n = std::min(end, piece_end) - at;
    cu.check(cu.cuMemcpyHtoDAsync(to, reinterpret_cast<const void*>(at), n, w.seat->stream),
             "loading the weights");
    at += n;
    to += n;
  }
}

void Loader::repack(Worker& w, const LoadItem& item, const Chunk& c, CUdeviceptr from) {
  const TypeInfo& info = type_info(item.type);
  RepackParams p{};
  p.raw = reinterpret_cast<const uint8_t*>(from);
  p.tiles =
      reinterpret_cast<uint8_t*>(item.dest) + static_cast<size_t>(c.first_row / kTileRows) * item.tile_bytes;
  p.row_bytes = row_bytes(item.type, static_cast<size_t>(item.n_in));
  p.type = static_cast<int32_t>(item.type);
  p.n_rows = static_cast<int32_t>(c.n_rows);
  p.n_in = static_cast<int32_t>(item.n_in);
  p.n_cells = item.n_cells;
  p.block_bytes = static_cast<int32_t>(info.block_bytes);
  p.block_values = static_cast<int32_t>(info.block_values);
  p.n_tiles = static_cast<int32_t>((c.n_rows + kTileRows - 1) / kTileRows);
  device_.launch(repack_, {static_cast<uint32_t>(p.n_tiles), 1}, kRepackThreads, 0, {w.seat->stream, false},
                 p);
}

void Loader::publish(Worker& w, const Chunk& c) {
  const Driver& cu = device_.cu;
  const int group = list_.items[static_cast<size_t>(c.item)].group;
  Group& g = groups_[static_cast<size_t>(group)];
  if (on_demand(group)) {
    cu.check(cu.cuEventRecord(w.latest, w.seat->stream), "loading the weights");
  } else {
    CUevent& event = g.last[static_cast<size_t>(w.seat->index)];  // this thread's own
    if (!event) event = w.seat->take_event(device_);
    cu.check(cu.cuEventRecord(event, w.seat->stream), "loading the weights");
  }
  if (!on_demand(group) || list_.rest_behind) done_bytes_ += c.bytes;
  bool last;
  {
    std::lock_guard lock(mutex_);
    last = --g.remaining == 0;
  }
  if (last) changed_.notify_all();
}

void Loader::rethrow_locked() {
  if (error_) std::rethrow_exception(error_);
}

/// Until `ready`, unless somebody interrupts.
template <class Ready>
void Loader::wait_locked(std::unique_lock<std::mutex>& lock, Ready ready) {
  while (interrupt_ && !ready()) {
    lock.unlock();
    if (interrupt_()) fail(ErrorKind::cancelled, "whoever waited for weights was to wait no more");
    lock.lock();
    changed_.wait_for(lock, kInterruptEvery, ready);
  }
  changed_.wait(lock, ready);
}

void Loader::require(int group, CUstream stream) {
  if (complete()) return;
  Group& g = groups_[static_cast<size_t>(group)];
  {
    std::unique_lock lock(mutex_);
    if (g.waited) return;
    wait_locked(lock, [&] { return error_ || g.remaining == 0; });
    rethrow_locked();
    g.waited = true;
  }
  for (CUevent e : g.last)
    if (e) device_.cu.check(device_.cu.cuStreamWaitEvent(stream, e, 0), "waiting for weights");
}

void Loader::want_deferred() {
  {
    std::lock_guard lock(mutex_);
    if (wanted_) return;
    wanted_ = true;
  }
  work_.notify_all();
}

void Loader::hurry(std::span<const int> groups) {
  {
    std::lock_guard lock(mutex_);
    for (int group : groups) {
      const auto i = static_cast<size_t>(group - list_.on_demand_group);
      if (!on_demand_[i].asked) {
        ask_locked(i, urgent_);
        continue;
      }
      // One that was to come behind, one group at a time, comes now.
      const OnDemand& o = on_demand_[i];
      if (behind_.empty() || behind_.front() < o.first_chunk || behind_.front() >= o.first_chunk + o.n_chunks)
        continue;
      urgent_.insert(urgent_.end(), behind_.begin(), behind_.end());
      behind_.clear();
    }
  }
  work_.notify_all();
}

void Loader::place(int group, CUdeviceptr slot) {
  std::lock_guard lock(mutex_);
  OnDemand& o = on_demand_[static_cast<size_t>(group - list_.on_demand_group)];
  o.asked = false;
  for (int c = o.first_chunk; c < o.first_chunk + o.n_chunks; ++c) {
    LoadItem& item = list_.items[static_cast<size_t>(chunks_[static_cast<size_t>(c)].item)];
    item.dest = slot + item.slot_offset;
  }
}

void Loader::require_all(std::span<const int> groups, CUstream stream) {
  {
    std::unique_lock lock(mutex_);
    for (int group : groups) {
      const Group& g = groups_[static_cast<size_t>(group)];
      changed_.wait(lock, [&] { return error_ || g.remaining == 0; });
      rethrow_locked();
    }
  }
  // A thread's copies end in order, so its latest stands for all before.
  for (auto& w : workers_)
    device_.cu.check(device_.cu.cuStreamWaitEvent(stream, w->latest, 0), "waiting for experts");
}

void Loader::stream_rest() {
  {
    std::lock_guard lock(mutex_);
    if (rest_ || !list_.rest_behind) return;
    rest_ = true;
  }
  work_.notify_all();
}

void Loader::finish() {
  stream_rest();
  std::unique_lock lock(mutex_);
  wait_locked(lock, [&] { return error_ || (idle_ == n_threads_ && !has_work_locked()); });
  rethrow_locked();
}

LoadStatus Loader::status() {
  std::lock_guard lock(mutex_);
  LoadStatus s;
  s.done = done_bytes_.load();
  s.total = total_bytes_ - (wanted_ ? 0 : deferred_bytes_) - (list_.rest_behind ? 0 : on_demand_bytes_);
  s.finished = idle_ == n_threads_ && !has_work_locked() && (!list_.rest_behind || rest_);
  s.finished_at = s.finished ? finished_at_ : 0;
  s.stood_by = crew_->stood_by();
  return s;
}

}  // namespace reflex::cuda
