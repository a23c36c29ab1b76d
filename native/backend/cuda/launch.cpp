#include "backend/cuda/launch.h"

#include <algorithm>

#include "backend/cuda/tile.h"

namespace reflex::cuda {

namespace {

constexpr int32_t kFewRows = 64;  // beyond, arithmetic bounds a product and not the weights' bytes
constexpr int32_t kRawRows = 4;   // beyond, a type without tiles is decoded to F16 tiles once
constexpr size_t kF16Scratch = size_t{64} << 20;
constexpr uint32_t kElementThreads = 256;
constexpr int kMaxSplit = 16;
// What merging a tile's split sums costs, in cells.
constexpr double kMergeCost = 0.4;

/// The kernel of two types, where there is one.
bool has_pair_kernel(GgmlType a, GgmlType b) {
#define REFLEX_PAIR(x, y) \
  if (a == GgmlType::x && b == GgmlType::y) return true;
  REFLEX_TILED_PAIRS(REFLEX_PAIR)
#undef REFLEX_PAIR
  return false;
}

bool has_many_kernel(GgmlType type) {
#define REFLEX_MANY(x) \
  if (type == GgmlType::x) return true;
  REFLEX_TILED_MANY(REFLEX_MANY)
#undef REFLEX_MANY
  return false;
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
    fragments_ =
        DeviceBuffer(device, rows * static_cast<size_t>(units(widest)) * kUnit * 2, "activations", true);
  if (exact || untiled)
    normed_ = DeviceBuffer(device, rows * static_cast<size_t>(widest) * sizeof(float), "activations");
  if (!exact && untiled) f16_tiles_ = DeviceBuffer(device, kF16Scratch, "decoded weights");
}

// Workers (split warps each) take tiles in turn, so the last round should be full; a split sum costs
// a merge per tile.
Launcher::Share Launcher::share_tiles(int32_t items, int32_t cells, uint32_t warps, int32_t max_split) const {
  Share best{1, 1};
  double best_cost = 1e30;
  for (int32_t split = 1; split <= std::min<int32_t>(max_split, static_cast<int32_t>(warps)); split *= 2) {
    if (split > cells) break;
    const auto per_block = static_cast<int32_t>(warps) / split;
    const auto blocks =
        static_cast<uint32_t>(std::min<int64_t>(device_.sm_count(), ceil_div(items, per_block)));
    const auto rounds = static_cast<double>(ceil_div(items, static_cast<int64_t>(blocks) * per_block));
    const double cost = rounds * (static_cast<double>(ceil_div(cells, split)) + (split > 1 ? kMergeCost : 0));
    if (cost < best_cost) best_cost = cost, best = {blocks, split};
  }
  return best;
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
  launch("norm", "rms_norm", {static_cast<uint32_t>(n_groups), 1}, kElementThreads, 0,
         NormParams{x, n.weight, out, n.eps, n_groups, group});
}

const float* Launcher::normed_rows(const Input& in) {
  if (!in.norm.weight) return static_cast<const float*>(in.x);
  norm(static_cast<const float*>(in.x), normed_.at<float>(), in.norm, in.rows, in.width);
  return normed_.at<float>();
}

const void* Launcher::to_fragments(const Input& in) {
  if (in.fragments) return in.x;
  launch("norm", "rows_to_fragments", {static_cast<uint32_t>(in.rows), 1}, kElementThreads, 0,
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
  if (!one && !exact_ && (!with_tiles.empty() || in.fragments || in.rows > kRawRows))
    fragments = to_fragments(in);
  if (fused) return tiled(in, fragments, parts, swiglu, swiglu_fragments);
  for (size_t i = 0; i < with_tiles.size();) {  // runs that one kernel can take
    size_t n = 1;
    GgmlType second = with_tiles[i].weight->type;
    for (; i + n < with_tiles.size(); ++n) {
      const GgmlType first = with_tiles[i].weight->type, next = with_tiles[i + n].weight->type;
      if (next == first || next == second) continue;
      if (!one || second != first || !has_pair_kernel(first, next)) break;
      second = next;
    }
    tiled(in, fragments, std::span(with_tiles).subspan(i, n), nullptr, false);
    i += n;
  }
  if (!without.empty()) {
    const bool decoded = fragments != nullptr && (in.fragments || in.rows > kRawRows);
    Input plain = in;
    if (!decoded) plain = {normed_rows(in), false, in.rows, in.width, {}};
    for (const Product& p : without)
      if (decoded)
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
  constexpr uint32_t kThreads = kMatvecThreads, kWarps = kThreads / 32;
  MatvecParams p{};
  int32_t tiles = 0, cells = INT32_MAX;
  for (const Product& part : parts) {
    fill_part(p.part[p.n_parts++], part, swiglu ? 0 : tiles);
    tiles += part.at->n_tiles;
    cells = std::min(cells, part.at->n_cells);
  }
  if (swiglu) {
    tiles = p.part[0].end_tile;
    p.part[0].out = static_cast<float*>(swiglu);
    p.epilogue = Epilogue::swiglu;
  }
  p.x = static_cast<const float*>(in.x);
  p.norm_weight = in.norm.weight;
  p.norm_eps = in.norm.eps;
  p.width = in.width;
  // A cell of 256 values may reach one unit beyond the width's own.
  const TileGeometry& tile = *tile_geometry(parts[0].weight->type);
  p.n_units = units(in.width);
  if (tile.cell_values > kUnit) p.n_units = (p.n_units + 1) / 2 * 2;
  const Share share = share_tiles(tiles, cells, kWarps, kMaxSplit);
  p.split = share.split;
  std::string name = format("matvec_%s", type_name(parts[0].weight->type));
  for (const Product& part : parts)
    if (part.weight->type != parts[0].weight->type) {
      name += format("_%s", type_name(part.weight->type));
      break;
    }
  const uint32_t shared = static_cast<uint32_t>(p.n_units) * kUnit * 2 + 2 * 2 * kWarps * 8 * sizeof(float);
  launch("matvec", name, {share.blocks, 1}, kThreads, shared, p);
}

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
  p.x = fragments;
  p.n_rows = in.rows;
  p.n_units = units(in.width);
  const GgmlType type = parts[0].weight->type;
  if (in.rows <= kFewRows)
    few_rows(p, type);
  else if (has_many_kernel(type))
    many_rows(p, type);
  else  // in two or more goes, each of as many rows as the other kernel takes
    for (int32_t first = 0; first < in.rows; first += kFewRows) {
      MatmulParams q = p;
      q.n_rows = std::min(kFewRows, in.rows - first);
      q.x = static_cast<const char*>(fragments) +
            static_cast<size_t>(first) * static_cast<size_t>(p.n_units) * kUnit * 2;
      for (int i = 0; i < q.n_parts; ++i) {
        TiledPart& part = q.part[i];
        part.out += static_cast<size_t>(first) * static_cast<size_t>(part.stride);
        if (part.residual) part.residual += static_cast<size_t>(first) * static_cast<size_t>(part.stride);
      }
      if (q.out_f16)
        q.out_f16 = static_cast<char*>(q.out_f16) +
                    static_cast<size_t>(first) * static_cast<size_t>(q.out_units) * kUnit * 2;
      few_rows(q, type);
    }
}

void Launcher::few_rows(MatmulParams p, GgmlType type) {
  const int m = p.n_rows <= 16 ? 1 : p.n_rows <= 32 ? 2 : 4;
  const auto threads = static_cast<uint32_t>(few_threads(m));
  int32_t tiles = 0, cells = INT32_MAX;
  for (int i = 0; i < p.n_parts; ++i) {
    tiles = std::max(tiles, p.part[i].end_tile);
    cells = std::min(cells, p.part[i].n_cells);
  }
  const Share share = share_tiles(tiles, cells, threads / 32, kMaxSplit);
  p.split = share.split;
  const int sets = p.epilogue == Epilogue::swiglu ? 2 : 1;
  const uint32_t shared = p.split == 1 ? 0 : threads * static_cast<uint32_t>(sets * m * 4) * sizeof(float);
  launch("matmul_few", format("matmul_few_%d_%s", m, type_name(type)), {share.blocks, 1}, threads, shared, p);
}

void Launcher::many_rows(MatmulParams p, GgmlType type) {
  // 16 mt rows by 64 nt outputs a block; small blocks keep less of the tensor cores busy.
  struct Shape {
    int32_t mt, nt;
    double efficiency;
  };
  static constexpr Shape kShapes[] = {{8, 4, 1.0}, {4, 2, 0.7}, {4, 1, 0.5}};
  const bool pair = p.epilogue == Epilogue::swiglu;
  const Shape* best = nullptr;
  Grid best_grid;
  double best_cost = 1e30;
  for (const Shape& s : kShapes) {
    if (pair && s.nt < 2) continue;
    const int64_t per_group = 8 * (pair ? s.nt / 2 : s.nt);
    int64_t groups = 0;
    for (int i = 0; i < (pair ? 1 : p.n_parts); ++i)
      groups += ceil_div(p.part[i].end_tile - p.part[i].first_tile, per_group);
    const Grid grid{static_cast<uint32_t>(ceil_div(p.n_rows, 16 * s.mt)), static_cast<uint32_t>(groups)};
    const double cost =
        static_cast<double>(ceil_div(static_cast<int64_t>(grid.x) * groups, device_.sm_count())) * s.mt *
        s.nt / s.efficiency;
    if (cost < best_cost) best_cost = cost, best = &s, best_grid = grid;
  }
  const uint32_t stage = static_cast<uint32_t>(best->mt) * kSteps * 32 * 16;
  p.stages = 3 * stage <= device_.max_shared() ? 3 : 2;
  launch("matmul_many", format("matmul_many_%dx%d_%s", best->mt, best->nt, type_name(type)), best_grid,
         kManyThreads, static_cast<uint32_t>(p.stages) * stage, p);
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
    launch("repack", "raw_to_f16", {static_cast<uint32_t>(tiles.n_tiles), 1}, 256, 0,
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
    launch("attention_one", format("attention_one_%dx%d", hd, heads), {kv_heads, kMaxSplits}, 256,
           attention_one_bytes(hd, heads), p);
    return;
  }
  const bool flash = !f32_states && hd == p.v_head_dim && (hd == 64 || hd == 128) && heads <= 64 &&
                     device_.capability() >= 75;
  if (flash) {
    const auto blocks = static_cast<uint32_t>(ceil_div(p.n_rows, 64 / heads));
    launch("attention_flash", format("attention_flash_%d", hd), {kv_heads, blocks}, 128, flash_bytes(hd), p);
    return;
  }
  launch("attention", f32_states ? "attention_f32" : "attention_f16",
         {static_cast<uint32_t>(p.n_heads), static_cast<uint32_t>(p.n_rows)}, 128, 0, p);
}

}  // namespace reflex::cuda
