// Streams, n-grams and attention over chosen blocks on the CPU against the float64 evaluator: chains cut into
// pieces, trees that hang off them, output rows alone; the sequence taken back; and plans that cannot be
// right.
#include <algorithm>
#include <limits>

#include "plan_builder.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kWidth = 20, kVocab = 61, kStreams = 3, kAll = kStreams * kWidth, kRank = 7;
constexpr int32_t kHeads = 4, kKvHeads = 2, kHeadDim = 6, kRot = 4;
constexpr int32_t kIndexHeads = 5, kIndexDim = 9, kBlock = 3, kBlocks = 4;
constexpr int32_t kGramHeads = 4, kGramWidth = 3, kGrams = 3, kTableRows = 41, kTaps = 3, kEos = 5;

/// embed -> streams -> n-grams -> mix -> attention over blocks -> inject -> mix -> head, with random weights.
class Streams : public PlanBuilder {
 public:
  explicit Streams(Rows rows, int32_t n_blocks = kBlocks)
      : PlanBuilder(kVocab, kWidth, 7, 0.5f), n_blocks_(n_blocks) {
    plan.ropes = {{kRot, RopeSpec::Pairing::adjacent, {1.0f, 0.1f}, 1.0f}};
    const ValueId e = embed("table"), x = ngrams(push(value(kAll), Repeat{e, kNone, kStreams}));
    ValueId logits = kNone;
    const ValueId h = mix(x, &logits), y = attention(h, rows);
    const ValueId into = with_rows(x, rows);
    const ValueId injected =
        push(like(into, kAll), StreamInject{into, with_rows(logits, rows), y, kNone, kStreams});
    plan.ops.emplace_back(Head{with_rows(mix(injected, nullptr), Rows::outputs), 0, kNone});
  }

 private:
  ValueId ngrams(ValueId x) {
    NgramEmbed op{};
    op.table = weight("grams", kGramWidth, kTableRows);
    op.tokens = state("tokens", StateSpec::Kind::fixed, kGrams - 1, true);
    op.multipliers = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 12345678901u};
    op.sizes = {11, 7, 13, 10};
    op.offsets = {0, 11, 18, 31};
    op.eos = kEos;
    const ValueId grams = push(value(kGramHeads * kGramWidth), op);
    const ValueId key = norm(linear(grams, "key", kAll)), query = norm(x),
                  in = linear(grams, "value", kWidth);
    const ValueId v = push(value(kAll), StreamGate{key, query, in, kNone, kStreams});
    const StateId history = state("history", StateSpec::Kind::fixed, (kTaps - 1) * kGrams * kAll, true);
    const WeightId taps = weight("taps", kTaps, kAll);
    const ValueId conv = push(value(kAll), CausalConv{norm(v), kNone, taps, history, kTaps, kGrams});
    return add(add(x, v), conv);
  }
  ValueId mix(ValueId x, ValueId* logits) {
    const ValueId n = norm(x), down = linear(n, "down", kRank);
    const ValueId low = push(like(x, kRank), Silu{down, kNone, 1.0f / kStreams});
    if (logits) *logits = linear(n, "inject", kStreams);
    const ValueId up = linear(low, "up", kAll);
    return push(like(x, kWidth), StreamMix{n, up, kNone, kStreams});
  }
  ValueId attention(ValueId h, Rows rows) {
    BlockAttention op{};
    const ValueId hq = with_rows(h, rows);
    op.q = linear(hq, "q", kHeads * kHeadDim);
    op.k = linear(h, "k", kKvHeads * kHeadDim);
    op.v = linear(h, "v", kKvHeads * kHeadDim);
    const ValueId iq = linear(hq, "iq", kIndexHeads * kIndexDim);
    op.index_q = push(like(hq, width(iq)), Rope{iq, kNone, 0, kIndexHeads});
    op.index_k = linear(h, "ik", kIndexDim);
    op.k_state = state("k", StateSpec::Kind::per_token, kKvHeads * kHeadDim, false);
    op.v_state = state("v", StateSpec::Kind::per_token, kKvHeads * kHeadDim, false);
    op.index_state = state("index", StateSpec::Kind::per_token, kIndexDim, false);
    op.index_norm = weight("index norm", kIndexDim, 1);
    op.index_rope = 0;
    op.n_heads = kHeads;
    op.n_kv_heads = kKvHeads;
    op.head_dim = op.v_head_dim = kHeadDim;
    op.index_heads = kIndexHeads;
    op.index_dim = kIndexDim;
    op.block_size = kBlock;
    op.n_blocks = n_blocks_;
    op.scale = 0.4f;
    op.index_eps = 1e-6f;
    return linear(push(like(hq, kHeads * kHeadDim), op), "output", kWidth);
  }

  ValueId norm(ValueId x) {
    const WeightId w = weight("norm", kAll, 1);
    return push(like(x, kAll), StreamNorm{x, kNone, w, kWidth, 1e-6f});
  }
  ValueId add(ValueId a, ValueId b) { return push(like(a, kAll), Add{a, b, kNone}); }

  const int32_t n_blocks_;
};

/// Rows whose tokens are kEos now and then, two of three an output.
Rowset with_ends(Rowset rows) {
  for (size_t i = 0; i < rows.tokens.size(); ++i)
    if ((static_cast<size_t>(rows.first_slot) + i) % 7 == 4) rows.tokens[i] = kEos;
  return rows.some_outputs();
}
Rowset chain(int32_t first, int32_t n) { return with_ends(Rowset::chain(first, n, kVocab)); }
Rowset forks(int32_t first, const std::vector<int32_t>& parents) {
  return with_ends(Rowset::chain(first, 0, kVocab).fork(parents, kVocab));
}

/// Branches of up to `kBlock` + 2 rows off slot n - 1, two of which share their first rows.
std::vector<int32_t> branches(int32_t n) {
  return {n - 1, n, n + 1, n + 2, n + 3, n - 1, n + 1, n + 6, n + 7, n - 1, n + 9};
}

}  // namespace

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
