// Attention over chosen blocks on the card: which kernels do a layer, and the scratch that they share from
// layer to layer. While no row sees more complete blocks than may be chosen, a layer is plain attention and
// only the blocks' keys are kept. Refuses: states and values, which callers own.
#pragma once
#include "backend/cuda/block_params.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

/// What a layer reads and writes beside its heads.
struct BlockMemory {
  const float *index_q, *index_k, *norm, *inv_freq;
  float magnitude;
  void* state;
  bool state_f32;
  int32_t n_rot;
  bool adjacent;
  int32_t n_rows;  ///< of the pass
};

class BlockSteps {
 public:
  /// Error(unsupported) names sizes that the kernels do not take. exact: all states are f32.
  BlockSteps(Device& device, const StepList& steps, int32_t max_rows, int32_t n_ctx, bool exact);
  /// Whether rows that see up to so many slots have to choose.
  static bool chooses(const BlockAttention& op, int32_t most_seen) {
    return most_seen / op.block_size > op.n_blocks;
  }
  /// How many of the plan's layers choose: it says which.
  int32_t n_choosing(int32_t most_seen) const;
  size_t scratch_bytes() const {
    return scores_.bytes() + lists_.bytes() + counts_.bytes() + partial_.bytes() + tickets_.bytes();
  }
  /// Keys of the pass's rows, and of the blocks that end with them, to the state.
  void keep_keys(Launcher& launcher, const BlockAttention& op, const BlockMemory& m,
                 const PassArrays& pass) const;
  /// Attention over the blocks that its rows choose; keys, values and queries are prepared.
  void attend(Launcher& launcher, const BlockAttention& op, const BlockMemory& m, AttentionParams a,
              bool f32_states) const;

 private:
  int32_t score_stride(const BlockAttention& op) const { return n_ctx_ / op.block_size + 1; }
  int32_t list_stride(const BlockAttention& op) const;
  int32_t rows_per_go(const BlockAttention& op) const;
  uint32_t score_warps(const BlockAttention& op) const;
  int32_t tile_slots(const BlockAttention& op, bool f32) const;

  Device& device_;
  int32_t max_rows_, n_ctx_;
  std::vector<BlockAttention> layers_;
  DeviceBuffer scores_, lists_, counts_, partial_, tickets_;
};

}  // namespace reflex::cuda
