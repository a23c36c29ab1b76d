// The card's weight layout, on the host: blocks repacked word by word and read back the way a warp
// reads them give dequantize_row's values, for every type that has a tile, ragged edges included.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cuda/tile.h"
#include "check.h"
#include "quant/dequantize.h"
#include "quant/int8_form.h"

using namespace reflex;
using namespace reflex::cuda;

namespace {

// f16 holds a weight to 2^-11 of itself; the scale it is made with is rounded once more.
constexpr float kRelative = 1.5e-3f, kAbsolute = 1e-6f;
// Where a type adds an offset, the rounding is that of the larger of the two terms.
constexpr float kOffsetTerm = 0.5f;

/// Random blocks whose halves (scales) are small and finite.
std::vector<uint8_t> random_rows(GgmlType type, int rows, int n_in, std::mt19937& rng) {
  const TypeInfo& info = type_info(type);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) * row_bytes(type, static_cast<size_t>(n_in)));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  std::uniform_real_distribution<float> scale(-0.02f, 0.02f);
  const auto put = [&](size_t at, float f) {
    const uint16_t h = f32_to_f16(f);
    std::memcpy(&bytes[at], &h, 2);
  };
  for (size_t b = 0; b < bytes.size(); b += info.block_bytes) switch (type) {
      case GgmlType::F16:
        put(b, scale(rng) * 50);
        break;
      case GgmlType::BF16: {
        const uint16_t h = f32_to_bf16(scale(rng) * 50);
        std::memcpy(&bytes[b], &h, 2);
        break;
      }
      case GgmlType::Q6_K:
        put(b + 208, scale(rng) / 30);
        break;
      case GgmlType::Q4_1:
      case GgmlType::Q5_1:
      case GgmlType::Q4_K:
      case GgmlType::Q5_K:
        put(b, scale(rng) / 10);
        put(b + 2, scale(rng));
        break;
      case GgmlType::MXFP4:  // an exponent: about a thirtieth
        bytes[b] = static_cast<uint8_t>(120 + rng() % 6);
        break;
      default:
        put(b, scale(rng) / 10);
    }
  return bytes;
}

/// The lane's 32 values of a unit, through f16.
template <class T>
void read_unit(const uint8_t* cell, int u, int lane, float* y) {
  const Scales scales = T::scales(cell, u, lane);
  for (int p = 0; p < 4; ++p) {
    h2 w[4];
    T::quarter(cell, u, p, lane, scales, w);
    for (int i = 0; i < 4; ++i) {
      y[8 * p + 2 * i] = f16_value(w[i] & 0xFFFF) / T::kScale;
      y[8 * p + 2 * i + 1] = f16_value(w[i] >> 16) / T::kScale;
    }
  }
}

/// The same values through the integer form.
template <class T, int p>
void read_ints(const uint8_t* cell, int u, int lane, float* y) {
  uint32_t words[2];
  T::template ints<p>(T::bits(cell, u, lane), words);
  const Factors f = T::factors(cell, u, lane);
  for (int i = 0; i < 8; ++i) {
    const int byte = T::kNibbleOrder ? field_byte(i) : i % 4, word = T::kNibbleOrder ? field_half(i) : i / 4;
    const auto q = static_cast<float>(static_cast<int8_t>(words[word] >> 8 * byte) - T::kOffset);
    const float scale = T::kHalves && p >= 2 ? f.b : f.a;
    y[8 * p + i] = scale * q + (T::kHasMin ? f.b : 0.0f);
  }
}

template <class T>
void read_int_unit(const uint8_t* cell, int u, int lane, float* y) {
  if constexpr (T::kIntegers) {
    read_ints<T, 0>(cell, u, lane, y);
    read_ints<T, 1>(cell, u, lane, y);
    read_ints<T, 2>(cell, u, lane, y);
    read_ints<T, 3>(cell, u, lane, y);
  }
}

template <GgmlType kType>
float worst_error(int n_rows, int n_in) {
  using T = Tile<kType>;
  const TypeInfo& info = type_info(kType);
  std::mt19937 rng(static_cast<uint32_t>(kType) + 7);
  const std::vector<uint8_t> bytes = random_rows(kType, n_rows, n_in, rng);
  const size_t stride = row_bytes(kType, static_cast<size_t>(n_in));
  const int n_cells = (n_in + T::kCell - 1) / T::kCell;
  const float offset = quant::has_min(static_cast<uint32_t>(kType)) ? kOffsetTerm : 0.0f;
  float worst = 0;
  std::vector<uint32_t> cell(T::kBytes / 4);
  std::vector<Quad> aligned(T::kBytes / 16);
  for (int first = 0; first < n_rows; first += kTileRows) {
    const RawRows rows{bytes.data() + static_cast<size_t>(first) * stride, stride,
                       std::min(kTileRows, n_rows - first), static_cast<int>(info.block_bytes),
                       n_in / static_cast<int>(info.block_values)};
    for (int c = 0; c < n_cells; ++c) {
      for (int w = 0; w < T::kBytes / 4; ++w) cell[static_cast<size_t>(w)] = T::word(rows, c, w);
      std::memcpy(aligned.data(), cell.data(), T::kBytes);
      for (int lane = 0; lane < 32; ++lane) {
        float got[64] = {}, ints[64] = {};
        for (int u = 0; u < T::kCell / kUnit; ++u) {
          read_unit<T>(reinterpret_cast<const uint8_t*>(aligned.data()), u, lane, got + 32 * u);
          read_int_unit<T>(reinterpret_cast<const uint8_t*>(aligned.data()), u, lane, ints + 32 * u);
        }
        const int row = first + lane / 4;
        std::vector<float> want(static_cast<size_t>(n_cells) * T::kCell, 0.0f);
        if (row < n_rows)
          dequantize_row(kType, bytes.data() + static_cast<size_t>(row) * stride, want.data(),
                         static_cast<size_t>(n_in));
        for (int u = 0; u < T::kCell / kUnit; ++u)
          for (int i = 0; i < 32; ++i) {
            const float expect = want[static_cast<size_t>(c * T::kCell + u * kUnit + lane % 4 * 32 + i)];
            const float bound = kAbsolute + kRelative * std::max(std::abs(expect), offset);
            worst = std::max(worst, std::abs(got[32 * u + i] - expect) / bound);
            // In f32 the integer form is exact but for the order of its two roundings.
            if (T::kIntegers)
              worst =
                  std::max(worst, std::abs(ints[32 * u + i] - expect) / (1e-6f + 1e-6f * std::abs(expect)));
          }
      }
    }
  }
  return worst;
}

template <GgmlType kType>
void check_type() {
  const bool k = Tile<kType>::kCell == 256;
  for (int n_in : {k ? 256 : 128, k ? 768 : 352}) {
    const float worst = worst_error<kType>(11, n_in);
    if (!(worst <= 1.0f))
      std::fprintf(stderr, "%s n_in %d: %g of the bound\n", type_info(kType).name, n_in,
                   static_cast<double>(worst));
    CHECK(worst <= 1.0f);
  }
}

}  // namespace

TEST(cuda_tiles_read_back_what_was_repacked) {
#define REFLEX_CHECK(type) check_type<GgmlType::type>();
  REFLEX_TILED(REFLEX_CHECK)
#undef REFLEX_CHECK
}

TEST(cuda_tiles_hold_the_bytes_of_their_blocks) {
#define REFLEX_CHECK(type)                                    \
  CHECK_EQ(static_cast<size_t>(Tile<GgmlType::type>::kBytes), \
           kTileRows* row_bytes(GgmlType::type, static_cast<size_t>(Tile<GgmlType::type>::kCell)));
  REFLEX_TILED(REFLEX_CHECK)
#undef REFLEX_CHECK
}

TEST(cuda_activation_orders_are_permutations) {
  std::vector<int> seen(kUnit, 0);
  for (int c = 0; c < kUnit; ++c) ++seen[static_cast<size_t>(x_index(c))];
  for (int n : seen) CHECK_EQ(n, 1);
  constexpr int kRows = 32, kUnits = 2;
  std::vector<int> fragment(kRows * kUnits * kUnit, 0);
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kUnits * kUnit; ++c) ++fragment[fragment_index(r, c, kUnits)];
  for (int n : fragment) CHECK_EQ(n, 1);
}
