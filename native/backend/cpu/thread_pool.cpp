#include "backend/cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>

#include "base/error.h"

namespace reflex::cpu {

namespace {

// How long a thread spins before it sleeps: longer than from one token to the next, for to be woken takes
// 50 microseconds; shorter than anything a person or a scheduler would notice.
constexpr std::chrono::microseconds kSpinTime{200};
constexpr int kSpins = 64;  ///< between two looks at the clock

/// Thrown at a barrier when another thread has left the job; never leaves the pool.
struct TeamBroken {};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t old) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

/// The first line of a file, empty when it cannot be read.
std::string first_line(const std::string& path) {
  std::FILE* f = std::fopen(path.c_str(), "re");
  if (!f) return {};
  char buf[4096];
  const bool ok = std::fgets(buf, sizeof buf, f) != nullptr;
  std::fclose(f);
  if (!ok) return {};
  buf[std::strcspn(buf, "\n")] = 0;
  return buf;
}

/// Smallest quota, in CPUs, of cgroup directory root + path and its parents; `read` gives that of
/// one directory, 0 for none.
template <class Read>
double smallest_quota(const std::string& root, std::string path, Read read) {
  double best = 0;
  for (;;) {
    const double q = read(root + path);
    if (q > 0 && (best == 0 || q < best)) best = q;
    const size_t slash = path.find_last_of('/');
    if (slash == std::string::npos || path.empty()) return best;
    path.resize(slash);
  }
}

double quota_v2(const std::string& dir) {
  double quota = 0, period = 0;
  if (std::sscanf(first_line(dir + "/cpu.max").c_str(), "%lf %lf", &quota, &period) != 2) return 0;
  return period > 0 ? quota / period : 0;
}

double quota_v1(const std::string& dir) {
  double quota = 0, period = 0;
  if (std::sscanf(first_line(dir + "/cpu.cfs_quota_us").c_str(), "%lf", &quota) != 1 || quota <= 0) return 0;
  if (std::sscanf(first_line(dir + "/cpu.cfs_period_us").c_str(), "%lf", &period) != 1) return 0;
  return period > 0 ? quota / period : 0;
}

bool has_cpu_controller(const std::string& controllers) {
  const std::string list = "," + controllers + ",";
  return list.find(",cpu,") != std::string::npos;
}

/// The process's CPU quota from /proc/self/cgroup, in CPUs; 0 for none. Inside a container the
/// path may name a directory that is not mounted there: the mount's root is looked at too.
double cgroup_quota() {
  std::FILE* f = std::fopen("/proc/self/cgroup", "re");
  if (!f) return 0;
  double best = 0;
  char line[4096];
  while (std::fgets(line, sizeof line, f)) {
    line[std::strcspn(line, "\n")] = 0;
    char* controllers = std::strchr(line, ':');  // id:controllers:path
    char* path = controllers ? std::strchr(controllers + 1, ':') : nullptr;
    if (!path) continue;
    *path++ = 0;
    ++controllers;
    const std::string at = std::strcmp(path, "/") == 0 ? "" : path;
    double q = 0;
    if (*controllers == 0)
      q = smallest_quota("/sys/fs/cgroup", at, quota_v2);
    else if (has_cpu_controller(controllers))
      q = smallest_quota("/sys/fs/cgroup/cpu", at, quota_v1);
    if (q > 0 && (best == 0 || q < best)) best = q;
  }
  std::fclose(f);
  return best;
}

}  // namespace

int available_threads() {
  int n = 0;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
  if (n < 1) n = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));  // more CPUs than the mask holds
  if (n < 1) n = 1;
  const double quota = cgroup_quota();
  if (quota > 0 && quota < n) n = static_cast<int>(std::ceil(quota));
  return n < 1 ? 1 : n;
}

ThreadPool::ThreadPool(int threads) : size_(threads > 0 ? threads : available_threads()) {}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  publish(epoch_, epoch_sleepers_);
  for (std::thread& w : workers_) w.join();
}

void ThreadPool::start_workers() {
  while (static_cast<int>(workers_.size()) < size_ - 1) {
    const int t = static_cast<int>(workers_.size()) + 1;
    try {
      workers_.emplace_back([this, t] { work(t); });
    } catch (const std::system_error& e) {
      fail(ErrorKind::out_of_memory, "cannot start thread %d of %d: %s", t + 1, size_, e.what());
    }
  }
}

// Waits until word is no longer old: spins, then sleeps. sleepers lets publish() skip the system
// call when nobody sleeps; both sides are sequentially consistent so that one sees the other.
void ThreadPool::wait_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& sleepers) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() - start < kSpinTime);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == old) futex_wait(word, old);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void ThreadPool::publish(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

void ThreadPool::call(int t) noexcept {
  try {
    (*job_)(t);
    return;
  } catch (const TeamBroken&) {
    return;
  } catch (...) {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
  broken_.store(true, std::memory_order_seq_cst);
  publish(phase_, phase_sleepers_);  // whoever waits at a barrier wakes and sees broken_
}

void ThreadPool::work(int t) {
  char name[16];
  std::snprintf(name, sizeof name, "reflex-%d", t);
  pthread_setname_np(pthread_self(), name);
  for (uint32_t seen = 0;;) {
    wait_change(epoch_, seen, epoch_sleepers_);
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    call(t);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) publish(done_, done_sleepers_);
  }
}

void ThreadPool::run(const std::function<void(int)>& job) {
  if (size_ == 1) return job(0);
  start_workers();
  job_ = &job;
  broken_.store(false, std::memory_order_relaxed);
  arrived_.store(0, std::memory_order_relaxed);
  error_ = nullptr;
  pending_.store(static_cast<uint32_t>(size_) - 1, std::memory_order_relaxed);
  const uint32_t done = done_.load(std::memory_order_relaxed);
  publish(epoch_, epoch_sleepers_);
  call(0);
  wait_change(done_, done, done_sleepers_);
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (broken_.load(std::memory_order_acquire)) throw TeamBroken{};
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    arrived_.store(0, std::memory_order_relaxed);
    publish(phase_, phase_sleepers_);
  } else {
    wait_change(phase_, phase, phase_sleepers_);
  }
  if (broken_.load(std::memory_order_acquire)) throw TeamBroken{};
}

}  // namespace reflex::cpu
