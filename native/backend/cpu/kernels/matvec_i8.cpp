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
  const Unpacked& u;
  int blocks;
  SourceUnpacked(const Unpacked& unpacked, int32_t n) : u(unpacked), blocks(n / BLOCK) {}
  __m512i weights(int j) const { return _mm512_loadu_si512(u.q + 64 * j); }
  __m512i odd(int j) const {
    return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(u.q + 64 * j)));
  }
  __m512 part(const float* p, int g) const {
    const int left = blocks - 16 * g;
    return _mm512_maskz_loadu_ps((__mmask16)(left < 16 ? (1 << left) - 1 : 0xFFFF), p + 16 * g);
  }
  __m512 scales(int g) const { return part(u.scale, g); }
  __m512 mins(int g) const { return part(u.min, g); }
};

template <class S>
float dot_source(const S& s, int32_t n, const uint8_t* record) {
  constexpr int kChunks = 16 * S::kBlock / 64;  // of 64 values, in 16 blocks
  constexpr int kPerChunk = 64 / S::kBlock;     // blocks in a chunk
  const RowLayout at(n);
  const auto* x = reinterpret_cast<const int8_t*>(record);
  const auto* xs = reinterpret_cast<const float*>(record + at.scale);
  const auto* total = reinterpret_cast<const float*>(record + (S::kBlock == 32 ? at.total32 : at.total16));
  const int blocks = n / S::kBlock, chunks = n / 64;
  // Lane i of chunk 0 belongs to block i / (16 / kPerChunk).
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i block_of_lane = _mm512_srli_epi32(lane, S::kBlock == 32 ? 3 : 2);
  __m512 acc[2] = {}, rest = {};
  for (int g = 0; g * 16 < blocks; ++g) {
    const int left = blocks - 16 * g;
    const auto mask = (__mmask16)(left < 16 ? (1 << left) - 1 : 0xFFFF);
    __m512 scale_x = _mm512_maskz_loadu_ps(mask, xs + 16 * g * S::kBlock / 32);
    if (S::kBlock == 16) {  // eight scales, each for two blocks
      scale_x = _mm512_castps256_ps512(_mm256_loadu_ps(xs + 8 * g));
      scale_x = _mm512_maskz_permutexvar_ps(mask, _mm512_srli_epi32(lane, 1), scale_x);
    }
    const __m512 scale_w = s.scales(g), total_x = _mm512_maskz_loadu_ps(mask, total + 16 * g);
    const __m512 scale = scale_w * scale_x;
    if (S::kOffset) rest = _mm512_fnmadd_ps(scale_w * (float)S::kOffset, total_x, rest);
    if (S::kHasMin) rest = _mm512_fmadd_ps(s.mins(g), total_x, rest);
    const auto add = [&](int c, __m512i w) {
      const int j = g * kChunks + c;
      const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_loadu_si512(x + 64 * j));
      const __m512i which = _mm512_add_epi32(block_of_lane, _mm512_set1_epi32(c * kPerChunk));
      acc[c % 2] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(which, scale), acc[c % 2]);
    };
    if (left >= 16) {
#pragma GCC unroll 8
      for (int c = 0; c < kChunks; ++c) add(c, s.weights(g * kChunks + c));
    } else {
      int c = 0;
      for (; g * kChunks + c < chunks; ++c) add(c, s.weights(g * kChunks + c));
      if (n % 64) add(c, s.odd(g * kChunks + c));
    }
  }
  return sum(acc[0] + acc[1] + rest);
}

template <int BLOCK, bool MIN>
float dot_unpacked(const Unpacked& u, int32_t n, const uint8_t* record) {
  return dot_source(SourceUnpacked<BLOCK, MIN>(u, n), n, record);
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
          prefetch_row(row(j), a.row_bytes);
          a.y[j - begin] = dot_source(S(row(j), a.n_in), a.n_in, a.act);
        }
      }))
    return;
#endif
  const ScratchI8 s = cut_scratch(a.scratch, a.n_in);
  for (int32_t j = begin; j < end; ++j) {
    prefetch_row(row(j), a.row_bytes);
    type.row(row(j), a.n_in, s.u.q, s.u.scale, s.u.min);
    a.y[j - begin] = dot_any(type, s.u, a.n_in, a.act);
  }
}

REFLEX_ISA_END
