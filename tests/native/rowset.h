// The rows of a pass, owned: what the tests of both backends send through their programs.
//
// Owns: chains, forks off them, and their positions. Refuses: running anything (sequence.h, the CUDA tests).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace native_test {

struct Rowset {
  std::vector<int32_t> tokens, positions, parents;  ///< (R)
  std::vector<int32_t> outputs;                     ///< (O), rows of the above
  int32_t first_slot = 0, n_chain = INT32_MAX;

  /// n rows that continue a chain of first_slot rows; `last_only`: one output, else all.
  static Rowset chain(int32_t first_slot, int32_t n, int32_t vocab, bool last_only = false) {
    Rowset r;
    r.first_slot = first_slot;
    for (int32_t i = first_slot; i < first_slot + n; ++i) {
      r.tokens.push_back((i * 7919 + 13) % vocab);
      r.positions.push_back(i);
      r.parents.push_back(i - 1);
      if (!last_only || i + 1 == first_slot + n) r.outputs.push_back(i - first_slot);
    }
    return r;
  }

  /// Rows that hang off these slots, each an output, none part of the sequence; slots before the pass are a
  /// chain's.
  Rowset& fork(const std::vector<int32_t>& of_parents, int32_t vocab) {
    n_chain = std::min(n_chain, static_cast<int32_t>(tokens.size()));
    for (int32_t parent : of_parents) {
      const auto row = static_cast<int32_t>(tokens.size());
      tokens.push_back((31 * row + 7 * first_slot + 5) % vocab);
      positions.push_back(parent < first_slot ? parent + 1
                                              : positions[static_cast<size_t>(parent - first_slot)] + 1);
      parents.push_back(parent);
      outputs.push_back(row);
    }
    return *this;
  }

  /// Two rows of three as outputs.
  Rowset& some_outputs() {
    outputs.clear();
    for (int32_t row = 0; row < static_cast<int32_t>(tokens.size()); ++row)
      if (row % 3 != 1) outputs.push_back(row);
    return *this;
  }

  reflex::Pass pass(reflex::HeadMode head = reflex::HeadMode::full) const {
    reflex::Pass p;
    p.tokens = tokens;
    p.positions = positions;
    p.parents = parents;
    p.first_slot = first_slot;
    p.n_chain = n_chain;
    p.outputs = outputs;
    p.head = head;
    return p;
  }
};

}  // namespace native_test
