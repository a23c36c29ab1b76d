// What the host hands to the kernels of a residual of several streams, of n-grams' rows and of convolutions
// along a row's ancestors: plain data, compiled by both sides. Letters as in backend.h: R rows, S streams of
// d values, T taps, C channels.
#pragma once
#include <cstdint>

namespace reflex::cuda {

inline constexpr int kStreamThreads = 256;

/// stream_repeat: y[r, s] = x[r]
struct RepeatParams {
  const float* x;  ///< (R, d)
  float* out;      ///< (R, S * d)
  int32_t d, n_streams;
};

/// stream_norm: y[r, s] = x[r, s] * rsqrt(mean(x[r, s]^2) + eps) * w[s]
struct StreamNormParams {
  const float* x;       ///< (R, S * d)
  const float* weight;  ///< (S * d)
  float* out;           ///< as x
  float eps;
  int32_t d, n_streams;
};

/// stream_mix: y[r] = mean over s of sigmoid(gate[r, s]) * x[r, s]
struct StreamMixParams {
  const float* x;     ///< (R, S * d)
  const float* gate;  ///< as x
  float* out;         ///< (R, d)
  int32_t d, n_streams;
};

/// stream_inject: y[r, s] = x[r, s] + 2 * sigmoid(logits[r, s] / S) * b[r]; then, where there is a weight,
/// normed = the StreamNorm of y.
struct StreamInjectParams {
  const float* x;       ///< (R, S * d)
  const float* logits;  ///< (R, S)
  const float* block;   ///< (R, d)
  float* out;           ///< as x
  const float* weight;  ///< (S * d) or null
  float* normed;        ///< as x, or null
  float eps;
  int32_t d, n_streams;
};

/// stream_gate: y[r, s] = sigmoid(sign(a) * sqrt(max(|a|, 1e-6))) * v[r], a = key[r, s] . query[r, s] /
/// sqrt(d)
struct StreamGateParams {
  const float* key;    ///< (R, S * d)
  const float* query;  ///< as key
  const float* value;  ///< (R, d)
  float* out;          ///< as key
  int32_t d, n_streams;
};

/// copy_pinned: quads from memory that the host rewrites between passes.
struct CopyParams {
  const void* from;
  void* to;
  uint32_t n_quads;
};

/// causal_conv: y[r, c] = silu(sum_j w[c, j] * x[(T - 1 - j) * dilation rows up r's ancestors, c]);
/// conv_history: the history after the chain's rows.
struct ConvParams {
  const float* x;          ///< (R, C)
  const float* weight;     ///< (C, T)
  float* out;              ///< (R, C)
  float* history;          ///< state: ((T - 1) * dilation, C), the newest last
  const int32_t* parents;  ///< (R): see DeltaParams
  int32_t n_rows, n_chain;
  int32_t n_channels, n_taps, dilation;
};

}  // namespace reflex::cuda
