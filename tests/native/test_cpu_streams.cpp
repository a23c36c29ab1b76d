// Streams, n-grams and attention over chosen blocks on the CPU against the float64 evaluator: chains cut into
// pieces, trees that hang off them, output rows alone; the sequence taken back; and plans that cannot be
// right.
#include <algorithm>
#include <limits>

#include "sequence.h"
#include "stream_model.h"

using namespace native_test;

TEST(cpu_streams_agree_with_the_reference_on_chains_and_trees) {
  for (Rows rows : {Rows::all, Rows::outputs})
    for (int32_t n : {1, 2, 12, 13, 14, 15, 16, 17, 40, 70})
      for (int threads : {1, 3}) {
        const Streams streams(rows);
        Sequence s(streams.plan, {.threads = threads});
        s.run(chain(0, n));
        s.run(forks(n, branches(n)));
        s.state().truncate(n);  // the branches are forgotten, and the sequence goes on
        s.run(chain(n, 9));
        s.run(forks(n + 9, branches(n + 9)));
      }
}

TEST(cpu_streams_agree_with_the_reference_where_a_pass_goes_on_and_forks) {
  const Streams streams(Rows::outputs);
  for (int32_t cut : {1, 5, 14, 15, 29}) {
    Sequence s(streams.plan);
    s.run(chain(0, cut));
    s.run(with_ends(Rowset::chain(cut, 30 - cut, kVocab).fork(branches(30), kVocab)));
  }
}

TEST(cpu_streams_in_pieces_of_any_size_agree_with_the_reference) {
  const Streams streams(Rows::outputs);
  for (int32_t piece = 1; piece <= 20; ++piece) {
    Sequence s(streams.plan);
    for (int32_t at = 0; at < 40; at += piece) s.run(chain(at, std::min(piece, 40 - at)));
  }
}

TEST(cpu_streams_single_rows_over_many_blocks_agree_with_the_reference) {
  // Enough slots for a list, and enough blocks for their scores, to be shared among threads.
  const Streams streams(Rows::outputs, 100);
  Sequence s(streams.plan, {.threads = 3});
  s.run(chain(0, 330));
  for (int32_t at = 330; at < 336; ++at) s.run(chain(at, 1));
  const Streams few(Rows::outputs, 2);
  Sequence long_one(few.plan, {.threads = 3});
  for (int32_t at = 0; at < 1600; at += 400) long_one.run(chain(at, 400));
  long_one.run(chain(1600, 1));
}

TEST(cpu_streams_taken_back_give_the_bits_of_the_first_time) {
  const Streams streams(Rows::all);
  Sequence s(streams.plan, {.checked = false});
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

TEST(cpu_streams_a_score_that_is_no_number_breaks_no_choice) {
  Streams streams(Rows::all);
  std::vector<float> bad(kIndexDim, std::numeric_limits<float>::quiet_NaN());
  streams.plan.weights[static_cast<size_t>(streams.op<BlockAttention>().index_norm)].data = bad.data();
  Sequence s(streams.plan, {.checked = false});
  for (double x : s.run(chain(0, 60))) CHECK(std::isfinite(x));
}

TEST(cpu_streams_a_gate_is_flat_around_zero) {
  // |key . query| below 1e-6 counts as 1e-6, and 0 has no sign.
  Streams streams(Rows::all);
  for (float size : {0.0f, 1e-8f}) {
    std::vector<float> key(kAll, size);
    for (const Op& o : streams.plan.ops)
      if (const auto* norm = std::get_if<StreamNorm>(&o); norm && norm->out == streams.op<StreamGate>().key)
        streams.plan.weights[static_cast<size_t>(norm->weight)].data = key.data();
    Sequence(streams.plan, {.threads = 1}).run(chain(0, 20));
  }
}

TEST(cpu_streams_plans_that_cannot_be_right_are_refused) {
  const auto refused = [](auto change) {
    Streams streams(Rows::all);
    check_plan(streams.plan);
    change(streams);
    CHECK_THROWS(ErrorKind::unsupported, check_plan(streams.plan));
  };
  refused([](Streams& s) { s.op<Repeat>().n = 2; });
  refused([](Streams& s) { s.op<StreamMix>().n_streams = 2; });
  refused([](Streams& s) { s.op<StreamInject>().n_streams = 4; });
  refused([](Streams& s) { s.op<StreamGate>().value = s.op<StreamGate>().key; });
  refused([](Streams& s) { s.op<NgramEmbed>().offsets[3] = kTableRows; });
  refused([](Streams& s) { s.op<NgramEmbed>().sizes[0] = 0; });
  refused([](Streams& s) { s.op<NgramEmbed>().sizes[1] = std::numeric_limits<uint64_t>::max(); });
  refused([](Streams& s) { s.op<NgramEmbed>().multipliers.pop_back(); });
  refused([](Streams& s) { s.op<NgramEmbed>().sizes.pop_back(); });
  refused([](Streams& s) { s.op<CausalConv>().dilation = 2; });
  refused([](Streams& s) { s.op<CausalConv>().dilation = 0; });
  refused([](Streams& s) { s.op<BlockAttention>().n_blocks = 0; });
  refused([](Streams& s) { s.op<BlockAttention>().block_size = 0; });
  refused([](Streams& s) { s.op<BlockAttention>().index_state = 2; });
  refused([](Streams& s) { s.op<BlockAttention>().index_heads = 4; });
}
