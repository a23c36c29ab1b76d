// Latent attention of many rows, decompressed: each head's keys and values are made once from the latents of
// all slots, and its queries attend to those as in any other model. Owns: when that is less work than the
// absorbed form (latent.h), and the memory for it. Refuses: f32 states, chosen slots, and heads for which
// there is no kernel; their passes stay absorbed.
#pragma once
#include "backend/cuda/latent_params.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

struct LatentMemory;

class LatentPrefill {
 public:
  LatentPrefill(Device& device, const StepList& steps, int32_t max_rows, const ProgramOptions& options);
  size_t scratch_bytes() const { return memory_.bytes(); }
  /// Whether this pass's rows should go this way.
  bool takes(const LatentAttention& op, const LatentMemory& m) const;
  /// out of every row of q. Of the layer's state the pass's own slots have been written.
  void run(Launcher& launcher, const LatentAttention& op, const LatentMemory& m) const;

 private:
  int32_t heads_per_go(const LatentAttention& op, int32_t slots) const;

  Device& device_;
  const LatentForm form_;
  DeviceBuffer memory_;  ///< of some heads at a time: matrices, keys, values
};

}  // namespace reflex::cuda
