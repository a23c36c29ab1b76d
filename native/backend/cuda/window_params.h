// What the host hands to the kernels of WindowAttention (window_attention.cu): plain data, compiled by both
// sides. Letters as in backend.h: H heads, one key of D values that is the value too.
#pragma once
#include <cstdint>

#include "backend/cuda/tile_params.h"

namespace reflex::cuda {

inline constexpr int kWindowHeads = kTileQueries;  ///< of a row that share a block
inline constexpr int kWindowMaxDim = 512;          ///< D, at most
inline constexpr int kWindowSplits = 16;           ///< of a row's list, at most

/// window_attention_*: o[r, h] = sum_x softmax(scale * q[r, h] . x, sinks[h]) x over the rows' lists.
struct WindowParams {
  const float* q;         ///< (rows, H * D)
  float* out;             ///< (rows, H * D)
  const float* sinks;     ///< (H)
  const void* state;      ///< (slots, D), with a ratio (slots, 2, D): kv, entry
  const int32_t* chosen;  ///< (rows, top_k) slots of entries, or null: all of them
  int32_t n_heads, head_dim, dim_pad;
  float scale;
  int32_t window, ratio, top_k;
  int32_t tile_slots;  ///< of the list in shared memory at a time: 32 or 16
  int32_t on_outputs;
  PassArrays pass;
  float* partial;     ///< (rows * head groups, splits, kWindowHeads, D + 2)
  uint32_t* tickets;  ///< (rows * head groups) zero between launches
};

inline constexpr int window_stride(int dim_pad, bool f32) { return dim_pad + (f32 ? 4 : 8); }
inline constexpr uint32_t window_attention_bytes(int dim_pad, int tile_slots, bool f32) {
  return static_cast<uint32_t>(tile_slots * window_stride(dim_pad, f32) * (f32 ? 4 : 2) +
                               4 * kWindowHeads * (dim_pad + 4)) +
         tile_scratch_bytes(tile_slots);
}

}  // namespace reflex::cuda
