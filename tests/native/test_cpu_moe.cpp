// A mixture of experts on the CPU against the float64 evaluator: gatings, groups, bias, few and many
// rows; and the same bits for any number of threads and whatever rows share the pass.
#include <cstring>

#include "plan_builder.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kWidth = 24, kHidden = 20, kVocab = 61;

/// embed -> router -> experts -> gate by a sigmoid -> head, with random weights.
class Mixture : public PlanBuilder {
 public:
  explicit Mixture(Moe op) : PlanBuilder(kVocab, kWidth, 1, 1.0f) {
    const int64_t e = op.n_experts;
    op.in = select(embed("table"));
    op.router = linear(op.in, "router", op.n_experts);
    op.gate = weight("gate", kWidth, kHidden, e);
    op.up = weight("up", kWidth, kHidden, e);
    op.down = weight("down", kHidden, kWidth, e);
    if (op.bias != kNone) op.bias = weight("bias", e, 1);
    const ValueId y = push(like(op.in, kWidth), op), gate = linear(op.in, "gate of all", 1);
    const ValueId gated = push(like(y, kWidth), SigmoidGate{y, gate, kNone});
    plan.ops.emplace_back(Head{gated, 0, kNone});
  }
};

Moe mixture(int32_t n_experts, int32_t n_used) {
  Moe op{};
  op.n_experts = n_experts;
  op.n_used = n_used;
  return op;
}

void compare(const Moe& op) {
  const Mixture m(op);
  for (int32_t n : {1, 2, 5, 17, 40}) Sequence(m.plan).run(Rowset::chain(0, n, kVocab));
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
  const auto logits = [&](int threads) {
    return Sequence(m.plan, {.threads = threads, .checked = false}).run(Rowset::chain(0, 40, kVocab));
  };
  const std::vector<double> one = logits(1);
  for (int threads : {2, 3}) CHECK(logits(threads) == one);
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
