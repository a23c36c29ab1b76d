// Latent attention on the CPU against the float64 evaluator, absorbed and decompressed: lengths on both sides
// of where one form gives way to the other, cuts into passes, trees, output rows alone; matrices split and
// whole.
#include <string>

#include "plan_builder.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kVocab = 61, kWidth = 24;

struct Shape {
  int32_t heads = 3, latent = 20, nope = 10, rope = 6, value = 7;  ///< decompressed from 9 rows on
  bool split = true;
  Rows rows = Rows::all;
};

/// embed -> latent attention -> head, with random weights.
class LatentModel : public PlanBuilder {
 public:
  explicit LatentModel(const Shape& s) : PlanBuilder(kVocab, kWidth, 1) {
    RopeSpec rope{s.rope, RopeSpec::Pairing::adjacent, {}, 1.0f};
    for (int32_t i = 0; i < s.rope / 2; ++i) rope.inv_freq.push_back(std::pow(0.1f, static_cast<float>(i)));
    plan.ropes = {rope};
    const ValueId x = embed("table"), hq = with_rows(x, s.rows);
    LatentAttention op{};
    op.q = linear(hq, "q", s.heads * (s.nope + s.rope));
    op.kv = linear(x, "kv", s.latent + s.rope);
    op.norm = normal("norm", s.latent, 1, 1, 0.0f, 1.0f);
    op.eps = 1e-6f;
    if (s.split) {
      op.k_b = weight("k_b", s.nope, s.latent, s.heads);
      op.v_b = weight("v_b", s.latent, s.value, s.heads);
    } else {
      op.kv_b = weight("kv_b", s.latent, s.heads * (s.nope + s.value));
    }
    op.rope = 0;
    op.state = state("latent", StateSpec::Kind::per_token, s.latent + s.rope, false);
    op.n_heads = s.heads;
    op.n_latent = s.latent;
    op.nope_dim = s.nope;
    op.rope_dim = s.rope;
    op.v_head_dim = s.value;
    op.scale = 0.3f;
    const ValueId out = with_rows(push(like(hq, s.heads * s.value), op), Rows::outputs);
    plan.ops.emplace_back(Head{out, weight("head", width(out), kVocab), kNone});
  }
};

void cuts(const Shape& s, std::initializer_list<int32_t> pieces, const std::string& isa = "",
          bool exact = true) {
  const LatentModel model(s);
  Sequence sequence(model.plan, {.isa = isa, .exact = exact});
  int32_t at = 0;
  for (int32_t n : pieces) {
    sequence.run(Rowset::chain(at, n, kVocab));
    at += n;
  }
}

}  // namespace

TEST(cpu_latent_attention_of_every_length) {
  for (bool split : {true, false})
    for (int32_t n : {1, 2, 7, 8, 9, 10, 31, 32, 33, 63, 64, 65, 70, 130, 257}) cuts({.split = split}, {n});
}

TEST(cpu_latent_attention_over_cuts_changes_form_on_the_way) {
  for (bool split : {true, false}) {
    cuts({.split = split}, {40, 1, 8, 9, 50, 2, 33});
    cuts({.split = split}, {1, 1, 30, 1, 100});
  }
}

TEST(cpu_latent_attention_of_sizes_that_never_pay) {
  cuts({.latent = 8, .nope = 10, .value = 9}, {40, 20});  // a row saves nothing: absorbed at any length
}

TEST(cpu_latent_attention_in_real_proportions) {
  for (bool split : {true, false})
    cuts({.heads = 2, .latent = 64, .nope = 16, .rope = 8, .value = 16, .split = split}, {70, 40, 1});
}

TEST(cpu_latent_attention_with_an_f16_state) {
  for (bool split : {true, false}) cuts({.split = split}, {40, 1, 30}, "", false);
}

TEST(cpu_latent_attention_on_every_instruction_set) {
  for (const char* isa : {"portable", "avx2", "avx512vnni"}) {
    try {
      make_cpu_backend(1, isa);
    } catch (const Error&) {
      continue;  // this machine has no such instructions
    }
    for (bool split : {true, false}) cuts({.split = split}, {33, 1, 12}, isa);
  }
}

TEST(cpu_latent_attention_of_trees_and_of_some_rows) {
  for (bool split : {true, false})
    for (Rows kind : {Rows::all, Rows::outputs}) {
      const LatentModel model({.split = split, .rows = kind});
      Sequence s(model.plan);
      s.run(Rowset::chain(0, 20, kVocab));
      // Three branches off the prompt's end, one of which forks again.
      Rowset tree = Rowset::chain(20, 0, kVocab);
      tree.fork({19, 20, 21, 22, 23, 24, 19, 26, 27, 28, 29, 30, 19, 32, 33, 34, 35, 36, 21}, kVocab);
      tree.outputs = {0, 3, 5, 6, 9, 11, 12, 13, 14, 15, 17, 18};
      s.run(tree);
      s.state().truncate(20);
      s.run(Rowset::chain(20, 15, kVocab));
    }
}
