#include "backend/cuda/residence.h"

#include "backend/cuda/operands.h"
#include "backend/cuda/tile.h"
#include "quant/dequantize.h"

namespace reflex::cuda {

namespace {

constexpr size_t kAlign = 256;
// A group is what a step waits for: small enough that the first layers run early, large enough that
// waiting costs nothing.
constexpr size_t kGroupBytes = size_t{12} << 20;

// What experts leave free for a sequence's memory, activations and scratch.
constexpr size_t kExpertReserve = size_t{4} << 30;

size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

/// f(op) where the step is one op as it is.
template <class F>
void for_op(const Step& step, F f) {
  const auto visit = [&f]<class T>(const T& s) {
    if constexpr (kIsOpStep<T>) f(s.op);
  };
  std::visit(visit, step);
}

/// All of w, as `d` has it laid out; group and place are the caller's.
LoadItem load_item(const Weight& w, const DeviceWeight& d) {
  LoadItem item;
  item.name = w.name.c_str();
  item.data = w.data;
  item.bytes = w.nbytes;
  item.fd = w.fd;
  item.offset = w.offset;
  item.type = w.type;
  item.n_in = w.n_in();
  item.n_out = w.n_out();
  item.tiled = d.tiled;
  item.n_cells = d.n_cells;
  item.tile_bytes = d.tile_bytes;
  return item;
}

}  // namespace

const TileGeometry* tile_geometry(GgmlType type) {
  switch (type) {
#define REFLEX_CASE(name)                                                   \
  case GgmlType::name: {                                                    \
    using T = Tile<GgmlType::name>;                                         \
    static constexpr TileGeometry geometry{T::kCell, T::kBytes, T::kScale}; \
    return &geometry;                                                       \
  }
    REFLEX_TILED(REFLEX_CASE)
#undef REFLEX_CASE
    default:
      return nullptr;
  }
}

Residence::Residence(Device& device, const Plan& plan, const StepList& steps, const ProgramOptions& options)
    : exact_(options.exact), weights_(plan.weights.size()), placed_(plan.weights.size(), false) {
  add_vectors(plan, steps);
  lay_out_experts(plan, steps);
  place_experts(device, plan, options);

  size_t group_bytes = 0;
  int group = 0;
  const auto next_group = [&] { ++group, group_bytes = 0; };
  const auto matrix = [&](WeightId id, bool raw = false) {
    add_matrix(plan, id, group, raw);
    group_bytes += plan.weights[static_cast<size_t>(id)].nbytes;
  };
  for (const Step& step : steps.steps) {
    if (const auto* s = std::get_if<MatmulStep>(&step)) {
      for (const MatmulPart& p : s->parts) matrix(p.weight);
    } else if (const auto* latent = std::get_if<LatentStep>(&step)) {
      for (WeightId id : {latent->op.k_b, latent->op.v_b, latent->op.kv_b})
        if (id != kNone) matrix(id, true);
    } else if (const auto* mix = std::get_if<HyperMixStep>(&step)) {
      matrix(mix->fn.weight);
    } else if (const auto* m = std::get_if<MoeStep>(&step)) {
      if (m->op.of_token != kNone) matrix(m->op.of_token, true);
      if (m->router != kNone) matrix(m->router);
      if (expert_mode_ == ExpertMode::eager) {
        next_group();  // what stands before the experts does not wait for them
        add_experts(plan, m->op, m->index, group, true);
        next_group();
      }
    }
    for_op(step, [&](const auto& op) { for_matrices(op, [&](WeightId id) { matrix(id, true); }); });
    size_ = align_up(size_);
    if (group_bytes >= kGroupBytes) next_group();
  }
  list_.deferred_group = group + 1;
  for (const Step& step : steps.steps)
    if (const auto* head = std::get_if<HeadStep>(&step))
      add_matrix(plan, head->weight, list_.deferred_group, false);
  list_.on_demand_group = list_.n_groups = list_.deferred_group + 1;
  if (expert_mode_ != ExpertMode::eager) {
    list_.rest_behind = expert_mode_ == ExpertMode::lazy;
    for (const Step& step : steps.steps)
      if (const auto* m = std::get_if<MoeStep>(&step)) {
        add_experts(plan, m->op, m->index, list_.n_groups, false);
        list_.n_groups += m->op.n_experts;
      }
  }

  arena_ = DeviceBuffer(device, size_, "the model's weights");
  for (DeviceWeight& w : weights_) w.at += arena_.address();
  for (LoadItem& i : list_.items)
    if (!i.in_slot) i.dest += arena_.address();
}

void Residence::add_vectors(const Plan& plan, const StepList& steps) {
  const auto norm_of = [&](const NormSpec& n) { add_vector(plan, n.weight); };
  for (const Step& step : steps.steps) {
    if (const auto* s = std::get_if<MatmulStep>(&step)) {
      norm_of(s->norm);
      for (const MatmulPart& p : s->parts) add_vector(plan, p.bias);
    } else if (const auto* a = std::get_if<AttentionStep>(&step)) {
      for (const HeadSpec* h : {&a->q, &a->k, &a->v}) norm_of(h->norm);
    } else if (const auto* b = std::get_if<BlockAttentionStep>(&step)) {
      for (const HeadSpec* h : {&b->plain.q, &b->plain.k, &b->plain.v, &b->index_q}) norm_of(h->norm);
      add_vector(plan, b->op.index_norm);
    } else if (const auto* h = std::get_if<HeadsStep>(&step)) {
      norm_of(h->item.norm);
    } else if (const auto* n = std::get_if<NormStep>(&step)) {
      norm_of(n->norm);
    } else if (const auto* m = std::get_if<MoeStep>(&step)) {
      norm_of(m->norm);
      add_vector(plan, m->op.bias);
    } else if (const auto* delta = std::get_if<DeltaStep>(&step)) {
      for (WeightId id : {delta->op.conv, delta->op.decay, delta->op.dt_bias, delta->op.norm})
        add_vector(plan, id);
    } else if (const auto* latent = std::get_if<LatentStep>(&step)) {
      add_vector(plan, latent->op.norm);
    } else if (const auto* inject = std::get_if<StreamInjectStep>(&step)) {
      add_vector(plan, inject->norm.weight);
    } else if (const auto* mix = std::get_if<HyperMixStep>(&step)) {
      add_vector(plan, mix->op.scale);
      add_vector(plan, mix->op.base);
    } else if (const auto* turn = std::get_if<TurnStep>(&step)) {
      norm_of(turn->item.norm);
    } else if (const auto* window = std::get_if<WindowStep>(&step)) {
      norm_of(window->q.norm);
      norm_of(window->kv.norm);
      add_vector(plan, window->op.sinks);
    } else if (const auto* head = std::get_if<HeadStep>(&step)) {
      norm_of(head->norm);
      add_vector(plan, head->bias);
    }
    for_op(step, [&](const auto& op) { for_vectors(op, [&](WeightId id) { add_vector(plan, id); }); });
  }
  vectors_.resize(vector_floats_);
  LoadItem all;
  all.name = "norms and biases";
  all.data = vectors_.data();
  all.bytes = vector_floats_ * sizeof(float);
  all.make = &make_;
  if (all.bytes) list_.items.push_back(all);
  size_ = align_up(all.bytes);
}

void Residence::add_vector(const Plan& plan, WeightId id) {
  if (id == kNone || placed_[static_cast<size_t>(id)]) return;
  placed_[static_cast<size_t>(id)] = true;
  const Weight& w = plan.weights[static_cast<size_t>(id)];
  const auto n = static_cast<size_t>(w.ne[0] * w.ne[1]);
  const size_t begin = vector_floats_;
  weights_[static_cast<size_t>(id)].at = begin * sizeof(float);
  vector_floats_ += align_up(n * sizeof(float)) / sizeof(float);
  sources_.push_back({&w, begin});
}

void Residence::make_vectors() {
  for (const VectorSource& s : sources_)
    dequantize_row(s.weight->type, s.weight->data, vectors_.data() + s.begin,
                   static_cast<size_t>(s.weight->ne[0] * s.weight->ne[1]));
}

/// A matrix's tiles, where its type and width have them; else its bytes as they are.
size_t Residence::lay_out(const Weight& w, bool tiled, DeviceWeight& d) {
  const TileGeometry* tile = tile_geometry(w.type);
  d.tiled = tiled;
  if (!tiled) return row_bytes(w.type, static_cast<size_t>(w.n_in())) * static_cast<size_t>(w.n_out());
  d.n_cells = static_cast<int32_t>((w.n_in() + tile->cell_values - 1) / tile->cell_values);
  d.n_tiles = static_cast<int32_t>((w.n_out() + kTileRows - 1) / kTileRows);
  d.tile_bytes = static_cast<uint32_t>(d.n_cells * tile->cell_bytes);
  d.scale = 1.0f / (kXScale * tile->scale);
  return static_cast<size_t>(d.n_tiles) * d.tile_bytes;
}

bool Residence::can_tile(const Weight& w) const {
  return !exact_ && tile_geometry(w.type) && w.n_in() % 32 == 0;
}

void Residence::add_matrix(const Plan& plan, WeightId id, int group, bool raw) {
  if (placed_[static_cast<size_t>(id)]) return;  // a tied weight is loaded where it is first used
  placed_[static_cast<size_t>(id)] = true;
  const Weight& w = plan.weights[static_cast<size_t>(id)];
  DeviceWeight& d = weights_[static_cast<size_t>(id)];
  const size_t tiles = lay_out(w, !raw && can_tile(w), d);
  LoadItem item = load_item(w, d);
  item.group = d.group = group;
  item.dest = d.at = size_;
  list_.items.push_back(item);
  // Tiles of one input follow each other without a gap: one run for the kernel that reads them.
  size_ += d.tiled ? tiles : align_up(w.nbytes);
}

// ---- experts ---------------------------------------------------------------------------------

void Residence::lay_out_experts(const Plan& plan, const StepList& steps) {
  for (const Step& step : steps.steps) {
    const auto* m = std::get_if<MoeStep>(&step);
    if (!m) continue;
    const Weight* w[3];
    const WeightId ids[3] = {m->op.gate, m->op.up, m->op.down};
    for (int i = 0; i < 3; ++i) w[i] = &plan.weights[static_cast<size_t>(ids[i])];
    DeviceExperts e;
    e.n_experts = m->op.n_experts;
    e.n_used = m->op.n_used;
    e.tiled = can_tile(*w[0]) && can_tile(*w[1]) && can_tile(*w[2]) && w[0]->type == w[1]->type;
    for (int i = 0; i < 3; ++i) {
      e.offset[i] = e.slot_bytes;
      e.slot_bytes += align_up(lay_out(*w[i], e.tiled, e.part[i]));
    }
    experts_.push_back(e);
  }
}

void Residence::place_experts(Device& device, const Plan& plan, const ProgramOptions& options) {
  std::vector<ExpertLayer> layers;
  for (const DeviceExperts& e : experts_) layers.push_back({e.slot_bytes, e.n_experts, e.n_used});
  uint64_t room = options.expert_bytes;
  if (!room && !experts_.empty()) {
    size_t free_bytes = 0, total = 0, others = 0;
    device.cu.check(device.cu.cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo");
    std::vector<bool> counts(plan.weights.size(), true);
    for (const Op& op : plan.ops)  // its table stays with the host
      if (const auto* ngram = std::get_if<NgramEmbed>(&op)) counts[static_cast<size_t>(ngram->table)] = false;
    for (size_t i = 0; i < plan.weights.size(); ++i)
      if (counts[i] && plan.weights[i].ne[2] == 1) others += plan.weights[i].nbytes;
    const size_t reserve = others + std::min(kExpertReserve, free_bytes / 8);
    room = std::max<uint64_t>(1, free_bytes - std::min(free_bytes, reserve));
  }
  const ExpertPlan chosen = plan_experts(options.experts, layers, room);
  expert_mode_ = chosen.mode;
  size_t size = 0;
  for (DeviceExperts& e : experts_) {
    e.n_slots = std::min(e.n_experts, chosen.slots);
    e.at = size;
    size += e.slot_bytes * static_cast<size_t>(e.n_slots);
  }
  expert_arena_ = DeviceBuffer(device, size, "the experts");
  for (DeviceExperts& e : experts_) e.at += expert_arena_.address();
}

/// Items of a mixture, an expert's three parts together; groups from `group` on, one each or one for all.
void Residence::add_experts(const Plan& plan, const Moe& op, int32_t mixture, int group, bool one_group) {
  DeviceExperts& at = experts_[static_cast<size_t>(mixture)];
  at.group = group;
  const WeightId ids[3] = {op.gate, op.up, op.down};
  for (int32_t e = 0; e < op.n_experts; ++e)
    for (int i = 0; i < 3; ++i) {
      const Weight& w = plan.weights[static_cast<size_t>(ids[i])];
      LoadItem item = load_item(w, at.part[i]);
      item.bytes /= static_cast<size_t>(op.n_experts);
      item.data = static_cast<const char*>(item.data) + static_cast<size_t>(e) * item.bytes;
      item.offset += static_cast<uint64_t>(e) * item.bytes;
      item.group = one_group ? group : group + e;
      item.in_slot = true;
      item.slot_offset = at.offset[i];
      item.dest = at.at + static_cast<size_t>(e) * at.slot_bytes + at.offset[i];
      list_.items.push_back(item);
    }
}

}  // namespace reflex::cuda
