#include "run_block.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "fiber.h"
#include "settings.h"

emulator::Dim threadIdx, blockIdx, blockDim, gridDim;
emulator::Lane* emulator::current_lane;

// The static shared memory of all kernels (__shared__ of device_code.h).
extern unsigned char shared_begin[] __asm__("__start_emulated_shared");
extern unsigned char shared_end[] __asm__("__stop_emulated_shared");

namespace emulator {

namespace {

constexpr int kMaxNamed = 16, kMaxWarps = kMaxThreads / kWarp, kMaxIdleRounds = 100000;
constexpr size_t kSharedArena = size_t{256} << 10, kPage = 4096, kQuad = 16;
constexpr unsigned char kCanary = 0xA5, kFresh = 0xFF;  // bytes of 0xFF are NaNs in every format
constexpr size_t kSignalStack = size_t{64} << 10;

enum class Wait { none, block, named, warp, bulk, turn, done };

struct Copy {
  void* to;
  const void* from;
  int group;
};
struct BulkCopy {
  void* to;
  const void* from;
  uint32_t bytes;
  uint64_t* barrier;
};

struct Thread {
  Fiber fiber;
  Wait wait = Wait::done;
  uint32_t until = 0;        // the barrier's round to get past
  int named = 0;             // which
  uint64_t* bulk = nullptr;  // the mbarrier
  uint32_t parity = 0;       //   and the phase of it
  const char* what = "";     // the warp's exchange
  uint32_t mask = 0;
  Exchange compute = nullptr;
  bool awaited_inputs = false;
  int groups = 0;  // copy groups committed
  std::vector<Copy> copies;
};

struct Barrier {
  int arrived = 0, expected = 0, trues = 0, result = 0;
  uint32_t round = 0;
};

struct Warp {
  uint32_t live, waiting, ready;  ///< lanes that have not ended; that wait for an exchange; that may go on
};

// What runs now: one launch at a time, under the driver's lock.
Fiber scheduler;  // the stack that launches
Thread threads[kMaxThreads];
Warp warps[kMaxWarps];
Lane lanes[kMaxThreads];
Barrier block, named[kMaxNamed];
std::vector<BulkCopy> bulk_copies;
int n_threads, n_live, current = -1;
const Kernel* kernel;
const void* kernel_params;
unsigned char *shared_arena, *dynamic;
std::string failure;
bool failed, failed_address, reverse;
uint32_t turns;  // outer rounds of the block, for yield()

std::map<std::string, const Kernel*>& kernels() {
  static std::map<std::string, const Kernel*> all;
  return all;
}

/// The lane that goes on now, of those that may; `from` is the one that went before it.
int take_ready(Warp& w, int from) {
  const uint32_t after = reverse ? w.ready & ((1u << from) - 1) : w.ready & ~((2u << from) - 1);
  const uint32_t among = after ? after : w.ready;
  const int lane = reverse ? 31 - std::countl_zero(among) : std::countr_zero(among);
  w.ready &= ~(1u << lane);
  return lane;
}

void set_current(int thread) {
  current = thread;
  current_lane = lanes + thread;
  threadIdx = {static_cast<uint32_t>(thread), 0, 0};
  threads[thread].wait = Wait::none;
}

/// This thread waits: the next of its warp goes on, or the scheduler where none can.
void suspend(Wait why) {
  Thread& t = threads[current];
  t.wait = why;
  const int warp = current / kWarp;
  if (!warps[warp].ready || failed) return t.fiber.leave(scheduler);
  const int next = warp * kWarp + take_ready(warps[warp], current % kWarp);
  set_current(next);
  t.fiber.leave(threads[next].fiber);
}

std::string here() {
  char text[160];
  std::snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u)", kernel->name, blockIdx.x, blockIdx.y,
                blockIdx.z);
  std::string s = text;
  if (current >= 0) s += ", thread " + std::to_string(current);
  return s;
}

void report(const std::string& text) {
  if (!failed) failure = here() + ": " + text;
  failed = true;
}

/// From a thread of the block: nothing more of the launch runs.
[[noreturn]] void stop_launch() {
  suspend(Wait::done);
  std::abort();  // nobody resumes it
}

// ---- an mbarrier, in the 64 bits that a kernel has for it: mark, bytes still expected, whether its one
// arrival
// ---- is, phase

constexpr uint64_t kBarrierMark = 0x5A5Aull << 48, kBarrierMask = 0xFFFFull << 48, kArrival = 2;
constexpr int kBytesAt = 16;

uint64_t& barrier_at(uint64_t* barrier, const char* doing) {
  if ((*barrier & kBarrierMask) != kBarrierMark) fail("%s: a barrier that nothing has initialised", doing);
  return *barrier;
}
uint32_t phase_of(uint64_t b) { return b & 1; }
uint32_t bytes_of(uint64_t b) { return static_cast<uint32_t>((b & ~kBarrierMask) >> kBytesAt); }

/// The bytes are there; with the last of those that its arrival said the phase ends.
void land(const BulkCopy& c) {
  std::memcpy(c.to, c.from, c.bytes);
  *c.barrier -= static_cast<uint64_t>(c.bytes) << kBytesAt;
  if (bytes_of(*c.barrier) == 0) *c.barrier = kBarrierMark | ((*c.barrier & 1) ^ 1) | kArrival;
}

// ---- scheduling ------------------------------------------------------------------------------------------

bool ready(const Thread& t) {
  switch (t.wait) {
    case Wait::none:
      return true;
    case Wait::block:
      return block.round != t.until;
    case Wait::named:
      return named[t.named].round != t.until;
    case Wait::bulk:
      return phase_of(*t.bulk) != t.parity;
    case Wait::turn:
      return turns != t.until;
    case Wait::warp:
    case Wait::done:
      return false;
  }
  return false;
}

void end_round(Barrier& b) {
  b.result = b.trues;
  b.arrived = b.trues = 0;
  ++b.round;
}

/// Computes the exchange that `lane` of the warp has come to, if all of its lanes have that have not ended.
bool try_exchange(int warp, int lane) {
  Warp& w = warps[warp];
  Thread* of = threads + warp * kWarp;
  const Thread& self = of[lane];
  const uint32_t taking = self.mask & w.live;
  if ((w.waiting & taking) != taking) return false;
  for (int i = 0; i < kWarp; ++i) {
    if (!(taking >> i & 1)) continue;
    if ((of[i].mask & w.live) != taking) return false;
    if (of[i].what != self.what && std::strcmp(of[i].what, self.what) != 0)
      fail("lane %d is at %s while lane %d is at %s", lane, self.what, i, of[i].what);
  }
  self.compute(lanes + warp * kWarp, taking);
  w.waiting &= ~taking;
  w.ready |= taking & ~(1u << current % kWarp);
  return true;
}

/// A thread has ended: those that waited for it need not.
void release_after_end(int warp) {
  for (int i = 0; i < kWarp; ++i)
    if (warps[warp].waiting >> i & 1 && try_exchange(warp, i)) break;
  if (block.arrived && block.arrived == n_live) end_round(block);
}

void thread_entry() {
  kernel->run(kernel_params);  // copies that it did not wait for never come
  --n_live;
  warps[current / kWarp].live &= ~(1u << lane_id());
  release_after_end(current / kWarp);
  suspend(Wait::done);
  std::abort();  // nobody resumes it
}

/// Until all lanes of the warp wait; false where they did already.
bool step_warp(int warp) {
  Warp& w = warps[warp];
  const int first = warp * kWarp;
  for (int i = 0; i < kWarp; ++i)
    if (w.live >> i & 1 && ready(threads[first + i])) w.ready |= 1u << i;
  if (!w.ready) return false;
  const int thread = first + take_ready(w, reverse ? 0 : kWarp - 1);
  set_current(thread);
  scheduler.leave(threads[thread].fiber);
  current = -1;
  return true;
}

void report_deadlock() {
  std::string text = "threads wait for each other:";
  const char* names[] = {"running", "__syncthreads", "a named barrier", "", "a bulk copy", "its turn", ""};
  std::map<std::string, int> counts;
  for (int i = 0; i < n_threads; ++i) {
    const Thread& t = threads[i];
    if (t.wait == Wait::done) continue;
    ++counts[t.wait == Wait::warp ? t.what : names[static_cast<int>(t.wait)]];
  }
  for (const auto& [what, n] : counts) text += " " + std::to_string(n) + " at " + what + ",";
  text += " " + std::to_string(n_threads - n_live) + " have ended";
  report(text);
}

/// A warp runs until all its lanes wait: the furthest that one can get ahead of another.
void run_threads() {
  const int n_warps = (n_threads + kWarp - 1) / kWarp;
  for (int idle = 0; n_live && !failed;) {
    bool moved = false;
    ++turns;
    for (int k = 0; k < n_warps; ++k) {
      const int warp = reverse ? n_warps - 1 - k : k;
      while (!failed && step_warp(warp)) moved = true;
    }
    // Threads that only take turns may wait for a block that never comes: blocks run one after the other.
    const bool turning =
        std::any_of(threads, threads + n_threads, [](const Thread& t) { return t.wait == Wait::turn; });
    idle = turning ? idle + 1 : 0;
    if (!failed && n_live && ((!moved && !turning) || idle > kMaxIdleRounds)) return report_deadlock();
  }
}

void prepare_block(const LaunchShape& shape) {
  std::fill(shared_begin, shared_end, kFresh);
  std::memset(dynamic, kFresh, shape.shared);
  n_live = n_threads;
  block.arrived = block.trues = 0;
  for (Barrier& b : named) b.arrived = 0;
  bulk_copies.clear();
  for (int w = 0; w < kMaxWarps; ++w) {
    const int n = std::clamp(n_threads - w * kWarp, 0, kWarp);
    warps[w] = {static_cast<uint32_t>((uint64_t{1} << n) - 1), 0, 0};
  }
  for (int i = 0; i < n_threads; ++i) {
    Thread& t = threads[i];
    t.wait = Wait::none;
    t.awaited_inputs = false;
    t.groups = 0;
    t.copies.clear();
    t.fiber.start(thread_entry);
  }
}

void check_block(const LaunchShape& shape) {
  const unsigned char* end = shared_arena + kSharedArena;
  const auto changed = [](unsigned char c) { return c != kCanary; };
  if (std::any_of<const unsigned char*>(dynamic + shape.shared, end, changed))
    report("wrote beyond its " + std::to_string(shape.shared) + " bytes of dynamic shared memory");
  if (std::any_of(dynamic - kPage, dynamic, changed)) report("wrote in front of its dynamic shared memory");
  if (!shape.overlaps) return;
  for (int i = 0; i < n_threads; ++i)
    if (!threads[i].awaited_inputs)
      report("thread " + std::to_string(i) +
             " never called wait_for_inputs, and the launch may overlap the one before it");
}

// ---- accesses outside all memory
// -----------------------------------------------------------------------------

/// Where a thread goes on whose access the signal handler stopped.
void after_signal() { stop_launch(); }

struct sigaction previous_segv, previous_ill, previous_bus;

void on_signal(int sig, siginfo_t* info, void* context) {
  if (current < 0) {  // not a kernel's: as it was before us
    sigaction(sig, sig == SIGILL ? &previous_ill : sig == SIGBUS ? &previous_bus : &previous_segv, nullptr);
    return;
  }
  char text[120];
  if (sig == SIGILL)
    std::snprintf(text, sizeof text, "an access that is not aligned to its size");
  else if (threads[current].fiber.guards(info->si_addr))
    std::snprintf(text, sizeof text, "its stack is full");
  else
    std::snprintf(
        text, sizeof text, "address %p, which is in no memory of its own%s", info->si_addr,
        info->si_addr >= shared_arena + kSharedArena && info->si_addr < shared_arena + kSharedArena + kPage
            ? " (just beyond dynamic shared memory)"
            : "");
  report(text);
  failed_address = true;
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  // As if called there: eight bytes off a multiple of 16.
  registers[REG_RSP] = reinterpret_cast<greg_t>(threads[current].fiber.top()) - 128 - 8;
  registers[REG_RIP] = reinterpret_cast<greg_t>(&after_signal);
}

/// The handlers, for as long as a launch runs.
class CatchSignals {
 public:
  CatchSignals() {
    static thread_local char stack[kSignalStack];
    stack_t own{};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &previous_stack_);
    struct sigaction act {};
    act.sa_sigaction = on_signal;
    act.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &act, &previous_segv);
    sigaction(SIGBUS, &act, &previous_bus);
    sigaction(SIGILL, &act, &previous_ill);
  }
  ~CatchSignals() {
    sigaction(SIGSEGV, &previous_segv, nullptr);
    sigaction(SIGBUS, &previous_bus, nullptr);
    sigaction(SIGILL, &previous_ill, nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }

 private:
  stack_t previous_stack_{};
};

/// Dynamic shared memory ends where an unmapped page begins; what the launch does not ask for is marked.
void place_shared(uint32_t bytes) {
  if (!shared_arena) {
    void* p = mmap(nullptr, kSharedArena + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(static_cast<char*>(p) + kSharedArena, kPage, PROT_NONE) != 0) {
      std::perror("emulator: shared memory");
      std::abort();
    }
    shared_arena = static_cast<unsigned char*>(p);
  }
  std::memset(shared_arena, kCanary, kSharedArena);
  dynamic = shared_arena + kSharedArena - (bytes + kQuad - 1) / kQuad * kQuad;
}

}  // namespace

// ---- what device code calls
// ---------------------------------------------------------------------------------

Kernel::Kernel(const char* name_, size_t bytes, int threads_, void (*run_)(const void*))
    : name(name_), params_bytes(bytes), max_threads(threads_), run(run_) {
  kernels()[name] = this;
}

const Kernel* find_kernel(const std::string& name) {
  const auto it = kernels().find(name);
  return it == kernels().end() ? nullptr : it->second;
}

void fail(const char* format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  report(text);
  stop_launch();
}

int lane_id() { return current % kWarp; }
unsigned char* dynamic_shared() { return dynamic; }
void inputs_awaited() { threads[current].awaited_inputs = true; }

void exchange(const char* what, uint32_t mask, Exchange compute) {
  if (!(mask >> lane_id() & 1)) fail("%s for lanes %08x, not this one", what, mask);
  Thread& self = threads[current];
  self.what = what;
  self.mask = mask;
  self.compute = compute;
  warps[current / kWarp].waiting |= 1u << lane_id();
  if (!try_exchange(current / kWarp, lane_id())) suspend(Wait::warp);
}

int block_barrier(bool value) {
  const uint32_t round = block.round;
  block.trues += value;
  if (++block.arrived == n_live) {
    end_round(block);
  } else {
    threads[current].until = round;
    suspend(Wait::block);
  }
  return block.result;
}

void named_barrier(int id, int expected) {
  if (id < 0 || id >= kMaxNamed || expected <= 0 || expected % kWarp || expected > n_threads)
    fail("barrier %d of %d threads", id, expected);
  Barrier& b = named[id];
  if (b.arrived && b.expected != expected)
    fail("barrier %d of %d threads, where others said %d", id, expected, b.expected);
  b.expected = expected;
  const uint32_t round = b.round;
  if (++b.arrived == expected) return end_round(b);
  threads[current].named = id;
  threads[current].until = round;
  suspend(Wait::named);
}

void yield() {
  threads[current].until = turns;
  suspend(Wait::turn);
}

// ---- asynchronous copies
// ----------------------------------------------------------------------------------------

void copy_quad(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % kQuad || reinterpret_cast<uintptr_t>(from) % kQuad)
    fail("an asynchronous copy of 16 bytes from %p to %p: not on 16 bytes", from, to);
  if (settings().early)
    std::memcpy(to, from, kQuad);
  else
    threads[current].copies.push_back({to, from, threads[current].groups});
}

void copy_commit() { ++threads[current].groups; }

void copy_wait(int pending) {
  Thread& t = threads[current];
  size_t n = 0;
  while (n < t.copies.size() && t.copies[n].group < t.groups - pending) {
    std::memcpy(t.copies[n].to, t.copies[n].from, kQuad);
    ++n;
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<ptrdiff_t>(n));
}

void barrier_init(uint64_t* barrier) { *barrier = kBarrierMark | kArrival; }

void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  uint64_t& b = barrier_at(barrier, "a bulk copy");
  if (!(b & kArrival)) fail("a bulk copy for a barrier that still waits for the one before");
  b = (b & ~kArrival) | static_cast<uint64_t>(bytes) << kBytesAt;
}

void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  barrier_expect(barrier, bytes);
  copy_bulk_expected(to, from, bytes, barrier);
}

void copy_bulk_expected(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if (bytes == 0 || bytes % kQuad || reinterpret_cast<uintptr_t>(to) % kQuad ||
      reinterpret_cast<uintptr_t>(from) % kQuad)
    fail("a bulk copy of %u bytes from %p to %p: not in units of 16", bytes, from, to);
  uint32_t under_way = bytes;
  for (const BulkCopy& c : bulk_copies)
    if (c.barrier == barrier) under_way += c.bytes;
  const uint64_t b = barrier_at(barrier, "a bulk copy");
  if (b & kArrival || under_way > bytes_of(b)) fail("a bulk copy of more bytes than its barrier expects");
  const BulkCopy copy{to, from, bytes, barrier};
  if (settings().early)
    land(copy);
  else
    bulk_copies.push_back(copy);
}

void barrier_wait(uint64_t* barrier, uint32_t parity) {
  if (phase_of(barrier_at(barrier, "waiting for a bulk copy")) != parity) return;
  for (size_t i = 0; i < bulk_copies.size();) {
    if (bulk_copies[i].barrier != barrier) {
      ++i;
      continue;
    }
    const BulkCopy copy = bulk_copies[i];
    bulk_copies.erase(bulk_copies.begin() + static_cast<ptrdiff_t>(i));
    land(copy);
    if (phase_of(*barrier) != parity) return;
  }
  threads[current].bulk = barrier;
  threads[current].parity = parity;
  suspend(Wait::bulk);
}

// ---- a launch
// ----------------------------------------------------------------------------------------------------

std::string run_launch(const Kernel& k, const LaunchShape& shape, const void* params, bool& address) {
  kernel = &k;
  kernel_params = params;
  failure.clear();
  failed = false;
  reverse = settings().reverse;
  failed_address = false;
  gridDim = shape.grid;
  blockDim = {shape.threads, 1, 1};
  n_threads = static_cast<int>(shape.threads);
  place_shared(shape.shared);
  const CatchSignals catching;
  const uint64_t n = uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  for (uint64_t i = 0; i < n && !failed; ++i) {
    const uint64_t at = reverse ? n - 1 - i : i;
    blockIdx = {static_cast<uint32_t>(at % shape.grid.x),
                static_cast<uint32_t>(at / shape.grid.x % shape.grid.y),
                static_cast<uint32_t>(at / shape.grid.x / shape.grid.y)};
    prepare_block(shape);
    run_threads();
    if (!failed) check_block(shape);
  }
  address = failed_address;
  return failure;
}

}  // namespace emulator
