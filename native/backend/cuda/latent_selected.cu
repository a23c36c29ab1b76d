// Multi-head latent attention over the slots that an indexer chose (DeepSeek-V3.2, arXiv 2512.02556): as
// latent_attention.cu, a tile of the list at a time.
#include "backend/cuda/latent_attention.cuh"

namespace reflex::cuda {

REFLEX_KERNEL(latent_selected_f32, LatentSelectedParams, kTileThreads) {
  latent::attend<float, 3, true>(p.attention, p.selection, p.top_k);
}
REFLEX_KERNEL(latent_selected_f16, LatentSelectedParams, kTileThreads) {
  latent::attend<__half, 1, true>(p.attention, p.selection, p.top_k);
}

}  // namespace reflex::cuda
