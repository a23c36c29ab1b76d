// What broken.cu's kernels take.
#pragma once
#include <cstdint>

struct __half;

namespace reflex::cuda {

struct BrokenParams {
  const float* in;  ///< (64)
  float* out;       ///< (64)
  int32_t n;
  int32_t sound;  ///< without the fault
};

/// y = z = A B^T: a (16, 16), b (8, 16)
struct ProductParams {
  const __half *a, *b;
  float *y, *z;  ///< (16, 8)
};

}  // namespace reflex::cuda
