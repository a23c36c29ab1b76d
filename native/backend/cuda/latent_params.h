// What the host hands to latent attention's kernels: plain data, compiled by both sides. Letters as in
// backend.h's LatentAttention: C latent values, P rotated ones, N others of a query, V of a result.
#pragma once
#include <cstdint>

#include "backend/cuda/tile_params.h"

namespace reflex::cuda {

inline constexpr int kLatentHeads = kTileQueries;  ///< of a row that share a block of latent_attention
inline constexpr int kLatentMaxDim = 512;          ///< C, at most
inline constexpr int kLatentSplits = 16;           ///< of a sequence, at most
inline constexpr int kLatentRows = 4;              ///< rows that latent_rows takes

/// latent_begin: c[r] = [rms_norm(kv[r, :C]) ; rotate(kv[r, C:])] into the state's slots, and the rotated
/// part of each query to the tail of its latent form.
struct LatentBeginParams {
  const float* kv;    ///< (R, C + P)
  const float* norm;  ///< (C)
  float eps;
  void* state;  ///< (slots, C + P)
  int32_t state_f32;
  int32_t n_state_rows;  ///< R, or 0: they are there
  const float* q;        ///< (rows, H, N + P)
  float* latent_q;       ///< (rows, H, dim_pad): these rows' first; zero beyond C + P
  int32_t first_row, n_rows;
  const float* rotation;  ///< (R, P / 2, 2)
  int32_t adjacent;
  int32_t n_heads, n_latent, nope_dim, rope_dim, dim_pad;
  const int32_t* outputs;  ///< q's rows are output rows; null: all rows
  const PassHeader* header;
};

/// latent_rows, latent_product_*: y[r, h] = W[h] x[r, h] in f32, W in file layout, any type. Row j of W[h] is
/// the file's row head_rows * h + first + j; with `transposed` that is W[h]'s column j.
struct LatentProductParams {
  const uint8_t* w;
  uint64_t row_bytes;
  int32_t type, head_rows, first, transposed;
  int32_t n_in, n_out, n_rows, n_heads;
  int32_t lanes;  ///< latent_rows: of a warp, for one output
  const float* x;
  float* y;
  int64_t x_row, y_row;  ///< floats from row to row
  int32_t x_head, y_head;
};

/// latent_attention_*: o[r, h] = sum_s softmax_s(scale * latent_q[r, h] . c[s]) c[s, :C]
struct LatentAttentionParams {
  const float* latent_q;  ///< (rows, H, dim_pad)
  float* latent_o;        ///< (rows, H, C)
  const void* state;      ///< (slots, C + P)
  int32_t n_heads, n_latent, rope_dim, dim_pad;
  float scale;
  int32_t first_row;   ///< of the q value
  int32_t tile_slots;  ///< of the sequence in shared memory at a time: 32 or 16
  int32_t on_outputs;
  PassArrays pass;
  float* partial;     ///< (rows * head groups, splits, kLatentHeads, latent_partial_stride(C))
  uint32_t* tickets;  ///< (rows * head groups) zero between launches
};

/// A split's sums of a head: its maximum and total, then C values in whole quads.
inline constexpr int kLatentPartialHead = 4;
inline constexpr int latent_partial_stride(int n_latent) {
  return (n_latent + 3) / 4 * 4 + kLatentPartialHead;
}

/// latent_selected_*: s over the slots chosen for the row
struct LatentSelectedParams {
  LatentAttentionParams attention;
  const int32_t* selection;  ///< (rows of the value, top_k): slots, ascending
  int32_t top_k;
};

inline constexpr int latent_stride(int dim_pad, bool f32) { return dim_pad + (f32 ? 4 : 8); }
inline constexpr uint32_t latent_attention_bytes(int dim_pad, int tile_slots, bool f32) {
  return static_cast<uint32_t>(tile_slots * latent_stride(dim_pad, f32) * (f32 ? 4 : 2) +
                               4 * kLatentHeads * (dim_pad + 4)) +
         tile_scratch_bytes(tile_slots);
}
inline constexpr int kLatentProductTile = 64;    ///< rows and outputs of a block of latent_product
inline constexpr int kLatentProductStride = 68;  ///< of its operands in shared memory

// Decompressed (latent_prefill.cu): slots and outputs of a block of latent_decompress, latent values at a
// time, how many such steps are on their way at once, and halves from row to row in shared memory.
inline constexpr int kDecompressTile = 128, kDecompressStep = 32, kDecompressStages = 3;
inline constexpr int kDecompressStride = kDecompressStep + 8, kDecompressThreads = 256;
inline constexpr uint32_t decompress_bytes() {
  return 2 * kDecompressStages * 2 * kDecompressTile * kDecompressStride;
}

/// latent_matrices: w[h, j] = row j of head first_head + h's [k_b ; v_b], decoded; latent_decompress:
/// keys[h, s] = k_b[h] c[s], values[h, s] = v_b[h] c[s]. All f16.
struct DecompressParams {
  struct Matrix {  ///< of all heads in file layout: rows head_rows * h + first .. are head h's
    const uint8_t* at;
    uint64_t row_bytes;
    int32_t type, head_rows, first;
  } k, v;
  int32_t k_by_latent;  ///< k's file rows are those of the latent values, N long: it lies transposed
  void* w;              ///< (heads, N + V, latent_pad), times kWScale; zero beyond C
  void* keys;           ///< (heads, slots, key_stride): N values, what is not rotated
  void* values;         ///< (heads, slots, value_stride): V values
  const void* state;    ///< (slots, C + P)
  int32_t n_slots, first_head, n_heads;
  int32_t n_latent, latent_pad, nope_dim, rope_dim, v_head_dim, key_stride, value_stride;
};

/// latent_flash_<DK>x<DV>: out[r, h] = sum_s softmax_s(scale * [q ; rotated q] . [keys[h, s] ; state[s, C:]])
/// values[h, s], of the heads in `from`
struct LatentFlashParams {
  DecompressParams from;
  const float* q;         ///< (rows, H, N + P)
  const float* rotation;  ///< (R, P / 2, 2)
  int32_t adjacent;
  int32_t n_rows, n_all_heads;  ///< of q; H
  float scale;
  int32_t on_outputs;
  PassArrays pass;
  float* out;  ///< (rows, H, V)
};

/// head_slice: out[i, :] = in[i, begin : begin + count] over i < n rows of `stride` values
struct HeadSliceParams {
  const float* x;
  float* out;
  uint64_t n;  ///< values of out
  int32_t stride, begin, count;
};

}  // namespace reflex::cuda
