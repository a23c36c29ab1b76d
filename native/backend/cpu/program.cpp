#include "backend/cpu/program.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "backend/cpu/pass_run.h"

namespace reflex::cpu {

CpuProgram::CpuProgram(Plan plan, const ProgramOptions& options, std::shared_ptr<ThreadPool> pool,
                       const Kernels& kernels)
    : plan_(std::move(plan)), options_(options), pool_(std::move(pool)), kernels_(kernels) {
  if (options_.max_rows < 1)
    fail(ErrorKind::invalid_input, "max_rows: expected 1 or more, found %d", options_.max_rows);
  check_plan(plan_);
  full_ = build_steps(plan_, true, constants_);
  states_only_ = build_steps(plan_, false, constants_);
  for (const Weight& w : plan_.weights) weight_bytes_ += w.nbytes;
  for (const Op& op : plan_.ops) {
    if (const auto* delta = std::get_if<GatedDelta>(&op)) n_taps_ = std::max(n_taps_, delta->n_taps);
    if (const auto* conv = std::get_if<CausalConv>(&op))
      n_taps_ = std::max(n_taps_, (conv->n_taps - 1) * conv->dilation + 1);
    if (const auto* ngram = std::get_if<NgramEmbed>(&op)) {
      n_taps_ = std::max(n_taps_, static_cast<int32_t>(ngram->multipliers.size()));
      // Scattered rows of a table that may be larger than memory: what lies around one is not wanted.
      const Weight& table = plan_.weights[static_cast<size_t>(ngram->table)];
      if (table.fd >= 0) advise_pages(table.data, table.nbytes, MADV_RANDOM);
    }
  }
}

std::unique_ptr<State> CpuProgram::new_state() {
  return std::make_unique<CpuState>(plan_.states, options_.n_ctx, options_.exact, this);
}

void CpuProgram::check_pass(const CpuState& state, const Pass& pass) const {
  const size_t rows = pass.tokens.size();
  if (state.owner() != this) fail(ErrorKind::invalid_input, "state: made by another program");
  if (rows < 1 || rows > static_cast<size_t>(options_.max_rows))
    fail(ErrorKind::invalid_input, "pass: expected 1 to %d rows, found %zu", options_.max_rows, rows);
  if (pass.positions.size() != rows || pass.parents.size() != rows)
    fail(ErrorKind::invalid_input, "pass: %zu tokens but %zu positions and %zu parents", rows,
         pass.positions.size(), pass.parents.size());
  for (int32_t t : pass.tokens)
    if (t < 0 || t >= plan_.n_vocab)
      fail(ErrorKind::invalid_input, "token id: expected 0 to %d, found %d", plan_.n_vocab - 1, t);
  int32_t last = -1;
  for (int32_t o : pass.outputs) {
    if (o <= last || static_cast<size_t>(o) >= rows)
      fail(ErrorKind::invalid_input, "outputs: expected ascending rows below %zu, found %d after %d", rows, o,
           last);
    last = o;
  }
  if (pass.head != HeadMode::gather) return;
  const std::span<const int32_t> begin = pass.gather_begin;
  if (begin.size() != pass.outputs.size() + 1 || begin.front() != 0 ||
      !std::is_sorted(begin.begin(), begin.end()) ||
      static_cast<size_t>(begin.back()) != pass.gather_ids.size())
    fail(ErrorKind::invalid_input, "gather_begin: expected %zu ascending offsets from 0 to %zu",
         pass.outputs.size() + 1, pass.gather_ids.size());
  for (int32_t id : pass.gather_ids)
    if (id < 0 || id >= plan_.n_vocab)
      fail(ErrorKind::invalid_input, "gather id: expected 0 to %d, found %d", plan_.n_vocab - 1, id);
}

void CpuProgram::run(State& base, const Pass& pass) {
  auto* state = dynamic_cast<CpuState*>(&base);
  if (!state) fail(ErrorKind::invalid_input, "state: made by another backend");
  check_pass(*state, pass);
  head_ = HeadMode::none;  // until the pass has ended well
  n_outputs_ = 0;
  state->ensure_slots(pass.first_slot + static_cast<int32_t>(pass.tokens.size()));
  if (n_taps_ > 0) delta_.build(pass, state->fixed_length(), n_taps_);
  const Visibility visibility = state->slots.extend(pass);
  const bool with_head = pass.head != HeadMode::none && !pass.outputs.empty();
  PassRun run(*this, *state, pass, visibility, with_head ? full_ : states_only_);
  state->begin_fixed();
  run.run();
  state->end_fixed(pass.first_slot + delta_.n_chain());
  if (!with_head) return;
  head_ = pass.head;
  n_outputs_ = static_cast<int32_t>(pass.outputs.size());
  gather_begin_.assign(pass.gather_begin.begin(), pass.gather_begin.end());
}

size_t CpuProgram::scratch_bytes() const {
  size_t n = all_values_.capacity() + output_values_.capacity() + rope_.capacity() + scratch_.capacity() +
             logits_.capacity() + parts_.capacity() + block_scores_.capacity() + hidden_.capacity() +
             latent_q_.capacity() + latent_o_.capacity();
  for (const Region& r : act_) n += r.capacity();
  return n;
}

}  // namespace reflex::cpu
