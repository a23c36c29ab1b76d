#include "backend/cpu/kernels/activations.h"

#include "backend/cpu/kernels/super_rows.h"

REFLEX_ISA_BEGIN

namespace {

/// 32 values to 8 bits: q (32), the scale; NaN where a value is not finite.
float quantize_block(const float* x, int8_t* q) {
  constexpr int kVectors = kQuantBlock / W;
  vf v[kVectors], top{}, poison{};
  for (int i = 0; i < kVectors; ++i) {
    v[i] = load(x + i * W);
    top = max(max(v[i], -v[i]), top);
    poison += v[i] * 0.0f;
  }
  const float largest = max_lane(top);
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  for (int i = 0; i < kVectors; ++i) store_i8(q + i * W, (vi)(v[i] * inverse + magic) - (vi)magic);
  return largest / 127.0f + sum(poison);
}

float sum_of(const int8_t* q, int32_t n) {
  int32_t s = 0;
  for (int32_t i = 0; i < n; ++i) s += q[i];
  return static_cast<float>(s);
}

void prepare_row_i8(const float* x, int32_t n, uint8_t* record) {
  const RowLayout at(n);
  auto* q = reinterpret_cast<act_t*>(record);
  auto* scale = reinterpret_cast<float*>(record + at.scale);
  auto* total32 = reinterpret_cast<float*>(record + at.total32);
  auto* total16 = reinterpret_cast<float*>(record + at.total16);
  for (int32_t b = 0; b < n / kQuantBlock; ++b) {
    int8_t block[kQuantBlock];
    scale[b] = quantize_block(x + b * kQuantBlock, block);
    const float first = sum_of(block, kHalfBlock), second = sum_of(block + kHalfBlock, kHalfBlock);
    total32[b] = scale[b] * (first + second);
    total16[2 * b] = scale[b] * first;
    total16[2 * b + 1] = scale[b] * second;
    for (int i = 0; i < kQuantBlock; ++i) q[b * kQuantBlock + i] = block[i];
  }
}

#if defined(__AVX512VNNI__)

/// Sixteen sums of 16 values each, in natural order, of 256 in natural order.
__m512i sums_of_16(const __m512i (&v)[4]) {
  __m512i s[4];
  for (int c = 0; c < 4; ++c) s[c] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), v[c]);
  const auto pair32 = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i a = pair32(s[0], s[1]), b = pair32(s[2], s[3]);
  // Lane 4 j + c holds the sum of block j of vector c.
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0),
                                  all);
}

void prepare_super(const float* x, int32_t n, uint8_t* record) {
  const SuperLayout at(n);
  const auto floats = [&](size_t part, int32_t i) { return reinterpret_cast<float*>(record + part) + i; };
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int32_t i = 0; i < n; i += kSuperBlock) {
    alignas(64) int8_t q[kSuperBlock];
    alignas(32) float scale[8];
    for (int b = 0; b < 8; ++b) scale[b] = quantize_block(x + i + 32 * b, q + 32 * b);
    __m512i v[4];
    for (int c = 0; c < 4; ++c) v[c] = _mm512_load_si512(q + 64 * c);

    uint8_t* pairs = record + i;
    for (int g = 0; g < 16; ++g) memcpy(pairs + g % 4 * 64 + g / 4 * 16, q + 16 * g, 16);
    uint8_t* quarters = record + at.quarters + i;
    _mm512_store_si512(quarters, _mm512_unpacklo_epi32(v[0], v[2]));
    _mm512_store_si512(quarters + 64, _mm512_unpackhi_epi32(v[0], v[2]));
    _mm512_store_si512(quarters + 128, _mm512_unpacklo_epi32(v[1], v[3]));
    _mm512_store_si512(quarters + 192, _mm512_unpackhi_epi32(v[1], v[3]));

    const __m256 s = _mm256_load_ps(scale);
    const __m512 twice = _mm512_permutexvar_ps(_mm512_srli_epi32(lane, 1), _mm512_castps256_ps512(s));
    const __m512i sum16 = sums_of_16(v);
    const __m512i sum32 = _mm512_add_epi32(sum16, _mm512_shuffle_epi32(sum16, (_MM_PERM_ENUM)0xB1));
    const __m512 total32 = twice * _mm512_cvtepi32_ps(sum32);
    const __m256 sixteenth = _mm256_set_ps(0.0625f, 1, 0.0625f, 1, 0.0625f, 1, 0.0625f, 1);
    _mm256_storeu_ps(floats(at.scale, i / 32), s);
    _mm256_storeu_ps(floats(at.shifted, i / 32), s * sixteenth);
    _mm512_storeu_ps(floats(at.scale16, i / 16), twice);
    _mm512_storeu_ps(floats(at.total16, i / 16), twice * _mm512_cvtepi32_ps(sum16));
    _mm256_storeu_ps(floats(at.total32, i / 32),
                     _mm512_castps512_ps256(_mm512_permutexvar_ps(_mm512_slli_epi32(lane, 1), total32)));
  }
}

#else

void prepare_super(const float*, int32_t, uint8_t*) {}  // choose_form() asks for none

#endif

// One row's lanes of a tile: q and scale of lane `first` and the L - 1 after it.
template <int L>
void place_row(const float* x, int32_t n, int first, uint8_t* tile) {
  constexpr int kRun = L * kStep;  // values of this row in one vector
  auto* q = reinterpret_cast<act_t*>(tile) + first * kStep;
  auto* scale = reinterpret_cast<float*>(tile + TileLayout(n, L).scale) + first;
  for (int32_t b = 0; b < n / kQuantBlock; ++b, scale += W) {
    int8_t block[kQuantBlock];
    const float s = quantize_block(x + b * kQuantBlock, block);
    for (int l = 0; l < L; ++l) scale[l] = s;
    act_t values[kQuantBlock];
    for (int i = 0; i < kQuantBlock; ++i) values[i] = block[i];
    for (int i = 0; i < kQuantBlock; i += kRun, q += kVectorValues)
      memcpy(q, values + i, kRun * sizeof(act_t));
  }
}

// The sums of each lane over its blocks, from the q and scale that are in place.
void place_sums(int32_t n, int lanes, uint8_t* tile) {
  const TileLayout at(n, lanes);
  const int per_half = kHalfBlock / (lanes * kStep);  // vectors in a half block
  weight_t ones[kVectorValues];
  for (weight_t& one : ones) one = 1;
  const vi each = load_i(ones);
  const auto put = [&](size_t part, int32_t index, auto v) {
    memcpy(tile + part + static_cast<size_t>(index) * sizeof v, &v, sizeof v);
  };
  const uint8_t* q = tile;
  for (int32_t b = 0; b < n / kQuantBlock; ++b) {
    vi half[2] = {};
    for (vi& h : half)
      for (int i = 0; i < per_half; ++i, q += sizeof(vi)) h = dot_step(h, each, load_i(q));
    const vf scale = (vf)load_i(tile + at.scale + static_cast<size_t>(b) * sizeof(vf));
    put(at.start32, b, (half[0] + half[1]) * -kBias);
    put(at.total32, b, scale * to_float(half[0] + half[1]));
    for (int h = 0; h < 2; ++h) {
      put(at.start16, 2 * b + h, half[h] * -kBias);
      put(at.total16, 2 * b + h, scale * to_float(half[h]));
    }
  }
}

template <int L>
void place_rows(const float* x, size_t ldx, int32_t n, int32_t rows, uint8_t* tile) {
  if (rows * L < W) memset(tile, 0, TileLayout(n, L).stride);
  for (int32_t r = 0; r < rows; ++r) place_row<L>(x + static_cast<size_t>(r) * ldx, n, r * L, tile);
}

void prepare_tile_i8(const float* x, size_t ldx, int32_t n, int32_t rows, uint8_t* tile) {
  const int lanes = lanes_for(rows);
  if (lanes == 1)
    place_rows<1>(x, ldx, n, rows, tile);
  else if (lanes == 2)
    place_rows<2>(x, ldx, n, rows, tile);
  else
    place_rows<4>(x, ldx, n, rows, tile);
  place_sums(n, lanes, tile);
}

void prepare_tile_f32(const float* x, size_t ldx, int32_t n, int32_t rows, float* tile) {
  int32_t k = 0;
  for (; k + W <= n; k += W) {
    vf v[W] = {};
    for (int32_t r = 0; r < rows; ++r) v[r] = load(x + static_cast<size_t>(r) * ldx + k);
    transpose(v);
    for (int i = 0; i < W; ++i) store(tile + (k + i) * W, v[i]);
  }
  for (; k < n; ++k)
    for (int32_t r = 0; r < W; ++r) tile[k * W + r] = r < rows ? x[static_cast<size_t>(r) * ldx + k] : 0.0f;
}

/// Bytes from one full tile to the next.
size_t tile_stride(Form form, int32_t n) {
  return form == Form::tile_i8 ? TileLayout(n, 1).stride : static_cast<size_t>(n) * W * sizeof(float);
}

}  // namespace

size_t act_bytes(Form form, int32_t n_in, int32_t n_rows) {
  const auto n = static_cast<size_t>(n_in), rows = static_cast<size_t>(n_rows);
  const size_t tiles = (rows + W - 1) / W;
  switch (form) {
    case Form::row_f32:
      return n * rows * sizeof(float);
    case Form::row_i8:
      return RowLayout(n_in).stride * rows;
    case Form::row_super:
      return SuperLayout(n_in).stride * rows;
    default:
      return tile_stride(form, n_in) * tiles;
  }
}

int32_t act_unit(Form form) { return form == Form::tile_f32 || form == Form::tile_i8 ? W : 1; }

void prepare(Form form, const float* x, size_t ldx, int32_t n_in, int32_t n_rows, int32_t begin, int32_t end,
             uint8_t* act) {
  const int32_t unit = act_unit(form);
  for (int32_t r = begin; r < end; r += unit, x += static_cast<size_t>(unit) * ldx) {
    const int32_t rows = tile_rows(r, n_rows);
    const auto at = static_cast<size_t>(r);
    switch (form) {
      case Form::row_f32:
        memcpy(act + at * static_cast<size_t>(n_in) * sizeof(float), x,
               static_cast<size_t>(n_in) * sizeof(float));
        break;
      case Form::row_i8:
        prepare_row_i8(x, n_in, act + at * RowLayout(n_in).stride);
        break;
      case Form::row_super:
        prepare_super(x, n_in, act + at * SuperLayout(n_in).stride);
        break;
      case Form::tile_i8:
        prepare_tile_i8(x, ldx, n_in, rows, act + at / W * tile_stride(form, n_in));
        break;
      case Form::tile_f32:
        prepare_tile_f32(x, ldx, n_in, rows,
                         reinterpret_cast<float*>(act + at / W * tile_stride(form, n_in)));
        break;
    }
  }
}

const uint8_t* act_row(Form form, const uint8_t* act, int32_t n_in, int32_t r) {
  const size_t stride = form == Form::row_i8      ? RowLayout(n_in).stride
                        : form == Form::row_super ? SuperLayout(n_in).stride
                                                  : static_cast<size_t>(n_in) * sizeof(float);
  return act + static_cast<size_t>(r) * stride;
}

REFLEX_ISA_END
