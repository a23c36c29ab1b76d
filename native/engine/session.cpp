#include "engine/session.h"

namespace reflex {

int32_t RowList::add(int32_t token, int32_t position, int32_t parent) {
  tokens.push_back(token);
  positions.push_back(position);
  parents.push_back(parent);
  return size() - 1;
}

void RowList::add_chain(std::span<const int32_t> ids) {
  for (int32_t id : ids) {
    const int32_t last = size() - 1;
    add(id, last < 0 ? 0 : positions.back() + 1, last);
  }
}

void Session::require(int64_t turn) const {
  if (turn != turn_)
    fail(ErrorKind::kv_cache,
         "the request cannot go on: another one has begun on this engine since, and one at a time has a "
         "state");
}

void Session::truncate(int32_t n) {
  if (state_ && n < state_->slots.size()) state_->truncate(n);
}

int32_t Session::run(const RowList& rows, int32_t end, HeadMode head, std::span<const OutputRow> outputs) {
  if (!state_) state_ = program_.new_state();
  const int32_t begin = state_->slots.size();
  const auto n = static_cast<size_t>(end - begin), from = static_cast<size_t>(begin);
  out_rows_.clear();
  gather_ids_.clear();
  gather_begin_.assign(1, 0);
  for (const OutputRow& o : outputs) {
    if (o.slot < begin || o.slot >= end) continue;
    out_rows_.push_back(o.slot - begin);
    gather_ids_.insert(gather_ids_.end(), o.ids.begin(), o.ids.end());
    gather_begin_.push_back(static_cast<int32_t>(gather_ids_.size()));
  }
  Pass pass;
  pass.tokens = std::span(rows.tokens).subspan(from, n);
  pass.positions = std::span(rows.positions).subspan(from, n);
  pass.parents = std::span(rows.parents).subspan(from, n);
  pass.first_slot = begin;
  pass.n_chain = rows.n_chain - begin;
  pass.outputs = out_rows_;
  pass.head = out_rows_.empty() ? HeadMode::none : head;
  pass.gather_ids = gather_ids_;
  pass.gather_begin = gather_begin_;
  program_.run(*state_, pass);
  return static_cast<int32_t>(out_rows_.size());
}

}  // namespace reflex
