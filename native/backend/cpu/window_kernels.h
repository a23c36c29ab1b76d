// What a WindowAttention step asks of an instruction set: some heads of one row, in plain pointers. Like
// kernels.h, compiled once per set and chosen by its name.
#pragma once
#include <cstddef>
#include <cstdint>

namespace reflex::cpu {

/// out[h] = sum_x p[h, x] x over the listed rows x; p = softmax of scale * q[h] . x and of sinks[h].
struct WindowArgs {
  const float* q = nullptr;        ///< (H, D)
  float* out = nullptr;            ///< (H, D)
  const float* sinks = nullptr;    ///< (H)
  const uint8_t* state = nullptr;  ///< rows of D values, f16 or f32
  const int32_t* at = nullptr;     ///< (n) row numbers
  int32_t n = 0, n_heads = 0, head_dim = 0;
  bool f16 = false;
  float scale = 1.0f;
};

struct WindowKernels {
  /// Floats of scratch for `attention`.
  size_t (*scratch)(const WindowArgs& args);
  void (*attention)(const WindowArgs& args, float* scratch);
};

namespace portable {
const WindowKernels& window_kernels();
}
namespace avx2 {
const WindowKernels& window_kernels();
}
namespace avx512vnni {
const WindowKernels& window_kernels();
}

}  // namespace reflex::cpu
