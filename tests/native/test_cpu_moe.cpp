// A mixture of experts on the CPU against the float64 evaluator: gatings, groups, bias, few and many
// rows; and the same bits for any number of threads and whatever rows share the pass.
#include <cstring>
#include <random>

#include "backend/backend.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr int32_t kWidth = 24, kHidden = 20, kVocab = 61;

/// embed -> router -> experts -> gate by a sigmoid -> head, with random weights.
class Mixture {
 public:
  explicit Mixture(Moe op, uint32_t seed = 1) : rng_(seed) {
    plan.n_vocab = kVocab;
    plan.n_embd = kWidth;
    const int64_t e = op.n_experts;
    const WeightId table = weight("table", kWidth, kVocab);
    const ValueId x = value(kWidth, Rows::all);
    plan.ops.emplace_back(Embed{table, x});
    op.in = value(kWidth, Rows::outputs);
    plan.ops.emplace_back(SelectOutputs{x, op.in});
    op.router = value(op.n_experts, Rows::outputs);
    plan.ops.emplace_back(Linear{op.in, op.router, weight("router", kWidth, e), kNone});
    op.gate = weight("gate", kWidth, kHidden, e);
    op.up = weight("up", kWidth, kHidden, e);
    op.down = weight("down", kHidden, kWidth, e);
    if (op.bias != kNone) op.bias = weight("bias", e, 1);
    op.out = value(kWidth, Rows::outputs);
    plan.ops.emplace_back(op);
    const ValueId gate = value(1, Rows::outputs), gated = value(kWidth, Rows::outputs);
    plan.ops.emplace_back(Linear{op.in, gate, weight("gate of all", kWidth, 1), kNone});
    plan.ops.emplace_back(SigmoidGate{op.out, gate, gated});
    plan.ops.emplace_back(Head{gated, table, kNone});
  }

  Plan plan;

 private:
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, int64_t members = 1) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out * members));
    std::normal_distribution<float> normal(0, 1);
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

  std::mt19937 rng_;
  std::vector<std::vector<float>> storage_;
};

Moe mixture(int32_t n_experts, int32_t n_used) {
  Moe op{};
  op.n_experts = n_experts;
  op.n_used = n_used;
  return op;
}

std::vector<float> logits(const Plan& plan, const std::vector<int32_t>& tokens, int threads,
                          bool against_reference) {
  ProgramOptions options;
  options.n_ctx = 256;
  options.exact = true;
  const auto backend = make_cpu_backend(threads);
  const auto program = backend->compile(plan, options);
  const auto state = program->new_state();
  std::vector<int32_t> positions, parents, outputs;
  for (int32_t i = 0; i < static_cast<int32_t>(tokens.size()); ++i) {
    positions.push_back(i);
    parents.push_back(i - 1);
    outputs.push_back(i);
  }
  Pass pass;
  pass.tokens = tokens;
  pass.positions = positions;
  pass.parents = parents;
  pass.outputs = outputs;
  pass.head = HeadMode::full;
  program->run(*state, pass);
  std::vector<float> all;
  for (int32_t o = 0; o < static_cast<int32_t>(outputs.size()); ++o)
    all.insert(all.end(), program->logits(o).begin(), program->logits(o).end());
  if (against_reference) {
    std::vector<double> want;
    for (const std::vector<double>& r : reference::Evaluator(plan).run(pass))
      want.insert(want.end(), r.begin(), r.end());
    CHECK(reference::nmse({all.begin(), all.end()}, want) < kExactNmse);
  }
  return all;
}

std::vector<int32_t> some_tokens(int32_t n) {
  std::vector<int32_t> t;
  for (int32_t i = 0; i < n; ++i) t.push_back((i * 17 + 5) % kVocab);
  return t;
}

void compare(const Moe& op) {
  const Mixture m(op);
  for (int32_t n : {1, 2, 5, 17, 40}) logits(m.plan, some_tokens(n), 2, true);
}

}  // namespace

TEST(cpu_moe_softmax) { compare(mixture(7, 3)); }

TEST(cpu_moe_one_expert_of_one) { compare(mixture(1, 1)); }

TEST(cpu_moe_every_expert) { compare(mixture(5, 5)); }

TEST(cpu_moe_sigmoid_with_bias_and_groups_by_their_two_best) {
  Moe op = mixture(12, 3);
  op.gating = Moe::Gating::sigmoid;
  op.group_score = Moe::GroupScore::best_two;
  op.n_groups = 4;
  op.n_groups_used = 2;
  op.bias = 0;  // any: there is one
  op.renormalise = true;
  op.scale = 2.5f;
  compare(op);
}

TEST(cpu_moe_softmax_with_groups_by_their_best) {
  Moe op = mixture(12, 4);
  op.n_groups = 3;
  op.n_groups_used = 1;
  op.scale = 16.0f;
  compare(op);
}

TEST(cpu_moe_same_bits_for_any_number_of_threads_and_rows) {
  const Mixture m(mixture(9, 4));
  const std::vector<int32_t> tokens = some_tokens(40);
  const std::vector<float> one = logits(m.plan, tokens, 1, false);
  for (int threads : {2, 3}) CHECK(logits(m.plan, tokens, threads, false) == one);
}

TEST(cpu_moe_is_refused_where_it_does_not_fit) {
  const auto refused = [](Moe op, const char* what) {
    try {
      check_plan(Mixture(op).plan);
    } catch (const Error& e) {
      CHECK(std::strstr(e.what(), what) != nullptr);
      return;
    }
    CHECK(false);
  };
  refused(mixture(4, 5), "n_used");
  Moe groups = mixture(6, 2);
  groups.n_groups = 4;
  refused(groups, "n_groups");
  groups.n_groups = 6;
  groups.n_groups_used = 1;
  refused(groups, "n_groups_used");
}
