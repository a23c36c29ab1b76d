// Random decoders of DeepSeek-V4's layers, of any shape: hyper-connections over streams, attention over a
// window and entries, experts by token and with limits. For the tests of the GPU against the float64
// evaluator.
#pragma once
#include "cuda_model.h"

namespace cuda_test {

struct CompressedShape {
  int32_t d = 64, vocab = 101, layers = 1, streams = 4;
  int32_t heads = 4, dim = 16, rot = 8, window = 9, groups = 2, group_out = 24;
  int32_t ratio = 4;  ///< 0: a window alone
  bool overlap = true, indexed = false;
  int32_t index_heads = 3, index_dim = 12, top_k = 5;
  int32_t experts = 6, hidden = 32, iterations = 3;  ///< no experts: streams and attention alone
  bool outputs = true;                               ///< the last layer's queries are of output rows
  RopeSpec::Pairing pairing = RopeSpec::Pairing::adjacent;
  GgmlType matrix = GgmlType::F32, expert = GgmlType::F32, router = GgmlType::F32;
};

class CompressedModel : public Model {
 public:
  explicit CompressedModel(const CompressedShape& s, uint32_t seed = 1)
      : Model(s.d, s.vocab, s.layers, seed), c_(s) {
    RopeSpec rope{s.rot, s.pairing, {}, 1.1f};
    for (int i = 0; i < s.rot / 2; ++i)
      rope.inv_freq.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(s.rot)));
    plan.ropes.push_back(rope);
    const ValueId x = value(s.d);
    const WeightId table = matrix("token_embd.weight", s.d, s.vocab, GgmlType::F32);
    plan.ops.emplace_back(Embed{table, x});
    ValueId streams = linear(x, s.streams * s.d, s.matrix);
    for (int32_t i = 0; i < s.layers; ++i) streams = layer(streams, s.outputs && i + 1 == s.layers);
    ValueId y = read(streams, mix(streams, s.streams));
    if (!s.outputs) y = select(y);
    plan.ops.emplace_back(Head{norm(y, s.d), matrix("output.weight", s.d, s.vocab, GgmlType::F32), kNone});
  }

 private:
  ValueId layer(ValueId streams, bool last) {
    const int32_t all = c_.streams * (2 + c_.streams);
    ValueId weights = mix(streams, all);
    const ValueId a = attention(norm(read(streams, weights), c_.d), last);
    if (last) {
      streams = select(streams);
      weights = select(weights);
    }
    streams = write(streams, weights, a);
    if (c_.experts == 0) return streams;
    weights = mix(streams, all);
    return write(streams, weights, experts(norm(read(streams, weights), c_.d)));
  }

  ValueId mix(ValueId streams, int32_t n) {
    const ValueId x = push(like(streams, width(streams)), UnitNorm{streams, kNone, width(streams), 1e-6f});
    const ValueId y = linear(x, n, GgmlType::F32);
    return push(like(y, n), HyperWeights{y, kNone, vector("scale", n == c_.streams ? 1 : 3, 1.0f),
                                         vector("base", n, 0.0f), c_.streams, c_.iterations, 1e-3f});
  }
  ValueId read(ValueId streams, ValueId weights) {
    return push(like(streams, c_.d), HyperRead{streams, weights, kNone, c_.streams});
  }
  ValueId write(ValueId streams, ValueId weights, ValueId in) {
    return push(like(streams, width(streams)), HyperWrite{streams, weights, in, kNone, c_.streams});
  }
  ValueId turned(ValueId x, int32_t heads, bool inverse) {
    return push(like(x, width(x)), TailRope{x, kNone, 0, heads, inverse});
  }
  StateId state(int32_t w) {
    plan.states.push_back(
        {"state" + std::to_string(plan.states.size()), StateSpec::Kind::per_token, w, false});
    return static_cast<StateId>(plan.states.size()) - 1;
  }

  void compress(ValueId h, int32_t dim, StateId entries, int32_t offset) {
    Compressor op{};
    const int32_t channels = c_.overlap ? 2 * dim : dim;
    op.kv = linear(h, channels, c_.matrix);
    op.gate = linear(h, channels, c_.matrix);
    op.ape = matrix("ape", channels, c_.ratio, GgmlType::F32);
    op.norm = vector("norm", dim, 1.0f);
    op.eps = 1e-6f;
    op.rope = 0;
    op.raw = state(2 * channels);
    op.entries = entries;
    op.head_dim = dim;
    op.ratio = c_.ratio;
    op.offset = offset;
    op.overlap = c_.overlap;
    plan.ops.emplace_back(op);
  }

  ValueId attention(ValueId h, bool last) {
    const ValueId hq = last ? select(h) : h;
    WindowAttention op{};
    const ValueId q = linear(hq, c_.heads * c_.dim, c_.matrix);
    op.q = turned(push(like(q, width(q)), UnitNorm{q, kNone, c_.dim, 1e-6f}), c_.heads, false);
    op.kv = turned(norm(linear(h, c_.dim, c_.matrix), c_.dim), 1, false);
    op.sinks = vector("sinks", c_.heads, 0.5f);
    op.n_heads = c_.heads;
    op.head_dim = c_.dim;
    op.window = c_.window;
    op.scale = 2.0f / std::sqrt(static_cast<float>(c_.dim));
    op.ratio = c_.ratio;
    op.state = state((c_.ratio > 0 ? 2 : 1) * c_.dim);
    if (c_.ratio > 0) compress(h, c_.dim, op.state, c_.dim);
    if (c_.indexed) op.selection = choose(h, hq);
    const ValueId back = turned(push(like(q, width(q)), op), c_.heads, true);
    const WeightId w = matrix("groups", width(q) / c_.groups, c_.groups * c_.group_out, c_.matrix);
    const ValueId y = push(like(q, c_.groups * c_.group_out), GroupedLinear{back, kNone, w, c_.groups});
    return linear(y, c_.d, c_.matrix);
  }

  ValueId choose(ValueId h, ValueId hq) {
    Indexer op{};
    op.state = state(c_.index_dim);
    compress(h, c_.index_dim, op.state, 0);
    op.query = linear(hq, c_.index_heads * c_.index_dim, c_.matrix);
    op.weights = linear(hq, c_.index_heads, c_.matrix);
    op.key = kNone;
    op.n_heads = c_.index_heads;
    op.head_dim = c_.index_dim;
    op.top_k = c_.top_k;
    op.ratio = c_.ratio;
    return push(like(op.query, c_.top_k), op);
  }

  WeightId stack(const std::string& name, int64_t n_in, int64_t n_out) {
    const WeightId id = matrix(name, n_in, n_out * c_.experts, c_.expert);
    Weight& w = plan.weights[static_cast<size_t>(id)];
    w.ne[1] = n_out;
    w.ne[2] = c_.experts;
    return id;
  }

  /// By token, so that no rounding changes the choice.
  ValueId experts(ValueId h) {
    Moe op{};
    op.in = h;
    op.router = linear(h, c_.experts, c_.router);
    op.gate = stack("gates", c_.d, c_.hidden);
    op.up = stack("ups", c_.d, c_.hidden);
    op.down = stack("downs", c_.hidden, c_.d);
    op.n_experts = c_.experts;
    op.n_used = 2;
    op.gating = Moe::Gating::sqrt_softplus;
    op.renormalise = true;
    op.scale = 1.5f;
    op.limit = 0.5f;
    op.of_token = table();
    const ValueId y = push(like(h, c_.d), op);
    const ValueId gate = linear(h, c_.hidden, c_.matrix), up = linear(h, c_.hidden, c_.matrix);
    const ValueId hidden = push(like(h, c_.hidden), ClampedSwiGlu{gate, up, kNone, 0.4f});
    return push(like(h, c_.d), Add{y, linear(hidden, c_.d, c_.matrix), kNone});
  }

  WeightId table() {
    std::vector<uint8_t> bytes(static_cast<size_t>(2 * c_.vocab) * sizeof(int32_t));
    for (int32_t i = 0; i < c_.vocab; ++i) {
      const int32_t pair[2] = {i % c_.experts, (i / 2 + 3) % c_.experts};  // in any order, and the same twice
      std::memcpy(&bytes[static_cast<size_t>(i) * sizeof pair], pair, sizeof pair);
    }
    return add("experts of tokens", GgmlType::I32, 2, c_.vocab, std::move(bytes));
  }

  const CompressedShape c_;
};

}  // namespace cuda_test
