// y = W x for a few rows of 8-bit activations, one but for AVX-512: a stream over the weights, bound by
// memory. A weight is decoded once, in a register, for all rows.
//
//   y = sum over blocks of  scale_w * scale_x * dot(w, x)  -  offset * scale_w * total_x
//                           [+ min_w * total_x]             total_x = scale_x * sum of x
//
// Weights are unsigned for the instructions' sake; the offset is taken back with the totals.
#include "backend/cpu/kernels/activations.h"
#include "backend/cpu/kernels/packed_avx512.h"
#include "backend/cpu/kernels/products.h"
#include "backend/cpu/kernels/stream.h"

REFLEX_ISA_BEGIN

namespace {

#if defined(__AVX512VNNI__)

/// A row already unpacked, as a source (packed_avx512.h).
template <int BLOCK, bool MIN>
struct SourceUnpacked {
  static constexpr int kBlock = BLOCK;
  static constexpr int kOffset = kBias;
  static constexpr bool kHasMin = MIN;
  static constexpr bool kFetch = false;  // it is in cache
  const weight_t* q;
  const float* scale;
  const float* min;
  explicit SourceUnpacked(const Unpacked& u) : q(u.q), scale(u.scale), min(u.min) {}
  void next() {
    q += 16 * BLOCK;
    scale += 16;
    min += 16;
  }
  __m512i weights(int c) const { return _mm512_loadu_si512(q + 64 * c); }
  __m512i odd(int c) const {
    return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(q + 64 * c)));
  }
  static __mmask16 first(int n) { return (__mmask16)(n < 16 ? (1 << n) - 1 : 0xFFFF); }
  __m512 scales(int n) const { return _mm512_maskz_loadu_ps(first(n), scale); }
  __m512 mins(int n) const { return _mm512_maskz_loadu_ps(first(n), min); }
};

/// The sums of one weight row against R activation rows so far. A single row has two, so that neither
/// waits for the other; more rows are independent as they are.
template <int R>
struct Sums {
  static constexpr int kSplit = R == 1 ? 2 : 1;
  __m512 dot[R][kSplit] = {};
  __m512 rest[R] = {};  ///< offsets and minima
};

/// The records of R activation rows, at the group in work.
template <int R>
struct Records {
  const int8_t* x[R];
  const float* scale[R];
  const float* total[R];
  Records(const uint8_t* record, const RowLayout& at, int block) {
    for (int r = 0; r < R; ++r, record += at.stride) {
      x[r] = reinterpret_cast<const int8_t*>(record);
      scale[r] = reinterpret_cast<const float*>(record + at.scale);
      total[r] = reinterpret_cast<const float*>(record + (block == 32 ? at.total32 : at.total16));
    }
  }
};

/// One group of 16 blocks, number g; n values of it are left in the row. ahead: where to fetch from
/// memory meanwhile, a line per 64 values.
template <class S, int R, bool WHOLE>
inline __attribute__((always_inline)) void dot_group(const S& s, int32_t n, const Records<R>& in, int32_t g,
                                                     const uint8_t* ahead, Sums<R>& sums) {
  constexpr int kPerChunk = 64 / S::kBlock, kValues = 16 * S::kBlock;
  const int blocks = WHOLE ? 16 : n / S::kBlock;
  const auto mask = (__mmask16)(WHOLE ? 0xFFFF : (1 << blocks) - 1);
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 scale_w = s.scales(blocks);
  __m512 scale[R];
  REFLEX_UNROLL
  for (int r = 0; r < R; ++r) {
    const float* xs = in.scale[r] + g * kValues / 32;
    __m512 scale_x;
    if (S::kBlock == 32)
      scale_x = _mm512_maskz_loadu_ps(mask, xs);
    else  // eight scales, each for two blocks
      scale_x = _mm512_maskz_permutexvar_ps(mask, _mm512_srli_epi32(lane, 1),
                                            _mm512_castps256_ps512(_mm256_loadu_ps(xs)));
    const __m512 total_x = _mm512_maskz_loadu_ps(mask, in.total[r] + 16 * g);
    scale[r] = scale_w * scale_x;
    if (S::kOffset) sums.rest[r] = _mm512_fnmadd_ps(scale_w * (float)S::kOffset, total_x, sums.rest[r]);
    if (S::kHasMin) sums.rest[r] = _mm512_fmadd_ps(s.mins(blocks), total_x, sums.rest[r]);
  }
  // Lane i of chunk c belongs to block c * kPerChunk + i / (16 / kPerChunk).
  const __m512i block_of_lane = _mm512_srli_epi32(lane, S::kBlock == 32 ? 3 : 2);
  const auto add = [&](int c, __m512i w) __attribute__((always_inline)) {
    if (S::kFetch) __builtin_prefetch(ahead + 64 * c, 0, 3);
    const __m512i which = _mm512_add_epi32(block_of_lane, _mm512_set1_epi32(c * kPerChunk));
    REFLEX_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i x = _mm512_loadu_si512(in.x[r] + g * kValues + 64 * c);
      const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
      __m512& sum = sums.dot[r][c % Sums<R>::kSplit];
      sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(which, scale[r]), sum);
    }
  };
  if (WHOLE) {
    REFLEX_UNROLL
    for (int c = 0; c < 16 / kPerChunk; ++c) add(c, s.weights(c));
  } else {
    int c = 0;
    for (; 64 * c + 64 <= n; ++c) add(c, s.weights(c));
    if (n % 64) add(c, s.odd(c));
  }
}

/// W partial sums for each of R rows, at y + r * W * W. `bytes` of the weight row are followed by the rows
/// that this thread reads next.
template <class S, int R>
inline __attribute__((always_inline)) void dot_source(S s, int32_t n, const Records<R>& in,
                                                      const uint8_t* ahead, size_t step, float* y) {
  constexpr int kValues = 16 * S::kBlock;  // of a group
  Sums<R> sums;
  int32_t g = 0;
  for (; n >= kValues; n -= kValues, ++g, ahead += step, s.next())
    dot_group<S, R, true>(s, n, in, g, ahead, sums);
  if (n > 0) dot_group<S, R, false>(s, n, in, g, ahead, sums);
  REFLEX_UNROLL
  for (int r = 0; r < R; ++r) {
    __m512 t = sums.dot[r][0];
    if (R == 1) t = t + sums.dot[r][Sums<R>::kSplit - 1];
    store(y + r * W * W, t + sums.rest[r]);
  }
}

template <class S, int R>
void source_rows(const MatmulArgs& a, int32_t begin, int32_t end) {
  const Records<R> in(a.act, RowLayout(a.n_in), S::kBlock);
  const size_t step = a.row_bytes * 16 * S::kBlock / static_cast<size_t>(a.n_in);  // bytes of a group
  stream_rows<R>(
      a, begin, end, [&](const uint8_t* w, float* y) __attribute__((always_inline)) {
        dot_source<S, R>(S(w), a.n_in, in, w + kAhead, step, y);
      });
}

/// One unpacked row.
template <class S, int R>
void dot_rows(const S& s, const MatmulArgs& a, float* y) {
  alignas(64) float sums[R][W * W];
  dot_source<S, R>(s, a.n_in, Records<R>(a.act, RowLayout(a.n_in), S::kBlock), s.q, 0, sums[0]);
  for (int r = 0; r < R; ++r) y[static_cast<size_t>(r) * a.ldy] = sum(load(sums[r]));
}

/// Calls use.template operator()<R>() for the number of activation rows.
template <class Use>
void with_rows(const MatmulArgs& a, Use use) {
  static_assert(kMaxRowsI8 == 4);
  if (a.n_rows == 1)
    use.template operator()<1>();
  else if (a.n_rows == 2)
    use.template operator()<2>();
  else if (a.n_rows == 3)
    use.template operator()<3>();
  else
    use.template operator()<4>();
}

template <int BLOCK, bool MIN>
void dot_unpacked(const MatmulArgs& a, const Unpacked& u, float* y) {
  with_rows(a,
            [&]<int R>() { dot_rows<SourceUnpacked<BLOCK, MIN>, R>(SourceUnpacked<BLOCK, MIN>(u), a, y); });
}

#else

template <int BLOCK, bool MIN>
void dot_unpacked(const MatmulArgs& a, const Unpacked& u, float* y) {
  static_assert(kMaxRowsI8 == 1);
  const int32_t n = a.n_in;
  const uint8_t* record = a.act;
  const RowLayout at(n);
  const auto* x = reinterpret_cast<const act_t*>(record);
  const auto* xs = reinterpret_cast<const float*>(record + at.scale);
  const auto* total = reinterpret_cast<const float*>(record + (BLOCK == 32 ? at.total32 : at.total16));
  static_assert(kBias == 0 && BLOCK % kVectorValues == 0);
  vf acc{};
  float rest = 0;
  for (int32_t b = 0; b < n / BLOCK; ++b) {
    vi dot{};
    for (int i = 0; i < BLOCK; i += kVectorValues)
      dot = dot_step(dot, load_i(u.q + b * BLOCK + i), load_i(x + b * BLOCK + i));
    acc = fma(to_float(dot), splat(u.scale[b] * xs[b * BLOCK / kQuantBlock]), acc);
    if (MIN) rest += u.min[b] * total[b];
  }
  *y = sum(acc) + rest;
}

#endif

void dot_any(const MatmulArgs& a, const UnpackInfo& type, const Unpacked& u, float* y) {
  const auto run = type.block == kQuantBlock
                       ? (type.has_min ? dot_unpacked<kQuantBlock, true> : dot_unpacked<kQuantBlock, false>)
                       : (type.has_min ? dot_unpacked<kHalfBlock, true> : dot_unpacked<kHalfBlock, false>);
  run(a, u, y);
}

}  // namespace

void matvec_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end) {
#if defined(__AVX512VNNI__)
  if (with_source(a.type,
                  [&]<class S>() { with_rows(a, [&]<int R>() { source_rows<S, R>(a, begin, end); }); }))
    return;
#endif
  const ScratchI8 s = cut_scratch(a.scratch, a.n_in, a.n_rows);
  for (int32_t j = begin; j < end; ++j) {
    const uint8_t* w = a.w + static_cast<size_t>(j) * a.row_bytes;
    touch_pages(w, a.row_bytes);
    for (size_t i = 0; i < a.row_bytes; i += 64) __builtin_prefetch(w + kAhead + i, 0, 3);
    type.row(w, a.n_in, s.u.q, s.u.scale, s.u.min);
    dot_any(a, type, s.u, a.y + (j - begin));
  }
}

REFLEX_ISA_END
