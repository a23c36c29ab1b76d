// From the file's layout to tiles (tile.h). repack moves bits, the same bytes in another order;
// raw_to_f16 decodes a type that has no tiles into tiles of F16, for one use.
#include "backend/cuda/raw.cuh"

namespace reflex::cuda {

namespace {

template <class T>
__device__ __forceinline__ void repack_tile(const RepackParams& p) {
  constexpr int kWords = T::kBytes / 4;
  const int first = blockIdx.x * kTileRows;
  const RawRows rows{p.raw + static_cast<size_t>(first) * p.row_bytes, p.row_bytes,
                     min(kTileRows, p.n_rows - first), p.block_bytes, p.n_in / p.block_values};
  auto* out = reinterpret_cast<uint32_t*>(p.tiles) + static_cast<size_t>(blockIdx.x) * p.n_cells * kWords;
  for (int i = threadIdx.x; i < p.n_cells * kWords; i += blockDim.x)
    out[i] = T::word(rows, i / kWords, i % kWords);
}

template <class Raw>
__device__ __forceinline__ void decode_tile(const RepackParams& p) {
  using F16 = Tile<GgmlType::F16>;
  const int first = blockIdx.x * kTileRows, n_rows = min(kTileRows, p.n_rows - first);
  auto* out =
      reinterpret_cast<uint4*>(p.tiles) + static_cast<size_t>(blockIdx.x) * p.n_cells * (F16::kBytes / 16);
  // A thread decodes the 32 values of one lane: four quads, 512 bytes apart.
  for (int i = threadIdx.x; i < p.n_cells * 32; i += blockDim.x) {
    const int cell = i / 32, lane = i % 32, row = lane / 4, group = cell * 4 + lane % 4;
    float y[32] = {};
    if (row < n_rows && 32 * group < p.n_in)
      Raw::read(p.raw + static_cast<size_t>(first + row) * p.row_bytes, group, p.n_in, y);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t q[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) q[k] = h2_of(y[8 * j + 2 * k] * kWScale, y[8 * j + 2 * k + 1] * kWScale);
      out[static_cast<size_t>(cell) * 128 + j * 32 + lane] = {q[0], q[1], q[2], q[3]};
    }
  }
}

}  // namespace

// One tile (8 rows) a block.
REFLEX_KERNEL(repack, RepackParams, 256) {
  wait_for_inputs();
  let_next_start();
  with_tile(p.type, [&](auto tile) { repack_tile<decltype(tile)>(p); });
}

REFLEX_KERNEL(raw_to_f16, RepackParams, 256) {
  wait_for_inputs();
  let_next_start();
  switch (static_cast<GgmlType>(p.type)) {
#define REFLEX_CASE(name)       \
  case GgmlType::name:          \
    decode_tile<Raw_##name>(p); \
    break;
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_EACH_##kind(REFLEX_CASE, name)
#include "quant/types.def"
#undef REFLEX_TYPE
    default:
      break;
  }
}

}  // namespace reflex::cuda
