// Which weights live on the card, in what layout and where; one arena holds them all. Owns: the
// arena and the list of what the loader must bring. The token table is not among them unless it is
// the head as well: its rows are decoded by the host as tokens come.
#pragma once
#include <vector>

#include "backend/cuda/load.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

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

class Residence {
 public:
  /// Allocates the arena: Error(out_of_memory) with need and have. Exact programs keep every matrix
  /// in the file's layout.
  Residence(Device& device, const Plan& plan, const StepList& steps, bool exact);

  const DeviceWeight& matrix(WeightId id) const { return weights_[static_cast<size_t>(id)]; }
  /// A bias or a norm's weight as f32; null for kNone.
  const float* vector(WeightId id) const {
    return id == kNone ? nullptr : reinterpret_cast<const float*>(weights_[static_cast<size_t>(id)].at);
  }
  /// What to load, in order of use. The vectors' bytes stay in this object.
  std::vector<LoadItem> items() const { return items_; }
  int n_groups() const { return n_groups_; }
  int deferred_group() const { return deferred_group_; }  ///< of the head
  size_t bytes() const { return arena_.bytes(); }

 private:
  void add_vector(const Plan& plan, WeightId id);
  void add_matrix(const Plan& plan, WeightId id, int group, bool exact);

  std::vector<DeviceWeight> weights_;
  std::vector<bool> placed_;
  std::vector<float> vectors_;  // every bias and norm weight, one after the other
  std::vector<LoadItem> items_;
  size_t size_ = 0;
  int n_groups_ = 1, deferred_group_ = 1;
  DeviceBuffer arena_;
};

}  // namespace reflex::cuda
