// The tree of slots, and which passes fixed states allow; shared by all backends.
#include <algorithm>
#include <utility>

#include "backend/backend.h"

namespace reflex {

Visibility SlotTree::extend(const Pass& pass) {
  const size_t n = pass.tokens.size();
  if (pass.first_slot < 0 || pass.first_slot > size())
    fail(ErrorKind::invalid_input, "pass starts at slot %d, the state holds %d", pass.first_slot, size());
  truncate(pass.first_slot);
  Visibility vis;
  vis.prefix.reserve(n);
  vis.extra_begin.reserve(n + 1);
  vis.extra_begin.push_back(0);
  for (size_t r = 0; r < n; ++r) {
    const int32_t slot = pass.first_slot + static_cast<int32_t>(r), parent = pass.parents[r];
    if (parent < -1 || parent >= slot) {
      truncate(pass.first_slot);
      fail(ErrorKind::invalid_input, "row %zu (slot %d) has parent %d, expected -1 or an earlier slot", r,
           slot, parent);
    }
    // A slot whose parent is the slot just before it, with nothing but a chain behind, extends
    // the chain; any other starts or continues a branch off the chain it hangs from.
    int32_t prefix = 0;
    if (parent >= 0) {
      const bool parent_on_chain = chain_prefix_[parent] == parent + 1;
      prefix = parent_on_chain ? (parent == slot - 1 ? slot + 1 : parent + 1) : chain_prefix_[parent];
    } else if (slot == 0) {
      prefix = 1;
    }
    parent_.push_back(parent);
    chain_prefix_.push_back(prefix);
    vis.prefix.push_back(prefix);
    if (prefix != slot + 1) {
      const size_t begin = vis.extra.size();
      for (int32_t s = slot; s >= prefix; s = parent_[s]) vis.extra.push_back(s);
      for (size_t i = begin, j = vis.extra.size() - 1; i < j; ++i, --j) std::swap(vis.extra[i], vis.extra[j]);
      vis.chain = false;
    }
    vis.extra_begin.push_back(static_cast<int32_t>(vis.extra.size()));
  }
  return vis;
}

void check_truncate(int32_t n, int32_t length, int32_t checkpoint) {
  if (n != 0 && n != checkpoint)
    fail(ErrorKind::kv_cache,
         "state: cannot go back to slot %d: the recurrent layers' memory is that after slot %d, and no "
         "checkpoint is there",
         n, length - 1);
}

int32_t check_forks(const Pass& pass, int32_t length) {
  const auto rows = static_cast<int32_t>(pass.tokens.size()), n_chain = std::clamp(pass.n_chain, 0, rows);
  if (pass.first_slot != length)
    fail(ErrorKind::kv_cache,
         "pass: it begins at slot %d, but the recurrent layers' state stands after %d; forks end with their "
         "pass, and the sequence can only go back to its beginning or to a checkpoint",
         pass.first_slot, length);
  const int32_t end = pass.first_slot + n_chain;  // slots of the sequence after this pass
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t slot = pass.first_slot + r, parent = pass.parents[static_cast<size_t>(r)];
    if (r < n_chain ? parent != slot - 1 : parent != end - 1 && (parent < end || parent >= slot))
      fail(ErrorKind::kv_cache,
           "pass: row %d (slot %d) has parent %d; recurrent layers have no state there (expected %s %d%s)", r,
           slot, parent, r < n_chain ? "slot" : "the sequence's last slot", r < n_chain ? slot - 1 : end - 1,
           r < n_chain ? "" : " or a fork of this pass");
  }
  return n_chain;
}

void SlotTree::truncate(int32_t n) {
  if (n < size()) {
    parent_.resize(static_cast<size_t>(n));
    chain_prefix_.resize(static_cast<size_t>(n));
  }
}

}  // namespace reflex
