// A fixed team of threads that runs one job at a time, the caller being thread 0.
//
// A job is one function called once per thread; inside it the threads may meet at barrier().
// Waiting threads spin briefly and then sleep in a futex, so an idle pool costs nothing. It keeps
// no queue, takes no work from two callers at once, and does not survive fork().
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace reflex::cpu {

/// CPUs that this process may use: its affinity mask, cut to the cgroup's quota (v1 and v2, every
/// level up to the root), rounded up; at least 1.
int available_threads();

class ThreadPool {
 public:
  /// threads 0: available_threads(). Threads start on the first run() that needs them.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  /// Calls job(t) for t in [0, size()) and returns when all are done. The first exception is
  /// rethrown here; threads that wait at a barrier meanwhile leave the job too.
  void run(const std::function<void(int)>& job);

  /// Inside a job: returns when every thread of the team has called it. What a thread wrote
  /// before is visible to all after.
  void barrier();

 private:
  void start_workers();
  void work(int t);
  void call(int t) noexcept;
  void wait_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& sleepers);
  void publish(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers);

  const int size_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;

  // One line each: words that different threads write.
  alignas(64) std::atomic<uint32_t> epoch_{0};  ///< a new job, or the end
  std::atomic<uint32_t> epoch_sleepers_{0};
  alignas(64) std::atomic<uint32_t> pending_{0};  ///< workers still in the job
  alignas(64) std::atomic<uint32_t> done_{0};     ///< jobs finished by all workers
  std::atomic<uint32_t> done_sleepers_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};  ///< barriers passed
  std::atomic<uint32_t> phase_sleepers_{0};
  alignas(64) std::atomic<bool> broken_{false};  ///< a thread left the job by an exception
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace reflex::cpu
