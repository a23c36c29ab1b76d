// The emulator's own tests: each fault that it is there to find, in a kernel that has it and in one that has
// not. A launch that fails breaks the context for good, so every case runs in a process of its own.
#include <cuda.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "broken.h"
#include "check.h"
#include "settings.h"

using namespace reflex::cuda;

namespace {

constexpr uint32_t kThreads = 64;

struct Outcome {
  CUresult result = CUDA_SUCCESS;
  char report[400] = "";
  float out[kThreads] = {};

  bool says(const char* text) const { return std::strstr(report, text) != nullptr; }
};

/// `run` in a child, which gives back the outcome.
Outcome in_child(const std::function<void(Outcome&)>& run) {
  int ends[2];
  Outcome o;
  if (pipe(ends) != 0) return o;
  const pid_t child = fork();
  if (child == 0) {
    run(o);
    const char* text = "";
    if (o.result != CUDA_SUCCESS) cuGetErrorString(o.result, &text);
    std::snprintf(o.report, sizeof o.report, "%s", text);
    const ssize_t n = write(ends[1], &o, sizeof o);
    _exit(n == static_cast<ssize_t>(sizeof o) ? 0 : 1);
  }
  close(ends[1]);
  size_t got = 0;
  for (ssize_t n; (n = read(ends[0], reinterpret_cast<char*>(&o) + got, sizeof o - got)) > 0;)
    got += static_cast<size_t>(n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(got == sizeof o && status == 0);
  return o;
}

CUfunction kernel(const char* name) {
  CUfunction f = nullptr;
  CHECK_EQ(cuModuleGetFunction(&f, nullptr, name), CUDA_SUCCESS);
  return f;
}

struct Shape {
  uint32_t blocks = 1, threads = kThreads, shared = kThreads * sizeof(float);
  bool overlap = false;
};

template <class Params>
CUresult launch(const char* name, Params p, Shape shape = {}, CUstream stream = nullptr) {
  CUlaunchConfig c{};
  c.gridDimX = shape.blocks;
  c.gridDimY = c.gridDimZ = c.blockDimY = c.blockDimZ = 1;
  c.blockDimX = shape.threads;
  c.sharedMemBytes = shape.shared;
  c.hStream = stream;
  CUlaunchAttribute overlap{};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  c.attrs = &overlap;
  c.numAttrs = shape.overlap ? 1 : 0;
  void* args[] = {&p};
  return cuLaunchKernelEx(&c, kernel(name), args, nullptr);
}

float* buffer(size_t n) {
  CUdeviceptr p = 0;
  CHECK_EQ(cuMemAlloc(&p, n * sizeof(float)), CUDA_SUCCESS);
  return reinterpret_cast<float*>(p);
}

/// One launch over in (64, the numbers from 0 on) and out.
Outcome run(const char* name, bool sound, bool backwards = false, bool early = false, Shape shape = {},
            int32_t n = 0) {
  return in_child([&](Outcome& o) {
    emulator::settings().reverse = backwards;
    emulator::settings().early = early;
    float *in = buffer(kThreads), *out = buffer(kThreads);
    std::iota(in, in + kThreads, 0.0f);
    std::memset(out, 0, sizeof o.out);
    o.result = launch(name, BrokenParams{in, out, n, sound}, shape);
    const CUresult r = cuStreamSynchronize(nullptr);
    if (o.result == CUDA_SUCCESS) o.result = r;
    std::memcpy(o.out, out, sizeof o.out);
  });
}

bool same(const Outcome& a, const Outcome& b) { return std::memcmp(a.out, b.out, sizeof a.out) == 0; }

}  // namespace

TEST(a_race_between_threads_shows_in_their_order) {
  CHECK(!same(run("shared_race", false), run("shared_race", false, true)));
  CHECK(same(run("shared_race", true), run("shared_race", true, true)));
}

TEST(a_race_between_blocks_shows_in_their_order) {
  const Shape blocks{8};
  CHECK_EQ(run("block_race", false, false, false, blocks).out[0], 7.0f);
  CHECK_EQ(run("block_race", false, true, false, blocks).out[0], 0.0f);
  for (const bool backwards : {false, true})
    CHECK_EQ(run("block_race", true, backwards, false, blocks).out[0], 28.0f);
}

TEST(a_write_outside_dynamic_shared_memory_is_found) {
  for (const char* name : {"beyond_shared", "behind_shared"}) {
    const Outcome o = run(name, false);
    CHECK(o.result == CUDA_ERROR_LAUNCH_FAILED || o.result == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(o.says(name) && o.says("shared memory"));
    CHECK_EQ(run(name, true).result, CUDA_SUCCESS);
  }
}

TEST(a_write_into_what_rounds_up_dynamic_shared_memory_is_found) {
  const Outcome o = run("beyond_shared", true, false, false, {1, kThreads, kThreads * sizeof(float) - 4});
  CHECK_EQ(o.result, CUDA_ERROR_LAUNCH_FAILED);
  CHECK(o.says("beyond its 252 bytes"));
}

TEST(a_read_outside_a_buffer_is_found) {
  const Outcome o = run("beyond_buffer", false, false, false, {}, 1);
  CHECK_EQ(o.result, CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(o.says("beyond_buffer") && o.says("thread 63"));
  CHECK_EQ(run("beyond_buffer", false, false, false, {}, 0).result, CUDA_SUCCESS);
}

TEST(a_write_into_what_rounds_up_a_buffer_is_found_when_it_is_freed) {
  for (const size_t too_many : {0, 1}) {
    const Outcome o = in_child([&](Outcome& out) {
      float* p = buffer(10);
      for (size_t i = 0; i < 10 + too_many; ++i) p[i] = 1;
      out.result = cuMemFree(reinterpret_cast<CUdeviceptr>(p));
    });
    CHECK_EQ(o.result, too_many ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
  }
}

TEST(memory_that_nothing_has_written_is_nan) {
  const Outcome unset = run("unset_shared", false), set = run("unset_shared", true);
  for (uint32_t i = 0; i < kThreads; ++i) {
    CHECK(std::isnan(unset.out[i]));
    CHECK_EQ(set.out[i], 2.0f);
  }
  CHECK(std::isnan(*buffer(1)));
}

TEST(threads_that_wait_for_each_other_are_found) {
  const Outcome o = run("barrier_of_some", false);
  CHECK_EQ(o.result, CUDA_ERROR_LAUNCH_FAILED);
  CHECK(o.says("32 at __syncthreads") && o.says("32 at a named barrier"));
  CHECK_EQ(run("barrier_of_some", true).result, CUDA_SUCCESS);
}

TEST(lanes_at_different_exchanges_are_found) {
  const Outcome o = run("two_exchanges", false);
  CHECK_EQ(o.result, CUDA_ERROR_LAUNCH_FAILED);
  CHECK(o.says("__shfl_xor_sync") && o.says("__syncwarp"));
  CHECK_EQ(run("two_exchanges", true).result, CUDA_SUCCESS);
}

TEST(what_a_lane_gives_that_has_ended_is_nan) {
  const Outcome dead = run("early_end", false), live = run("early_end", true);
  CHECK(std::isnan(dead.out[0]));
  CHECK_EQ(live.out[0], 1.0f);
}

TEST(a_copy_that_nothing_waited_for_is_not_there) {
  for (const char* name : {"copied_late", "copied_in_bulk"}) {
    CHECK(std::isnan(run(name, false).out[5]));
    CHECK_EQ(run(name, true).out[5], 5.0f);
    CHECK_EQ(run(name, true, true, true).out[5], 5.0f);
  }
}

TEST(a_copy_over_what_is_still_read_shows_when_copies_are_early) {
  CHECK(!same(run("copied_early", false, false, true), run("copied_early", true, false, true)));
  for (const bool early : {false, true}) CHECK_EQ(run("copied_early", true, false, early).out[5], 1.0f);
}

TEST(a_kernel_that_may_start_early_and_does_not_wait_for_its_inputs_is_found) {
  const Shape overlap{1, kThreads, 0, true};
  CHECK(run("unwaited_inputs", false, false, false, overlap).says("never called wait_for_inputs"));
  CHECK_EQ(run("unwaited_inputs", true, false, false, overlap).result, CUDA_SUCCESS);
  CHECK_EQ(run("unwaited_inputs", false).result, CUDA_SUCCESS);
}

TEST(an_access_that_is_not_aligned_to_its_size_is_found) {
  const Outcome o = run("not_aligned", false);
  CHECK_EQ(o.result, CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(o.says("not aligned"));
  CHECK_EQ(run("not_aligned", true).result, CUDA_SUCCESS);
}

TEST(launches_over_the_limits_are_refused) {
  CHECK_EQ(run("unset_shared", true, false, false, {1, 96}).result, CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(run("unset_shared", true, false, false, {0}).result, CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(run("unset_shared", true, false, false, {1, kThreads, (48u << 10) + 16}).result,
           CUDA_ERROR_INVALID_VALUE);
}

TEST(a_missing_wait_for_an_event_shows_in_the_result) {
  for (const bool waits : {false, true}) {
    const Outcome o = in_child([&](Outcome& outcome) {
      CUstream copies = nullptr, work = nullptr;
      CUevent copied = nullptr;
      cuStreamCreate(&copies, 0);
      cuStreamCreate(&work, 0);
      cuEventCreate(&copied, 0);
      void* pinned = nullptr;
      cuMemHostAlloc(&pinned, kThreads * sizeof(float), 0);
      auto* from = static_cast<float*>(pinned);
      std::iota(from, from + kThreads, 0.0f);
      float *in = buffer(kThreads), *out = buffer(kThreads);
      cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(in), from, kThreads * sizeof(float), copies);
      cuEventRecord(copied, copies);
      if (waits) cuStreamWaitEvent(work, copied, 0);
      outcome.result = launch("beyond_buffer", BrokenParams{in, out, 0, 0}, {}, work);
      cuStreamSynchronize(work);
      std::memcpy(outcome.out, out, sizeof outcome.out);
    });
    CHECK_EQ(o.result, CUDA_SUCCESS);
    if (waits)
      CHECK_EQ(o.out[5], 5.0f);
    else
      CHECK(std::isnan(o.out[5]));
  }
}

TEST(after_a_failure_every_call_says_so) {
  const Outcome o = in_child([](Outcome& outcome) {
    float* out = buffer(kThreads);
    CHECK_EQ(launch("barrier_of_some", BrokenParams{nullptr, out, 0, 0}), CUDA_SUCCESS);
    CHECK_EQ(cuCtxSynchronize(), CUDA_ERROR_LAUNCH_FAILED);
    CUdeviceptr p = 0;
    outcome.result = cuMemAlloc(&p, 16);
  });
  CHECK_EQ(o.result, CUDA_ERROR_LAUNCH_FAILED);
  CHECK(o.says("barrier_of_some"));
}

TEST(tensor_cores_and_matrix_loads_give_the_product) {
  float* a = buffer(128);
  float* b = buffer(64);
  float *y = buffer(128), *z = buffer(128);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> halves(256 + 128);
  for (uint16_t& h : halves) h = reflex::f32_to_f16(normal(rng));
  std::memcpy(a, halves.data(), 512);
  std::memcpy(b, halves.data() + 256, 256);
  CHECK_EQ(launch("products", ProductParams{reinterpret_cast<__half*>(a), reinterpret_cast<__half*>(b), y, z},
                  {1, 32, 0}),
           CUDA_SUCCESS);
  CHECK_EQ(cuCtxSynchronize(), CUDA_SUCCESS);
  double worst = 0;
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 8; ++j) {
      double sum = 0;
      for (size_t k = 0; k < 16; ++k)
        sum += double{reflex::f16_to_f32(halves[i * 16 + k])} *
               double{reflex::f16_to_f32(halves[256 + j * 16 + k])};
      worst = std::max({worst, std::fabs(sum - double{y[i * 8 + j]}), std::fabs(sum - double{z[i * 8 + j]})});
    }
  std::printf("products: worst error %.1e\n", worst);
  CHECK(worst < 1e-5);
}
