// The lightning indexer on the card: which kernels choose a pass's slots, and the scratch that they share
// from layer to layer. Refuses: states and values, which callers own.
#pragma once
#include "backend/cuda/index_params.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/steps.h"

namespace reflex::cuda {

/// What a pass's launches are made for: not its very slots, so that a captured pass serves more of them.
struct IndexReach {
  int32_t slots = 0;       ///< that a row may see, at most
  int32_t mask_words = 0;  ///< at most
};

/// What a layer reads and writes.
struct IndexMemory {
  const float *query, *weights, *key;  ///< key: null where the entries are there
  int32_t* out;
  void* state;
  bool state_f32;
  int32_t n_rows;    ///< of key: the pass's
  int32_t n_q_rows;  ///< of query and out
  bool on_outputs;   ///< the query's rows are output rows
  PassArrays pass;
  IndexReach reach;
};

class IndexSteps {
 public:
  /// Error(unsupported) names sizes that the kernels do not take.
  IndexSteps(Device& device, const StepList& steps, int32_t max_rows, int32_t n_ctx);

  /// Whether the plan has such layers at all.
  bool any() const { return prepared_rows_ > 0; }
  /// The slots that launches for a pass up to slot n - 1 are made for: n or more, the same for many n, and
  /// never across a border behind which a layer begins to choose. 0 for plans without an indexer.
  int32_t reach(int32_t n) const;
  /// Whether no row can see more than is chosen, so that all of it is.
  static bool chooses_all(int32_t top_k, int32_t ratio, const IndexReach& reach) {
    return reach.slots / ratio <= top_k;
  }
  size_t scratch_bytes() const { return prepared_.bytes() + scale_.bytes() + scores_.bytes(); }
  void run(Launcher& launcher, const IndexStep& s, const IndexMemory& m) const;

 private:
  int32_t n_ctx_;
  int32_t prepared_rows_ = 0;     ///< of queries, in every layer, that fit the scratch
  std::vector<int32_t> borders_;  ///< the most slots of which each layer chooses all
  DeviceBuffer prepared_, scale_, scores_;
};

}  // namespace reflex::cuda
