// y = W x for one to four rows of 8-bit activations and weights of Q4_K, Q5_K or Q6_K: a stream over the
// weights, bound by memory if all goes well. A weight is decoded once, in a register, for all rows.
//
//   y = sum over blocks of  scale_w * scale_x * dot(w, x)  -  min_w * total_x  (or 32 * scale_w * total_x)
#include "backend/cpu/kernels/matvec_super.h"

#include "backend/cpu/kernels/products.h"
#include "backend/cpu/kernels/stream.h"
#include "backend/cpu/kernels/type_ids.h"

#if defined(__AVX512VNNI__)

REFLEX_ISA_BEGIN

namespace {

/// The sums of one weight row against R activation rows so far.
template <int R>
struct Sums {
  __m512 dot[R][2] = {};  ///< two chains, so that neither waits for the other
  __m512 rest[R] = {};    ///< minima, or scales, times totals
};

/// The records of R activation rows.
template <int R>
struct Records {
  const uint8_t* at[R];
  SuperLayout layout;
  Records(const uint8_t* record, int32_t n) : layout(n) {
    for (int r = 0; r < R; ++r) at[r] = record + static_cast<size_t>(r) * layout.stride;
  }
  __m512i bytes(int r, size_t part, int32_t i) const { return _mm512_load_si512(at[r] + part + i); }
  __m512 floats(int r, size_t part, int32_t i, __mmask16 mask) const {
    return _mm512_maskz_loadu_ps(mask, at[r] + part + static_cast<size_t>(i) * sizeof(float));
  }
};

/// The dot products of two vectors of weights each with their activations, as floats per lane.
template <int R>
inline __attribute__((always_inline)) __m512 two_dots(const Records<R>& x, int r, size_t part, int32_t at,
                                                      const __m512i (&w)[2]) {
  __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[0], x.bytes(r, part, at));
  dot = _mm512_dpbusd_epi32(dot, w[1], x.bytes(r, part, at + 64));
  return _mm512_cvtepi32_ps(dot);
}

/// Rows of Q4_K or Q5_K.
template <class S>
struct PairRows {
  typedef typename S::Block Block;

  /// One block, the K-th of its pair; scale: of the pair's 16 blocks of 32, with the activations' own.
  template <int K, int R>
  static inline __attribute__((always_inline)) void block(const Block& b, const Records<R>& x, int32_t at,
                                                          const __m512 (&scale)[R], Sums<R>& sums) {
    const __m512i lane = _mm512_set_epi32(6, 6, 6, 6, 4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0);
    const __m512i even = _mm512_add_epi32(lane, _mm512_set1_epi32(8 * K)),
                  odd = _mm512_add_epi32(lane, _mm512_set1_epi32(8 * K + 1));
    const S q(b);
    REFLEX_UNROLL
    for (int r = 0; r < R; ++r) {
      sums.dot[r][0] = _mm512_fmadd_ps(two_dots(x, r, 0, at, q.even), _mm512_permutexvar_ps(even, scale[r]),
                                       sums.dot[r][0]);
      sums.dot[r][1] = _mm512_fmadd_ps(two_dots(x, r, 0, at + 128, q.odd),
                                       _mm512_permutexvar_ps(odd, scale[r]), sums.dot[r][1]);
    }
  }

  /// N blocks, at most 4, number `first` of the row.
  template <int N, int R>
  static inline __attribute__((always_inline)) void some(const Block* b, int32_t first, const Records<R>& x,
                                                         Sums<R>& sums) {
    const PairScales scales(b, N);
    pair<0, N>(b, first, x, scales, sums);
    if (N > 2) pair<1, N>(b, first, x, scales, sums);
  }

  template <int P, int N, int R>
  static inline __attribute__((always_inline)) void pair(const Block* b, int32_t first, const Records<R>& x,
                                                         const PairScales& scales, Sums<R>& sums) {
    constexpr auto kMask = (__mmask16)(N > 2 * P + 1 ? 0xFFFF : 0x00FF);
    const int32_t at = (first + 2 * P) * 8;
    __m512 scale_w, min_w, scale[R];
    scales.template get<P>(scale_w, min_w);
    REFLEX_UNROLL
    for (int r = 0; r < R; ++r) {
      scale[r] = scale_w * x.floats(r, S::kShifted ? x.layout.shifted : x.layout.scale, at, kMask);
      sums.rest[r] = _mm512_fnmadd_ps(min_w, x.floats(r, x.layout.total32, at, kMask), sums.rest[r]);
    }
    block<0>(b[2 * P], x, at * 32, scale, sums);
    if (N > 2 * P + 1) block<1>(b[2 * P + 1], x, at * 32 + kSuperBlock, scale, sums);
  }

  template <int R>
  static inline __attribute__((always_inline)) void row(const uint8_t* w, int32_t n, const Records<R>& x,
                                                        float* y) {
    const auto* b = reinterpret_cast<const Block*>(w);
    Sums<R> sums;
    int32_t i = 0;
    for (; i + 4 <= n; i += 4, b += 4) {
      fetch_ahead<4 * sizeof(Block)>(b);
      some<4>(b, i, x, sums);
    }
    if (n - i == 1)
      some<1>(b, i, x, sums);
    else if (n - i == 2)
      some<2>(b, i, x, sums);
    else if (n - i == 3)
      some<3>(b, i, x, sums);
    for (int r = 0; r < R; ++r) store(y + r * W * W, sums.dot[r][0] + sums.dot[r][1] + sums.rest[r]);
  }
};

/// Rows of Q6_K.
struct QuarterRows {
  typedef QuartersQ6_K::Block Block;

  template <int R>
  static inline __attribute__((always_inline)) void row(const uint8_t* w, int32_t n, const Records<R>& x,
                                                        float* y) {
    // Lane 4 j + m is of block j, with m odd j + 8; of the high ones, 4 more.
    const __m512i low = _mm512_set_epi32(11, 3, 11, 3, 10, 2, 10, 2, 9, 1, 9, 1, 8, 0, 8, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    const auto* b = reinterpret_cast<const Block*>(w);
    Sums<R> sums;
    for (int32_t i = 0; i < n; ++i, ++b) {
      fetch_ahead<sizeof(Block)>(b);
      const QuartersQ6_K q(*b);
      const __m512 scale_w = QuartersQ6_K::scales(*b);
      const int32_t at = i * kSuperBlock;
      REFLEX_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512 scale = scale_w * x.floats(r, x.layout.scale16, i * 16, 0xFFFF);
        sums.rest[r] = _mm512_fmadd_ps(scale_w, x.floats(r, x.layout.total16, i * 16, 0xFFFF), sums.rest[r]);
        sums.dot[r][0] = _mm512_fmadd_ps(two_dots(x, r, x.layout.quarters, at, q.low),
                                         _mm512_permutexvar_ps(low, scale), sums.dot[r][0]);
        sums.dot[r][1] = _mm512_fmadd_ps(two_dots(x, r, x.layout.quarters, at + 128, q.high),
                                         _mm512_permutexvar_ps(high, scale), sums.dot[r][1]);
      }
    }
    for (int r = 0; r < R; ++r)
      store(y + r * W * W,
            _mm512_fnmadd_ps(sums.rest[r], _mm512_set1_ps(32.0f), sums.dot[r][0] + sums.dot[r][1]));
  }
};

template <class T, int R>
void product(const MatmulArgs& a, int32_t begin, int32_t end) {
  const Records<R> x(a.act, a.n_in);
  stream_rows<R>(
      a, begin, end, [&](const uint8_t* w, float* sums) __attribute__((always_inline)) {
        T::template row<R>(w, a.n_in / kSuperBlock, x, sums);
      });
}

template <class T>
void any_rows(const MatmulArgs& a, int32_t begin, int32_t end) {
  static_assert(kMaxRowsI8 == 4);
  const auto run = a.n_rows == 1   ? product<T, 1>
                   : a.n_rows == 2 ? product<T, 2>
                   : a.n_rows == 3 ? product<T, 3>
                                   : product<T, 4>;
  run(a, begin, end);
}

}  // namespace

void matvec_super(const MatmulArgs& a, int32_t begin, int32_t end) {
  switch (a.type) {
    case kTypeQ4_K:
      return any_rows<PairRows<PairsQ4_K>>(a, begin, end);
    case kTypeQ5_K:
      return any_rows<PairRows<PairsQ5_K>>(a, begin, end);
    case kTypeQ6_K:
      return any_rows<QuarterRows>(a, begin, end);
    default:
      return;  // choose_form() gives this form to no other type
  }
}

REFLEX_ISA_END

#endif
