// The instructions of native/backend/cuda/instructions.cuh, each a function of the same name, for device code
// that the host's compiler compiles (it finds this header first). REFLEX_EMULATED_ARCH is the compute
// capability, times 100, that the kernels see. Tensor cores multiply exactly and add in f32, one product
// after the other: a card's sums differ in their last bits.
#pragma once
#include <cuda_fp16.h>

#include <array>
#include <type_traits>

#include "emulator/device_code.h"

#define REFLEX_KERNEL(name, Params, ...)                                                 \
  static void emulated_##name(const Params& p);                                          \
  static const ::emulator::Kernel kernel_##name(                                         \
      #name, sizeof(Params), std::array{__VA_ARGS__}[0],                                 \
      [](const void* params) { emulated_##name(*static_cast<const Params*>(params)); }); \
  static void emulated_##name(const Params& p)

#define REFLEX_DYNAMIC_SHARED(T, name) auto* name = reinterpret_cast<T*>(::emulator::dynamic_shared())

namespace reflex::cuda {

inline constexpr int kArch = REFLEX_EMULATED_ARCH;

inline void wait_for_inputs() { emulator::inputs_awaited(); }
inline void let_next_start() {}
inline void prefetch_l2(const void*, uint32_t) {}
inline void prefetch_line(const void*) {}
inline uint4 load_volatile(const uint4* from) { return *from; }
inline float exp2_fast(float x) { return std::exp2(x); }

// ---- tensor cores --------------------------------------------------------------------------

/// f16 to f32 by table.
inline const float* half_values() {
  static const auto table = [] {
    auto* t = new float[65536];
    for (uint32_t i = 0; i < 65536; ++i) t[i] = f16_to_f32(static_cast<uint16_t>(i));
    return t;
  }();
  return table;
}

/// Each lane's share of A (16, K) B (K, 8): rows g and g + 8, columns 2t and 2t + 1.
template <int K>
void multiply(emulator::Lane* lanes, const float (&a)[16][K], const float (&b)[K][8]) {
  float y[16][8] = {};
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < K; ++k)
      for (int j = 0; j < 8; ++j) y[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < emulator::kWarp; ++l) {
    const int g = l / 4, t = l % 4;
    const float share[4] = {y[g][2 * t], y[g][2 * t + 1], y[g + 8][2 * t], y[g + 8][2 * t + 1]};
    std::memcpy(lanes[l].out, share, sizeof share);
  }
}
inline void need_all_lanes(const char* what, uint32_t mask) {
  if (mask != 0xFFFFFFFFu) emulator::fail("%s by the lanes %08x alone", what, mask);
}
inline void add_share(float (&acc)[4]) {
  float share[4];
  std::memcpy(share, emulator::lane_slot().out, sizeof share);
  for (int i = 0; i < 4; ++i) acc[i] += share[i];
}

inline void mma(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                uint32_t b1) {
  const uint32_t in[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(emulator::lane_slot().in, in, sizeof in);
  emulator::exchange("mma", 0xFFFFFFFFu, [](emulator::Lane* lanes, uint32_t mask) {
    need_all_lanes("mma", mask);
    const float* value = half_values();
    float a[16][16], b[16][8];
    for (int l = 0; l < emulator::kWarp; ++l)
      for (int i = 0; i < 6; ++i)
        for (int h = 0; h < 2; ++h) {
          const float v = value[lanes[l].in[i] >> (16 * h) & 0xFFFF];
          if (i < 4)
            a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8 + h] = v;
          else
            b[l % 4 * 2 + (i - 4) * 8 + h][l / 4] = v;
        }
    multiply(lanes, a, b);
  });
  add_share(acc);
}

/// To nearest, ties away from zero; 10 bits of mantissa.
inline uint32_t tf32_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x7F800000u) == 0x7F800000u ? bits : (bits + 0x1000u) & ~0x1FFFu;
}
inline void mma_tf32(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  std::memcpy(emulator::lane_slot().in, a, sizeof a);
  std::memcpy(emulator::lane_slot().in + 4, b, sizeof b);
  emulator::exchange("mma", 0xFFFFFFFFu, [](emulator::Lane* lanes, uint32_t mask) {
    need_all_lanes("mma", mask);
    const auto value = [](uint32_t bits) { return std::bit_cast<float>(bits & ~0x1FFFu); };
    float a_all[16][8], b_all[8][8];
    for (int l = 0; l < emulator::kWarp; ++l) {
      const int g = l / 4, t = l % 4;
      for (int i = 0; i < 4; ++i) a_all[g + i % 2 * 8][t + i / 2 * 4] = value(lanes[l].in[i]);
      for (int i = 0; i < 2; ++i) b_all[t + 4 * i][g] = value(lanes[l].in[4 + i]);
    }
    multiply(lanes, a_all, b_all);
  });
  add_share(acc);
}

template <bool kTransposed>
void load_four_matrices(uint32_t (&r)[4], const __half* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) emulator::fail("a matrix's row at %p: not on 16 bytes", p);
  std::memcpy(emulator::lane_slot().in, &p, sizeof p);
  emulator::exchange(
      kTransposed ? "ldmatrix.trans" : "ldmatrix", 0xFFFFFFFFu, [](emulator::Lane* lanes, uint32_t mask) {
        need_all_lanes("ldmatrix", mask);
        const __half* rows[emulator::kWarp];
        for (int l = 0; l < emulator::kWarp; ++l) std::memcpy(&rows[l], lanes[l].in, sizeof rows[l]);
        for (int l = 0; l < emulator::kWarp; ++l)
          for (int m = 0; m < 4; ++m) {
            const int g = l / 4, t = l % 4;
            const auto at = [&](int row, int c) { return uint32_t{rows[8 * m + row][c].bits}; };
            lanes[l].out[m] =
                kTransposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
          }
      });
  std::memcpy(r, emulator::lane_slot().out, sizeof r);
}
inline void load_matrices(uint32_t (&r)[4], const __half* p) { load_four_matrices<false>(r, p); }
inline void load_matrices_transposed(uint32_t (&r)[4], const __half* p) { load_four_matrices<true>(r, p); }

// ---- copies to shared memory -----------------------------------------------------------------

inline void copy_quad(void* to, const void* from) { emulator::copy_quad(to, from); }
inline void copy_commit() { emulator::copy_commit(); }
template <int kPending>
void copy_wait() {
  emulator::copy_wait(kPending);
}
inline void barrier_init(uint64_t* barrier) { emulator::barrier_init(barrier); }
inline void barrier_inits_done() {}
inline void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulator::copy_bulk(to, from, bytes, barrier);
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { emulator::barrier_expect(barrier, bytes); }
inline void copy_bulk_expected(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulator::copy_bulk_expected(to, from, bytes, barrier);
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) { emulator::barrier_wait(barrier, parity); }
inline void named_barrier(int id, int threads) { emulator::named_barrier(id, threads); }

}  // namespace reflex::cuda
