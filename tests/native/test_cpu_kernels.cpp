// Products of every type and instruction set on buffers of the exact size, so that a sanitizer sees a
// read past a weight's last byte, an activation's, or a write past y.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "backend/cpu/isa.h"
#include "check.h"
#include "quant/dequantize.h"

using namespace reflex;

namespace {

constexpr double kExactError = 1e-10, kFastError = 1e-4;  // design.md
constexpr int32_t kDrawnRows = 24;

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<uint8_t[], Free>;

Aligned aligned(size_t n) {
  return Aligned(static_cast<uint8_t*>(std::aligned_alloc(64, (n + 63) / 64 * 64)));
}

/// Bytes whose halves are all finite and of about the same size.
std::vector<uint8_t> random_bytes(size_t n, std::mt19937& rng) {
  std::vector<uint8_t> bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng() & 0x3F);
  return bytes;
}

struct Sums {
  double error = 0, energy = 0;
};

/// Adds up the squared error of W x against float64, W (n_out, n_in), and the energy of its terms, |w|^2
/// |x|^2 / n_in. The bytes below give weights of one sign, whose sums may cancel: over |W x|^2 the same
/// rounding of x would look as large as the draw pleases.
void product_error(const cpu::Kernels& k, const TypeInfo& type, int32_t n_in, int32_t n_out, int32_t rows,
                   bool exact, uint32_t seed, Sums& sums) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const size_t bytes = row_bytes(type.type, static_cast<size_t>(n_in));
  const std::vector<uint8_t> w = random_bytes(bytes * static_cast<size_t>(n_out), rng);
  std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(n_in));
  for (float& f : x) f = normal(rng);
  const auto id = static_cast<uint32_t>(type.type);
  const cpu::Form form = k.form(id, n_in, rows, exact);
  const Aligned act = aligned(k.act_bytes(form, n_in, rows)), scratch = aligned(k.matmul_scratch(n_in, rows));
  const int32_t unit = k.act_unit(form);
  for (int32_t r = 0; r < rows; r += unit)
    k.prepare(form, x.data() + static_cast<size_t>(r) * static_cast<size_t>(n_in), static_cast<size_t>(n_in),
              n_in, rows, r, std::min(rows, r + unit), act.get());
  std::vector<float> y(static_cast<size_t>(rows) * static_cast<size_t>(n_out));
  cpu::MatmulArgs a;
  a.type = id;
  a.w = w.data();
  a.row_bytes = bytes;
  a.n_in = n_in;
  a.form = form;
  a.act = act.get();
  a.n_rows = rows;
  a.y = y.data();
  a.ldy = static_cast<size_t>(n_out);
  a.scratch = scratch.get();
  k.matmul(a, 0, n_out);

  std::vector<float> row(static_cast<size_t>(n_in));
  for (int32_t r = 0; r < rows; ++r)
    for (int32_t j = 0; j < n_out; ++j) {
      dequantize_row(type.type, w.data() + static_cast<size_t>(j) * bytes, row.data(), row.size());
      double sum = 0, ww = 0, xx = 0;
      for (size_t i = 0; i < row.size(); ++i) {
        const auto wi = static_cast<double>(row[i]);
        const auto xi = static_cast<double>(x[static_cast<size_t>(r) * row.size() + i]);
        sum += wi * xi;
        ww += wi * wi;
        xx += xi * xi;
      }
      const double got = static_cast<double>(
          y[static_cast<size_t>(r) * static_cast<size_t>(n_out) + static_cast<size_t>(j)]);
      sums.error += (got - sum) * (got - sum);
      sums.energy += ww * xx / n_in;
    }
}

}  // namespace

TEST(cpu_products_stay_inside_their_buffers) {
  for (const cpu::Kernels* k : cpu::usable_kernels())
    for (uint32_t id = 0; id < 64; ++id) {
      const TypeInfo* type = find_type(id);
      if (!type || !can_dequantize(type->type)) continue;
      const auto block = static_cast<int32_t>(type->block_values);
      for (int32_t n_in : {block == 1 ? 45 : std::max(block, 32), block == 1 ? 64 : 3 * std::max(block, 32)})
        for (int32_t rows : {1, 3, 17})
          for (bool exact : {false, true}) {
            // One row of x is one draw of its rounding, which all of W sees: several, then.
            Sums sums;
            for (int32_t draw = 0; draw * rows < kDrawnRows; ++draw)
              product_error(*k, *type, n_in, 7, rows, exact, static_cast<uint32_t>(draw), sums);
            const double e = sums.error / sums.energy;
            const double gate = exact ? kExactError : kFastError;
            if (!(e <= gate))
              std::fprintf(stderr, "%s %s n_in %d rows %d exact %d: error %.3g\n", k->name, type->name, n_in,
                           rows, exact, e);
            CHECK(e <= gate);
          }
    }
}

// Four super-blocks are decoded together and sixteen rows folded together: every remainder of both, and as
// many rows of x as share a decoded weight.
TEST(cpu_products_of_super_blocks_of_every_count) {
  for (const cpu::Kernels* k : cpu::usable_kernels())
    for (const char* name : {"Q4_K", "Q5_K", "Q6_K"}) {
      const TypeInfo* type = nullptr;
      for (uint32_t id = 0; id < 64; ++id)
        if (const TypeInfo* t = find_type(id); t && std::strcmp(t->name, name) == 0) type = t;
      for (int32_t blocks = 1; blocks <= 9; ++blocks)
        for (int32_t rows = 1; rows <= 4; ++rows) {
          Sums sums;
          for (uint32_t draw = 0; draw < 3; ++draw)
            product_error(*k, *type, 256 * blocks, 35, rows, false, draw, sums);
          const double e = sums.error / sums.energy;
          if (!(e <= kFastError))
            std::fprintf(stderr, "%s %s %d blocks, %d rows: error %.3g\n", k->name, name, blocks, rows, e);
          CHECK(e <= kFastError);
        }
    }
}
