// The indexer and the latent attention over its choice, on the CPU against the float64 evaluator: chains and
// trees, output rows alone, fewer and more slots than are chosen; and plans that choose by something else.
#include "plan_builder.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kWidth = 24, kVocab = 61, kHeads = 3, kLatent = 14, kNope = 6, kRope = 4, kValue = 5;
constexpr int32_t kIndexHeads = 9, kIndexDim = 10, kTopK = 7;

/// embed -> indexer and latent attention -> head, with random weights.
class Sparse : public PlanBuilder {
 public:
  explicit Sparse(Rows rows) : PlanBuilder(kVocab, kWidth, 5, 0.5f) {
    plan.ropes = {{kRope, RopeSpec::Pairing::adjacent, {1.0f, 0.1f}, 1.0f}};
    const ValueId x = embed("table"), hq = with_rows(x, rows);
    const ValueId y = linear(attention(x, hq, indexer(x, hq)), "output", kWidth);
    plan.ops.emplace_back(Head{with_rows(y, Rows::outputs), 0, kNone});
  }

 private:
  ValueId indexer(ValueId x, ValueId hq) {
    Indexer op{};
    op.query = linear(hq, "query", kIndexHeads * kIndexDim);
    op.weights = linear(hq, "weights", kIndexHeads);
    const ValueId key = linear(x, "key", kIndexDim);
    const WeightId norm = weight("norm", kIndexDim, 1), bias = weight("b", kIndexDim, 1);
    op.key = push(like(key, kIndexDim), LayerNorm{key, kNone, norm, bias, 1e-6f});
    op.n_heads = kIndexHeads;
    op.head_dim = kIndexDim;
    op.top_k = kTopK;
    op.state = state("index", StateSpec::Kind::per_token, kIndexDim, false);
    return push(like(hq, kTopK), op);
  }
  ValueId attention(ValueId x, ValueId hq, ValueId selection) {
    LatentAttention op{};
    op.q = linear(hq, "q", kHeads * (kNope + kRope));
    op.kv = linear(x, "kv", kLatent + kRope);
    op.norm = weight("latent norm", kLatent, 1);
    op.eps = 1e-6f;
    op.k_b = weight("k_b", kNope, kLatent, kHeads);
    op.v_b = weight("v_b", kLatent, kValue, kHeads);
    op.rope = 0;
    op.state = state("latent", StateSpec::Kind::per_token, kLatent + kRope, false);
    op.n_heads = kHeads;
    op.n_latent = kLatent;
    op.nope_dim = kNope;
    op.rope_dim = kRope;
    op.v_head_dim = kValue;
    op.scale = 0.3f;
    op.selection = selection;
    return push(like(hq, kHeads * kValue), op);
  }
};

/// A chain of n rows, then a tree that hangs off it: all against the evaluator.
void compare(Rows rows, int32_t n, int threads) {
  const Sparse sparse(rows);
  Sequence s(sparse.plan, {.threads = threads});
  s.run(Rowset::chain(0, n, kVocab).some_outputs());
  Rowset tree = Rowset::chain(n, 0, kVocab);
  s.run(tree.fork({n - 1, n, n - 1, n + 2, n + 2, n + 4, n}, kVocab).some_outputs());
}

}  // namespace

TEST(cpu_sparse_a_choice_of_slots_agrees_with_the_reference_on_chains_and_trees) {
  for (Rows rows : {Rows::all, Rows::outputs})
    for (int32_t n : {1, 5, 7, 8, 9, 40, 70})
      for (int threads : {1, 3}) compare(rows, n, threads);
}

TEST(cpu_sparse_slots_chosen_by_anything_but_an_indexer_are_refused) {
  Sparse sparse(Rows::all);
  sparse.op<LatentAttention>().selection = sparse.op<LatentAttention>().q;
  CHECK_THROWS(ErrorKind::unsupported, check_plan(sparse.plan));
}
