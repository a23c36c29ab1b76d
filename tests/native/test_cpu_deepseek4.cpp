// DeepSeek-V4's steps on the CPU against the float64 evaluator: streams, a window with entries of both kinds,
// experts by token and limits, over chains cut at any place and over trees that end blocks in their branches.
#include <cstring>
#include <random>

#include "backend/backend.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr int32_t kWidth = 20, kVocab = 61, kStreams = 3, kHeads = 4, kDim = 10, kRot = 4, kWindow = 5;
constexpr int32_t kIndexHeads = 9, kIndexDim = 6, kTopK = 3, kExperts = 6, kHidden = 12, kLatent = 7;

struct Options {
  int32_t ratio = 4;
  bool overlap = true, indexed = true, by_token = true;
  Rows rows = Rows::outputs;
};

/// One layer of attention and experts on streams, with random weights.
class Layer {
 public:
  explicit Layer(const Options& o) : options_(o) {
    plan.n_vocab = kVocab;
    plan.n_embd = kWidth;
    plan.ropes = {{kRot, RopeSpec::Pairing::adjacent, {1.0f, 0.2f}, 1.0f}};
    const ValueId x = value(kWidth, Rows::all);
    plan.ops.emplace_back(Embed{weight("table", kWidth, kVocab), x});
    ValueId streams = value(kStreams * kWidth, Rows::all);
    plan.ops.emplace_back(Repeat{x, streams, kStreams});
    ValueId weights = mix(streams, kStreams * (2 + kStreams));
    const ValueId a = attention(read(streams, weights));
    if (o.rows == Rows::outputs) {
      streams = select(streams);
      weights = select(weights);
    }
    streams = write(streams, weights, a);
    weights = mix(streams, kStreams * (2 + kStreams));
    streams = write(streams, weights, experts(read(streams, weights)));
    ValueId y = read(streams, mix(streams, kStreams));
    if (o.rows == Rows::all) y = select(y);
    plan.ops.emplace_back(Head{y, 0, kNone});
  }

  Plan plan;

 private:
  ValueId mix(ValueId streams, int32_t n) {
    const ValueId x = value(kStreams * kWidth, rows(streams));
    plan.ops.emplace_back(UnitNorm{streams, x, kStreams * kWidth, 1e-6f});
    const ValueId y = linear(x, "fn", n), out = value(n, rows(streams));
    plan.ops.emplace_back(HyperWeights{y, out, weight("scale", n == kStreams ? 1 : 3, 1),
                                       weight("base", n, 1), kStreams, 3, 1e-3f});
    return out;
  }
  ValueId read(ValueId streams, ValueId weights) {
    const ValueId y = value(kWidth, rows(streams));
    plan.ops.emplace_back(HyperRead{streams, weights, y, kStreams});
    return y;
  }
  ValueId write(ValueId streams, ValueId weights, ValueId in) {
    const ValueId y = value(kStreams * kWidth, rows(streams));
    plan.ops.emplace_back(HyperWrite{streams, weights, in, y, kStreams});
    return y;
  }
  ValueId select(ValueId x) {
    const ValueId y = value(width(x), Rows::outputs);
    plan.ops.emplace_back(SelectOutputs{x, y});
    return y;
  }
  ValueId turned(ValueId x, int32_t heads, bool inverse) {
    const ValueId y = value(width(x), rows(x));
    plan.ops.emplace_back(TailRope{x, y, 0, heads, inverse});
    return y;
  }

  void compress(ValueId h, int32_t dim, StateId entries, int32_t offset) {
    Compressor op{};
    const int32_t channels = options_.overlap ? 2 * dim : dim;
    op.kv = linear(h, "kv", channels);
    op.gate = linear(h, "gate", channels);
    op.ape = weight("ape", channels, options_.ratio);
    op.norm = weight("norm", dim, 1);
    op.eps = 1e-6f;
    op.rope = 0;
    op.raw = state(2 * channels);
    op.entries = entries;
    op.head_dim = dim;
    op.ratio = options_.ratio;
    op.offset = offset;
    op.overlap = options_.overlap;
    plan.ops.emplace_back(op);
  }

  ValueId attention(ValueId h) {
    const ValueId hq = options_.rows == Rows::outputs ? select(h) : h;
    WindowAttention op{};
    op.q = turned(linear(hq, "q", kHeads * kDim), kHeads, false);
    op.kv = turned(linear(h, "kv", kDim), 1, false);
    op.out = value(kHeads * kDim, options_.rows);
    op.sinks = weight("sinks", kHeads, 1);
    op.n_heads = kHeads;
    op.head_dim = kDim;
    op.window = kWindow;
    op.scale = 0.3f;
    op.ratio = options_.ratio;
    op.state = state(options_.ratio > 0 ? 2 * kDim : kDim);
    if (options_.ratio > 0) compress(h, kDim, op.state, kDim);
    if (options_.indexed) {
      Indexer index{};
      index.state = state(kIndexDim);
      compress(h, kIndexDim, index.state, 0);
      index.query = linear(hq, "index query", kIndexHeads * kIndexDim);
      index.weights = linear(hq, "index weights", kIndexHeads);
      index.key = kNone;
      index.out = op.selection = value(kTopK, options_.rows);
      index.n_heads = kIndexHeads;
      index.head_dim = kIndexDim;
      index.top_k = kTopK;
      index.ratio = options_.ratio;
      plan.ops.emplace_back(index);
    }
    plan.ops.emplace_back(op);
    const ValueId back = turned(op.out, kHeads, true), y = value(2 * kLatent, options_.rows);
    plan.ops.emplace_back(GroupedLinear{back, y, weight("groups", kHeads * kDim / 2, 2 * kLatent), 2});
    return linear(y, "output", kWidth);
  }

  ValueId experts(ValueId h) {
    Moe op{};
    op.in = h;
    op.router = linear(h, "router", kExperts);
    op.gate = weight("gates", kWidth, kHidden, kExperts);
    op.up = weight("ups", kWidth, kHidden, kExperts);
    op.down = weight("downs", kHidden, kWidth, kExperts);
    op.out = value(kWidth, rows(h));
    op.n_experts = kExperts;
    op.n_used = 2;
    op.gating = Moe::Gating::sqrt_softplus;
    op.renormalise = true;
    op.scale = 1.5f;
    op.limit = 0.5f;
    if (options_.by_token) op.of_token = table();
    plan.ops.emplace_back(op);
    const ValueId gate = linear(h, "gate", kHidden), up = linear(h, "up", kHidden);
    const ValueId hidden = value(kHidden, rows(h)), y = value(kWidth, rows(h));
    plan.ops.emplace_back(ClampedSwiGlu{gate, up, hidden, 0.4f});
    plan.ops.emplace_back(Add{op.out, linear(hidden, "down", kWidth), y});
    return y;
  }

  WeightId table() {
    for (int32_t i = 0; i < kVocab; ++i) {
      experts_.push_back(i % kExperts);
      experts_.push_back((i / 2 + 3) % kExperts);
    }
    Weight w;
    w.name = "experts of tokens";
    w.type = GgmlType::I32;
    w.ne[0] = 2;
    w.ne[1] = kVocab;
    w.data = experts_.data();
    w.nbytes = experts_.size() * sizeof(int32_t);
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, int64_t members = 1) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out * members));
    std::normal_distribution<float> normal(0, 0.4f);
    for (float& f : data) f = normal(rng_);
    Weight w;
    w.name = name;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.ne[2] = members;
    w.data = data.data();
    w.nbytes = data.size() * sizeof(float);
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  StateId state(int32_t width) {
    plan.states.push_back({"state", StateSpec::Kind::per_token, width, false});
    return static_cast<StateId>(plan.states.size()) - 1;
  }
  ValueId value(int32_t width, Rows rows) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  int32_t width(ValueId x) const { return plan.values[static_cast<size_t>(x)].width; }
  Rows rows(ValueId x) const { return plan.values[static_cast<size_t>(x)].rows; }
  ValueId linear(ValueId x, const std::string& name, int32_t n_out) {
    const ValueId y = value(n_out, rows(x));
    plan.ops.emplace_back(Linear{x, y, weight(name, width(x), n_out), kNone});
    return y;
  }

  const Options options_;
  std::mt19937 rng_{7};
  std::vector<std::vector<float>> storage_;
  std::vector<int32_t> experts_;
};

/// A program and the evaluator, pass by pass.
class Pair {
 public:
  Pair(const Plan& plan, int threads) : evaluator_(plan) {
    ProgramOptions options;
    options.n_ctx = 256;
    options.exact = true;
    backend_ = make_cpu_backend(threads);
    program_ = backend_->compile(plan, options);
    state_ = program_->new_state();
  }
  void run(int32_t first, const std::vector<int32_t>& parents, const std::vector<int32_t>& positions) {
    std::vector<int32_t> tokens, outputs;
    for (int32_t i = 0; i < static_cast<int32_t>(parents.size()); ++i) {
      tokens.push_back((positions[static_cast<size_t>(i)] * 17 + 5 * i + first) % kVocab);
      if (i % 3 != 1) outputs.push_back(i);
    }
    Pass pass;
    pass.tokens = tokens;
    pass.positions = positions;
    pass.parents = parents;
    pass.first_slot = first;
    pass.outputs = outputs;
    pass.head = HeadMode::full;
    program_->run(*state_, pass);
    std::vector<double> got, want;
    for (int32_t o = 0; o < static_cast<int32_t>(outputs.size()); ++o)
      got.insert(got.end(), program_->logits(o).begin(), program_->logits(o).end());
    for (const std::vector<double>& r : evaluator_.run(pass)) want.insert(want.end(), r.begin(), r.end());
    CHECK(reference::nmse(got, want) < kExactNmse);
  }
  void chain(int32_t begin, int32_t end) {
    std::vector<int32_t> parents, positions;
    for (int32_t i = begin; i < end; ++i) {
      parents.push_back(i - 1);
      positions.push_back(i);
    }
    run(begin, parents, positions);
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<State> state_;
  reference::Evaluator evaluator_;
};

void compare(const Options& options) {
  const Layer layer(options);
  for (int32_t cut : {1, 3, 4, 6, 9})
    for (int threads : {1, 3}) {
      Pair pair(layer.plan, threads);
      pair.chain(0, cut);
      pair.chain(cut, 30);
      // Branches that end a block each, of which two share its beginning; then the chain goes on instead.
      pair.run(30, {29, 30, 30, 29, 33, 34, 35}, {30, 31, 31, 30, 31, 32, 33});
      pair.chain(30, 43);
      pair.chain(17, 26);
    }
}

}  // namespace

TEST(cpu_deepseek4_with_overlapping_entries_chosen) { compare({}); }

TEST(cpu_deepseek4_with_overlapping_entries_on_all_rows) {
  Options o;
  o.rows = Rows::all;
  o.by_token = false;
  compare(o);
}

TEST(cpu_deepseek4_with_every_entry_of_blocks_apart) {
  Options o;
  o.ratio = 7;
  o.overlap = o.indexed = false;
  compare(o);
}

TEST(cpu_deepseek4_with_a_window_alone) {
  Options o;
  o.ratio = 0;
  o.indexed = false;
  compare(o);
}

TEST(cpu_deepseek4_experts_that_are_not_there_are_refused) {
  Layer layer({});
  for (Weight& w : layer.plan.weights)
    if (w.type == GgmlType::I32) {
      std::vector<int32_t> ids(static_cast<size_t>(2 * kVocab), 0);
      ids[50] = kExperts;
      w.data = ids.data();
      CHECK_THROWS(ErrorKind::gguf, check_plan(layer.plan));
    }
}

TEST(cpu_deepseek4_a_choice_for_another_ratio_is_refused) {
  Layer layer({});
  for (Op& op : layer.plan.ops)
    if (auto* indexer = std::get_if<Indexer>(&op)) indexer->ratio = 5;
  CHECK_THROWS(ErrorKind::unsupported, check_plan(layer.plan));
}
