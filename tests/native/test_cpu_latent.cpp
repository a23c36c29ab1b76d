// Latent attention on the CPU against the float64 evaluator, absorbed and decompressed: lengths on both sides
// of where one form gives way to the other, cuts into passes, trees, output rows alone; matrices split and
// whole.
#include <random>
#include <string>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr double kFastNmse = 1e-4;  // latents in f16
constexpr int32_t kVocab = 61, kWidth = 24;

struct Shape {
  int32_t heads = 3, latent = 20, nope = 10, rope = 6, value = 7;  ///< decompressed from 9 rows on
  bool split = true;
  Rows rows = Rows::all;
};

/// embed -> latent attention -> head, with random weights.
class LatentModel {
 public:
  explicit LatentModel(const Shape& s) {
    plan.n_vocab = kVocab;
    plan.n_embd = kWidth;
    plan.states = {{"latent", StateSpec::Kind::per_token, s.latent + s.rope, false}};
    RopeSpec rope{s.rope, RopeSpec::Pairing::adjacent, {}, 1.0f};
    for (int32_t i = 0; i < s.rope / 2; ++i) rope.inv_freq.push_back(std::pow(0.1f, static_cast<float>(i)));
    plan.ropes = {rope};
    const ValueId x = value(kWidth, Rows::all);
    plan.ops.emplace_back(Embed{weight("table", kWidth, kVocab), x});
    ValueId hq = x;
    if (s.rows == Rows::outputs) plan.ops.emplace_back(SelectOutputs{x, hq = value(kWidth, s.rows)});
    LatentAttention op{};
    op.q = linear(hq, s.heads * (s.nope + s.rope));
    op.kv = linear(x, s.latent + s.rope);
    op.out = value(s.heads * s.value, s.rows);
    op.norm = weight("norm", s.latent, 1);
    op.eps = 1e-6f;
    if (s.split) {
      op.k_b = weight("k_b", s.nope, s.latent, s.heads);
      op.v_b = weight("v_b", s.latent, s.value, s.heads);
    } else {
      op.kv_b = weight("kv_b", s.latent, s.heads * (s.nope + s.value));
    }
    op.rope = 0;
    op.state = 0;
    op.n_heads = s.heads;
    op.n_latent = s.latent;
    op.nope_dim = s.nope;
    op.rope_dim = s.rope;
    op.v_head_dim = s.value;
    op.scale = 0.3f;
    plan.ops.emplace_back(op);
    ValueId out = op.out;
    if (s.rows == Rows::all)
      plan.ops.emplace_back(SelectOutputs{op.out, out = value(s.heads * s.value, Rows::outputs)});
    plan.ops.emplace_back(Head{out, weight("head", s.heads * s.value, kVocab), kNone});
  }

  Plan plan;

 private:
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, int64_t members = 1) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out * members));
    std::normal_distribution<float> normal(0, n_out == 1 ? 1.0f : 1.0f / std::sqrt(static_cast<float>(n_in)));
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
  ValueId linear(ValueId in, int32_t n_out) {
    const ValueId out = value(n_out, plan.values[static_cast<size_t>(in)].rows);
    plan.ops.emplace_back(Linear{in, out, weight("matrix", kWidth, n_out), kNone});
    return out;
  }

  std::mt19937 rng_{1};
  std::vector<std::vector<float>> storage_;
};

struct Rowset {
  std::vector<int32_t> tokens, positions, parents, outputs;
  int32_t first_slot;

  Rowset(int32_t first, int32_t n) : first_slot(first) {
    for (int32_t i = 0; i < n; ++i) add(first + i - 1, first + i);
  }
  void add(int32_t parent, int32_t position) {
    const auto i = static_cast<int32_t>(tokens.size());
    tokens.push_back((7 * (first_slot + i) + 3 * parent + 5) % kVocab);
    positions.push_back(position);
    parents.push_back(parent);
    outputs.push_back(i);
  }
  Pass pass() const {
    Pass p;
    p.tokens = tokens;
    p.positions = positions;
    p.parents = parents;
    p.outputs = outputs;
    p.first_slot = first_slot;
    p.head = HeadMode::full;
    return p;
  }
};

class Compared {
 public:
  explicit Compared(const Shape& s, const std::string& isa = "", bool exact = true)
      : model_(s),
        evaluator_(model_.plan),
        backend_(make_cpu_backend(2, isa)),
        gate_(exact ? kExactNmse : kFastNmse) {
    ProgramOptions options;
    options.n_ctx = 1024;
    options.exact = exact;
    program_ = backend_->compile(model_.plan, options);
    state_ = program_->new_state();
  }
  void run(const Rowset& rows) {
    program_->run(*state_, rows.pass());
    std::vector<double> got, want;
    for (size_t o = 0; o < rows.outputs.size(); ++o) {
      const auto r = program_->logits(static_cast<int32_t>(o));
      got.insert(got.end(), r.begin(), r.end());
    }
    for (const std::vector<double>& r : evaluator_.run(rows.pass()))
      want.insert(want.end(), r.begin(), r.end());
    const double error = reference::nmse(got, want);
    if (!(error < gate_))
      std::fprintf(stderr, "%zu rows after %d: NMSE %.1e (gate %.0e)\n", rows.tokens.size(), rows.first_slot,
                   error, gate_);
    CHECK(error < gate_);
  }
  State& state() { return *state_; }

 private:
  LatentModel model_;
  reference::Evaluator evaluator_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<State> state_;
  double gate_;
};

void cuts(const Shape& s, std::initializer_list<int32_t> pieces, const std::string& isa = "",
          bool exact = true) {
  Compared c(s, isa, exact);
  int32_t at = 0;
  for (int32_t n : pieces) {
    c.run(Rowset(at, n));
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
      Compared c({.split = split, .rows = kind});
      c.run(Rowset(0, 20));
      Rowset tree(20, 0);  // three branches off the prompt's end, one of which forks again
      for (int32_t branch = 0; branch < 3; ++branch) {
        int32_t parent = 19, position = 20;
        for (int32_t i = 0; i < 6; ++i) {
          tree.add(parent, position++);
          parent = 20 + static_cast<int32_t>(tree.tokens.size()) - 1;
        }
      }
      tree.add(21, 22);
      tree.outputs = {0, 3, 5, 6, 9, 11, 12, 13, 14, 15, 17, 18};
      c.run(tree);
      c.state().truncate(20);
      c.run(Rowset(20, 15));
    }
}
