// Which weights live on the card, in what layout and where; one arena holds them all but the experts of
// mixtures, whose slots have their own. Owns: the arenas and the list of what the loader must bring. The
// token table is not among them unless it is the head as well: its rows are decoded by the host as tokens
// come.
#pragma once
#include <functional>
#include <mutex>
#include <vector>

#include "backend/cuda/expert_slots.h"
#include "backend/cuda/load.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

inline constexpr int kVectorGroup = 0;  ///< of the loader: biases and norms' weights come first of all

struct DeviceWeight {
  CUdeviceptr at = 0;
  bool tiled = false;  ///< tile.h's layout; else the file's
  int group = 0;       ///< the loader's
  int32_t n_tiles = 0, n_cells = 0;
  uint32_t tile_bytes = 0;
  float scale = 1.0f;  ///< 1 / (kXScale * the tile type's kScale)
};

/// Geometry of the types that have tiles.
struct TileGeometry {
  int32_t cell_values, cell_bytes;
  float scale;  ///< kScale
};
/// nullptr for types without tiles.
const TileGeometry* tile_geometry(GgmlType type);

/// A mixture's experts, in slots: gate, up and down of one, then the next (moe_params.h).
struct DeviceExperts {
  CUdeviceptr at = 0;  ///< slot 0
  size_t slot_bytes = 0;
  size_t offset[3] = {};  ///< of gate, up, down in a slot
  int32_t n_experts = 0, n_used = 0, n_slots = 0;
  bool tiled = false;    ///< all three, gate and up of one type; else the file's layout
  DeviceWeight part[3];  ///< the geometry of one expert's tiles
  int group = 0;         ///< of the loader: of all (eager), or of expert 0, the others following
};

class Residence {
 public:
  /// Allocates the arenas: Error(out_of_memory) with need and have. Exact programs keep every matrix
  /// in the file's layout.
  Residence(Device& device, const Plan& plan, const StepList& steps, const ProgramOptions& options);

  Residence(const Residence&) = delete;  // what makes the vectors knows where this is
  Residence& operator=(const Residence&) = delete;

  const DeviceWeight& matrix(WeightId id) const { return weights_[static_cast<size_t>(id)]; }
  /// A bias or a norm's weight as f32; null for kNone.
  const float* vector(WeightId id) const {
    return id == kNone ? nullptr : reinterpret_cast<const float*>(weights_[static_cast<size_t>(id)].at);
  }
  const DeviceExperts& experts(int32_t mixture) const { return experts_[static_cast<size_t>(mixture)]; }
  ExpertMode expert_mode() const { return expert_mode_; }
  /// What to load, in order of use; the head is deferred. The vectors' bytes stay in this object, names in
  /// the plan.
  const LoadList& list() const { return list_; }
  size_t bytes() const { return arena_.bytes() + expert_arena_.bytes(); }

 private:
  bool can_tile(const Weight& w) const;
  static size_t lay_out(const Weight& w, bool tiled, DeviceWeight& d);
  void add_vectors(const Plan& plan, const StepList& steps);
  void add_vector(const Plan& plan, WeightId id);
  /// `raw`: in the file's layout, members of a stack one after the other.
  void add_matrix(const Plan& plan, WeightId id, int group, bool raw);
  void lay_out_experts(const Plan& plan, const StepList& steps);
  void place_experts(Device& device, const Plan& plan, const ProgramOptions& options);
  void add_experts(const Plan& plan, const Moe& op, int32_t mixture, int group, bool one_group);

  const bool exact_;
  std::vector<DeviceWeight> weights_;
  std::vector<bool> placed_;
  /// A bias or a norm's weight, and where among the vectors its floats begin.
  struct VectorSource {
    const Weight* weight;
    size_t begin;
  };
  void make_vectors();

  std::vector<float> vectors_;  // every bias and norm weight, one after the other
  std::vector<VectorSource> sources_;
  size_t vector_floats_ = 0;
  // Their pages of the file are touched by the thread that copies them, not before anything moves.
  std::once_flag made_;
  const std::function<void()> make_ = [this] { std::call_once(made_, [this] { make_vectors(); }); };
  std::vector<DeviceExperts> experts_;
  ExpertMode expert_mode_ = ExpertMode::eager;
  LoadList list_;
  size_t size_ = 0;
  DeviceBuffer arena_, expert_arena_;
};

}  // namespace reflex::cuda
