// DeepSeek-V4's steps on the CPU against the float64 evaluator: streams, a window with entries of both kinds,
// experts by token and limits, over chains cut at any place and over trees that end blocks in their branches.
#include <cstring>
#include <utility>

#include "plan_builder.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kWidth = 20, kVocab = 61, kStreams = 3, kHeads = 4, kDim = 10, kRot = 4, kWindow = 5;
constexpr int32_t kIndexHeads = 9, kIndexDim = 6, kTopK = 3, kExperts = 6, kHidden = 12, kLatent = 7;

struct Options {
  int32_t ratio = 4;
  bool overlap = true, indexed = true, by_token = true;
  Rows rows = Rows::outputs;
};

/// One layer of attention and experts on streams, with random weights.
class Layer : public PlanBuilder {
 public:
  explicit Layer(const Options& o) : PlanBuilder(kVocab, kWidth, 7, 0.4f), options_(o) {
    plan.ropes = {{kRot, RopeSpec::Pairing::adjacent, {1.0f, 0.2f}, 1.0f}};
    ValueId streams = push(value(kStreams * kWidth), Repeat{embed("table"), kNone, kStreams});
    ValueId weights = mix(streams, kStreams * (2 + kStreams));
    const ValueId a = attention(read(streams, weights));
    streams = write(with_rows(streams, o.rows), with_rows(weights, o.rows), a);
    weights = mix(streams, kStreams * (2 + kStreams));
    streams = write(streams, weights, experts(read(streams, weights)));
    const ValueId y = read(streams, mix(streams, kStreams));
    plan.ops.emplace_back(Head{with_rows(y, Rows::outputs), 0, kNone});
  }

 private:
  ValueId mix(ValueId streams, int32_t n) {
    const int32_t all = kStreams * kWidth;
    const ValueId x = push(like(streams, all), UnitNorm{streams, kNone, all, 1e-6f});
    const ValueId y = linear(x, "fn", n);
    const WeightId scale = weight("scale", n == kStreams ? 1 : 3, 1), base = weight("base", n, 1);
    return push(like(y, n), HyperWeights{y, kNone, scale, base, kStreams, 3, 1e-3f});
  }
  ValueId read(ValueId streams, ValueId weights) {
    return push(like(streams, kWidth), HyperRead{streams, weights, kNone, kStreams});
  }
  ValueId write(ValueId streams, ValueId weights, ValueId in) {
    return push(like(streams, kStreams * kWidth), HyperWrite{streams, weights, in, kNone, kStreams});
  }
  ValueId turned(ValueId x, int32_t heads, bool inverse) {
    return push(like(x, width(x)), TailRope{x, kNone, 0, heads, inverse});
  }
  StateId per_token(int32_t width) { return state("state", StateSpec::Kind::per_token, width, false); }

  void compress(ValueId h, int32_t dim, StateId entries, int32_t offset) {
    Compressor op{};
    const int32_t channels = options_.overlap ? 2 * dim : dim;
    op.kv = linear(h, "kv", channels);
    op.gate = linear(h, "gate", channels);
    op.ape = weight("ape", channels, options_.ratio);
    op.norm = weight("norm", dim, 1);
    op.eps = 1e-6f;
    op.rope = 0;
    op.raw = per_token(2 * channels);
    op.entries = entries;
    op.head_dim = dim;
    op.ratio = options_.ratio;
    op.offset = offset;
    op.overlap = options_.overlap;
    plan.ops.emplace_back(op);
  }

  ValueId attention(ValueId h) {
    const ValueId hq = with_rows(h, options_.rows);
    WindowAttention op{};
    op.q = turned(linear(hq, "q", kHeads * kDim), kHeads, false);
    op.kv = turned(linear(h, "kv", kDim), 1, false);
    op.sinks = weight("sinks", kHeads, 1);
    op.n_heads = kHeads;
    op.head_dim = kDim;
    op.window = kWindow;
    op.scale = 0.3f;
    op.ratio = options_.ratio;
    op.state = per_token(options_.ratio > 0 ? 2 * kDim : kDim);
    if (options_.ratio > 0) compress(h, kDim, op.state, kDim);
    if (options_.indexed) op.selection = indexer(h, hq);
    const ValueId back = turned(push(like(hq, kHeads * kDim), op), kHeads, true);
    const WeightId groups = weight("groups", kHeads * kDim / 2, 2 * kLatent);
    return linear(push(like(back, 2 * kLatent), GroupedLinear{back, kNone, groups, 2}), "output", kWidth);
  }

  ValueId indexer(ValueId h, ValueId hq) {
    Indexer op{};
    op.state = per_token(kIndexDim);
    compress(h, kIndexDim, op.state, 0);
    op.query = linear(hq, "index query", kIndexHeads * kIndexDim);
    op.weights = linear(hq, "index weights", kIndexHeads);
    op.key = kNone;
    op.n_heads = kIndexHeads;
    op.head_dim = kIndexDim;
    op.top_k = kTopK;
    op.ratio = options_.ratio;
    return push(like(hq, kTopK), op);
  }

  ValueId experts(ValueId h) {
    Moe op{};
    op.in = h;
    op.router = linear(h, "router", kExperts);
    op.gate = weight("gates", kWidth, kHidden, kExperts);
    op.up = weight("ups", kWidth, kHidden, kExperts);
    op.down = weight("downs", kHidden, kWidth, kExperts);
    op.n_experts = kExperts;
    op.n_used = 2;
    op.gating = Moe::Gating::sqrt_softplus;
    op.renormalise = true;
    op.scale = 1.5f;
    op.limit = 0.5f;
    if (options_.by_token) op.of_token = table();
    const ValueId routed = push(like(h, kWidth), op);
    const ValueId gate = linear(h, "gate", kHidden), up = linear(h, "up", kHidden);
    const ValueId hidden = push(like(h, kHidden), ClampedSwiGlu{gate, up, kNone, 0.4f});
    return push(like(h, kWidth), Add{routed, linear(hidden, "down", kWidth), kNone});
  }

  WeightId table() {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < kVocab; ++i) {
      ids.push_back(i % kExperts);
      ids.push_back((i / 2 + 3) % kExperts);
    }
    std::vector<uint8_t> bytes(ids.size() * sizeof(int32_t));
    std::memcpy(bytes.data(), ids.data(), bytes.size());
    return add("experts of tokens", GgmlType::I32, 2, kVocab, std::move(bytes));
  }

  const Options options_;
};

/// Rows [begin, end) of a chain.
Rowset chain(int32_t begin, int32_t end) { return Rowset::chain(begin, end - begin, kVocab).some_outputs(); }

void compare(const Options& options) {
  const Layer layer(options);
  for (int32_t cut : {1, 3, 4, 6, 9})
    for (int threads : {1, 3}) {
      Sequence s(layer.plan, {.threads = threads});
      s.run(chain(0, cut));
      s.run(chain(cut, 30));
      // Branches that end a block each, of which two share its beginning; then the chain goes on instead.
      s.run(Rowset::chain(30, 0, kVocab).fork({29, 30, 30, 29, 33, 34, 35}, kVocab).some_outputs());
      s.run(chain(30, 43));
      s.run(chain(17, 26));
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
  layer.op<Indexer>().ratio = 5;
  CHECK_THROWS(ErrorKind::unsupported, check_plan(layer.plan));
}
