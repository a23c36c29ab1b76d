// y[r] = W x[r] for two rows or more, activations of 8 bits.
//
// Per block of weights, an integer dot product; then y += (scale_w * scale_x) * dot, and where the
// type has a minimum, y += min_w * (scale_x * sum of x). Rows are in tiles: L lanes of a vector
// belong to one row, a weight's L lanes are broadcast to all, and a group of weight rows is unpacked
// once, into cache, for all tiles.
#include "backend/cpu/kernels/activations.h"
#include "backend/cpu/kernels/products.h"

REFLEX_ISA_BEGIN

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPairRows = kGroup;  ///< weight rows against two tiles at once: 32 registers
#else
constexpr int kPairRows = kGroup / 2;  ///< 16 registers
#endif

/// What the tile kernel reads of one or two tiles.
struct Tiles {
  const uint8_t* tile;  ///< the first; the second lies `stride` further
  size_t stride;
  int32_t n;
};

// M weight rows against N tiles of W / L rows: out (M, N * W) with rows ldo apart, lane for lane.
template <int M, int N, int L, int BLOCK, bool MIN>
void tile_kernel(const Unpacked& u, int m0, const Tiles& t, float* out, size_t ldo) {
  constexpr int kRun = L * kStep;  // values of a weight row per step
  constexpr int kSteps = BLOCK / kRun;
  const TileLayout at(t.n, L);
  const size_t start_at = BLOCK == kQuantBlock ? at.start32 : at.start16;
  const size_t total_at = BLOCK == kQuantBlock ? at.total32 : at.total16;
  vf acc[M][N] = {};
  const weight_t* w = u.q + static_cast<size_t>(m0) * u.ldq;
  const float* scale = u.scale + static_cast<size_t>(m0) * u.lds;
  const float* min = u.min + static_cast<size_t>(m0) * u.lds;
  const uint8_t* q = t.tile;
  for (int32_t b = 0; b < t.n / BLOCK; ++b) {
    const auto block = static_cast<size_t>(b);
    vi dot[M][N];
    REFLEX_UNROLL
    for (int j = 0; j < N; ++j) {
      const vi start =
          kBias ? load_i(t.tile + static_cast<size_t>(j) * t.stride + start_at + block * sizeof(vi)) : vi{};
      REFLEX_UNROLL
      for (int m = 0; m < M; ++m) dot[m][j] = start;
    }
    for (int k = 0; k < kSteps; ++k, q += sizeof(vi)) {
      vi x[N];
      REFLEX_UNROLL
      for (int j = 0; j < N; ++j) x[j] = load_i(q + static_cast<size_t>(j) * t.stride);
      REFLEX_UNROLL
      for (int m = 0; m < M; ++m) {
        const vi wm =
            broadcast<L>(w + static_cast<size_t>(m) * u.ldq + static_cast<size_t>(b * BLOCK + k * kRun));
        REFLEX_UNROLL
        for (int j = 0; j < N; ++j) dot[m][j] = dot_step(dot[m][j], wm, x[j]);
      }
    }
    REFLEX_UNROLL
    for (int j = 0; j < N; ++j) {
      const uint8_t* tile = t.tile + static_cast<size_t>(j) * t.stride;
      const vf xs = (vf)load_i(tile + at.scale + block * BLOCK / kQuantBlock * sizeof(vf));
      vf total{};
      if (MIN) total = (vf)load_i(tile + total_at + block * sizeof(vf));
      REFLEX_UNROLL
      for (int m = 0; m < M; ++m) {
        const size_t s = static_cast<size_t>(m) * u.lds + block;
        acc[m][j] = fma(to_float(dot[m][j]), xs * scale[s], acc[m][j]);
        if (MIN) acc[m][j] = fma(total, splat(min[s]), acc[m][j]);
      }
    }
  }
  REFLEX_UNROLL
  for (int m = 0; m < M; ++m) {
    REFLEX_UNROLL
    for (int j = 0; j < N; ++j) store(out + static_cast<size_t>(m) * ldo + j * W, acc[m][j]);
  }
}

template <int BLOCK, bool MIN>
void tiles(int lanes, int n_tiles, const Unpacked& u, const Tiles& t, float* out, size_t ldo) {
  if (n_tiles == 2)
    for (int m = 0; m < kGroup; m += kPairRows)
      tile_kernel<kPairRows, 2, 1, BLOCK, MIN>(u, m, t, out + static_cast<size_t>(m) * ldo, ldo);
  else if (lanes == 1)
    tile_kernel<kGroup, 1, 1, BLOCK, MIN>(u, 0, t, out, ldo);
  else if (lanes == 2)
    tile_kernel<kGroup, 1, 2, BLOCK, MIN>(u, 0, t, out, ldo);
  else
    tile_kernel<kGroup, 1, 4, BLOCK, MIN>(u, 0, t, out, ldo);
}

void run_tiles(const UnpackInfo& type, int lanes, int n_tiles, const Unpacked& u, const Tiles& t, float* out,
               size_t ldo) {
  const auto run = type.block == kQuantBlock
                       ? (type.has_min ? tiles<kQuantBlock, true> : tiles<kQuantBlock, false>)
                       : (type.has_min ? tiles<kHalfBlock, true> : tiles<kHalfBlock, false>);
  run(lanes, n_tiles, u, t, out, ldo);
}

/// One group of at most kGroup weight rows against all activation rows.
void group_product(const MatmulArgs& a, const UnpackInfo& type, int32_t first, int32_t rows,
                   const Unpacked& u, float* out, size_t ldo) {
  for (int32_t m = 0; m < rows; ++m) {
    const auto at = static_cast<size_t>(m);
    const uint8_t* w = a.w + static_cast<size_t>(first + m) * a.row_bytes;
    // The next group comes from memory while this one is computed with.
    for (size_t i = 0; i < a.row_bytes; i += 64) __builtin_prefetch(w + kGroup * a.row_bytes + i, 0, 2);
    type.row(w, a.n_in, u.q + at * u.ldq, u.scale + at * u.lds, u.min + at * u.lds);
  }
  const size_t stride = TileLayout(a.n_in, 1).stride;
  for (int32_t r = 0; r < a.n_rows;) {
    const bool pair = a.n_rows - r > W && lanes_for(tile_rows(r + W, a.n_rows)) == 1;
    const int n_tiles = pair ? 2 : 1, lanes = lanes_for(tile_rows(r, a.n_rows));
    const Tiles t{a.act + static_cast<size_t>(r / W) * stride, stride, a.n_in};
    run_tiles(type, lanes, n_tiles, u, t, out + r, ldo);
    r += n_tiles * W;
  }
}

/// y (R, rows) from the tiles' results, whose columns are lanes.
void write_out(const MatmulArgs& a, const float* out, size_t ldo, int32_t rows, float* y) {
  const int32_t last = (a.n_rows - 1) / W * W;  // where the last tile starts
  const int lanes = lanes_for(a.n_rows - last);
  const int32_t whole = lanes == 1 ? a.n_rows : last;
  transpose_block(out, ldo, rows, whole, y, a.ldy);
  for (int32_t r = whole; r < a.n_rows; ++r)
    for (int32_t m = 0; m < rows; ++m) {
      const float* o = out + static_cast<size_t>(m) * ldo + last + (r - last) * lanes;
      float v = o[0];
      for (int l = 1; l < lanes; ++l) v += o[l];
      y[static_cast<size_t>(r) * a.ldy + static_cast<size_t>(m)] = v;
    }
}

}  // namespace

void matmul_tile_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end) {
  const ScratchI8 s = cut_scratch(a.scratch, a.n_in, a.n_rows);
  for (int32_t c = begin; c < end; c += kChunk) {
    const int32_t rows = end - c < kChunk ? end - c : kChunk;
    for (int32_t g = 0; g < rows; g += kGroup)
      group_product(a, type, c + g, rows - g < kGroup ? rows - g : kGroup, s.u,
                    s.out + static_cast<size_t>(g) * s.ldo, s.ldo);
    write_out(a, s.out, s.ldo, rows, a.y + (c - begin));
  }
}

REFLEX_ISA_END
