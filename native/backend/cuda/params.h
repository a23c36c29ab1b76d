// What the host hands to kernels: plain structs, compiled by both sides. Kernels are found by name,
// so each struct says whose argument it is. Letters as in backend.h.
#pragma once
#include <cstdint>

namespace reflex::cuda {

inline constexpr int kMaxParts = 3;                   ///< matrices of one input in one launch (q, k, v)
inline constexpr int kMatvecThreads = 512;            ///< at most
inline constexpr int kMinRing = 4, kMaxRing = 8;      ///< cells a warp of matvec has in shared memory, either
inline constexpr int kMinPlaces = 2, kMaxPlaces = 4;  ///< for two cells each, of a warp of matvec_two
inline constexpr uint32_t kMatvecUnitBytes = 320;     ///< of shared memory, at most, per 128 values of x
inline constexpr int kMatmulThreads = 256;
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kMaxSplits = 16;  ///< of a sequence, in attention for one row

/// A pass as the kernels see it, at the start of the device's pass block.
struct PassHeader {
  int32_t n_rows, n_out, first_slot;
  int32_t mask_base;   ///< first slot that the mask speaks of
  int32_t mask_words;  ///< of 32 slots, per row; 0: every row sees exactly [0, prefix)
  uint32_t sequence;   ///< of the pass, what `done` becomes
  int32_t pad[2];
};

/// Where a pass block's arrays are: each row's position and visible prefix, the output rows'
/// indices, and for each row mask_words words, bit b of word w: slot mask_base + 32 w + b is seen.
struct PassArrays {
  const PassHeader* header;
  const int32_t* positions;  ///< (R)
  const int32_t* prefix;     ///< (R)
  const int32_t* outputs;    ///< (O)
  const uint32_t* mask;      ///< (R, mask_words)
};

inline constexpr int kMaxRopes = 4;

/// begin_pass: copies a pass block and the rows' embeddings from pinned memory, in 16-byte words, and
/// works out the rows' rotations: (cos, sin) of position * inv_freq[i], times the magnitude.
struct BeginParams {
  const void* from[2];
  void* to[2];
  uint32_t n_quads[2];
  const int32_t* positions;  ///< (R), pinned
  int32_t n_rows, n_ropes;
  struct Rope {
    const float* inv_freq;  ///< (half)
    float* out;             ///< (R, half, 2)
    float magnitude;
    int32_t half;
  } rope[kMaxRopes];
};

/// repack, raw_to_f16: `n_rows` raw rows, a multiple of 8 unless they are the matrix's last, to
/// the tiles at `tiles`.
struct RepackParams {
  const uint8_t* raw;
  uint8_t* tiles;
  uint64_t row_bytes;
  int32_t type, n_rows, n_in, n_cells;
  int32_t block_bytes, block_values, n_tiles;
};

/// One tiled matrix among those that share an input.
struct TiledPart {
  const uint8_t* tiles;
  const float* bias;      ///< (n_out) or null
  const float* residual;  ///< (rows, n_out), added; or null
  float* out;             ///< (rows, n_out)
  int32_t type, n_out;
  int32_t stride;                ///< floats from row to row of out and residual
  int32_t first_tile, end_tile;  ///< its share of the launch's tiles
  int32_t n_cells;
  uint32_t tile_bytes;
  float scale;  ///< of a sum: 1 / (kXScale * the type's kScale)
};

/// What the matrices of one input write.
enum class Epilogue : int32_t {
  store,   ///< out = W x + bias + residual, each part its own
  swiglu,  ///< parts 0 and 1 are gate and up: part 0's out = silu(gate) * up
};

struct Best {
  float value;
  int32_t id;  ///< -1: nothing but NaN and -inf
};

/// matvec: y = W norm(x) for one row. Parts that are not there begin at INT32_MAX.
struct MatvecParams {
  TiledPart part[kMaxParts];
  const float* x;            ///< (width)
  const float* norm_weight;  ///< (width) or null: x as it is
  float norm_eps;
  int32_t width, n_units, n_cells;
  int32_t ring;               ///< kMinRing or kMaxRing; matvec_two: places
  int32_t split, split_log2;  ///< warps that share a tile's cells, a power of two
  int32_t n_workers;          ///< groups of so many warps in the grid; each takes every n_workers-th tile
  int32_t end_a;              ///< tiles below are of the first type
  int32_t first_b, begin_b, end_b;  ///< the second type's first part, end_a rounded down to n_workers (matvec
                                    ///< alone: matvec_two counts items), end
  Best* best;                       ///< (blocks) the best output of each, or null
};

/// matmul_<mt>: several rows, 16 mt a block.
struct MatmulParams {
  TiledPart part[kMaxParts];
  int32_t n_parts;
  Epilogue epilogue;
  const void* x;  ///< f16 fragments (tile.h), mtiles of 16 rows
  void* out_f16;  ///< swiglu: fragments of `out_units` units; null: part 0's out in f32
  int32_t out_units;
  int32_t n_rows, n_units;
  int32_t cells_per_split;
  float* workspace;   ///< (blocks of one split, splits, sums of a block)
  uint32_t* tickets;  ///< (blocks of one split), zero between launches
};
/// Tiles a warp takes.
inline constexpr int matmul_tiles(int mt) { return mt <= 2 ? 2 : 4; }
/// Units of x in the ring: two, where copies are not asynchronous or 16-bit weights leave no room.
inline constexpr int matmul_slots(bool async, int cell_bytes) { return async && cell_bytes < 2048 ? 3 : 2; }
/// Bytes of the rings, or of the block's sums that take their place at the end, whichever is more.
inline constexpr uint32_t matmul_ring(bool async, int mt, int cell_values, int cell_bytes) {
  const int slots = matmul_slots(async, cell_bytes), cells = cell_values == 256 ? 2 : slots;
  const int rings = slots * mt * 4096 + 8 * matmul_tiles(mt) * cells * cell_bytes;
  const int sums = 16 * mt * (8 * matmul_tiles(mt) * 8 + 8) * 4;
  return static_cast<uint32_t>(rings > sums ? rings : sums);
}

/// rows_to_fragments: norm (where there is one) and to f16 fragments.
struct FragmentParams {
  const float* x;            ///< (rows, width)
  const float* norm_weight;  ///< (width) or null
  void* out;
  float eps;
  int32_t n_rows, width, n_units;
};

/// rms_norm: groups of `group` values, f32 to f32.
struct NormParams {
  const float* x;
  const float* weight;
  float* out;
  float eps;
  int32_t n_groups, group;
};

/// add, swiglu: element by element, four at a time where n allows.
struct PairParams {
  const float* a;
  const float* b;
  float* out;
  uint64_t n;
};

/// sigmoid_gate: out[i] = x[i] * sigmoid(gate[per_row ? i / width : i])
struct SigmoidGateParams {
  const float* x;
  const float* gate;
  float* out;
  uint64_t n;
  int32_t width, per_row;
};

/// select_rows: out[o] = x[outputs[o]]
struct SelectParams {
  const float* x;
  float* out;
  const int32_t* outputs;
  int32_t n_out, width;
};

/// One kind of head for `heads`: norm, rotation, then f32 to `out` or to a state's slots.
struct HeadItem {
  const float* x;            ///< (rows, n_heads * head_dim)
  float* out;                ///< the same, or null
  void* state;               ///< (slots, n_heads * head_dim), or null
  const float* norm_weight;  ///< (head_dim) or null
  const float* rotation;     ///< (R, n_rot / 2, 2) cos and sin by row of the pass, or null: none
  float eps;
  int32_t n_heads, head_dim, n_rot;
  int32_t adjacent;    ///< pairing
  int32_t state_f32;   ///< else f16
  int32_t on_outputs;  ///< x's rows are the output rows
  int32_t n_rows;
};
struct HeadsParams {
  HeadItem item[3];
  int32_t n_items;
  PassArrays pass;
};

/// attention_*: see attention.cu.
struct AttentionParams {
  const float* q;  ///< (rows, H * hd)
  const void* k;   ///< (slots, G * hd)
  const void* v;   ///< (slots, G * hd_v)
  float* out;      ///< (rows, H * hd_v), or null
  void* out_f16;   ///< the same as fragments of out_units units, or null
  int32_t out_units;
  int32_t n_rows;  ///< of q
  int32_t n_heads, n_kv_heads, head_dim, v_head_dim;
  float scale;
  int32_t on_outputs;
  PassArrays pass;
  float* partial;     ///< (H, splits, hd_v + 2) for a sequence in splits
  uint32_t* tickets;  ///< (G) zero between launches
  // attention_one alone: the new row's own heads, not yet normed, rotated or stored
  HeadItem q_item, k_item, v_item;
};

/// Query heads per key/value head that attention_one is built for.
#define REFLEX_ATTENTION_ONE(M) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8)
inline constexpr int attention_one_threads(int capability) { return capability >= 90 ? 512 : 256; }
inline constexpr uint32_t attention_one_bytes(int head_dim, int query_heads, int threads) {
  const int warps = threads / 32;
  return static_cast<uint32_t>(
      4 * ((query_heads + 2 + warps * query_heads) * head_dim + 2 * warps * query_heads) + 16);
}
// Of flash.cuh: threads, queries and slots of a block; halves between one slot and the next in shared memory.
inline constexpr int kFlashThreads = 128, kFlashRows = 64, kFlashSlots = 64, kFlashPad = 8;
inline constexpr uint32_t flash_bytes(int head_dim, int v_head_dim) {
  return static_cast<uint32_t>(2 * kFlashSlots * (head_dim + v_head_dim + 2 * kFlashPad));
}
inline constexpr uint32_t flash_bytes(int head_dim) { return flash_bytes(head_dim, head_dim); }

/// linear_raw: y = W x + bias + residual, W in file layout, in f32.
struct RawLinearParams {
  const uint8_t* w;
  const float* x;         ///< (rows, n_in)
  const float* bias;      ///< (n_out) or null
  const float* residual;  ///< (rows, n_out) or null
  float* out;             ///< (rows, n_out)
  uint64_t row_bytes;
  int32_t type, n_in, n_out, n_rows;
};

/// gather_dots: out[i] = w[i] . x[row[i]]
struct GatherParams {
  const float* x;  ///< (O, width)
  const float* w;  ///< (n, width)
  const int32_t* row;
  float* out;
  int32_t n, width;
};

// ---- reading logits ---------------------------------------------------------------------

inline constexpr int kScanThreads = 256;
inline constexpr int kScanBlocks = 64;  ///< per row, in the kernels that scan a vocabulary
inline constexpr int kMaxTop = 128;     ///< alternatives that top_* can give

/// best_of_blocks: the best of each block's share. best_of_rows: of each row's blocks.
struct BestParams {
  const float* logits;  ///< (O, V)
  int32_t n_vocab, n_out;
  int32_t n_partial;        ///< per row
  Best* partial;            ///< (O, n_partial)
  Best* out;                ///< (O), pinned
  volatile uint32_t* done;  ///< pinned; becomes the pass's sequence when all rows are out
  const PassHeader* header;
};

/// sum_exp: partial sums of exp((x - max) * inv_t) in f64
struct SumExpParams {
  const float* x;
  int32_t n;
  const Best* max;  ///< pinned result of best_of_rows
  float inv_temperature;
  double* partial;  ///< (kScanBlocks), pinned
};

/// top_logits: the `n_top` best of each block's share, best first
struct TopParams {
  const float* x;
  int32_t n, n_top;
  Best* partial;  ///< (kScanBlocks, n_top), pinned
};

/// Sampling: see sample.cu.
struct AdjustItem {
  int32_t id;
  float bias;
  float repetition;  ///< 1: none
  float subtract;    ///< frequency and presence together
};
struct AdjustParams {
  float* x;
  const AdjustItem* items;  ///< one per id
  int32_t n_items;
  const uint32_t* allowed;  ///< bitmask or null
  int32_t n;
};
struct DrawParams {
  const float* x;  ///< adjusted logits
  int32_t n;
  const Best* max;
  float inv_temperature;
  int32_t top_k;  ///< 0: all
  float top_p, min_p, random;
  int32_t* out;  ///< pinned
};

}  // namespace reflex::cuda
