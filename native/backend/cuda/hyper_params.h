// What the host hands to the kernels of hyper-connections and of heads with a turned tail (hyper.cu): plain
// data, compiled by both sides. Letters as in backend.h: n streams of d values.
#pragma once
#include <cstdint>

#include "backend/cuda/params.h"

namespace reflex::cuda {

/// unit_norm: a group a block.
struct UnitNormParams {
  const float* x;
  float* out;
  float eps;
  int32_t group;
};

/// clamped_swiglu: out = silu(min(gate, limit)) * max(-limit, min(up, limit))
struct ClampedParams {
  const float* gate;
  const float* up;
  float* out;
  uint64_t n;
  float limit;
};

/// A value's heads: normed where `normed` says (by norm_weight, or by ones), their last n_rot values rotated
/// by the row's position or back, then f32 to `out` or to a state's slots.
struct TurnItem {
  const float* x;            ///< (rows, n_heads * head_dim)
  float* out;                ///< the same, or null
  void* state;               ///< (slots, state_width), from the slot's first value on; or null
  const float* norm_weight;  ///< (head_dim) or null
  const float* rotation;     ///< (R, n_rot / 2, 2) cos and sin by row of the pass
  float eps;
  int32_t normed, n_heads, head_dim, n_rot;
  int32_t adjacent;  ///< pairing
  int32_t inverse;
  int32_t state_f32, state_width;
  int32_t on_outputs;  ///< x's rows are the output rows
  int32_t n_rows;
};
struct TurnParams {
  TurnItem item[2];
  int32_t n_items;
  PassArrays pass;
};
inline constexpr int kTurnWarps = 4;

/// hyper_weights: a warp a row. Shared memory: n * n floats a warp.
struct HyperWeightsParams {
  const float* x;      ///< (rows, n + n + n * n), or pre alone
  const float* scale;  ///< (3), or (1)
  const float* base;   ///< as wide as x
  float* out;
  float eps;
  int32_t n_rows, n_streams, n_iterations, pre_alone;
};
inline constexpr uint32_t kHyperShared = 16 << 10;  ///< of a block of hyper_weights, at most

/// hyper_read: out[r] = sum_s weights[r, s] * streams[r, s]
/// hyper_write: out[r, to] = post[r, to] * in[r] + sum_from comb[r, from, to] * streams[r, from]
struct HyperParams {
  const float* streams;  ///< (rows, n * d)
  const float* weights;  ///< (rows, weights_width): pre, post, comb
  const float* in;       ///< (rows, d), of hyper_write
  float* out;
  int32_t n_rows, n_streams, d, weights_width;
};
inline constexpr int kHyperThreads = 256;

/// hyper_mix_<rows>: of up to so many rows, x = fn unit_norm(streams), then hyper_weights and hyper_read. A
/// block has a part of the columns, the last of a group of rows does the rest.
struct HyperMixParams {
  const float* streams;  ///< (rows, width), width = n * d, a multiple of 4
  const float* fn;       ///< (m, width), m the width of x
  float norm_eps;
  HyperWeightsParams weights;    ///< its x is null
  float* read;                   ///< (rows, d)
  int32_t width, d, m, n_split;  ///< n_split: columns of a block, a multiple of 4
  float* partial;                ///< (groups, splits, rows of a group, m + 1): squares, then products
  uint32_t* tickets;             ///< (groups) zero between launches
};
inline constexpr int kMixRows = 8;      ///< of a group, at most
inline constexpr int kMixOutputs = 24;  ///< m, at most: 4 streams
inline constexpr int kMixSplits = 32,
                     kMixColumns = 256;  ///< blocks of a group at most, columns of one at least
inline constexpr int kMaxHyperStreams = 64;

}  // namespace reflex::cuda
