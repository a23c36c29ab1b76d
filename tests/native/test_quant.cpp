// native/quant where the sanitizers can see it: rows in buffers of exactly their size, at every
// alignment; the table; errors. That the values are right is tests/quant's, against gguf-py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/half.h"
#include "check.h"
#include "quant/dequantize.h"
#include "quant/int8_form.h"
#include "quant/quantize.h"
#include "test_quant_set.h"

using namespace reflex;

namespace {

struct Line {
  GgmlType type;
  const char* kind;
};
constexpr Line kLines[] = {
#define REFLEX_TYPE(name, id, values, bytes, kind) {GgmlType::name, #kind},
#include "quant/types.def"
#undef REFLEX_TYPE
};

/// Bytes from a linear congruential generator (Knuth's MMIX constants); any will do.
std::vector<uint8_t> random_bytes(size_t n, uint64_t seed) {
  std::vector<uint8_t> bytes(n);
  for (uint8_t& b : bytes) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    b = static_cast<uint8_t>(seed >> 56);
  }
  return bytes;
}

/// The bytes at an address that is `offset` past an aligned one, in an allocation that ends with them.
struct Placed {
  Placed(const std::vector<uint8_t>& bytes, size_t offset) : memory(new uint8_t[bytes.size() + offset]) {
    data = memory.get() + offset;
    std::copy(bytes.begin(), bytes.end(), data);
  }
  std::unique_ptr<uint8_t[]> memory;
  uint8_t* data;
};

bool same_value(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

size_t blocks_to_try(const TypeInfo& t) { return t.block_values == 1 ? 37 : 9; }

}  // namespace

TEST(quant_decode_reads_and_writes_exactly_the_row_at_any_alignment) {
  for (const Line& line : kLines) {
    if (!can_dequantize(line.type)) continue;
    const TypeInfo& t = type_info(line.type);
    for (size_t blocks = 0; blocks <= blocks_to_try(t); ++blocks) {
      const size_t n = blocks * t.block_values;
      const std::vector<uint8_t> bytes = random_bytes(row_bytes(t.type, n), 1 + blocks);
      std::vector<float> first(n);
      for (const size_t offset : {0, 1, 2, 3, 7}) {
        const Placed row(bytes, offset);
        const std::unique_ptr<float[]> y(new float[n]);
        dequantize_row(t.type, row.data, y.get(), n);
        if (offset == 0) std::copy(y.get(), y.get() + n, first.begin());
        for (size_t i = 0; i < n; ++i) CHECK(same_value(y[i], first[i]));
      }
    }
  }
}

TEST(quant_int8_form_multiplies_out_to_decode_at_any_alignment) {
  for (const Line& line : kLines) {
    const TypeInfo& t = type_info(line.type);
    const auto id = static_cast<uint32_t>(t.type);
    CHECK_EQ(quant::has_int8_form(id), t.kind == TypeKind::packed);
    if (t.kind != TypeKind::packed) continue;
    for (size_t blocks = 1; blocks <= 9; ++blocks) {
      const size_t n = blocks * t.block_values;
      const Placed row(random_bytes(row_bytes(t.type, n), 77 * blocks), blocks % 4);
      const std::unique_ptr<int8_t[]> q(new int8_t[n]);
      const std::unique_ptr<float[]> scale(new float[n / 16]), y(new float[n]);
      // Where the type has no offset its minimum may be null: it is never touched.
      const std::unique_ptr<float[]> min(quant::has_min(id) ? new float[n / 16] : nullptr);
      CHECK(quant::unpack_int8(id, row.data, q.get(), scale.get(), min.get(), n));
      dequantize_row(t.type, row.data, y.get(), n);
      for (size_t i = 0; i < n; ++i) {
        const float product = scale[i / 16] * static_cast<float>(q[i]);
        CHECK(same_value(y[i], min ? product + min[i / 16] : product));
      }
    }
  }
}

TEST(quant_single_groups_decode_as_the_row_does) {
  for (const Line& line : kLines)
    quant::with_format(static_cast<uint32_t>(line.type), [&]<class F>() {
      const Placed row(random_bytes(sizeof(typename F::Block), 5), 1);
      const auto* block = reinterpret_cast<const typename F::Block*>(row.data);
      float whole[F::kValues], group[32];
      dequantize_row(line.type, row.data, whole, F::kValues);
      for (int g = 0; g < F::kValues / 32; ++g) {
        quant::decode32<F>(*block, g, group);
        for (int i = 0; i < 32; ++i) CHECK(same_value(group[i], whole[32 * g + i]));
      }
    });
}

TEST(quant_scale_every_32_means_two_equal_scales_and_16_that_they_may_differ) {
  for (const Line& line : kLines)
    quant::with_format(static_cast<uint32_t>(line.type), [&]<class F>() {
      constexpr size_t n = 8 * F::kValues;
      const std::vector<uint8_t> row = random_bytes(row_bytes(line.type, n), 11);
      int8_t q[n];
      float scale[n / 16], min[n / 16] = {};
      quant::unpack_row<F>(row.data(), q, scale, min, n);
      bool differ = false;
      for (size_t i = 0; i < n / 16; i += 2)
        differ |= !same_value(scale[i], scale[i + 1]) || !same_value(min[i], min[i + 1]);
      CHECK_EQ(differ, F::kScaleEvery == 16);
    });
}

// A program holds the headers once per instruction set; the linker must not merge the copies.
TEST(quant_two_sets_in_one_program_are_different_code_with_the_same_results) {
  const auto id = static_cast<uint32_t>(GgmlType::Q4_K);
  CHECK(test_set::unpack != &quant::unpack_int8);
  const std::vector<uint8_t> row = random_bytes(row_bytes(GgmlType::Q4_K, 512), 3);
  int8_t q[2][512];
  float scale[2][32], min[2][32];
  CHECK(quant::unpack_int8(id, row.data(), q[0], scale[0], min[0], 512));
  CHECK(test_set::unpack(id, row.data(), q[1], scale[1], min[1], 512));
  CHECK(std::memcmp(q[0], q[1], sizeof q[0]) == 0);
  for (int i = 0; i < 32; ++i)
    CHECK(same_value(scale[0][i], scale[1][i]) && same_value(min[0][i], min[1][i]));
}

TEST(quant_every_half_widens_as_base_half_does) {
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
    const auto h = static_cast<uint16_t>(bits);
    quant::Half half;
    std::memcpy(&half, &h, sizeof half);
    CHECK(same_value(quant::to_float(half), f16_to_f32(h)));
  }
}

TEST(quant_types_without_weights_are_refused) {
  float y[256] = {};
  uint8_t x[512] = {};
  for (const Line& line : kLines) {
    if (can_dequantize(line.type)) continue;
    CHECK_THROWS(ErrorKind::unsupported, dequantize_row(line.type, x, y, type_info(line.type).block_values));
    CHECK_THROWS(ErrorKind::unsupported, quantize_row(line.type, y, x, type_info(line.type).block_values));
    CHECK(!quant::unpack_int8(static_cast<uint32_t>(line.type), x, nullptr, nullptr, nullptr, 0));
  }
}

TEST(quant_broken_rows_are_refused_before_anything_is_touched) {
  CHECK_THROWS(ErrorKind::invalid_input, dequantize_row(GgmlType::Q4_K, nullptr, nullptr, 255));
  CHECK_THROWS(ErrorKind::invalid_input, dequantize_row(GgmlType::Q8_0, nullptr, nullptr, 31));
  CHECK_THROWS(ErrorKind::invalid_input, quantize_row(GgmlType::Q8_0, nullptr, nullptr, 33));
}

TEST(quant_encode_and_decode_stay_within_half_a_step) {
  constexpr size_t n = 32 * 64;
  const std::vector<uint8_t> noise = random_bytes(2 * n, 9);
  std::vector<float> x(n), back(n);
  for (size_t i = 0; i < n; ++i)
    x[i] = static_cast<float>(noise[2 * i] * 256 + noise[2 * i + 1] - 32768) / 1e4f;
  struct {
    GgmlType type;
    float tolerance;  // of the largest value of the block: half a step, and the scale's own rounding
  } const cases[] = {{GgmlType::F32, 0.0f},
                     {GgmlType::F16, 0x1p-11f},
                     {GgmlType::BF16, 0x1p-8f},
                     {GgmlType::Q8_0, 0.5f / 127 + 0x1p-10f},
                     {GgmlType::Q4_0, 1.0f / 8 + 0x1p-10f}};
  for (const auto& c : cases) {
    std::vector<uint8_t> row(row_bytes(c.type, n));
    quantize_row(c.type, x.data(), row.data(), n);
    dequantize_row(c.type, row.data(), back.data(), n);
    for (size_t block = 0; block < n; block += 32) {
      float largest = 0;
      for (size_t i = block; i < block + 32; ++i) largest = std::fmax(largest, std::fabs(x[i]));
      for (size_t i = block; i < block + 32; ++i) CHECK(std::fabs(x[i] - back[i]) <= c.tolerance * largest);
    }
  }
}
