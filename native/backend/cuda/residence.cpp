#include "backend/cuda/residence.h"

#include "backend/cuda/tile.h"
#include "quant/dequantize.h"

namespace reflex::cuda {

namespace {

constexpr size_t kAlign = 256;
// A group is what a step waits for: small enough that the first layers run early, large enough that
// waiting costs nothing.
constexpr size_t kGroupBytes = size_t{12} << 20;

size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

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

Residence::Residence(Device& device, const Plan& plan, const StepList& steps, bool exact)
    : weights_(plan.weights.size()), placed_(plan.weights.size(), false) {
  const auto norm_of = [&](const NormSpec& n) { add_vector(plan, n.weight); };
  for (const Step& step : steps.steps) {
    if (const auto* s = std::get_if<MatmulStep>(&step)) {
      norm_of(s->norm);
      for (const MatmulPart& p : s->parts) add_vector(plan, p.bias);
    } else if (const auto* a = std::get_if<AttentionStep>(&step)) {
      for (const HeadSpec* h : {&a->q, &a->k, &a->v}) norm_of(h->norm);
    } else if (const auto* h = std::get_if<HeadsStep>(&step)) {
      norm_of(h->item.norm);
    } else if (const auto* n = std::get_if<NormStep>(&step)) {
      norm_of(n->norm);
    } else if (const auto* head = std::get_if<HeadStep>(&step)) {
      norm_of(head->norm);
      add_vector(plan, head->bias);
    }
  }
  LoadItem all;
  all.name = "norms and biases";
  all.data = vectors_.data();
  all.bytes = vectors_.size() * sizeof(float);
  if (all.bytes) items_.push_back(all);
  size_ = align_up(all.bytes);

  size_t group_bytes = 0;
  int group = 0;
  for (const Step& step : steps.steps) {
    const auto* s = std::get_if<MatmulStep>(&step);
    if (!s) continue;
    for (const MatmulPart& p : s->parts) {
      add_matrix(plan, p.weight, group, exact);
      group_bytes += plan.weights[static_cast<size_t>(p.weight)].nbytes;
    }
    size_ = align_up(size_);
    if (group_bytes >= kGroupBytes) ++group, group_bytes = 0;
  }
  deferred_group_ = group + 1;
  for (const Step& step : steps.steps)
    if (const auto* head = std::get_if<HeadStep>(&step))
      add_matrix(plan, head->weight, deferred_group_, exact);
  n_groups_ = deferred_group_ + 1;

  arena_ = DeviceBuffer(device, size_, "the model's weights");
  for (DeviceWeight& w : weights_) w.at += arena_.address();
  for (LoadItem& i : items_) i.dest += arena_.address();
}

void Residence::add_vector(const Plan& plan, WeightId id) {
  if (id == kNone || placed_[static_cast<size_t>(id)]) return;
  placed_[static_cast<size_t>(id)] = true;
  const Weight& w = plan.weights[static_cast<size_t>(id)];
  const auto n = static_cast<size_t>(w.ne[0] * w.ne[1]);
  weights_[static_cast<size_t>(id)].at = vectors_.size() * sizeof(float);
  const size_t begin = vectors_.size();
  vectors_.resize(begin + align_up(n * sizeof(float)) / sizeof(float));
  dequantize_row(w.type, w.data, vectors_.data() + begin, n);
}

void Residence::add_matrix(const Plan& plan, WeightId id, int group, bool exact) {
  if (placed_[static_cast<size_t>(id)]) return;  // a tied weight is loaded where it is first used
  placed_[static_cast<size_t>(id)] = true;
  const Weight& w = plan.weights[static_cast<size_t>(id)];
  DeviceWeight& d = weights_[static_cast<size_t>(id)];
  const TileGeometry* tile = tile_geometry(w.type);
  LoadItem item;
  item.name = w.name;
  item.data = w.data;
  item.bytes = w.nbytes;
  item.fd = w.fd;
  item.offset = w.offset;
  item.type = w.type;
  item.n_in = w.n_in();
  item.n_out = w.n_out();
  item.group = d.group = group;
  item.dest = d.at = size_;
  size_t bytes = w.nbytes;
  if (tile && !exact && w.n_in() % 32 == 0) {
    d.tiled = true;
    d.n_cells = static_cast<int32_t>((w.n_in() + tile->cell_values - 1) / tile->cell_values);
    d.n_tiles = static_cast<int32_t>((w.n_out() + kTileRows - 1) / kTileRows);
    d.tile_bytes = static_cast<uint32_t>(d.n_cells * tile->cell_bytes);
    d.scale = 1.0f / (kXScale * tile->scale);
    bytes = static_cast<size_t>(d.n_tiles) * d.tile_bytes;
  }
  item.tiled = d.tiled;
  item.n_cells = d.n_cells;
  item.tile_bytes = d.tile_bytes;
  items_.push_back(item);
  // Tiles of one input follow each other without a gap: one run for the kernel that reads them.
  size_ += d.tiled ? bytes : align_up(bytes);
}

}  // namespace reflex::cuda
