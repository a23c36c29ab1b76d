// Gated DeltaNet with sigmoid(z) for its gate (qwen4exp): the two kernels that know it.
#include "backend/cuda/gated_delta_ends.cuh"

namespace reflex::cuda {

REFLEX_KERNEL(delta_outputs_sigmoid, DeltaParams, kDeltaWarps * 32) { gated_outputs<true>(p); }
REFLEX_KERNEL(delta_one_sigmoid, DeltaParams, 1024, 1) { one_row<true>(p); }

}  // namespace reflex::cuda
