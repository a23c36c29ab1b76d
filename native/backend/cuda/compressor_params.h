// What the host hands to the kernels of Compressor (compressor.cu): plain data, compiled by both sides.
// Letters as in backend.h: R rows of the pass, C channels of kv and gate, entries of D values.
#pragma once
#include <cstdint>

#include "backend/cuda/params.h"

namespace reflex::cuda {

/// compress_rows: each row's [kv | gate + ape] into its slot of raw. compress_entries: the entry of each row
/// that ends a block; with `alone`, the pass is one row and its raw part is written first.
struct CompressorParams {
  const float* kv;        ///< (R, C)
  const float* gate;      ///< (R, C)
  const float* ape;       ///< (ratio, C)
  const float* norm;      ///< (D)
  const float* inv_freq;  ///< (n_rot / 2)
  void* raw;              ///< (slots, 2 C)
  void* entries;          ///< (slots, entries_width), from value `offset` on
  float magnitude, eps;
  int32_t channels, head_dim, ratio, overlap, entries_width, offset;
  int32_t n_rot, adjacent;
  int32_t raw_f32, entries_f32;
  int32_t alone;
  PassArrays pass;
};
inline constexpr int kCompressThreads = 512;
/// Of compress_entries: the slots that an entry is pooled from, and the entry.
inline constexpr uint32_t compress_bytes(int ratio, bool overlap, int head_dim) {
  return 4u * static_cast<uint32_t>((overlap ? 2 : 1) * ratio + head_dim);
}

}  // namespace reflex::cuda
