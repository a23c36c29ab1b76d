// The team of threads by itself: every thread runs, barriers order memory, errors get out.
#include <atomic>
#include <numeric>
#include <vector>

#include "backend/cpu/thread_pool.h"
#include "check.h"

using reflex::cpu::ThreadPool;

TEST(cpu_pool_calls_every_thread_once) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.size(), threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<int> calls(static_cast<size_t>(threads), 0);
      pool.run([&](int t) { ++calls[static_cast<size_t>(t)]; });
      CHECK(calls == std::vector<int>(static_cast<size_t>(threads), 1));
    }
  }
}

TEST(cpu_pool_barrier_shows_what_was_written_before) {
  constexpr int kThreads = 4, kRounds = 300;
  ThreadPool pool(kThreads);
  std::vector<int> mine(kThreads, 0);  // plain memory: only the barrier orders it
  std::atomic<int> wrong{0};
  pool.run([&](int t) {
    for (int round = 1; round <= kRounds; ++round) {
      mine[static_cast<size_t>(t)] = round;
      pool.barrier();
      if (std::accumulate(mine.begin(), mine.end(), 0) != round * kThreads) ++wrong;
      pool.barrier();
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

TEST(cpu_pool_error_frees_threads_that_wait_at_a_barrier) {
  for (int thrower : {0, 1, 2}) {
    ThreadPool pool(3);
    std::atomic<int> passed{0};
    CHECK_THROWS(reflex::ErrorKind::io, pool.run([&](int t) {
      if (t == thrower) reflex::fail(reflex::ErrorKind::io, "thread %d", t);
      pool.barrier();
      ++passed;
    }));
    CHECK_EQ(passed.load(), 0);
    // The pool is whole again.
    std::atomic<int> calls{0};
    pool.run([&](int) {
      pool.barrier();
      ++calls;
    });
    CHECK_EQ(calls.load(), 3);
  }
}

TEST(cpu_pool_of_one_runs_inline) {
  ThreadPool pool(1);
  int depth = 0;
  pool.run([&](int t) {
    pool.barrier();
    depth = t + 1;
  });
  CHECK_EQ(depth, 1);
  CHECK_THROWS(reflex::ErrorKind::busy,
               pool.run([](int) { reflex::fail(reflex::ErrorKind::busy, "inline"); }));
}

TEST(cpu_pool_that_never_ran_ends) {
  const ThreadPool pool(5);
  CHECK_EQ(pool.size(), 5);
  CHECK(reflex::cpu::available_threads() >= 1);
}
