// Mixtures of experts as launches, and the experts' way to the card. Where all are there or on their way
// in order, a mixture is launches alone. Else the host reads the router's choice, has the missing experts
// brought ahead of everything else, and goes on; where a layer has fewer slots than the choice has
// experts, in waves, each of which the next overwrites.
#include <algorithm>

#include "backend/cuda/program.h"
#include "backend/cuda/tile.h"

namespace reflex::cuda {

namespace {

constexpr int32_t kBlockRows[] = {4, 2, 1};  // mtiles of a block of moe_rows
constexpr uint32_t kStaticShared = 1024;     // of a kernel beside its own, at most
constexpr uint32_t kBlocksPerSm = 3;         // of moe_gate_up
constexpr int32_t kWarpsWanted = 16;         // per multiprocessor

uint32_t ceil_div(int64_t a, int64_t b) { return static_cast<uint32_t>((a + b - 1) / b); }

/// Places that rows' experts can take, at most.
int32_t places(int32_t rows, const Moe& op) {
  const int64_t pairs = int64_t{rows} * op.n_used;
  const int64_t n = pairs + std::min<int64_t>(pairs, op.n_experts) * (kPlaceAlign - 1);
  return static_cast<int32_t>((n + kPlaceAlign - 1) / kPlaceAlign * kPlaceAlign);
}
/// Blocks of up to block_rows places, at most.
uint32_t most_blocks(int32_t rows, const Moe& op, int32_t block_rows) {
  const int64_t pairs = int64_t{rows} * op.n_used;
  return static_cast<uint32_t>(std::min(pairs, pairs / block_rows + op.n_experts));
}

int32_t units_of(const DeviceWeight& w, GgmlType type) {
  return w.n_cells * (tile_geometry(type)->cell_values / kUnit);
}

GatingParams gating(const Moe& op, const float* bias) {
  GatingParams g{};
  g.bias = bias;
  g.n_experts = op.n_experts;
  g.n_used = op.n_used;
  g.n_groups = op.n_groups;
  g.n_groups_used = op.n_groups_used;
  g.sigmoid = op.gating == Moe::Gating::sigmoid;
  g.best_two = op.group_score == Moe::GroupScore::best_two;
  g.renormalise = op.renormalise;
  g.scale = op.scale;
  return g;
}

}  // namespace

const Weight& CudaProgram::expert_weight(const MoeStep& s, int part) const {
  const WeightId ids[3] = {s.op.gate, s.op.up, s.op.down};
  return plan_.weights[static_cast<size_t>(ids[part])];
}

void CudaProgram::allocate_mixtures() {
  size_t pairs = 0, n_places = 0, blocks = 0, experts = 0, x = 0, hidden = 0, up = 0, out = 0, one = 0;
  for (const Step& step : steps_.steps) {
    const auto* s = std::get_if<MoeStep>(&step);
    if (!s) continue;
    const Moe& op = s->op;
    if (op.n_experts > kMaxExperts || op.n_used > kMaxChosen)
      fail(ErrorKind::unsupported,
           "mixture of %d experts, %d of them for a row: the CUDA backend takes up to %d and %d",
           op.n_experts, op.n_used, kMaxExperts, kMaxChosen);
    while (options_.max_rows > 1 &&
           moe_sort_bytes(options_.max_rows, op.n_experts) + kStaticShared > device_->max_shared())
      options_.max_rows /= 2;
  }
  for (const Step& step : steps_.steps) {
    const auto* s = std::get_if<MoeStep>(&step);
    if (!s) continue;
    const Moe& op = s->op;
    const DeviceExperts& at = residence_.experts(s->index);
    const Weight &gate = expert_weight(*s, 0), &down = expert_weight(*s, 2);
    const auto rows = static_cast<size_t>(options_.max_rows);
    // A block may read mtiles beyond an expert's last.
    const auto n = static_cast<size_t>(places(options_.max_rows, op)) + 16 * kBlockRows[0];
    pairs = std::max(pairs, rows * static_cast<size_t>(op.n_used));
    n_places = std::max(n_places, n);
    blocks = std::max<size_t>(blocks, most_blocks(options_.max_rows, op, kRawPlaces));
    experts = std::max(experts, static_cast<size_t>(op.n_experts));
    size_t wide = static_cast<size_t>(gate.n_out()) * sizeof(float);  // of a place's hidden values
    if (at.tiled) {
      x = std::max(x, n * static_cast<size_t>(units_of(at.part[0], gate.type)) * kUnit * 2);
      wide = std::max(wide, static_cast<size_t>(units_of(at.part[2], down.type)) * kUnit * 2);
    } else {
      up = std::max(up, n * wide);
    }
    if (at.tiled && op.limit > 0)  // gate and up by place, before the limit
      up = std::max(up, 2 * n * static_cast<size_t>(gate.n_out()) * sizeof(float));
    hidden = std::max(hidden, n * wide);
    one = std::max(one, static_cast<size_t>(op.n_used) * static_cast<size_t>(gate.n_out()) * sizeof(float));
    out = std::max(out, n * static_cast<size_t>(down.n_out()) * sizeof(float));
    if (residence_.expert_mode() == ExpertMode::cached)
      mixtures_.slots.emplace_back(op.n_experts, at.n_slots);
  }
  if (!experts) return;
  Mixtures& m = mixtures_;
  const auto device = [&](DeviceBuffer& b, size_t bytes) {
    b = DeviceBuffer::zeros(*device_, bytes, "a mixture's rows", stream_);
    scratch_bytes_ += b.bytes();
  };
  device(m.ids, pairs * sizeof(int32_t));
  device(m.weights, pairs * sizeof(float));
  device(m.place_of, pairs * sizeof(int32_t));
  device(m.row_of, n_places * sizeof(int32_t));
  device(m.blocks, blocks * sizeof(RowBlock));
  device(m.n_blocks, sizeof(int32_t));
  device(m.ticket, sizeof(uint32_t));
  device(m.x, x);
  device(m.hidden, hidden);
  device(m.up, up);
  device(m.one, one);
  device(m.out, out);
  if (residence_.expert_mode() == ExpertMode::eager) return;
  device(m.slot_of, experts * sizeof(int32_t));
  m.host_ids = PinnedBuffer(*device_, pairs * sizeof(int32_t), "the routers' choices");
  m.host_slots = PinnedBuffer(*device_, experts * sizeof(int32_t), "the experts' slots");
}

void CudaProgram::step(const MoeStep& s) {
  const int32_t rows = rows_of(s.op.in);
  if (rows == 0) return;
  if (s.router != kNone) loader_->require(residence_.matrix(s.router).group, stream_);
  route(s, rows);
  const ExpertMode mode = residence_.expert_mode();
  if (mode != ExpertMode::eager && !now_.loaded) return fetch_experts(s, rows);
  if (mode == ExpertMode::eager) loader_->require(residence_.experts(s.index).group, stream_);
  if (rows == 1 && one_row_fits(s)) return experts_of_one(s, nullptr);
  sort_rows(s, rows, rows_per_block(s, rows));
  expert_products(s, rows, nullptr);
  combine(s, rows);
}

// ---- the choice ----------------------------------------------------------------------------------

void CudaProgram::route(const MoeStep& s, int32_t rows) {
  const Moe& op = s.op;
  const int32_t width = steps_.values[static_cast<size_t>(op.in)].width;
  const GatingParams g = gating(op, residence_.vector(op.bias));
  const auto* router =
      s.router == kNone ? nullptr : reinterpret_cast<const float*>(residence_.matrix(s.router).at);
  const bool more = op.gating == Moe::Gating::sqrt_softplus || op.of_token != kNone;
  if (rows == 1 && router && !more) {
    const Norming n = norming(s.norm);
    const RouteParams p{value(s.in),
                        n.weight,
                        value(op.in),
                        router,
                        value(op.router),
                        mixtures_.ids.at<int32_t>(),
                        mixtures_.weights.at<float>(),
                        mixtures_.ticket.at<uint32_t>(),
                        g,
                        n.eps,
                        width};
    launcher_->launch("moe", "moe_route", {ceil_div(op.n_experts, kExpertWarps)}, kExpertThreads, 0, p);
    return;
  }
  if (s.norm.weight != kNone) launcher_->norm(value(s.in), value(op.in), norming(s.norm), rows, width);
  if (router)
    launcher_->launch("moe", "moe_logits",
                      {ceil_div(op.n_experts, kExpertWarps), ceil_div(rows, kRouterRows)}, kExpertThreads, 0,
                      RouterParams{value(op.in), router, value(op.router), rows, width, op.n_experts});
  const ChooseParams choose{value(op.router), mixtures_.ids.at<int32_t>(), mixtures_.weights.at<float>(), g};
  if (more)
    choose_more(s, rows, choose);
  else
    launcher_->launch("moe", "moe_choose", {static_cast<uint32_t>(rows)}, kExpertThreads, 0, choose);
}

// By the root of softplus, or by token.
void CudaProgram::choose_more(const MoeStep& s, int32_t rows, const ChooseParams& choose) {
  ChooseMoreParams p{};
  p.choose = choose;
  p.sqrt_softplus = s.op.gating == Moe::Gating::sqrt_softplus;
  if (s.op.of_token != kNone) {
    const DeviceWeight& table = residence_.matrix(s.op.of_token);
    loader_->require(table.group, stream_);
    p.of_token = reinterpret_cast<const int32_t*>(table.at);
    p.tokens = block_.at<int32_t>(now_.tokens_at);
    if (steps_.values[static_cast<size_t>(s.op.in)].rows == Rows::outputs) p.outputs = arrays().outputs;
  }
  launcher_->launch("moe_token", "moe_choose_more", {static_cast<uint32_t>(rows)}, kExpertThreads, 0, p);
}

void CudaProgram::sort_rows(const MoeStep& s, int32_t rows, int32_t block_rows) {
  const Moe& op = s.op;
  const Mixtures& m = mixtures_;
  const SortParams p{m.ids.at<int32_t>(),
                     m.place_of.at<int32_t>(),
                     m.row_of.at<int32_t>(),
                     m.blocks.at<RowBlock>(),
                     m.n_blocks.at<int32_t>(),
                     rows,
                     op.n_used,
                     op.n_experts,
                     block_rows,
                     places(rows, op)};
  launcher_->launch("moe", "moe_sort", {1}, kSortThreads, moe_sort_bytes(rows, op.n_experts), p);
}

/// Places of a block: of the shapes that leave half of one idle, the smaller.
int32_t CudaProgram::rows_per_block(const MoeStep& s, int32_t rows) const {
  const DeviceExperts& at = residence_.experts(s.index);
  if (!at.tiled) return kRawPlaces;
  const int64_t pairs = int64_t{rows} * s.op.n_used;
  const int64_t each = pairs / std::min<int64_t>(pairs, s.op.n_experts);
  for (const int32_t mt : kBlockRows) {
    const TileGeometry &in = *tile_geometry(expert_weight(s, 0).type),
                       &out = *tile_geometry(expert_weight(s, 2).type);
    const uint32_t shared = std::max(moe_rows_ring(mt, in.cell_values, in.cell_bytes),
                                     moe_rows_ring(mt, out.cell_values, out.cell_bytes));
    if (mt == 1 || (each > 8 * mt && shared + kStaticShared <= device_->max_shared())) return 16 * mt;
  }
  return 16;
}

// ---- experts that may not be there -----------------------------------------------------------------

std::vector<int32_t> CudaProgram::chosen_experts(const MoeStep& s, int32_t rows) {
  const size_t pairs = static_cast<size_t>(rows) * static_cast<size_t>(s.op.n_used);
  const Driver& cu = device_->cu;
  cu.check(cu.cuMemcpyDtoHAsync(mixtures_.host_ids.at(), mixtures_.ids.address(), pairs * sizeof(int32_t),
                                stream_),
           "reading the routers' choices");
  synchronize("reading the routers' choices");
  return distinct_experts({mixtures_.host_ids.at<int32_t>(), pairs}, s.op.n_experts);
}

void CudaProgram::fetch_experts(const MoeStep& s, int32_t rows) {
  const std::vector<int32_t> experts = chosen_experts(s, rows);
  const bool one = rows == 1 && one_row_fits(s);
  if (residence_.expert_mode() == ExpertMode::lazy) {
    const int first = residence_.experts(s.index).group;
    std::vector<int> groups;
    for (int32_t e : experts) groups.push_back(first + e);
    loader_->hurry(groups);
    if (!one) sort_rows(s, rows, rows_per_block(s, rows));
    loader_->require_all(groups, stream_);
    if (one) return experts_of_one(s, nullptr);
    expert_products(s, rows, nullptr);
    return combine(s, rows);
  }
  const auto* slot_of = mixtures_.slot_of.at<int32_t>();
  const auto wave = static_cast<size_t>(mixtures_.slots[static_cast<size_t>(s.index)].n_slots());
  if (!one) sort_rows(s, rows, rows_per_block(s, rows));
  for (size_t first = 0; first < experts.size(); first += wave) {
    if (first) synchronize("a mixture's experts");  // the next overwrite them
    place_wave(s, std::span(experts).subspan(first, std::min(wave, experts.size() - first)));
    if (one) return experts_of_one(s, slot_of);  // a row's experts always fit
    expert_products(s, rows, slot_of);
  }
  combine(s, rows);
}

// The stream has nothing under way that reads slots or the map of them: the choice was just read.
void CudaProgram::place_wave(const MoeStep& s, std::span<const int32_t> experts) {
  const DeviceExperts& at = residence_.experts(s.index);
  auto* map = mixtures_.host_slots.at<int32_t>();
  std::fill_n(map, s.op.n_experts, -1);
  std::vector<int> groups;
  for (const ExpertSlots::Placed& p : mixtures_.slots[static_cast<size_t>(s.index)].place(experts)) {
    map[p.expert] = p.slot;
    if (!p.missing) continue;
    groups.push_back(at.group + p.expert);
    loader_->place(groups.back(), at.at + static_cast<size_t>(p.slot) * at.slot_bytes);
  }
  loader_->hurry(groups);
  const Driver& cu = device_->cu;
  cu.check(cu.cuMemcpyHtoDAsync(mixtures_.slot_of.address(), map,
                                static_cast<size_t>(s.op.n_experts) * sizeof(int32_t), stream_),
           "placing experts");
  loader_->require_all(groups, stream_);
}

// ---- products ----------------------------------------------------------------------------------------

namespace {

/// The warps that share a tile: the fewest that make enough of them, no more than there are cells.
int32_t split_of(int64_t items, int64_t wanted, int32_t cells) {
  int32_t log2 = 0;
  while (items << log2 < wanted && (2 << log2) <= std::min(kExpertWarps, cells)) ++log2;
  return log2;
}
uint32_t unit_bytes(GgmlType type) {
  return type == GgmlType::F16 || type == GgmlType::BF16 ? kDotUnitBytes : kMatvecUnitBytes;
}
uint32_t down_shared(const DeviceExperts& at, GgmlType type, int32_t split_log2) {
  const auto used = static_cast<uint32_t>(at.n_used);
  return used * static_cast<uint32_t>(units_of(at.part[2], type)) * unit_bytes(type) +
         (used << split_log2) * kTileRows * static_cast<uint32_t>(sizeof(float));
}

}  // namespace

bool CudaProgram::one_row_fits(const MoeStep& s) const {
  const DeviceExperts& at = residence_.experts(s.index);
  if (!at.tiled) return false;
  const GgmlType in = expert_weight(s, 0).type, out = expert_weight(s, 2).type;
  const uint32_t room = device_->max_shared() - kStaticShared;
  return static_cast<uint32_t>(units_of(at.part[0], in)) * unit_bytes(in) <= room &&
         down_shared(at, out, split_of(at.n_used, kExpertWarps, at.part[2].n_cells)) <= room;
}

void CudaProgram::experts_of_one(const MoeStep& s, const int32_t* slot_of) {
  const DeviceExperts& at = residence_.experts(s.index);
  const Weight &gate = expert_weight(s, 0), &down = expert_weight(s, 2);
  const auto sms = static_cast<uint32_t>(device_->sm_count());
  GateUpParams p{};
  p.stack = reinterpret_cast<const uint8_t*>(at.at);
  p.slot_of = slot_of;
  p.ids = mixtures_.ids.at<int32_t>();
  p.x = value(s.op.in);
  p.hidden = mixtures_.one.at<float>();  // fragments' padding must stay zero, so not theirs
  p.slot_bytes = at.slot_bytes;
  p.to_up = at.offset[1];
  p.tile_bytes = at.part[0].tile_bytes;
  p.width = static_cast<int32_t>(gate.n_in());
  p.n_cells = at.part[0].n_cells;
  p.n_tiles = at.part[0].n_tiles;
  p.n_hidden = static_cast<int32_t>(gate.n_out());
  p.n_used = s.op.n_used;
  const int64_t items = int64_t{p.n_used} * p.n_tiles;
  p.split_log2 = split_of(items, int64_t{kWarpsWanted} * device_->sm_count(), p.n_cells);
  const uint32_t blocks = std::min(ceil_div(items << p.split_log2, kExpertWarps), kBlocksPerSm * sms);
  const uint32_t shared = static_cast<uint32_t>(units_of(at.part[0], gate.type)) * unit_bytes(gate.type);
  const char* type = type_info(gate.type).name;
  if (s.op.limit > 0)
    launcher_->launch("moe_one_limited", format("moe_gate_up_limited_%s", type), {blocks}, kExpertThreads,
                      shared, LimitedGateUpParams{p, s.op.limit});
  else
    launcher_->launch("moe_one", format("moe_gate_up_%s", type), {blocks}, kExpertThreads, shared, p);

  DownParams d{};
  d.stack = p.stack + at.offset[2];
  d.slot_of = slot_of;
  d.ids = p.ids;
  d.weights = mixtures_.weights.at<float>();
  d.hidden = p.hidden;
  d.residual = s.residual == kNone ? nullptr : value(s.residual);
  d.out = value(s.out);
  d.slot_bytes = at.slot_bytes;
  d.tile_bytes = at.part[2].tile_bytes;
  d.n_hidden = p.n_hidden;
  d.n_units = units_of(at.part[2], down.type);
  d.n_cells = at.part[2].n_cells;
  d.n_tiles = at.part[2].n_tiles;
  d.width = static_cast<int32_t>(down.n_out());
  d.n_used = p.n_used;
  d.split_log2 = split_of(d.n_used, kExpertWarps, d.n_cells);
  launcher_->launch("moe_one", format("moe_down_%s", type_info(down.type).name),
                    {std::min(static_cast<uint32_t>(d.n_tiles), 2 * sms)}, kExpertThreads,
                    down_shared(at, down.type, d.split_log2), d);
}

void CudaProgram::expert_products(const MoeStep& s, int32_t rows, const int32_t* slot_of) {
  if (residence_.experts(s.index).tiled)
    tiled_products(s, rows, slot_of);
  else
    raw_products(s, rows, slot_of);
}

void CudaProgram::tiled_products(const MoeStep& s, int32_t rows, const int32_t* slot_of) {
  const DeviceExperts& at = residence_.experts(s.index);
  const Weight &gate = expert_weight(s, 0), &down = expert_weight(s, 2);
  const int32_t block_rows = rows_per_block(s, rows), mt = block_rows / 16;
  const int32_t in_units = units_of(at.part[0], gate.type), hidden_units = units_of(at.part[2], down.type);
  launcher_->launch("moe", "moe_gather", {static_cast<uint32_t>(places(rows, s.op))}, kExpertThreads, 0,
                    PlaceParams{value(s.op.in), mixtures_.row_of.at<int32_t>(), mixtures_.x.at(),
                                static_cast<int32_t>(gate.n_in()), in_units});
  ExpertRowsParams p{};
  p.stack = reinterpret_cast<const uint8_t*>(at.at);
  p.slot_of = slot_of;
  p.blocks = mixtures_.blocks.at<RowBlock>();
  p.n_blocks = mixtures_.n_blocks.at<int32_t>();
  p.x = mixtures_.x.at();
  p.slot_bytes = at.slot_bytes;
  p.to_up = at.offset[1];
  const auto go = [&](const DeviceWeight& w, GgmlType type) {
    const TileGeometry& tile = *tile_geometry(type);
    p.tile_bytes = w.tile_bytes;
    p.n_cells = w.n_cells;
    p.n_tiles = w.n_tiles;
    p.n_units = units_of(w, type);
    p.scale = w.scale;
    const int32_t tiles = kExpertWarps * moe_rows_tiles(mt) / (p.pair ? 2 : 1);
    launcher_->launch("moe_rows", format("moe_rows_%d_%s", mt, type_info(type).name),
                      {ceil_div(p.n_tiles, tiles), most_blocks(rows, s.op, block_rows)}, kExpertThreads,
                      moe_rows_ring(mt, tile.cell_values, tile.cell_bytes), p);
  };
  p.n_out = static_cast<int32_t>(gate.n_out());
  if (s.op.limit > 0) {
    auto* both = mixtures_.up.at<float>();  // gate, then up
    const int32_t n_places = places(rows, s.op);
    p.out = both;
    go(at.part[0], gate.type);
    p.stack += at.offset[1];
    p.out = both + static_cast<size_t>(n_places) * static_cast<size_t>(p.n_out);
    go(at.part[1], gate.type);
    p.stack -= at.offset[1];
    launcher_->launch("moe_one_limited", "moe_limit", {static_cast<uint32_t>(n_places)}, kExpertThreads, 0,
                      LimitParams{both, static_cast<float*>(p.out), mixtures_.row_of.at<int32_t>(),
                                  mixtures_.hidden.at(), s.op.limit, p.n_out, hidden_units});
  } else {
    p.pair = 1;
    p.up_scale = at.part[1].scale;
    p.out = mixtures_.hidden.at();
    p.out_units = hidden_units;
    go(at.part[0], gate.type);
    p.pair = 0;
  }
  p.stack += at.offset[2];
  p.n_out = static_cast<int32_t>(down.n_out());
  p.x = mixtures_.hidden.at();
  p.out = mixtures_.out.at();
  go(at.part[2], down.type);
}

void CudaProgram::raw_products(const MoeStep& s, int32_t rows, const int32_t* slot_of) {
  const DeviceExperts& at = residence_.experts(s.index);
  const auto go = [&](int part, const int32_t* row_of, const float* x, float* out) {
    const Weight& w = expert_weight(s, part);
    ExpertRawParams p{};
    p.stack = reinterpret_cast<const uint8_t*>(at.at) + at.offset[part];
    p.slot_of = slot_of;
    p.blocks = mixtures_.blocks.at<RowBlock>();
    p.n_blocks = mixtures_.n_blocks.at<int32_t>();
    p.row_of = row_of;
    p.x = x;
    p.out = out;
    p.slot_bytes = at.slot_bytes;
    p.row_bytes = row_bytes(w.type, static_cast<size_t>(w.n_in()));
    p.n_in = static_cast<int32_t>(w.n_in());
    p.n_out = static_cast<int32_t>(w.n_out());
    launcher_->launch("moe_raw", format("moe_raw_%s", type_info(w.type).name),
                      {ceil_div(p.n_out, kExpertWarps), most_blocks(rows, s.op, kRawPlaces)}, kExpertThreads,
                      0, p);
  };
  auto *hidden = mixtures_.hidden.at<float>(), *up = mixtures_.up.at<float>();
  const auto* row_of = mixtures_.row_of.at<int32_t>();
  go(0, row_of, value(s.op.in), hidden);
  go(1, row_of, value(s.op.in), up);
  const auto n = static_cast<size_t>(places(rows, s.op)) * static_cast<size_t>(expert_weight(s, 0).n_out());
  if (s.op.limit > 0)
    clamped_swiglu(hidden, up, hidden, n, s.op.limit);
  else
    elementwise("swiglu", hidden, up, hidden, n);
  go(2, nullptr, hidden, mixtures_.out.at<float>());
}

void CudaProgram::combine(const MoeStep& s, int32_t rows) {
  const int32_t width = steps_.values[static_cast<size_t>(s.out)].width;
  launcher_->launch(
      "moe", "moe_combine", {ceil_div(width, kExpertThreads), static_cast<uint32_t>(rows)}, kExpertThreads, 0,
      CombineParams{mixtures_.out.at<float>(), mixtures_.place_of.at<int32_t>(),
                    mixtures_.weights.at<float>(), s.residual == kNone ? nullptr : value(s.residual),
                    value(s.out), rows, s.op.n_used, width});
}

}  // namespace reflex::cuda
