// What the host hands to the kernels of elements.cu: plain data, compiled by both sides.
#pragma once
#include <cstdint>

namespace reflex::cuda {

/// layer_norm: out = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias, a row of `width` values a block
struct LayerNormParams {
  const float* x;
  const float* weight;  ///< (width)
  const float* bias;    ///< (width)
  float* out;
  float eps;
  int32_t width;
};

/// concat: out[r] = [a[r] ; b[r]] over n values of out
struct ConcatParams {
  const float* a;
  const float* b;
  float* out;
  uint64_t n;
  int32_t a_width, b_width;
};

/// silu_of: out = silu(scale * x)
struct SiluParams {
  const float* x;
  float* out;
  uint64_t n;
  float scale;
};

}  // namespace reflex::cuda
