// A small decoder of streams, n-grams and attention over chosen blocks, and rows for it: for the tests of
// both backends.
#pragma once
#include <cmath>

#include "plan_builder.h"
#include "rowset.h"

namespace native_test {

inline constexpr int32_t kWidth = 20, kVocab = 61, kStreams = 3, kAll = kStreams * kWidth, kRank = 7;
inline constexpr int32_t kRot = 4, kIndexDim = 9, kBlock = 3, kBlocks = 4;
inline constexpr int32_t kGramHeads = 4, kGramWidth = 3, kGrams = 3, kTableRows = 41, kTaps = 3, kEos = 5;

struct StreamHeads {
  int32_t heads = 4, kv_heads = 2, head_dim = 6, v_dim = 6, index_heads = 5, index_dim = kIndexDim;
};

/// embed -> streams -> n-grams -> mix -> attention over blocks -> inject -> mix -> head, with random weights.
/// With n_blocks 0: plain attention.
class Streams : public PlanBuilder {
 public:
  explicit Streams(Rows rows, int32_t n_blocks = kBlocks, const StreamHeads& heads = {})
      : PlanBuilder(kVocab, kWidth, 7, 0.5f), n_blocks_(n_blocks), heads_(heads) {
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
  /// The operands that both kinds of attention have.
  template <class T>
  void read_heads(T& op, ValueId h, Rows rows) {
    const StreamHeads& n = heads_;
    op.q = linear(with_rows(h, rows), "q", n.heads * n.head_dim);
    op.k = linear(h, "k", n.kv_heads * n.head_dim);
    op.v = linear(h, "v", n.kv_heads * n.v_dim);
    op.k_state = state("k", StateSpec::Kind::per_token, n.kv_heads * n.head_dim, false);
    op.v_state = state("v", StateSpec::Kind::per_token, n.kv_heads * n.v_dim, false);
    op.n_heads = n.heads;
    op.n_kv_heads = n.kv_heads;
    op.head_dim = n.head_dim;
    op.v_head_dim = n.v_dim;
    op.scale = 1.0f / std::sqrt(static_cast<float>(n.head_dim));
  }
  ValueId attention(ValueId h, Rows rows) {
    const StreamHeads& n = heads_;
    if (n_blocks_ == 0) {
      Attention op{};
      read_heads(op, h, rows);
      return linear(push(like(op.q, n.heads * n.v_dim), op), "output", kWidth);
    }
    BlockAttention op{};
    read_heads(op, h, rows);
    const ValueId iq = linear(with_rows(h, rows), "iq", n.index_heads * n.index_dim);
    op.index_q = push(like(iq, width(iq)), Rope{iq, kNone, 0, n.index_heads});
    op.index_k = linear(h, "ik", n.index_dim);
    op.index_state = state("index", StateSpec::Kind::per_token, n.index_dim, false);
    op.index_norm = weight("index norm", n.index_dim, 1);
    op.index_rope = 0;
    op.index_heads = n.index_heads;
    op.index_dim = n.index_dim;
    op.block_size = kBlock;
    op.n_blocks = n_blocks_;
    op.index_eps = 1e-6f;
    return linear(push(like(op.q, n.heads * n.v_dim), op), "output", kWidth);
  }

  ValueId norm(ValueId x) {
    const WeightId w = weight("norm", kAll, 1);
    return push(like(x, kAll), StreamNorm{x, kNone, w, kWidth, 1e-6f});
  }
  ValueId add(ValueId a, ValueId b) { return push(like(a, kAll), Add{a, b, kNone}); }

  const int32_t n_blocks_;
  const StreamHeads heads_;
};

/// Rows whose tokens are kEos now and then, two of three an output.
inline Rowset with_ends(Rowset rows) {
  for (size_t i = 0; i < rows.tokens.size(); ++i)
    if ((static_cast<size_t>(rows.first_slot) + i) % 7 == 4) rows.tokens[i] = kEos;
  return rows.some_outputs();
}
inline Rowset chain(int32_t first, int32_t n) { return with_ends(Rowset::chain(first, n, kVocab)); }
inline Rowset forks(int32_t first, const std::vector<int32_t>& parents) {
  return with_ends(Rowset::chain(first, 0, kVocab).fork(parents, kVocab));
}

/// Branches of up to `kBlock` + 2 rows off slot n - 1, two of which share their first rows.
inline std::vector<int32_t> branches(int32_t n) {
  return {n - 1, n, n + 1, n + 2, n + 3, n - 1, n + 1, n + 6, n + 7, n - 1, n + 9};
}

}  // namespace native_test
