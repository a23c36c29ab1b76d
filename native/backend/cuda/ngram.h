// Embeddings of n-grams on a card: the host works out which rows of a table a pass reads, decodes those and
// no others, and the pass copies them as it does the embedded tokens. Tables stay where the file is: they may
// be larger than the card. Refuses: the sequence's last tokens, which its state keeps.
#pragma once
#include <span>
#include <vector>

#include "backend/cuda/steps.h"

namespace reflex::cuda {

class NgramTables {
 public:
  NgramTables(const Plan& plan, const StepList& steps);
  /// Bytes of a pass's rows in pinned memory, step after step, each on 16 bytes.
  size_t bytes(int32_t rows) const { return place(kNone, rows); }
  /// Where the op's begin.
  size_t at(const NgramEmbed& op, int32_t rows) const { return place(op.out, rows); }

  /// `parents` as DeltaPass has them. last(state): that state's tokens, the newest last, plus 1; 0: none.
  template <class Last>
  void write(char* to, const Pass& pass, std::span<const int32_t> parents, Last last) {
    const auto rows = static_cast<int32_t>(pass.tokens.size());
    for (const NgramEmbed& op : steps_) write_table(to + at(op, rows), op, pass, parents, last(op.tokens));
  }
  /// The tokens after the pass's first n_chain rows.
  template <class Last>
  void move_on(const Pass& pass, int32_t n_chain, Last last) const {
    for (const NgramEmbed& op : steps_) move_tokens(pass, n_chain, last(op.tokens));
  }

 private:
  size_t place(ValueId out, int32_t rows) const;
  void write_table(char* to, const NgramEmbed& op, const Pass& pass, std::span<const int32_t> parents,
                   std::span<const int32_t> last);
  static void move_tokens(const Pass& pass, int32_t n_chain, std::span<int32_t> last);

  const Plan& plan_;
  std::vector<NgramEmbed> steps_;
  std::vector<uint64_t> rows_;  ///< (rows, heads) of the table, of the pass under way
};

}  // namespace reflex::cuda
