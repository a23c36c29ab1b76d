// Streams, n-grams, convolutions along ancestors and attention over chosen blocks on the GPU, against the
// float64 evaluator. Without a GPU every case says so and checks nothing; tests/gpu/check.sh is where they
// must run.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cuda_device.h"
#include "sequence.h"
#include "stream_model.h"

using namespace native_test;
using cuda_test::gpu;

namespace {

// Keys in f16 choose another block where two are as good: a few of a row's slots then differ.
constexpr double kOtherChoiceNmse = 2e-2;

Sequence sequence(const Streams& streams, bool exact, bool checked = true) {
  const bool chooses = std::any_of(streams.plan.ops.begin(), streams.plan.ops.end(), [](const Op& op) {
    const auto* block = std::get_if<BlockAttention>(&op);
    return block && block->n_blocks <= kBlocks;
  });
  return Sequence(streams.plan, {.backend = &gpu(),
                                 .exact = exact,
                                 .checked = checked,
                                 .gate = chooses && !exact ? kOtherChoiceNmse : 0});
}

}  // namespace

TEST(cuda_streams_agree_with_the_reference_on_chains_and_trees) {
  NEED_GPU();
  // Of no blocks: plain attention.
  for (const int32_t n_blocks : {0, kBlocks})
    for (const bool exact : {true, false})
      for (const int32_t n : {1, 14, 15, 40}) {
        const Streams streams(n % 2 ? Rows::all : Rows::outputs, n_blocks);
        Sequence s = sequence(streams, exact);
        s.run(chain(0, n));
        s.run(forks(n, branches(n)));
        s.state().truncate(n);  // the branches are forgotten, and the sequence goes on
        s.run(chain(n, 9));
        s.run(forks(n + 9, branches(n + 9)));
      }
}

TEST(cuda_streams_agree_with_the_reference_where_a_pass_goes_on_and_forks) {
  NEED_GPU();
  for (const bool exact : {true, false})
    for (const int32_t cut : {1, 14, 29}) {
      const Streams streams(Rows::outputs);
      Sequence s = sequence(streams, exact);
      s.run(chain(0, cut));
      s.run(with_ends(Rowset::chain(cut, 30 - cut, kVocab).fork(branches(30), kVocab)));
    }
}

TEST(cuda_streams_in_pieces_of_any_size_agree_with_the_reference) {
  NEED_GPU();
  const Streams streams(Rows::outputs);
  for (const int32_t piece : {1, 2, 3, 5, 7, 13, 16}) {
    Sequence s = sequence(streams, true);
    for (int32_t at = 0; at < 40; at += piece) {  // launched, then captured, then replayed
      s.run(chain(at, std::min(piece, 40 - at)));
      s.program().finish_load();
    }
  }
}

TEST(cuda_streams_rows_over_many_blocks_agree_with_the_reference) {
  NEED_GPU();
  // Lists of several tiles and splits, and choices of more than one digit of a radix select.
  for (const int32_t n_blocks : {2, 100})
    for (const bool exact : {true, false}) {
      const Streams streams(Rows::outputs, n_blocks);
      Sequence s = sequence(streams, exact);
      s.run(with_ends(Rowset::chain(0, 330, kVocab)));
      for (int32_t at = 330; at < 334; ++at) s.run(with_ends(Rowset::chain(at, 1, kVocab)));
    }
}

TEST(cuda_streams_heads_of_any_size_agree_with_the_reference) {
  NEED_GPU();
  const StreamHeads shapes[] = {{20, 1, 64, 72, 17, 32},   // more heads than a block takes
                                {6, 2, 128, 128, 16, 64},  // as the models have them
                                {3, 3, 260, 12, 1, 130}};  // wide, and no whole quads of f16
  for (const StreamHeads& heads : shapes)
    for (const bool exact : {true, false}) {
      const Streams streams(Rows::outputs, kBlocks, heads);
      Sequence s = sequence(streams, exact);
      s.run(chain(0, 33));
      for (int32_t at = 33; at < 36; ++at) s.run(chain(at, 1));
      s.run(forks(36, branches(36)));
    }
}

TEST(cuda_streams_taken_back_give_the_bits_of_the_first_time) {
  NEED_GPU();
  for (const bool exact : {true, false}) {
    const Streams streams(Rows::all);
    Sequence s = sequence(streams, exact, false);
    const std::vector<double> begin = s.run(chain(0, 22));
    s.state().checkpoint();
    const std::vector<double> rest = s.run(chain(22, 30));
    s.state().truncate(22);
    CHECK(s.run(chain(22, 30)) == rest);
    s.state().truncate(22);
    s.run(forks(22, branches(22)));
    s.state().truncate(22);
    CHECK(s.run(chain(22, 30)) == rest);
    CHECK_THROWS(ErrorKind::kv_cache, s.state().truncate(30));
    s.state().truncate(0);
    CHECK(s.run(chain(0, 22)) == begin);
    CHECK(s.run(chain(22, 30)) == rest);
  }
}

TEST(cuda_streams_a_score_that_is_no_number_breaks_no_choice) {
  NEED_GPU();
  Streams streams(Rows::all);
  std::vector<float> bad(kIndexDim, std::numeric_limits<float>::quiet_NaN());
  streams.plan.weights[static_cast<size_t>(streams.op<BlockAttention>().index_norm)].data = bad.data();
  Sequence s = sequence(streams, true, false);
  for (double x : s.run(chain(0, 60))) CHECK(std::isfinite(x));
}

TEST(cuda_streams_blocks_of_one_score_go_to_the_older) {
  NEED_GPU();
  // All scores 0: the oldest are chosen, as the evaluator does.
  Streams streams(Rows::all);
  const std::vector<float> zeros(kIndexDim, 0.0f);
  streams.plan.weights[static_cast<size_t>(streams.op<BlockAttention>().index_norm)].data = zeros.data();
  sequence(streams, true).run(chain(0, 60));
}

TEST(cuda_streams_a_gate_is_flat_around_zero) {
  NEED_GPU();
  // |key . query| below 1e-6 counts as 1e-6, and 0 has no sign.
  for (const float by : {0.0f, 1e-8f}) {
    Streams streams(Rows::all, 0);
    const std::vector<float> weight(kAll, by);
    for (const Op& o : streams.plan.ops)
      if (const auto* norm = std::get_if<StreamNorm>(&o); norm && norm->out == streams.op<StreamGate>().key)
        streams.plan.weights[static_cast<size_t>(norm->weight)].data = weight.data();
    sequence(streams, true).run(chain(0, 20));
  }
}

TEST(cuda_streams_rows_that_choose_among_many_blocks_go_in_turns) {
  NEED_GPU();
  // So long a context that the scores of 100 rows are more than the scratch holds.
  const Streams streams(Rows::outputs);
  Sequence s(streams.plan, {.backend = &gpu(), .n_ctx = 1 << 20});
  s.run(chain(0, 100));
}

TEST(cuda_streams_the_table_of_ngrams_stays_with_the_host) {
  NEED_GPU();
  Streams streams(Rows::all, 0);
  Weight& table = streams.plan.weights[static_cast<size_t>(streams.op<NgramEmbed>().table)];
  std::vector<float> large(size_t{kGramWidth} << 17);
  std::memcpy(large.data(), table.data, table.nbytes);
  table.ne[1] = 1 << 17;
  table.data = large.data();
  table.nbytes = large.size() * sizeof(float);
  Sequence s = sequence(streams, true);
  s.run(chain(0, 5));
  s.program().finish_load();
  CHECK(s.program().weight_bytes() < table.nbytes);
}

/// Every kernel once, in sizes that a sanitizer gets through.
TEST(cuda_small_streams) {
  NEED_GPU();
  for (const bool exact : {true, false}) {
    const Streams streams(Rows::outputs);
    Sequence s = sequence(streams, exact);
    s.run(chain(0, 20));
    s.run(chain(20, 1));
    s.run(forks(21, {20, 21, 20, 22}));
  }
}
