// Which kernel does a step, and with what shape: the choice between one row, a few and many, how
// warps share a tile, which types go together. Owns the scratch that products need.
#pragma once
#include <span>

#include "backend/cuda/device.h"
#include "backend/cuda/params.h"
#include "backend/cuda/residence.h"

namespace reflex::cuda {

struct Norming {
  const float* weight = nullptr;  ///< null: none
  float eps = 0;
};

/// out = W x + bias [+ residual]
struct Product {
  const Weight* weight = nullptr;
  const DeviceWeight* at = nullptr;
  const float* bias = nullptr;
  const float* residual = nullptr;
  float* out = nullptr;
  int32_t stride = 0;  ///< floats from row to row of out and residual
};

class Launcher {
 public:
  Launcher(Device& device, CUstream stream, bool exact, int32_t max_rows, const Plan& plan);

  /// From here on kernels may start early (programmatic dependent launch), or not.
  void set_overlap(bool on) { overlap_ = on && device_.overlaps_launches(); }
  /// The next launch waits for all before it.
  void order_next() { first_ = true; }

  template <class P>
  void launch(const char* image, const std::string& kernel, Grid grid, uint32_t threads, uint32_t shared,
              const P& p) {
    device_.launch(device_.kernel(image, kernel), grid, threads, shared, {stream_, overlap_ && !first_}, p);
    first_ = false;
  }

  /// Rows of x, f32 or (where `fragments`) f16 fragments.
  struct Input {
    const void* x;
    bool fragments;
    int32_t rows, width;
    Norming norm;
  };
  /// Each part's product; with `swiglu` the two parts' silu(a) * b goes to it instead, as fragments
  /// where so asked, and the parts' own `out` may be used as scratch.
  void products(const Input& in, std::span<const Product> parts, void* swiglu, bool swiglu_fragments);
  /// Blocks of a one-row product with a weight of tiles: as many leave their best output at `best`.
  uint32_t one_row_blocks(const Product& part) const;
  void set_best(Best* best) { best_ = best; }  ///< for the next one-row product
  void norm(const float* x, float* out, const Norming& n, int32_t n_groups, int32_t group);
  void attention(AttentionParams p, bool f32_states, bool one_row);

  /// Whether products of `rows` rows with this weight read and write fragments.
  bool uses_fragments(const DeviceWeight& w, int32_t rows) const { return !exact_ && w.tiled && rows > 1; }
  size_t scratch_bytes() const {
    return fragments_.bytes() + normed_.bytes() + f16_tiles_.bytes() + workspace_.bytes();
  }
  static int32_t padded_rows(int32_t rows) { return (rows + 127) / 128 * 128; }
  static int32_t units(int32_t width) { return (width + kUnitValues - 1) / kUnitValues; }

 private:
  static constexpr int32_t kUnitValues = 128;
  struct Share {
    uint32_t blocks;
    int32_t split;
    double cost = 0;  ///< in cells
  };
  /// What a one-row product's shape depends on.
  struct OneRow {
    const TileGeometry* tile = nullptr;
    uint32_t cell_bytes = 0;             ///< the largest of its types'
    int32_t tiles_a = 0, tiles_b = 0;    ///< of the first type (pair: of one matrix), of the second
    int32_t cells = 0;                   ///< of a tile
    bool pair = false, can_two = false;  ///< gate and up; whether all types can be taken in twos

    int32_t tiles() const { return tiles_a + tiles_b; }
    int32_t twos() const { return (tiles_a + 1) / 2 + (tiles_b + 1) / 2; }
  };
  struct RowShape {
    Share share;
    uint32_t threads = 0, shared = 0;
    int32_t units = 0, ring = 0;
    bool two = false;  ///< by matvec_two: tiles in twos
  };
  struct MatmulShape {
    int32_t mt = 1, cells_per_split = 1;
    uint32_t shared = 0;
    Grid grid;
  };
  MatmulShape matmul_shape(const MatmulParams& p, int32_t cells, const TileGeometry& tile) const;
  Share share_items(int32_t items, int32_t cells, double cell_cost, uint32_t warps) const;
  RowShape one_row_shape(const OneRow& row) const;
  void tiled(const Input& in, const void* fragments, std::span<const Product> parts, void* swiglu,
             bool swiglu_fragments);
  void one_row(const Input& in, std::span<const Product> parts, void* swiglu);
  void rows(const Input& in, const void* fragments, std::span<const Product> parts, void* swiglu,
            bool swiglu_fragments);
  void raw(const Input& in, const Product& part);
  void raw_as_f16(const Input& in, const Product& part);
  const void* to_fragments(const Input& in);
  const float* normed_rows(const Input& in);
  static void fill_part(TiledPart& part, const Product& product, int32_t first_tile);

  Device& device_;
  CUstream stream_;
  const bool exact_;
  bool overlap_ = false, first_ = true;
  Best* best_ = nullptr;
  DeviceBuffer fragments_, normed_, f16_tiles_, workspace_, matmul_tickets_;
};

}  // namespace reflex::cuda
