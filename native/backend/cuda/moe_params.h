// What the host hands to the kernels of a mixture of experts (moe*.cu). Letters as in backend.h.
//
// A layer's experts lie in slots: gate, up and down of one expert one after the other, slot_bytes from
// slot to slot. Where not all of them are on the card, slot_of says which are where.
//
// Several rows are worked on by place: each expert's rows together, ascending, beginning at a multiple of
// 16 (the rows of an mma tile). Places between two experts belong to no row.
#pragma once
#include <cstdint>

namespace reflex::cuda {

inline constexpr int kMaxExperts = 2048;    ///< of a layer
inline constexpr int kMaxChosen = 64;       ///< experts of a row
inline constexpr int kPlaceAlign = 16;      ///< an expert's places begin at a multiple of this
inline constexpr int kExpertThreads = 256;  ///< of every kernel here but moe_sort
inline constexpr int kExpertWarps = kExpertThreads / 32;
inline constexpr int kSortThreads = 1024;
inline constexpr int kRawPlaces = 8;            ///< places that moe_raw_* takes at once
inline constexpr uint32_t kDotUnitBytes = 512;  ///< of shared memory, at most, per 128 values of x

/// How scores become a choice (backend.h, Moe).
struct GatingParams {
  const float* bias;  ///< (E) or null
  int32_t n_experts, n_used, n_groups, n_groups_used;
  int32_t sigmoid, best_two, renormalise;
  float scale;
};

/// moe_route: of one row, normed = norm(x), logits = router normed, then the choice. A warp per expert.
struct RouteParams {
  const float* x;            ///< (width)
  const float* norm_weight;  ///< (width) or null: x as it is
  float* normed;             ///< (width) where there is a norm
  const float* router;       ///< (E, width)
  float* logits;             ///< (E)
  int32_t* ids;              ///< (n_used) ascending
  float* weights;            ///< (n_used)
  uint32_t* ticket;          ///< zero between launches
  GatingParams gating;
  float norm_eps;
  int32_t width;
};

/// moe_logits: logits (R, E) = x (R, width) router^T in f32, kRouterRows rows a block
inline constexpr int kRouterRows = 8;
struct RouterParams {
  const float* x;
  const float* router;
  float* logits;
  int32_t n_rows, width, n_experts;
};

/// moe_choose: a row a block, from its logits.
struct ChooseParams {
  const float* logits;  ///< (R, E)
  int32_t* ids;         ///< (R, n_used) ascending in each row
  float* weights;       ///< (R, n_used)
  GatingParams gating;
};

/// moe_choose_more: as moe_choose, for what only some models want: scores by sqrt(log(1 + e^x)), and experts
/// that a table holds for the row's token.
struct ChooseMoreParams {
  ChooseParams choose;
  int32_t sqrt_softplus;
  const int32_t* of_token;  ///< (V, n_used), or null: the best by score
  const int32_t* tokens;    ///< (R) of the pass
  const int32_t* outputs;   ///< the rows are output rows; null: all rows
};

/// Places [first, first + count) of one expert: what one block works on.
struct RowBlock {
  int32_t expert, first, count;
};

/// moe_sort: from each row's experts to each expert's rows. One block.
struct SortParams {
  const int32_t* ids;  ///< (R, n_used)
  int32_t* place_of;   ///< (R, n_used)
  int32_t* row_of;     ///< (places), -1: no row
  RowBlock* blocks;    ///< runs of up to block_rows places
  int32_t* n_blocks;
  int32_t n_rows, n_used, n_experts, block_rows, n_places;  ///< n_places: room in row_of
};
/// Of shared memory: a bit per expert and row, and two counts per expert.
inline constexpr uint32_t moe_sort_bytes(int n_rows, int n_experts) {
  return static_cast<uint32_t>((n_rows + 31) / 32 * n_experts + 2 * n_experts) * 4;
}

/// moe_gather: rows of x as f16 fragments (tile.h), by place.
struct PlaceParams {
  const float* x;         ///< (R, width)
  const int32_t* row_of;  ///< (places)
  void* out;
  int32_t width, n_units;
};

/// moe_combine: y[r] = sum_k weights[r, k] * experts[place_of[r, k]] [+ residual[r]], in the order of k
struct CombineParams {
  const float* experts;  ///< (places, width)
  const int32_t* place_of;
  const float* weights;
  const float* residual;  ///< (R, width) or null
  float* out;             ///< (R, width)
  int32_t n_rows, n_used, width;
};

/// moe_gate_up_<type>: for one row and each expert chosen, hidden[k] = silu(gate x) * up x.
struct GateUpParams {
  const uint8_t* stack;    ///< the gate of slot 0, in tiles
  const int32_t* slot_of;  ///< (E), or null: slot e holds expert e
  const int32_t* ids;      ///< (n_used)
  const float* x;          ///< (width)
  float* hidden;           ///< (n_used, n_hidden)
  uint64_t slot_bytes, to_up;
  uint32_t tile_bytes;
  int32_t width, n_cells, n_tiles, n_hidden, n_used;
  int32_t split_log2;  ///< warps that share a tile's cells
};

/// moe_gate_up_limited_<type>: hidden[k] = silu(min(gate x, limit)) * max(-limit, min(up x, limit))
struct LimitedGateUpParams : GateUpParams {
  float limit;
};

/// moe_down_<type>: out = sum_k weights[k] * down[k] hidden[k] [+ residual], in the order of k.
struct DownParams {
  const uint8_t* stack;  ///< the down of slot 0, in tiles
  const int32_t* slot_of;
  const int32_t* ids;
  const float* weights;
  const float* hidden;    ///< (n_used, n_hidden)
  const float* residual;  ///< (width) or null
  float* out;             ///< (width)
  uint64_t slot_bytes;
  uint32_t tile_bytes;
  int32_t n_hidden, n_units, n_cells, n_tiles, width, n_used;  ///< n_units: of one expert's hidden row
  int32_t split_log2;
};

/// moe_rows_<mt>_<type>: tensor-core products by place; 16 mt places a block.
struct ExpertRowsParams {
  const uint8_t* stack;
  const int32_t* slot_of;  ///< (E), or null; -1: that expert is not now
  const RowBlock* blocks;
  const int32_t* n_blocks;
  const void* x;  ///< f16 fragments by place, n_units units a row
  uint64_t slot_bytes, to_up;
  uint32_t tile_bytes;
  int32_t n_units, n_cells, n_tiles, n_out;
  int32_t pair;           ///< gate and up: fragments of silu(gate) * up; else f32
  float scale, up_scale;  ///< of a sum
  void* out;              ///< f32 (places, n_out), or fragments of out_units units
  int32_t out_units;
};
/// Tiles a warp takes, and the bytes of a block's rings (moe_rows.cu).
inline constexpr int moe_rows_tiles(int mt) { return mt <= 2 ? 2 : 4; }
inline constexpr uint32_t moe_rows_ring(int mt, int cell_values, int cell_bytes) {
  const int slots = cell_bytes < 2048 ? 3 : 2, cells = cell_values == 256 ? 2 : slots;
  const int rings = slots * mt * 4096 + kExpertWarps * moe_rows_tiles(mt) * cells * cell_bytes;
  const int sums = 16 * mt * (kExpertWarps * moe_rows_tiles(mt) * 8 + 8) * 4;
  return static_cast<uint32_t>(rings > sums ? rings : sums);
}

/// moe_limit: fragments of silu(min(gate, limit)) * max(-limit, min(up, limit)), by place.
struct LimitParams {
  const float* gate;      ///< (places, n_hidden)
  const float* up;        ///< (places, n_hidden)
  const int32_t* row_of;  ///< (places)
  void* out;
  float limit;
  int32_t n_hidden, n_units;
};

/// moe_raw_<type>: f32 products by place, weights in the file's layout, any type.
struct ExpertRawParams {
  const uint8_t* stack;
  const int32_t* slot_of;  ///< as above
  const RowBlock* blocks;  ///< of up to kRawPlaces places
  const int32_t* n_blocks;
  const int32_t* row_of;  ///< x by row of the pass, or null: x by place
  const float* x;         ///< (rows or places, n_in)
  float* out;             ///< (places, n_out)
  uint64_t slot_bytes, row_bytes;
  int32_t n_in, n_out;
};

}  // namespace reflex::cuda
