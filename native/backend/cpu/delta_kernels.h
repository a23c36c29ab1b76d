// What a GatedDelta step asks of an instruction set: one head of one layer over a whole pass, in plain
// pointers. Like kernels.h, compiled once per set and chosen by its name.
#pragma once
#include <cstddef>
#include <cstdint>

namespace reflex::cpu {

/// Where a row that forks takes its state from and whether rows after it need its own.
struct DeltaFork {
  int32_t from = -1;  ///< kept copy; -1: the state after the chain
  int32_t to = -1;    ///< kept copy, `from` itself where nobody else needs that; -1: not kept
};

/// Letters as in backend.h's GatedDelta: K key heads of N values, H value heads of M, T taps.
struct DeltaArgs {
  int32_t n_key_heads = 0, n_value_heads = 0, key_dim = 0, value_dim = 0, n_taps = 0;
  bool grouped = false;
  bool sigmoid_gate = false;  ///< of z; else silu
  float qk_eps = 0, norm_eps = 0;
  const float* conv = nullptr;   ///< (C, T), C = 2 K N + H M
  const float* decay = nullptr;  ///< (H)
  const float* dt_bias = nullptr;
  const float* norm = nullptr;  ///< (M)

  int32_t n_rows = 0, n_chain = 0;
  const float* qkv = nullptr;        ///< (R, C)
  const float* beta = nullptr;       ///< (R, H)
  const float* alpha = nullptr;      ///< (R, H)
  const float* z = nullptr;          ///< (R or O, H M); nullptr: only the state is wanted
  float* out = nullptr;              ///< as z
  const int32_t* out_row = nullptr;  ///< (R) row of z and out, -1: none; nullptr: the row itself
  const int32_t* sources = nullptr;  ///< (R, source_stride): see DeltaPlan
  int32_t source_stride = 0;
  const DeltaFork* forks = nullptr;  ///< of row n_chain + i
  int32_t n_kept = 0;                ///< copies that forks hold at once

  float* history = nullptr;  ///< state: (T - 1, C) inputs before the pass, the newest last
  float* state = nullptr;    ///< state: (H, N, M)
};

struct DeltaKernels {
  const char* name;
  /// Floats of scratch for delta_head.
  size_t (*scratch)(const DeltaArgs& args);
  /// Value head h of every row: outputs, and the state moved past the chain rows.
  void (*head)(const DeltaArgs& args, int32_t h, float* scratch);
};

namespace portable {
const DeltaKernels& delta_kernels();
}
namespace avx2 {
const DeltaKernels& delta_kernels();
}
namespace avx512vnni {
const DeltaKernels& delta_kernels();
}

}  // namespace reflex::cpu
