// What the host hands to the kernels of attention over chosen blocks: plain data, compiled by both sides.
// Letters as in backend.h's BlockAttention: B tokens of a block, R rows of the pass, H query heads.
#pragma once
#include <cstdint>

#include "backend/cuda/tile_params.h"

namespace reflex::cuda {

inline constexpr int kBlockKeyThreads = 128, kBlockChoiceThreads = 512;
inline constexpr int kBlockScoreKeys = 8;    ///< of a warp at a time
inline constexpr int kBlockScoreHeads = 16;  ///< that index heads are padded to: the rows of an mma

/// block_keys: each row's raw key to its slot or, where the row ends a block, the block's:
/// rotate(rms_norm(mean of index_k), position of the first).
struct BlockKeysParams {
  const float* index_k;   ///< (R, dim)
  void* state;            ///< (slots, dim)
  const float* norm;      ///< (dim)
  const float* inv_freq;  ///< (n_rot / 2)
  float eps, magnitude;
  int32_t state_f32, dim, n_rot, adjacent, block_size;
  PassArrays pass;
};

/// block_scores_*: scores[i, b] = sum over the index heads of relu(q[i, h] . key[b]), for rows that see more
/// complete blocks than may be chosen.
struct BlockScoresParams {
  const float* q;     ///< (rows, heads, dim)
  const void* state;  ///< (slots, dim)
  float* scores;      ///< (these rows, score_stride)
  int32_t heads, dim, block_size, n_blocks, score_stride;
  int32_t first_row, on_outputs;  ///< of q
  PassArrays pass;
};
inline constexpr int block_key_stride(int dim) { return (dim + 7) / 8 * 8 + 4; }
inline constexpr int block_query_rows(int heads) {
  return (heads + kBlockScoreHeads - 1) / kBlockScoreHeads * kBlockScoreHeads;
}
inline constexpr uint32_t block_scores_bytes(int heads, int dim, int warps) {
  return static_cast<uint32_t>(4 * block_key_stride(dim) *
                               (block_query_rows(heads) + warps * kBlockScoreKeys));
}

/// block_choice: the slots that a row's attention reads, ascending: those of the n_blocks best blocks, ties
/// to the older, and what lies behind its last complete block; all of them where there are no more.
struct BlockChoiceParams {
  const float* scores;  ///< (these rows, score_stride), none negative, none NaN
  int32_t* lists;       ///< (these rows, list_stride)
  int32_t* counts;      ///< (these rows)
  int32_t block_size, n_blocks, score_stride, list_stride;
  int32_t first_row, on_outputs;
  PassArrays pass;
};

/// list_attention_*: attention over the listed slots; `a` without its header, prefix and mask.
struct ListAttentionParams {
  AttentionParams a;
  const int32_t* lists;   ///< (these rows, list_stride)
  const int32_t* counts;  ///< (these rows)
  int32_t list_stride, first_row;
  int32_t tile_slots;  ///< in shared memory at a time: 32 or 16
};
inline constexpr int list_tile_stride(int width, bool f32) { return (width + 7) / 8 * 8 + (f32 ? 4 : 8); }
inline constexpr uint32_t list_attention_bytes(int head_dim, int v_head_dim, int slots, bool f32) {
  return static_cast<uint32_t>(slots * (list_tile_stride(head_dim, f32) + list_tile_stride(v_head_dim, f32)) *
                                   (f32 ? 4 : 2) +
                               4 * kTileQueries * list_tile_stride(head_dim, true)) +
         tile_scratch_bytes(slots);
}

}  // namespace reflex::cuda
