#include "backend/cuda/launch.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "backend/cuda/tile.h"
#include "backend/cuda/tile_params.h"

namespace reflex::cuda {

namespace {

constexpr int32_t kRawRows = 4;  // beyond, a type without tiles, F32 apart, is decoded to F16 tiles once
constexpr size_t kF16Scratch = size_t{64} << 20;
constexpr uint32_t kElementThreads = 256, kRowThreads = 512;
constexpr int32_t kWorkspaceBlocks = 300;  // that share sums, at most: a little more than the SMs of any card
// What merging a tile's split sums costs, and a cell of each of two tiles taken together, in cells taken
// alone.
constexpr double kMergeCost = 0.4, kTwoCells = 1.6;
// Microseconds on an H200, for choosing between shapes: of a block per 128 values of n_in, of a block
// beside that, of merging splits and of what each leaves; a finer split must be that much better.
struct BlockCost {
  int32_t mt;
  double unit;
};
constexpr BlockCost kBlockCosts[] = {{1, 0.5}, {2, 0.65}, {4, 1.8}, {8, 3.3}};
constexpr double kBlockTime = 5.0, kMergeTime = 2.5, kMergeReadTime = 0.15, kWorthwhile = 0.97;
constexpr uint32_t kStaticShared = 1024;              // of a kernel beside its ring, at most
constexpr uint32_t kMatvecStatic = 3072;              // of a one-row product beside its ring, at most
constexpr int64_t kSomeCells = 24, kManyCells = 128;  // of a one-row product, per multiprocessor

/// The kernel of two types, where there is one.
bool has_pair_kernel(GgmlType a, GgmlType b) {
#define REFLEX_PAIR(x, y) \
  if (a == GgmlType::x && b == GgmlType::y) return true;
  REFLEX_TILED_PAIRS(REFLEX_PAIR)
#undef REFLEX_PAIR
  return false;
}

/// Whether a warp can take two tiles of the type at a time.
bool in_twos(GgmlType type) {
#define REFLEX_256(t) \
  if (type == GgmlType::t) return true;
  REFLEX_TILED_256(REFLEX_256)
#undef REFLEX_256
  return false;
}

/// Whether b's tiles come right after a's.
bool follows(const Product& a, const Product& b) {
  return b.at->at == a.at->at + static_cast<size_t>(a.at->n_tiles) * a.at->tile_bytes;
}

const char* type_name(GgmlType type) { return type_info(type).name; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

RepackParams repack_params(const uint8_t* raw, const Weight& w, uint8_t* tiles, int32_t n_rows) {
  const TypeInfo& info = type_info(w.type);
  RepackParams p{};
  p.raw = raw;
  p.tiles = tiles;
  p.row_bytes = row_bytes(w.type, static_cast<size_t>(w.n_in()));
  p.type = static_cast<int32_t>(w.type);
  p.n_rows = n_rows;
  p.n_in = static_cast<int32_t>(w.n_in());
  p.n_cells = static_cast<int32_t>(ceil_div(w.n_in(), kUnit));
  p.block_bytes = static_cast<int32_t>(info.block_bytes);
  p.block_values = static_cast<int32_t>(info.block_values);
  p.n_tiles = static_cast<int32_t>(ceil_div(n_rows, kTileRows));
  return p;
}

}  // namespace

Launcher::Launcher(Device& device, CUstream stream, bool exact, int32_t max_rows, const Plan& plan)
    : device_(device), stream_(stream), exact_(exact) {
  int32_t widest = 0;
  bool untiled = false;
  for (const ValueSpec& v : plan.values) widest = std::max(widest, v.width);
  for (const Weight& w : plan.weights)
    untiled |= w.ne[1] > 1 && !(tile_geometry(w.type) && w.n_in() % 32 == 0);
  const auto rows = static_cast<size_t>(padded_rows(max_rows));
  if (!exact)  // zeroed: rows beyond a pass's last are computed with, though never read back
    fragments_ = DeviceBuffer::zeros(device, rows * static_cast<size_t>(units(widest)) * kUnit * 2,
                                     "activations", stream);
  if (exact || untiled)
    normed_ = DeviceBuffer(device, rows * static_cast<size_t>(widest) * sizeof(float), "activations");
  if (!exact) {
    // The largest block's sums: 8 mtiles of 16 rows by 8 warps of 4 tiles of 8.
    workspace_ = DeviceBuffer(device, size_t{kWorkspaceBlocks} * 8 * 4 * 4 * kMatmulThreads * sizeof(float),
                              "split products");
    matmul_tickets_ =
        DeviceBuffer::zeros(device, kWorkspaceBlocks * sizeof(uint32_t), "split products", stream);
  }
  if (!exact && untiled) f16_tiles_ = DeviceBuffer(device, kF16Scratch, "decoded weights");
}

// Workers (split warps each) take items, tiles or two, in turn, so the last round should be full; a split sum
// costs a merge per item.
Launcher::Share Launcher::share_items(int32_t items, int32_t cells, double cell_cost, uint32_t warps) const {
  Share best{1, 1, 1e30};
  for (int32_t split = 1; split <= static_cast<int32_t>(warps) && split <= cells; split *= 2) {
    const auto per_block = static_cast<int32_t>(warps) / split;
    const auto blocks =
        static_cast<uint32_t>(std::min<int64_t>(device_.sm_count(), ceil_div(items, per_block)));
    const auto rounds = static_cast<double>(ceil_div(items, static_cast<int64_t>(blocks) * per_block));
    const double cost =
        rounds * (cell_cost * static_cast<double>(ceil_div(cells, split)) + (split > 1 ? kMergeCost : 0));
    if (cost < best.cost) best = {blocks, split, cost};
  }
  return best;
}

// Threads of a one-row product and places of their rings: as deep as fits, because what a ring holds is
// fetched while the product before it runs; fewer threads where there is little to do, so that blocks of the
// next product start beside this one's. Where there is much, one block has a multiprocessor to itself and its
// successor takes over as it ends. Two tiles a warp where the type can and it does not leave warps idle.
Launcher::RowShape Launcher::one_row_shape(const OneRow& row) const {
  const int64_t cells_per_sm =
      ceil_div(int64_t{row.tiles()} * row.cells * (row.pair ? 2 : 1), device_.sm_count());
  const bool much = cells_per_sm > kManyCells;
  RowShape r;
  r.units = row.cells * (row.tile->cell_values / kUnit);
  const auto shared = [&](int32_t ring, uint32_t place) {
    const uint32_t warps = r.threads / 32;
    return static_cast<uint32_t>(r.units) * kMatvecUnitBytes +
           warps * (static_cast<uint32_t>(ring) * place + 2 * 2 * kTileRows * sizeof(float));
  };
  const auto fits = [&](int32_t ring, uint32_t place) {
    return shared(ring, place) + kMatvecStatic <= device_.max_shared();
  };
  const uint32_t threads = cells_per_sm > kSomeCells ? kMatvecThreads : kMatvecThreads / 2;
  const auto settle = [&](bool two) {
    const uint32_t place = two ? 2 * row.cell_bytes : row.cell_bytes;
    const int32_t least = two ? kMinPlaces : kMinRing;
    r.two = two;
    r.threads = threads;
    r.ring = two ? kMaxPlaces : kMaxRing;
    while (r.ring > least && !fits(r.ring, place)) r.ring = two ? r.ring - 1 : least;
    while (r.threads > 32 && !fits(r.ring, place)) r.threads /= 2;
    r.shared = shared(r.ring, place);
    const uint32_t warps = r.threads / 32;
    r.share = two ? share_items(row.pair ? row.tiles_a : row.twos(), row.cells, kTwoCells, warps)
                  : share_items(row.tiles(), row.cells, row.pair ? 2 : 1, warps);
  };
  settle(false);
  if (row.can_two) {
    const RowShape one = r;
    settle(true);
    if (r.threads < one.threads || r.share.cost > one.share.cost) r = one;
  }
  if (much) r.shared = std::max(r.shared, device_.max_shared() / 2 + kMatvecStatic);
  return r;
}

uint32_t Launcher::one_row_blocks(const Product& part) const {
  OneRow row;
  row.tile = tile_geometry(part.weight->type);
  row.cell_bytes = static_cast<uint32_t>(row.tile->cell_bytes);
  row.tiles_a = part.at->n_tiles;
  row.cells = part.at->n_cells;
  row.can_two = in_twos(part.weight->type);
  return one_row_shape(row).share.blocks;
}

void Launcher::fill_part(TiledPart& part, const Product& p, int32_t first_tile) {
  part.tiles = reinterpret_cast<const uint8_t*>(p.at->at);
  part.bias = p.bias;
  part.residual = p.residual;
  part.out = p.out;
  part.type = static_cast<int32_t>(p.weight->type);
  part.n_out = static_cast<int32_t>(p.weight->n_out());
  part.stride = p.stride;
  part.first_tile = first_tile;
  part.end_tile = first_tile + p.at->n_tiles;
  part.n_cells = p.at->n_cells;
  part.tile_bytes = p.at->tile_bytes;
  part.scale = p.at->scale;
}

void Launcher::norm(const float* x, float* out, const Norming& n, int32_t n_groups, int32_t group) {
  launch("norm", "rms_norm", {static_cast<uint32_t>(n_groups)}, kElementThreads, 0,
         NormParams{x, n.weight, out, n.eps, n_groups, group});
}

const float* Launcher::normed_rows(const Input& in) {
  if (!in.norm.weight) return static_cast<const float*>(in.x);
  norm(static_cast<const float*>(in.x), normed_.at<float>(), in.norm, in.rows, in.width);
  return normed_.at<float>();
}

const void* Launcher::to_fragments(const Input& in) {
  if (in.fragments) return in.x;
  launch("norm", "rows_to_fragments", {static_cast<uint32_t>(in.rows)}, kRowThreads, 0,
         FragmentParams{static_cast<const float*>(in.x), in.norm.weight, fragments_.at(), in.norm.eps,
                        in.rows, in.width, units(in.width)});
  return fragments_.at();
}

void Launcher::products(const Input& in, std::span<const Product> parts, void* swiglu,
                        bool swiglu_fragments) {
  const bool one = in.rows == 1;
  std::vector<Product> with_tiles, without;
  for (const Product& p : parts) (!exact_ && p.at->tiled ? with_tiles : without).push_back(p);
  const bool fused = swiglu && without.empty() && parts[0].weight->type == parts[1].weight->type;

  const void* fragments = nullptr;
  // F32 weights are worth f32: they are few (routers, gates), or their file is meant to be exact.
  const auto decode = [&](const Product& p) {
    return !exact_ && (in.fragments || (in.rows > kRawRows && p.weight->type != GgmlType::F32));
  };
  const bool any_decoded = std::any_of(without.begin(), without.end(), decode);
  if (!one && !exact_ && (!with_tiles.empty() || any_decoded)) fragments = to_fragments(in);
  if (fused) return tiled(in, fragments, parts, swiglu, swiglu_fragments);
  for (size_t i = 0; i < with_tiles.size();) {  // runs that one kernel can take
    size_t n = 1;
    GgmlType second = with_tiles[i].weight->type;
    for (; i + n < with_tiles.size(); ++n) {
      const GgmlType first = with_tiles[i].weight->type, next = with_tiles[i + n].weight->type;
      // One launch reads parts of a type as one run of tiles.
      if (one && next == with_tiles[i + n - 1].weight->type &&
          !follows(with_tiles[i + n - 1], with_tiles[i + n]))
        break;
      if (next == second || (next == first && second == first)) continue;
      if (!one || second != first || !has_pair_kernel(first, next)) break;
      second = next;
    }
    tiled(in, fragments, std::span(with_tiles).subspan(i, n), nullptr, false);
    i += n;
  }
  if (!without.empty()) {
    Input plain = in;
    if (!std::all_of(without.begin(), without.end(), decode))
      plain = {normed_rows(in), false, in.rows, in.width, {}};
    for (const Product& p : without)
      if (decode(p))
        raw_as_f16({fragments, true, in.rows, in.width, {}}, p);
      else
        raw(plain, p);
  }
  if (swiglu) {
    const auto n = static_cast<uint64_t>(in.rows) * static_cast<uint64_t>(parts[0].weight->n_out());
    launch("norm", "swiglu", {static_cast<uint32_t>(ceil_div(static_cast<int64_t>(n), kElementThreads)), 1},
           kElementThreads, 0, PairParams{parts[0].out, parts[1].out, static_cast<float*>(swiglu), n});
  }
}

void Launcher::tiled(const Input& in, const void* fragments, std::span<const Product> parts, void* swiglu,
                     bool swiglu_fragments) {
  if (in.rows == 1)
    one_row(in, parts, swiglu);
  else
    rows(in, fragments, parts, swiglu, swiglu_fragments);
}

void Launcher::one_row(const Input& in, std::span<const Product> parts, void* swiglu) {
  const GgmlType first = parts[0].weight->type;
  GgmlType second = first;
  MatvecParams p{};
  OneRow row;
  int n = 0;
  int32_t tiles = 0;
  for (TiledPart& part : p.part) part.first_tile = INT32_MAX;
  for (const bool is_first : {true, false}) {  // the kernel takes all of one type, then all of the other
    if (!is_first) p.first_b = n;
    for (const Product& part : parts) {
      if ((part.weight->type == first) != is_first) continue;
      if (!is_first) second = part.weight->type;
      fill_part(p.part[n++], part, swiglu ? 0 : tiles);
      tiles += part.at->n_tiles;
      row.cell_bytes =
          std::max(row.cell_bytes, static_cast<uint32_t>(tile_geometry(part.weight->type)->cell_bytes));
    }
    if (is_first) p.end_a = tiles;
  }
  p.first_b = std::min(p.first_b, kMaxParts - 1);
  p.end_b = tiles;
  if (swiglu) {  // gate and up are read side by side
    p.end_a = p.end_b = p.part[0].end_tile;
    p.part[0].out = static_cast<float*>(swiglu);
  }
  p.x = static_cast<const float*>(in.x);
  p.norm_weight = in.norm.weight;
  p.norm_eps = in.norm.eps;
  p.width = in.width;
  p.n_cells = parts[0].at->n_cells;
  row.tile = tile_geometry(first);
  row.tiles_a = p.end_a;
  row.tiles_b = p.end_b - p.end_a;
  row.cells = p.n_cells;
  row.pair = swiglu != nullptr;
  row.can_two = in_twos(first) && in_twos(second);
  const RowShape shape = one_row_shape(row);
  p.n_units = shape.units;
  p.ring = shape.ring;
  p.split = shape.share.split;
  p.split_log2 = std::countr_zero(static_cast<uint32_t>(p.split));
  p.n_workers = static_cast<int32_t>(shape.share.blocks * (shape.threads / 32)) / p.split;
  p.begin_b = p.end_a / p.n_workers * p.n_workers;
  p.best = std::exchange(best_, nullptr);
  std::string name =
      format("%s%s%s", shape.two ? "matvec_two_" : "matvec_", swiglu ? "pair_" : "", type_name(first));
  if (second != first) name += format("_%s", type_name(second));
  launch(shape.two ? "matvec_two" : "matvec", name, {shape.share.blocks}, shape.threads, shape.shared, p);
}

// 16 mt rows a block; where that leaves multiprocessors idle, blocks share a sum.
void Launcher::rows(const Input& in, const void* fragments, std::span<const Product> parts, void* swiglu,
                    bool swiglu_fragments) {
  MatmulParams p{};
  int32_t tiles = 0;
  for (const Product& part : parts) {
    fill_part(p.part[p.n_parts++], part, swiglu ? 0 : tiles);
    tiles += part.at->n_tiles;
  }
  if (swiglu) {
    p.epilogue = Epilogue::swiglu;
    p.part[0].out = static_cast<float*>(swiglu);
    p.part[0].stride = p.part[0].n_out;
    p.out_f16 = swiglu_fragments ? swiglu : nullptr;
    p.out_units = units(p.part[0].n_out);
  }
  const TileGeometry& tile = *tile_geometry(parts[0].weight->type);
  const int32_t cells = parts[0].at->n_cells;
  p.x = fragments;
  p.n_rows = in.rows;
  p.n_units = cells * (tile.cell_values / kUnit);

  const MatmulShape shape = matmul_shape(p, cells, tile);
  p.cells_per_split = shape.cells_per_split;
  p.workspace = workspace_.at<float>();
  p.tickets = matmul_tickets_.at<uint32_t>();
  launch("matmul", format("matmul_%d_%s", shape.mt, type_name(parts[0].weight->type)), shape.grid,
         kMatmulThreads, shape.shared, p);
}

// The rows of a block and the splits of n_in that should take least: blocks in rounds over the
// multiprocessors, each its units and what it costs beside them.
Launcher::MatmulShape Launcher::matmul_shape(const MatmulParams& p, int32_t cells,
                                             const TileGeometry& tile) const {
  MatmulShape best;
  double best_cost = 1e30;
  const bool pair = p.epilogue == Epilogue::swiglu;
  const int32_t units_per_cell = tile.cell_values / kUnit;
  for (const BlockCost& c : kBlockCosts) {
    if (c.mt > 1 && 8 * c.mt >= p.n_rows) continue;  // half of the block would be idle
    const uint32_t shared = matmul_ring(device_.capability() >= 80, c.mt, tile.cell_values, tile.cell_bytes);
    if (shared + kStaticShared > device_.max_shared()) continue;
    const int64_t per_group = int64_t{8} * matmul_tiles(c.mt) / (pair ? 2 : 1);
    int64_t groups = 0;
    for (int i = 0; i < (pair ? 1 : p.n_parts); ++i)
      groups += ceil_div(p.part[i].end_tile - p.part[i].first_tile, per_group);
    const int64_t row_blocks = ceil_div(p.n_rows, 16 * c.mt), blocks = row_blocks * groups;
    for (int64_t s = 1; s == 1 || (s <= cells && s * blocks <= kWorkspaceBlocks); ++s) {
      const int64_t each = ceil_div(cells, s), n = ceil_div(cells, each);
      const auto rounds = static_cast<double>(ceil_div(blocks * n, device_.sm_count()));
      // A merge reads what all splits left: the more rows, the more of it.
      const double merge = n > 1 ? kMergeTime + static_cast<double>(n * c.mt) * kMergeReadTime : 0;
      const double cost = rounds * (static_cast<double>(each * units_per_cell) * c.unit + kBlockTime) + merge;
      if (cost >= best_cost * kWorthwhile) continue;
      best_cost = cost;
      best = {c.mt,
              static_cast<int32_t>(each),
              shared,
              {static_cast<uint32_t>(row_blocks), static_cast<uint32_t>(groups), static_cast<uint32_t>(n)}};
    }
  }
  return best;
}

void Launcher::raw(const Input& in, const Product& part) {
  const Weight& w = *part.weight;
  RawLinearParams p{};
  p.w = reinterpret_cast<const uint8_t*>(part.at->at);
  p.x = static_cast<const float*>(in.x);
  p.bias = part.bias;
  p.residual = part.residual;
  p.out = part.out;
  p.row_bytes = row_bytes(w.type, static_cast<size_t>(w.n_in()));
  p.type = static_cast<int32_t>(w.type);
  p.n_in = static_cast<int32_t>(w.n_in());
  p.n_out = static_cast<int32_t>(w.n_out());
  p.n_rows = in.rows;
  launch("matmul_raw", format("linear_raw_%s", type_name(w.type)),
         {static_cast<uint32_t>(ceil_div(p.n_out, 8)), static_cast<uint32_t>(ceil_div(p.n_rows, 4))}, 256, 0,
         p);
}

// Decoded into F16 tiles, as many rows of it at a time as the scratch holds.
void Launcher::raw_as_f16(const Input& in, const Product& part) {
  const Weight& w = *part.weight;
  const TileGeometry& f16 = *tile_geometry(GgmlType::F16);
  DeviceWeight tiles;
  tiles.at = f16_tiles_.address();
  tiles.tiled = true;
  tiles.n_cells = units(in.width);
  tiles.tile_bytes = static_cast<uint32_t>(tiles.n_cells * f16.cell_bytes);
  tiles.scale = 1.0f / (kXScale * kWScale);
  const size_t stride = row_bytes(w.type, static_cast<size_t>(w.n_in()));
  const auto per_go = static_cast<int64_t>(kF16Scratch / tiles.tile_bytes) * kTileRows;
  for (int64_t first = 0; first < w.n_out(); first += per_go) {
    Weight some = w;
    some.type = GgmlType::F16;
    some.ne[1] = std::min(per_go, w.n_out() - first);
    tiles.n_tiles = static_cast<int32_t>(ceil_div(some.ne[1], kTileRows));
    launch("repack", "raw_to_f16", {static_cast<uint32_t>(tiles.n_tiles)}, 256, 0,
           repack_params(reinterpret_cast<const uint8_t*>(part.at->at) + static_cast<size_t>(first) * stride,
                         w, f16_tiles_.at<uint8_t>(), static_cast<int32_t>(some.ne[1])));
    Product p = part;
    p.weight = &some;
    p.at = &tiles;
    p.out += first;
    if (p.bias) p.bias += first;
    if (p.residual) p.residual += first;
    order_next();  // these tiles are written by the launch before: nothing of them may be read early
    rows(in, in.x, {&p, 1}, nullptr, false);
  }
}

void Launcher::attention(AttentionParams p, bool f32_states, bool one_row) {
  const int32_t heads = p.n_heads / p.n_kv_heads, hd = p.head_dim;
  const auto kv_heads = static_cast<uint32_t>(p.n_kv_heads);
  if (one_row) {
    const int threads = attention_one_threads(device_.capability());
    launch("attention_one", format("attention_one_%dx%d", hd, heads), {kv_heads, kMaxSplits},
           static_cast<uint32_t>(threads), attention_one_bytes(hd, heads, threads), p);
    return;
  }
  const bool flash = !f32_states && hd == p.v_head_dim && (hd == 64 || hd == 128) && heads <= 64 &&
                     device_.capability() >= 75;
  if (flash) {
    const auto blocks = static_cast<uint32_t>(ceil_div(p.n_rows, 64 / heads));
    launch("attention_flash", format("attention_flash_%d", hd), {kv_heads, blocks}, 128, flash_bytes(hd), p);
    return;
  }
  const uint32_t tile = attention_tile_bytes(hd, p.v_head_dim);
  if (!f32_states && heads <= kTileQueries && tile + kStaticShared <= device_.max_shared()) {
    const auto blocks = static_cast<uint32_t>(ceil_div(p.n_rows, kTileQueries / heads));
    const uint32_t splits = p.n_rows == 1 ? kMaxSplits : 1;
    launch("attention_tile", "attention_tile", {kv_heads, blocks, splits}, 256, tile, p);
    return;
  }
  launch("attention", f32_states ? "attention_f32" : "attention_f16",
         {static_cast<uint32_t>(p.n_heads), static_cast<uint32_t>(p.n_rows)}, 128, 0, p);
}

}  // namespace reflex::cuda
