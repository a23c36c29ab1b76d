// One sequence on a loaded program: the rows of a request, pushed through in chunks. Rows form a
// tree (a prompt is a chain); which ones and why is the request's business, not the session's.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace reflex {

/// Rows in slot order: row i becomes slot i. parents are earlier slots or -1.
struct RowList {
  std::vector<int32_t> tokens, positions, parents;
  int32_t n_chain = INT32_MAX;  ///< rows from here on fork (Pass::n_chain), counted in slots
  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  int32_t add(int32_t token, int32_t position, int32_t parent);  ///< returns its slot
  void add_chain(std::span<const int32_t> ids);                  ///< after the last row
};

/// Logits wanted of one row: all of them (ids empty) or those of some ids.
struct OutputRow {
  int32_t slot = 0;
  std::vector<int32_t> ids;
};

class Session {
 public:
  explicit Session(Program& program) : program_(program) {}
  Program& program() { return program_; }
  int32_t length() const { return state_ ? state_->slots.size() : 0; }
  /// Begin a request: forget every slot. Returns the turn that is now; those before are over.
  int64_t begin() {
    truncate(0);
    return ++turn_;
  }
  /// Error(kv_cache) where another request has begun since this turn: its rows are gone.
  void require(int64_t turn) const;
  /// Forget every slot at and above n.
  void truncate(int32_t n);
  /// Makes truncate(length()) possible later on where layers are recurrent.
  void checkpoint() {
    if (state_) state_->checkpoint();
  }
  /// Run rows [length(), end) of the list; outputs are those of `outputs` (by slot, ascending)
  /// that fall into the range. Returns how many outputs were computed.
  int32_t run(const RowList& rows, int32_t end, HeadMode head, std::span<const OutputRow> outputs);

 private:
  Program& program_;
  std::unique_ptr<State> state_;
  int64_t turn_ = 0;
  std::vector<int32_t> out_rows_, gather_ids_, gather_begin_;
};

}  // namespace reflex
