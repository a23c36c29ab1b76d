// The indexer and the latent attention over its choice, on the CPU against the float64 evaluator: chains and
// trees, output rows alone, fewer and more slots than are chosen; and plans that choose by something else.
#include <random>

#include "backend/backend.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr int32_t kWidth = 24, kVocab = 61, kHeads = 3, kLatent = 14, kNope = 6, kRope = 4, kValue = 5;
constexpr int32_t kIndexHeads = 9, kIndexDim = 10, kTopK = 7;

/// embed -> indexer and latent attention -> head, with random weights.
class Sparse {
 public:
  explicit Sparse(Rows rows) {
    plan.n_vocab = kVocab;
    plan.n_embd = kWidth;
    plan.states = {{"index", StateSpec::Kind::per_token, kIndexDim, false},
                   {"latent", StateSpec::Kind::per_token, kLatent + kRope, false}};
    plan.ropes = {{kRope, RopeSpec::Pairing::adjacent, {1.0f, 0.1f}, 1.0f}};
    const ValueId x = value(kWidth, Rows::all);
    plan.ops.emplace_back(Embed{weight("table", kWidth, kVocab), x});
    ValueId hq = x;
    if (rows == Rows::outputs) {
      hq = value(kWidth, rows);
      plan.ops.emplace_back(SelectOutputs{x, hq});
    }
    Indexer index{};
    index.query = linear(hq, "query", kIndexHeads * kIndexDim);
    index.weights = linear(hq, "weights", kIndexHeads);
    const ValueId key = linear(x, "key", kIndexDim);
    index.key = value(kIndexDim, Rows::all);
    plan.ops.emplace_back(
        LayerNorm{key, index.key, weight("norm", kIndexDim, 1), weight("b", kIndexDim, 1), 1e-6f});
    index.out = value(kTopK, rows);
    index.n_heads = kIndexHeads;
    index.head_dim = kIndexDim;
    index.top_k = kTopK;
    index.state = 0;
    plan.ops.emplace_back(index);
    LatentAttention op{};
    op.q = linear(hq, "q", kHeads * (kNope + kRope));
    op.kv = linear(x, "kv", kLatent + kRope);
    op.out = value(kHeads * kValue, rows);
    op.norm = weight("latent norm", kLatent, 1);
    op.eps = 1e-6f;
    op.k_b = weight("k_b", kNope, kLatent, kHeads);
    op.v_b = weight("v_b", kLatent, kValue, kHeads);
    op.rope = 0;
    op.state = 1;
    op.n_heads = kHeads;
    op.n_latent = kLatent;
    op.nope_dim = kNope;
    op.rope_dim = kRope;
    op.v_head_dim = kValue;
    op.scale = 0.3f;
    op.selection = index.out;
    plan.ops.emplace_back(op);
    ValueId y = linear(op.out, "output", kWidth);
    if (rows == Rows::all) {
      const ValueId out = value(kWidth, Rows::outputs);
      plan.ops.emplace_back(SelectOutputs{y, out});
      y = out;
    }
    plan.ops.emplace_back(Head{y, 0, kNone});
  }

  Plan plan;

 private:
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, int64_t members = 1) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out * members));
    std::normal_distribution<float> normal(0, 0.5f);
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
  ValueId value(int32_t width, Rows rows) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  ValueId linear(ValueId x, const std::string& name, int32_t n_out) {
    const ValueSpec spec = plan.values[static_cast<size_t>(x)];
    const ValueId y = value(n_out, spec.rows);
    plan.ops.emplace_back(Linear{x, y, weight(name, spec.width, n_out), kNone});
    return y;
  }

  std::mt19937 rng_{5};
  std::vector<std::vector<float>> storage_;
};

/// A chain of n rows, then a tree that hangs off it: all against the evaluator.
void compare(Rows rows, int32_t n, int threads) {
  const Sparse sparse(rows);
  ProgramOptions options;
  options.n_ctx = 256;
  options.exact = true;
  const auto backend = make_cpu_backend(threads);
  const auto program = backend->compile(sparse.plan, options);
  const auto state = program->new_state();
  reference::Evaluator evaluator(sparse.plan);
  const auto run = [&](int32_t first, const std::vector<int32_t>& parents,
                       const std::vector<int32_t>& positions) {
    std::vector<int32_t> tokens, outputs;
    for (int32_t i = 0; i < static_cast<int32_t>(parents.size()); ++i) {
      tokens.push_back((i * 17 + 5 + first) % kVocab);
      if (i % 3 != 1) outputs.push_back(i);
    }
    Pass pass;
    pass.tokens = tokens;
    pass.positions = positions;
    pass.parents = parents;
    pass.first_slot = first;
    pass.outputs = outputs;
    pass.head = HeadMode::full;
    program->run(*state, pass);
    std::vector<double> got, want;
    for (int32_t o = 0; o < static_cast<int32_t>(outputs.size()); ++o)
      got.insert(got.end(), program->logits(o).begin(), program->logits(o).end());
    for (const std::vector<double>& r : evaluator.run(pass)) want.insert(want.end(), r.begin(), r.end());
    CHECK(reference::nmse(got, want) < kExactNmse);
  };
  std::vector<int32_t> parents, positions;
  for (int32_t i = 0; i < n; ++i) {
    parents.push_back(i - 1);
    positions.push_back(i);
  }
  run(0, parents, positions);
  run(n, {n - 1, n, n - 1, n + 2, n + 2, n + 4, n}, {n, n + 1, n, n + 1, n + 1, n + 2, n + 1});
}

}  // namespace

TEST(cpu_sparse_a_choice_of_slots_agrees_with_the_reference_on_chains_and_trees) {
  for (Rows rows : {Rows::all, Rows::outputs})
    for (int32_t n : {1, 5, 7, 8, 9, 40, 70})
      for (int threads : {1, 3}) compare(rows, n, threads);
}

TEST(cpu_sparse_slots_chosen_by_anything_but_an_indexer_are_refused) {
  Sparse sparse(Rows::all);
  for (Op& op : sparse.plan.ops)
    if (auto* latent = std::get_if<LatentAttention>(&op)) latent->selection = latent->q;
  CHECK_THROWS(ErrorKind::unsupported, check_plan(sparse.plan));
}
