// What the host hands to Gated DeltaNet's kernels: plain data, compiled by both sides. Letters as in
// backend.h: R rows of the pass, K key heads of N values, H value heads of M, T taps, C channels.
#pragma once
#include <cstdint>

namespace reflex::cuda {

inline constexpr int kDeltaChunk = 64;          ///< rows that go through the recurrence at once
inline constexpr int kDeltaSlice = 32;          ///< columns of a head's state that a block keeps
inline constexpr int kDeltaMaxKeyDim = 1024;    ///< what delta_rows has registers for
inline constexpr int kDeltaOneGroups = 8;       ///< warps of delta_one that share a column
inline constexpr int kDeltaOneMaxDim = 128;     ///< N and M of delta_one, at most
inline constexpr int kDeltaPairStride = 68;     ///< of a chunk's square matrices in shared memory
inline constexpr int kDeltaSliceStride = 40;    ///< of a slice's rows there
inline constexpr int kDeltaInverseStride = 20;  ///< of a 16 by 16 block's inverse there

/// A fork: its row, where its state comes from, where it goes for forks that need it later.
struct DeltaFork {
  int32_t row;
  int32_t from;  ///< a kept copy, or one of those below
  int32_t to;    ///< a kept copy; kDropped: none
};
inline constexpr int32_t kFromChain = -1;   ///< the state after the chain
inline constexpr int32_t kFromBefore = -2;  ///< the fork before it in the list
inline constexpr int32_t kDropped = -1;

/// Every delta_* kernel takes this. A row of the pass lies in the scratch at its `place`: chain rows first,
/// the forks from fork_base on, where the chain's last chunk ends; rows between are zero.
struct DeltaParams {
  int32_t n_key_heads, n_value_heads, key_dim, value_dim, n_taps;
  int32_t grouped;             ///< which key head a value head reads
  int32_t key_pad, value_pad;  ///< N to a multiple of 16, M to one of kDeltaSlice
  float qk_eps, norm_eps;

  const float* conv;     ///< (C, T)
  const float* decay;    ///< (H)
  const float* dt_bias;  ///< (H)
  const float* norm;     ///< (M)

  const float* qkv;        ///< (R, C)
  const float* beta;       ///< (R, H)
  const float* alpha;      ///< (R, H)
  const float* z;          ///< (R or O, H M); null: only the states are wanted
  float* out;              ///< as z
  const int32_t* outputs;  ///< (O) rows of z and out; null: all rows

  float* history;  ///< state: (T - 1, C), the newest last
  float* state;    ///< state: (H, N, M)

  int32_t n_rows, n_chain, n_out;
  int32_t fork_base, n_places;
  const int32_t* parents;  ///< (R) a row's parent among the rows; below 0: -1 - i, the i-th before the pass

  int32_t capacity;  ///< places of each head in the scratch
  float* q;          ///< (K, capacity, key_pad): convolved, normed, times 1 / sqrt(N)
  float* k;          ///< (K, capacity, key_pad)
  float* v;          ///< (H, capacity, value_pad): v; then U = (I + L)^-1 diag(b) v; then the output
  float* w;          ///< (H, capacity, key_pad): W = (I + L)^-1 diag(b c) k
  float* pairs;      ///< (H, capacity, kDeltaChunk): D * Q K^T
  float* gate;       ///< (H, capacity): log of the decay
  float* strength;   ///< (H, capacity): b
  float* carry;      ///< (H, capacity): c_t, the decay from the chunk's beginning to t
  float* ratio;      ///< (H, capacity): c_C / c_t, from t to the chunk's end

  const DeltaFork* forks;   ///< (F), branch after branch
  const int32_t* branches;  ///< (n_branches + 1) where each begins: forks of different ones share none
  float* kept;              ///< (n_kept, H, N, M)
  uint32_t* tickets;        ///< (K) zero between launches
  int32_t buffers;          ///< delta_scan: 3 where W, Q and K of a chunk fit side by side, else 1
};

inline constexpr uint32_t delta_chunks_bytes(int key_pad) {
  return static_cast<uint32_t>(4 * (kDeltaChunk * (key_pad + 4) + kDeltaChunk * kDeltaPairStride +
                                    8 * kDeltaChunk * 8 + 4 * 16 * kDeltaInverseStride + 2 * kDeltaChunk) +
                               8 * kDeltaChunk);
}
inline constexpr uint32_t delta_scan_bytes(int key_pad, int buffers) {
  return static_cast<uint32_t>(4 * (key_pad * kDeltaSliceStride + 2 * kDeltaChunk * kDeltaSliceStride +
                                    kDeltaChunk * kDeltaPairStride + buffers * kDeltaChunk * (key_pad + 4) +
                                    4 * kDeltaChunk));
}
inline constexpr uint32_t delta_rows_bytes(int key_pad, int groups) {
  return static_cast<uint32_t>(4 * (2 * 2 * key_pad + 2 * groups * kDeltaSlice));
}

}  // namespace reflex::cuda
