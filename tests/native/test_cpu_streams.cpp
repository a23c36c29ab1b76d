// Streams, n-grams and attention over chosen blocks on the CPU against the float64 evaluator: chains cut into
// pieces, trees that hang off them, output rows alone; the sequence taken back; and plans that cannot be
// right.
#include <algorithm>
#include <limits>
#include <random>

#include "backend/backend.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr int32_t kWidth = 20, kVocab = 61, kStreams = 3, kAll = kStreams * kWidth, kRank = 7;
constexpr int32_t kHeads = 4, kKvHeads = 2, kHeadDim = 6, kRot = 4;
constexpr int32_t kIndexHeads = 5, kIndexDim = 9, kBlock = 3, kBlocks = 4;
constexpr int32_t kGramHeads = 4, kGramWidth = 3, kGrams = 3, kTableRows = 41, kTaps = 3, kEos = 5;

/// embed -> streams -> n-grams -> mix -> attention over blocks -> inject -> mix -> head, with random weights.
class Streams {
 public:
  explicit Streams(Rows rows, int32_t n_blocks = kBlocks) : n_blocks_(n_blocks) {
    plan.n_vocab = kVocab;
    plan.n_embd = kWidth;
    plan.states = {{"tokens", StateSpec::Kind::fixed, kGrams - 1, true},
                   {"history", StateSpec::Kind::fixed, (kTaps - 1) * kGrams * kAll, true},
                   {"k", StateSpec::Kind::per_token, kKvHeads * kHeadDim, false},
                   {"v", StateSpec::Kind::per_token, kKvHeads * kHeadDim, false},
                   {"index", StateSpec::Kind::per_token, kIndexDim, false}};
    plan.ropes = {{kRot, RopeSpec::Pairing::adjacent, {1.0f, 0.1f}, 1.0f}};
    const ValueId e = value(kWidth, Rows::all), copies = value(kAll, Rows::all);
    plan.ops.emplace_back(Embed{weight("table", kWidth, kVocab), e});
    plan.ops.emplace_back(Repeat{e, copies, kStreams});
    ValueId x = ngrams(copies);
    ValueId logits = kNone;
    const ValueId h = mix(x, &logits), y = attention(h, rows);
    if (rows == Rows::outputs) {
      x = select(x);
      logits = select(logits);
    }
    const ValueId injected = value(kAll, rows);
    plan.ops.emplace_back(StreamInject{x, logits, y, injected, kStreams});
    ValueId last = mix(injected, nullptr);
    if (rows == Rows::all) last = select(last);
    plan.ops.emplace_back(Head{last, 0, kNone});
  }

  Plan plan;
  template <class T>
  T& op() {
    for (Op& o : plan.ops)
      if (auto* found = std::get_if<T>(&o)) return *found;
    throw std::logic_error("no such op");
  }

 private:
  ValueId ngrams(ValueId x) {
    NgramEmbed op{};
    op.out = value(kGramHeads * kGramWidth, Rows::all);
    op.table = weight("grams", kGramWidth, kTableRows);
    op.tokens = 0;
    op.multipliers = {0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 12345678901u};
    op.sizes = {11, 7, 13, 10};
    op.offsets = {0, 11, 18, 31};
    op.eos = kEos;
    plan.ops.emplace_back(op);
    const ValueId key = norm(linear(op.out, "key", kAll)), query = norm(x);
    const ValueId v = value(kAll, Rows::all), conv = value(kAll, Rows::all);
    plan.ops.emplace_back(StreamGate{key, query, linear(op.out, "value", kWidth), v, kStreams});
    plan.ops.emplace_back(CausalConv{norm(v), conv, weight("taps", kTaps, kAll), 1, kTaps, kGrams});
    return add(add(x, v), conv);
  }
  ValueId mix(ValueId x, ValueId* logits) {
    const ValueId n = norm(x), down = linear(n, "down", kRank), low = value(kRank, rows_of(x));
    plan.ops.emplace_back(Silu{down, low, 1.0f / kStreams});
    if (logits) *logits = linear(n, "inject", kStreams);
    const ValueId up = linear(low, "up", kAll), y = value(kWidth, rows_of(x));
    plan.ops.emplace_back(StreamMix{n, up, y, kStreams});
    return y;
  }
  ValueId attention(ValueId h, Rows rows) {
    BlockAttention op{};
    const ValueId hq = rows == Rows::outputs ? select(h) : h;
    op.q = linear(hq, "q", kHeads * kHeadDim);
    op.k = linear(h, "k", kKvHeads * kHeadDim);
    op.v = linear(h, "v", kKvHeads * kHeadDim);
    op.index_q = value(kIndexHeads * kIndexDim, rows);
    plan.ops.emplace_back(Rope{linear(hq, "iq", kIndexHeads * kIndexDim), op.index_q, 0, kIndexHeads});
    op.index_k = linear(h, "ik", kIndexDim);
    op.out = value(kHeads * kHeadDim, rows);
    op.k_state = 2;
    op.v_state = 3;
    op.index_state = 4;
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
    plan.ops.emplace_back(op);
    return linear(op.out, "output", kWidth);
  }

  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out));
    std::normal_distribution<float> normal(0, 0.5f);
    for (float& f : data) f = normal(rng_);
    Weight w;
    w.name = name;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.data = data.data();
    w.nbytes = data.size() * sizeof(float);
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  ValueId value(int32_t width, Rows rows) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  Rows rows_of(ValueId x) const { return plan.values[static_cast<size_t>(x)].rows; }
  ValueId linear(ValueId x, const std::string& name, int32_t n_out) {
    const ValueSpec spec = plan.values[static_cast<size_t>(x)];
    const ValueId y = value(n_out, spec.rows);
    plan.ops.emplace_back(Linear{x, y, weight(name, spec.width, n_out), kNone});
    return y;
  }
  ValueId norm(ValueId x) {
    const ValueId y = value(kAll, rows_of(x));
    plan.ops.emplace_back(StreamNorm{x, y, weight("norm", kAll, 1), kWidth, 1e-6f});
    return y;
  }
  ValueId add(ValueId a, ValueId b) {
    const ValueId y = value(kAll, rows_of(a));
    plan.ops.emplace_back(Add{a, b, y});
    return y;
  }
  ValueId select(ValueId x) {
    const ValueId y = value(plan.values[static_cast<size_t>(x)].width, Rows::outputs);
    plan.ops.emplace_back(SelectOutputs{x, y});
    return y;
  }

  const int32_t n_blocks_;
  std::mt19937 rng_{7};
  std::vector<std::vector<float>> storage_;
};

int32_t token(int32_t slot) { return slot % 7 == 4 ? kEos : (slot * 17 + 3) % kVocab; }

/// A program on a sequence, with or without the evaluator beside it.
class Sequence {
 public:
  Sequence(const Plan& plan, int threads, bool checked)
      : backend_(make_cpu_backend(threads)), evaluator_(plan), checked_(checked) {
    ProgramOptions options;
    options.n_ctx = 2048;
    options.exact = true;
    program_ = backend_->compile(plan, options);
    state_ = program_->new_state();
  }

  /// Rows with these parents behind the first `first` slots; the first n_chain go on with the sequence.
  std::vector<double> run(int32_t first, const std::vector<int32_t>& parents, int32_t n_chain) {
    std::vector<int32_t> tokens, outputs, positions;
    for (int32_t i = 0; i < static_cast<int32_t>(parents.size()); ++i) {
      const int32_t parent = parents[static_cast<size_t>(i)];
      tokens.push_back(token(first + i));
      depth_.resize(static_cast<size_t>(first + i));
      depth_.push_back(parent < 0 ? 0 : depth_[static_cast<size_t>(parent)] + 1);
      positions.push_back(depth_.back());
      if (i % 3 != 1) outputs.push_back(i);
    }
    Pass pass;
    pass.tokens = tokens;
    pass.positions = positions;
    pass.parents = parents;
    pass.first_slot = first;
    pass.n_chain = n_chain;
    pass.outputs = outputs;
    pass.head = HeadMode::full;
    program_->run(*state_, pass);
    std::vector<double> got, want;
    for (int32_t o = 0; o < static_cast<int32_t>(outputs.size()); ++o)
      got.insert(got.end(), program_->logits(o).begin(), program_->logits(o).end());
    if (!checked_) return got;
    for (const std::vector<double>& r : evaluator_.run(pass)) want.insert(want.end(), r.begin(), r.end());
    CHECK(reference::nmse(got, want) < kExactNmse);
    return got;
  }
  std::vector<double> chain(int32_t first, int32_t n) {
    std::vector<int32_t> parents;
    for (int32_t i = 0; i < n; ++i) parents.push_back(first + i - 1);
    return run(first, parents, n);
  }
  State& state() { return *state_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<State> state_;
  reference::Evaluator evaluator_;
  const bool checked_;
  std::vector<int32_t> depth_;
};

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
        Sequence s(streams.plan, threads, true);
        s.chain(0, n);
        s.run(n, branches(n), 0);
        s.state().truncate(n);  // the branches are forgotten, and the sequence goes on
        s.chain(n, 9);
        s.run(n + 9, branches(n + 9), 0);
      }
}

TEST(cpu_streams_agree_with_the_reference_where_a_pass_goes_on_and_forks) {
  const Streams streams(Rows::outputs);
  for (int32_t cut : {1, 5, 14, 15, 29}) {
    Sequence s(streams.plan, 2, true);
    s.chain(0, cut);
    std::vector<int32_t> parents;
    for (int32_t i = cut; i < 30; ++i) parents.push_back(i - 1);
    for (int32_t p : branches(30)) parents.push_back(p);
    s.run(cut, parents, 30 - cut);
  }
}

TEST(cpu_streams_in_pieces_of_any_size_agree_with_the_reference) {
  const Streams streams(Rows::outputs);
  for (int32_t piece = 1; piece <= 20; ++piece) {
    Sequence s(streams.plan, 2, true);
    for (int32_t at = 0; at < 40; at += piece) s.chain(at, std::min(piece, 40 - at));
  }
}

TEST(cpu_streams_single_rows_over_many_blocks_agree_with_the_reference) {
  // Enough slots for a list, and enough blocks for their scores, to be shared among threads.
  const Streams streams(Rows::outputs, 100);
  Sequence s(streams.plan, 3, true);
  s.chain(0, 330);
  for (int32_t at = 330; at < 336; ++at) s.chain(at, 1);
  const Streams few(Rows::outputs, 2);
  Sequence long_one(few.plan, 3, true);
  for (int32_t at = 0; at < 1600; at += 400) long_one.chain(at, 400);
  long_one.chain(1600, 1);
}

TEST(cpu_streams_taken_back_give_the_bits_of_the_first_time) {
  const Streams streams(Rows::all);
  Sequence s(streams.plan, 2, false);
  const std::vector<double> begin = s.chain(0, 22);
  s.state().checkpoint();
  const std::vector<double> rest = s.chain(22, 30);
  s.state().truncate(22);
  CHECK(s.chain(22, 30) == rest);
  s.state().truncate(22);
  s.run(22, branches(22), 0);
  s.state().truncate(22);
  CHECK(s.chain(22, 30) == rest);
  CHECK_THROWS(ErrorKind::kv_cache, s.state().truncate(30));
  s.state().truncate(0);
  CHECK(s.chain(0, 22) == begin);
  CHECK(s.chain(22, 30) == rest);
}

TEST(cpu_streams_a_score_that_is_no_number_breaks_no_choice) {
  Streams streams(Rows::all);
  std::vector<float> bad(kIndexDim, std::numeric_limits<float>::quiet_NaN());
  streams.plan.weights[static_cast<size_t>(streams.op<BlockAttention>().index_norm)].data = bad.data();
  Sequence s(streams.plan, 2, false);
  for (double x : s.chain(0, 60)) CHECK(std::isfinite(x));
}

TEST(cpu_streams_a_gate_is_flat_around_zero) {
  // |key . query| below 1e-6 counts as 1e-6, and 0 has no sign.
  Streams streams(Rows::all);
  std::vector<float> zeros(kAll, 0.0f);
  for (const Op& o : streams.plan.ops)
    if (const auto* norm = std::get_if<StreamNorm>(&o); norm && norm->out == streams.op<StreamGate>().key)
      streams.plan.weights[static_cast<size_t>(norm->weight)].data = zeros.data();
  Sequence(streams.plan, 1, true).chain(0, 20);
  std::vector<float> tiny(kAll, 1e-8f);
  for (const Op& o : streams.plan.ops)
    if (const auto* norm = std::get_if<StreamNorm>(&o); norm && norm->out == streams.op<StreamGate>().key)
      streams.plan.weights[static_cast<size_t>(norm->weight)].data = tiny.data();
  Sequence(streams.plan, 1, true).chain(0, 20);
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
