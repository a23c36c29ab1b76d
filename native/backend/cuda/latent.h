// Latent attention on the card: which kernels do a layer, and the scratch that they share from layer to
// layer. Few rows attend absorbed, here; of many latent_prefill.h says more. Refuses: states and values,
// which callers own.
#pragma once
#include "backend/cuda/latent_params.h"
#include "backend/cuda/latent_prefill.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

/// What a layer reads and writes.
struct LatentMemory {
  const float *q, *kv, *norm, *rotation;
  float* out;
  void* state;
  bool state_f32;
  int32_t n_rows;    ///< of kv: the pass's
  int32_t n_q_rows;  ///< of q and out
  int32_t n_slots;   ///< of the sequence, the pass's own included
  bool on_outputs;   ///< q's rows are output rows
  bool adjacent;     ///< the rope's pairing
  PassArrays pass;
  const int32_t* selection;  ///< (rows of q, top_k) slots; null: all that a row sees
  int32_t top_k;
  /// k_b and v_b, or kv_b twice: on the card, and as the plan has them.
  const uint8_t *k_at, *v_at;
  const Weight *k_weight, *v_weight;
};

/// y[r, h] = W[h] x[r, h]: the launch that suits p's rows; type and row_bytes come from `weight`.
void head_products(Launcher& launcher, LatentProductParams p, const Weight& weight, bool exact);

class LatentSteps {
 public:
  /// Error(unsupported) names sizes that the kernels do not take.
  LatentSteps(Device& device, const StepList& steps, int32_t max_rows, const ProgramOptions& options);
  size_t scratch_bytes() const {
    return latent_q_.bytes() + latent_o_.bytes() + partial_.bytes() + tickets_.bytes() +
           prefill_.scratch_bytes();
  }
  void run(Launcher& launcher, const LatentAttention& op, const LatentMemory& m) const;

 private:
  int32_t tile_slots(int32_t dim_pad) const;
  int32_t rows_per_go(const LatentAttention& op) const;
  void attend(Launcher& launcher, const LatentAttention& op, const LatentMemory& m, int32_t first,
              int32_t rows) const;

  Device& device_;
  const bool exact_;
  int32_t max_rows_;
  LatentPrefill prefill_;
  DeviceBuffer latent_q_, latent_o_, partial_, tickets_;
};

}  // namespace reflex::cuda
