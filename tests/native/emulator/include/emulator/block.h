// What emulated device code asks of the block it runs in. A block's threads are fibers of one thread of the
// host: each runs until it must wait for others. Owns: threads, barriers, warps' exchanges, copies under way.
// Refuses: the driver (driver.cpp), what instructions compute (instructions.cuh).
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr int kWarp = 32, kMaxThreads = 1024;

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
};

/// What one lane brings to an exchange of its warp, and takes from it.
struct Lane {
  static constexpr int kWords = 8;
  uint32_t in[kWords], out[kWords];
  int source;  ///< of a shuffle: the lane it reads
};
/// Run once, by the last lane to come, over all 32 lanes; `mask` names those that take part.
using Exchange = void (*)(Lane* lanes, uint32_t mask);

/// This thread's lane of the warp's next exchange; fill in `in`, then call exchange().
extern Lane* current_lane;
inline Lane& lane_slot() { return *current_lane; }
int lane_id();
/// Until all lanes of `mask` that have not ended have come to the same exchange. `what` names it.
void exchange(const char* what, uint32_t mask, Exchange compute);

/// A barrier of the whole block; how many threads gave true.
int block_barrier(bool value = false);
void named_barrier(int id, int threads);
/// Lets others run: for loops that wait for what another thread will write.
void yield();
/// The thread has called wait_for_inputs.
void inputs_awaited();

// ---- asynchronous copies: as late as a kernel may expect them, or at once (settings.h) ---------------
void copy_quad(void* to, const void* from);
void copy_commit();
void copy_wait(int pending);
void barrier_init(uint64_t* barrier);
void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void barrier_expect(uint64_t* barrier, uint32_t bytes);
void copy_bulk_expected(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void barrier_wait(uint64_t* barrier, uint32_t parity);

/// The block's dynamic shared memory.
unsigned char* dynamic_shared();

/// Ends the launch, and with it the context: says which kernel, block and thread did what.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// A kernel of the library, known by its name from its definition (REFLEX_KERNEL) on.
struct Kernel {
  Kernel(const char* name, size_t params_bytes, int max_threads, void (*run)(const void* params));
  const char* name;
  size_t params_bytes;
  int max_threads;  ///< of its launch bounds
  void (*run)(const void*);
};

}  // namespace emulator

extern emulator::Dim threadIdx, blockIdx, blockDim, gridDim;
