// WindowAttention on the card: which kernels do a layer, and the scratch that they share from layer to layer;
// and what its compressors may ask for.
// Refuses: states and values, which callers own.
#pragma once
#include "backend/cuda/launch.h"
#include "backend/cuda/steps.h"
#include "backend/cuda/window_params.h"

namespace reflex::cuda {

class WindowSteps {
 public:
  /// Error(unsupported) names sizes that the kernels do not take.
  WindowSteps(Device& device, const StepList& steps, int32_t max_rows, int32_t n_ctx, bool exact);
  size_t scratch_bytes() const { return partial_.bytes() + tickets_.bytes(); }
  /// Launches a layer's attention over `rows` queries; `p` comes with values, states, selection and pass.
  void run(Launcher& launcher, const WindowAttention& op, WindowParams p, int32_t rows, bool f32) const;

 private:
  void check(const Compressor& op) const;
  int32_t tile_slots(int32_t dim_pad) const;
  int32_t splits(const WindowAttention& op, int32_t top_k, int32_t blocks) const;

  Device& device_;
  const int32_t n_ctx_;
  const bool exact_;
  DeviceBuffer partial_, tickets_;
};

}  // namespace reflex::cuda
