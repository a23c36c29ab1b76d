// How a product of one or a few activation rows walks over the weights: one pass through memory, of which
// everything else is to stay out of the way.
#pragma once
#include "backend/cpu/kernels.h"
#include "backend/cpu/kernels/simd.h"

REFLEX_ISA_BEGIN

/// Bytes ahead of the row in work that are asked of memory.
constexpr size_t kAhead = 4096;

/// Pages are 4 KiB where the page cache's are, and a prefetch whose page is not in the TLB holds up what
/// comes after it until the page is walked, some 100 ns: 40% of the time a page's weights take. Walks go on
/// side by side, though, so pages are asked for in batches, a batch ahead.
static inline void touch_pages(const uint8_t* w, size_t bytes) {
  const uintptr_t border = (uintptr_t)(w + bytes) / kPageBatch * kPageBatch;
  if (border <= (uintptr_t)w) return;
  for (size_t i = 0; i < kPageBatch; i += kPage)
    __builtin_prefetch((const void*)(border + kPageBatch + i), 0, 2);
}

/// Asks for BYTES of weights, kAhead from those at p.
template <size_t BYTES>
static inline void fetch_ahead(const void* p) {
  REFLEX_UNROLL
  for (size_t i = 0; i < BYTES; i += 64) __builtin_prefetch((const uint8_t*)p + kAhead + i, 0, 3);
}

/// Calls row(w, sums) for weight rows [begin, end): it leaves W partial sums for activation row r at
/// sums + r * W * W. Sixteen rows are then folded together, in the order in which sum() folds one.
template <int R, class Row>
static inline void stream_rows(const MatmulArgs& a, int32_t begin, int32_t end, Row row) {
  alignas(64) float sums[R][W * W];
  for (int32_t j = begin; j < end; j += W) {
    const int32_t rows = end - j < W ? end - j : W;
    for (int32_t i = 0; i < rows; ++i) {
      const uint8_t* w = a.w + static_cast<size_t>(j + i) * a.row_bytes;
      touch_pages(w, a.row_bytes);
      row(w, sums[0] + i * W);
    }
    for (int r = 0; r < R; ++r) {
      float* y = a.y + static_cast<size_t>(r) * a.ldy + (j - begin);
      if (rows == W) {
        vf v[W];
        for (int i = 0; i < W; ++i) v[i] = load(sums[r] + i * W);
        store(y, sums_of(v));
      } else {
        for (int32_t i = 0; i < rows; ++i) y[i] = sum(load(sums[r] + i * W));
      }
    }
  }
}

REFLEX_ISA_END
