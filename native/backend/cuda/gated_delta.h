// Gated DeltaNet on the card: which kernels do a layer, and the scratch that they share from layer to
// layer. Owns: how a pass's forks are laid out for them. Refuses: states and values, which callers own.
#pragma once
#include <vector>

#include "backend/cuda/delta_params.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

/// A pass's rows as the kernels see them, the same for every layer.
struct DeltaPass {
  int32_t n_chain = 0;            ///< rows that go on with the sequence, the first of the pass
  std::vector<int32_t> parents;   ///< (R): see DeltaParams
  std::vector<DeltaFork> forks;   ///< branch after branch, in an order that seldom needs a copy
  std::vector<int32_t> branches;  ///< (n_branches + 1)
  int32_t n_kept = 0;             ///< copies of the state that forks need
  int32_t n_branches() const { return static_cast<int32_t>(branches.size()) - 1; }

  DeltaPass() = default;
  /// n_chain as check_forks() gives it.
  DeltaPass(const Pass& pass, int32_t n_chain);
  /// Bytes of the three arrays for passes of so many rows, each on 16 bytes: an upper bound.
  static size_t bytes(int32_t rows);
};

class DeltaSteps {
 public:
  /// Error(unsupported) names sizes that the kernels do not take.
  DeltaSteps(Device& device, const StepList& steps, int32_t max_rows, bool exact);

  /// Whether the plan has such layers at all.
  bool any() const { return max_key_heads_ > 0; }
  size_t kept_bytes(const DeltaPass& pass) const {
    return static_cast<size_t>(pass.n_kept) * state_floats_ * sizeof(float);
  }
  /// Whether copies for the pass fit; if not, reserve() makes room once nothing runs.
  bool has_room(const DeltaPass& pass) const { return kept_bytes(pass) <= kept_.bytes(); }
  void reserve(const DeltaPass& pass);
  size_t scratch_bytes() const { return scratch_.bytes() + kept_.bytes() + tickets_.bytes(); }

  /// Launches a layer; `p` comes with weights, values, states, rows and forks.
  void run(Launcher& launcher, const GatedDelta& op, DeltaParams p, int32_t n_branches) const;

 private:
  void lay_out(const GatedDelta& op, DeltaParams& p, size_t& floats) const;
  bool chunks_fit(int32_t key_pad) const;

  Device& device_;
  const bool exact_;
  int32_t capacity_ = 0, max_key_heads_ = 0;
  size_t state_floats_ = 0;  ///< of the largest layer
  DeviceBuffer scratch_, kept_, tickets_;
};

}  // namespace reflex::cuda
