// Which rows of a pass go on with the sequence and which fork from it, for steps with a fixed state.
#pragma once
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/delta_kernels.h"

namespace reflex::cpu {

/// Worked out once per pass, the same for every layer and head.
class DeltaPlan {
 public:
  /// n_taps: the most rows that an op of the plan looks at, itself and its ancestors. Throws Error(kv_cache)
  /// where a row would need a state that is not there: fixed states stand after `length` slots and nowhere
  /// else.
  void build(const Pass& pass, int32_t length, int32_t n_taps);

  int32_t n_chain() const { return n_chain_; }  ///< rows that go on, the first of the pass
  /// (R, n_taps): where the value of `back` rows up the row's ancestors lies, its own at back = 0: a row
  /// of the pass, or -1 - i for the i-th before the pass, counted from the newest
  const std::vector<int32_t>& sources() const { return sources_; }
  int32_t n_taps() const { return n_taps_; }
  const std::vector<DeltaFork>& forks() const { return forks_; }    ///< of rows n_chain ..
  int32_t n_kept() const { return n_kept_; }                        ///< copies of the state that forks need
  const std::vector<int32_t>& out_row() const { return out_row_; }  ///< (R) output row, or -1

 private:
  void build_forks(const Pass& pass);
  int32_t n_chain_ = 0, n_taps_ = 0, n_kept_ = 0;
  std::vector<int32_t> sources_, out_row_;
  std::vector<DeltaFork> forks_;
};

}  // namespace reflex::cpu
