// y = W x for one row of 8-bit activations: a stream over the weights, bound by memory.
//
//   y = sum over blocks of  scale_w * scale_x * dot(w, x)  -  offset * scale_w * total_x
//                           [+ min_w * total_x]             total_x = scale_x * sum of x
//
// Weights are unsigned for the instructions' sake; the offset is taken back with the totals.
#include "backend/cpu/kernels/activations.h"
#include "backend/cpu/kernels/packed_avx512.h"
#include "backend/cpu/kernels/products.h"

REFLEX_ISA_BEGIN

namespace {

/// Bytes ahead of the row in work that are asked of memory: about two microseconds of stream.
constexpr size_t kAhead = 4096;

#if defined(__AVX512VNNI__)

/// A row already unpacked, as a source (packed_avx512.h).
template <int BLOCK, bool MIN>
struct SourceUnpacked {
  static constexpr int kBlock = BLOCK;
  static constexpr int kOffset = kBias;
  static constexpr bool kHasMin = MIN;
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

/// The sums of one weight row so far.
struct Sums {
  __m512 dot[2] = {};  ///< two, so that neither waits for the other
  __m512 rest = {};    ///< offsets and minima
};

/// One group of 16 blocks; n values of it are left in the row. x: its activations, xs and total:
/// their scales and totals; ahead: where to fetch from memory meanwhile, kLines lines.
template <class S, bool WHOLE>
void dot_group(const S& s, int32_t n, const int8_t* x, const float* xs, const float* total,
               const uint8_t* ahead, Sums& sums) {
  constexpr int kPerChunk = 64 / S::kBlock;
  const int blocks = WHOLE ? 16 : n / S::kBlock;
  const auto mask = (__mmask16)(WHOLE ? 0xFFFF : (1 << blocks) - 1);
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512 scale_x;
  if (S::kBlock == 32)
    scale_x = _mm512_maskz_loadu_ps(mask, xs);
  else  // eight scales, each for two blocks
    scale_x = _mm512_maskz_permutexvar_ps(mask, _mm512_srli_epi32(lane, 1),
                                          _mm512_castps256_ps512(_mm256_loadu_ps(xs)));
  const __m512 scale_w = s.scales(blocks), total_x = _mm512_maskz_loadu_ps(mask, total);
  const __m512 scale = scale_w * scale_x;
  if (S::kOffset) sums.rest = _mm512_fnmadd_ps(scale_w * (float)S::kOffset, total_x, sums.rest);
  if (S::kHasMin) sums.rest = _mm512_fmadd_ps(s.mins(blocks), total_x, sums.rest);
  // Lane i of chunk c belongs to block c * kPerChunk + i / (16 / kPerChunk).
  const __m512i block_of_lane = _mm512_srli_epi32(lane, S::kBlock == 32 ? 3 : 2);
  const auto add = [&](int c, __m512i w) {
    __builtin_prefetch(ahead + 64 * c, 0, 3);
    const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_loadu_si512(x + 64 * c));
    const __m512i which = _mm512_add_epi32(block_of_lane, _mm512_set1_epi32(c * kPerChunk));
    sums.dot[c % 2] =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(which, scale), sums.dot[c % 2]);
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

/// `bytes` of the row are followed by the rows that this thread reads next.
template <class S>
float dot_source(S s, int32_t n, const uint8_t* record, const uint8_t* ahead, size_t bytes) {
  constexpr int kValues = 16 * S::kBlock;  // of a group
  const RowLayout at(n);
  const auto* x = reinterpret_cast<const int8_t*>(record);
  const auto* xs = reinterpret_cast<const float*>(record + at.scale);
  const auto* total = reinterpret_cast<const float*>(record + (S::kBlock == 32 ? at.total32 : at.total16));
  const size_t step = bytes * kValues / static_cast<size_t>(n);
  Sums sums;
  for (; n >= kValues; n -= kValues, x += kValues, xs += kValues / 32, total += 16, ahead += step, s.next())
    dot_group<S, true>(s, n, x, xs, total, ahead, sums);
  if (n > 0) dot_group<S, false>(s, n, x, xs, total, ahead, sums);
  return sum(sums.dot[0] + sums.dot[1] + sums.rest);
}

template <int BLOCK, bool MIN>
float dot_unpacked(const Unpacked& u, int32_t n, const uint8_t* record) {
  return dot_source(SourceUnpacked<BLOCK, MIN>(u), n, record, record, 0);
}

#else

template <int BLOCK, bool MIN>
float dot_unpacked(const Unpacked& u, int32_t n, const uint8_t* record) {
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
  return sum(acc) + rest;
}

#endif

float dot_any(const UnpackInfo& type, const Unpacked& u, int32_t n, const uint8_t* record) {
  if (type.block == kQuantBlock)
    return type.has_min ? dot_unpacked<kQuantBlock, true>(u, n, record)
                        : dot_unpacked<kQuantBlock, false>(u, n, record);
  return type.has_min ? dot_unpacked<kHalfBlock, true>(u, n, record)
                      : dot_unpacked<kHalfBlock, false>(u, n, record);
}

void prefetch_row(const uint8_t* w, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(w + kAhead + i, 0, 3);
}

}  // namespace

void matvec_i8(const MatmulArgs& a, const UnpackInfo& type, int32_t begin, int32_t end) {
  const auto row = [&](int32_t j) { return a.w + static_cast<size_t>(j) * a.row_bytes; };
#if defined(__AVX512VNNI__)
  if (with_source(a.type, [&]<class S>() {
        for (int32_t j = begin; j < end; ++j) {
          a.y[j - begin] = dot_source(S(row(j)), a.n_in, a.act, row(j) + kAhead, a.row_bytes);
        }
      }))
    return;
#endif
  const ScratchI8 s = cut_scratch(a.scratch, a.n_in, a.n_rows);
  for (int32_t j = begin; j < end; ++j) {
    prefetch_row(row(j), a.row_bytes);
    type.row(row(j), a.n_in, s.u.q, s.u.scale, s.u.min);
    a.y[j - begin] = dot_any(type, s.u, a.n_in, a.act);
  }
}

REFLEX_ISA_END
