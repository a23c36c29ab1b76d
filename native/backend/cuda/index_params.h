// What the host hands to the indexer's kernels: plain data, compiled by both sides. Letters as in backend.h's
// Indexer: H heads of D values, rows of the query.
//
// A row's candidates are at places that are the same for every row of a pass, so that a block may keep keys
// and take row after row: place j of the first n_strided is slot (j + 1) * ratio - 1, candidate of the rows
// whose prefix holds it; behind them 32 places for each word of the mask are slots from mask_base on. Places
// ascend with their slots.
#pragma once
#include <cstdint>

#include "backend/cuda/params.h"

namespace reflex::cuda {

inline constexpr int kIndexMaxDim = 256;     ///< D, at most
inline constexpr int kIndexHeldDim = 128;    ///< D of f16 keys that stay in registers, at most
inline constexpr int kIndexHeads = 16;       ///< of a tile: the rows of an mma
inline constexpr int kIndexThreads = 128;    ///< of index_scores_*
inline constexpr int kIndexPlaces = 32;      ///< of a warp: as many as a word of the mask has bits
inline constexpr int kIndexRows = 16;        ///< that a block of index_scores_* takes in turn
inline constexpr int kSelectThreads = 1024;  ///< of index_select
/// Values of a head in the 16 bytes that each of a quad's four lanes reads at once.
inline constexpr int index_chunk(bool f32) { return f32 ? 16 : 32; }

/// index_begin, index_scores_*, index_select
struct IndexParams {
  const float* query;    ///< (rows of the value, H, D)
  const float* weights;  ///< (rows of the value, H)
  const float* key;      ///< (R, D), or null: the entries are there
  void* state;           ///< (slots, D)
  int32_t* out;          ///< (rows of the value, top_k)
  int32_t state_f32;
  int32_t n_heads, head_dim, top_k, ratio;

  int32_t n_state_rows;       ///< rows of key to write: R, or 0
  int32_t first_row, n_rows;  ///< of the query, in this go
  int32_t on_outputs;         ///< the query's rows are output rows
  int32_t n_strided;          ///< places before the mask's, a multiple of 32
  int32_t places;             ///< of a row in `scores`
  PassArrays pass;

  void* prepared;    ///< (n_rows, head tiles, chunks, 2, 32 lanes) of 16 bytes: the query as mma takes it
  float* scale;      ///< (n_rows, 16 * head tiles): the weights, times what the query was divided by
  uint32_t* scores;  ///< (n_rows, places): they order as the scores do; 0: no candidate
};

}  // namespace reflex::cuda
