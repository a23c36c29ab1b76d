// Sizes of attention over tiles of slots (attention_tile.cuh), as both sides reckon them.
#pragma once
#include "backend/cuda/params.h"

namespace reflex::cuda {

inline constexpr int kTileQueries = 16;  ///< of a block
inline constexpr int kTileWeights = 36;  ///< stride of a query's weights in shared memory

/// Halves from slot to slot of a tile of f16: quads, and no bank twice in 8 rows.
inline constexpr int tile_stride(int head_dim) { return (head_dim + 7) / 8 * 8 + 8; }
inline constexpr uint32_t tile_scratch_bytes(int slots) {
  return static_cast<uint32_t>(
      4 * (8 / (slots / 8) * kTileQueries * (slots + 4) + kTileQueries * kTileWeights + 2 * kTileQueries));
}
inline constexpr uint32_t attention_tile_bytes(int head_dim, int v_head_dim) {
  return static_cast<uint32_t>(2 * 32 * (tile_stride(head_dim) + tile_stride(v_head_dim)) +
                               4 * kTileQueries * (tile_stride(head_dim) - 4)) +
         tile_scratch_bytes(32);
}

}  // namespace reflex::cuda
