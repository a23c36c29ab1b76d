// Whole passes of the CPU backend against the float64 evaluator: fusion, trees, heads, threads.
#include <cstring>
#include <random>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
// f16 keys and values, and activations of 8 bits where the weights are quantised.
constexpr double kFastNmse = 1e-4;

struct Shape {
  int32_t d = 48, n_heads = 4, n_kv_heads = 2, hd = 12, hd_v = 12, ff = 80, vocab = 101, layers = 2;
  bool qk_norm = true, bias = false, adjacent = false;
};

/// A dense model with random F32 weights, and the memory behind them.
class TinyModel {
 public:
  explicit TinyModel(const Shape& s, uint32_t seed = 1) : s_(s), rng_(seed) {
    plan.n_layers = s.layers;
    plan.n_vocab = s.vocab;
    plan.n_embd = s.d;
    plan.n_ctx_train = 4096;
    RopeSpec rope{s.hd / 2 * 2, s.adjacent ? RopeSpec::Pairing::adjacent : RopeSpec::Pairing::half, {}, 1.1f};
    for (int i = 0; i < rope.n_rot / 2; ++i)
      rope.inv_freq.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(rope.n_rot)));
    plan.ropes.push_back(rope);
    const WeightId table = weight("token_embd.weight", s.d, s.vocab);
    ValueId x = value(s.d);
    plan.ops.emplace_back(Embed{table, x});
    for (int32_t i = 0; i < s.layers; ++i) x = layer(i, x, i == s.layers - 1);
    x = norm(x, s.d);
    plan.ops.emplace_back(Head{x, table, s.bias ? weight("output.bias", s.vocab, 1) : kNone});
  }

  Plan plan;

 private:
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, float center = 0) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out));
    std::normal_distribution<float> normal(0, 1.0f / std::sqrt(static_cast<float>(n_out == 1 ? 100 : n_in)));
    for (float& f : data) f = center + normal(rng_);
    Weight w;
    w.name = name;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.data = data.data();
    w.nbytes = data.size() * sizeof(float);
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  ValueId value(int32_t width, Rows rows = Rows::all) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  ValueId like(ValueId v, int32_t width) { return value(width, plan.values[static_cast<size_t>(v)].rows); }
  template <class T>
  ValueId push(ValueId out, T op) {
    op.out = out;
    plan.ops.emplace_back(op);
    return out;
  }
  ValueId norm(ValueId x, int32_t group) {
    return push(like(x, plan.values[static_cast<size_t>(x)].width),
                RmsNorm{x, kNone, weight("norm.weight", group, 1, 1.0f), group, 1e-6f});
  }
  ValueId linear(ValueId x, int32_t n_out, bool bias = false) {
    const int32_t n_in = plan.values[static_cast<size_t>(x)].width;
    const WeightId w = weight("matrix.weight", n_in, n_out);
    return push(like(x, n_out), Linear{x, kNone, w, bias ? weight("matrix.bias", n_out, 1) : kNone});
  }
  ValueId rope(ValueId x, int32_t heads) {
    return push(like(x, plan.values[static_cast<size_t>(x)].width), Rope{x, kNone, 0, heads});
  }
  ValueId select(ValueId x) {
    return push(value(plan.values[static_cast<size_t>(x)].width, Rows::outputs), SelectOutputs{x, kNone});
  }
  ValueId layer(int32_t i, ValueId x, bool last) {
    const ValueId h = norm(x, s_.d);
    ValueId q = linear(last ? select(h) : h, s_.n_heads * s_.hd, s_.bias);
    ValueId k = linear(h, s_.n_kv_heads * s_.hd, s_.bias);
    const ValueId v = linear(h, s_.n_kv_heads * s_.hd_v, s_.bias);
    if (s_.qk_norm) {
      q = norm(q, s_.hd);
      k = norm(k, s_.hd);
    }
    q = rope(q, s_.n_heads);
    k = rope(k, s_.n_kv_heads);
    plan.states.push_back(
        {"k" + std::to_string(i), StateSpec::Kind::per_token, s_.n_kv_heads * s_.hd, false});
    plan.states.push_back(
        {"v" + std::to_string(i), StateSpec::Kind::per_token, s_.n_kv_heads * s_.hd_v, false});
    const ValueId o = push(like(q, s_.n_heads * s_.hd_v),
                           Attention{q, k, v, kNone, 2 * i, 2 * i + 1, s_.n_heads, s_.n_kv_heads, s_.hd,
                                     s_.hd_v, 1.0f / std::sqrt(static_cast<float>(s_.hd))});
    const ValueId a = linear(o, s_.d);
    x = push(like(a, s_.d), Add{last ? select(x) : x, a, kNone});
    const ValueId f = norm(x, s_.d);
    const ValueId gate = linear(f, s_.ff), up = linear(f, s_.ff);
    const ValueId down = linear(push(like(x, s_.ff), SwiGlu{gate, up, kNone}), s_.d);
    return push(like(x, s_.d), Add{x, down, kNone});
  }

  Shape s_;
  std::mt19937 rng_;
  std::vector<std::vector<float>> storage_;
};

/// The rows of a pass, owned.
struct Rowset {
  std::vector<int32_t> tokens, positions, parents, outputs;
  int32_t first_slot = 0;
  Pass pass(HeadMode head = HeadMode::full) const {
    Pass p;
    p.tokens = tokens;
    p.positions = positions;
    p.parents = parents;
    p.outputs = outputs;
    p.first_slot = first_slot;
    p.head = head;
    return p;
  }
};

Rowset chain(int32_t first, int32_t n, std::vector<int32_t> outputs) {
  Rowset r;
  for (int32_t i = 0; i < n; ++i) {
    r.tokens.push_back((7 * (first + i) + 3) % 101);
    r.positions.push_back(first + i);
    r.parents.push_back(first + i - 1);
  }
  r.outputs = std::move(outputs);
  r.first_slot = first;
  return r;
}

std::vector<double> flat(const reference::Matrix& m) {
  std::vector<double> out;
  for (const auto& r : m) out.insert(out.end(), r.begin(), r.end());
  return out;
}

std::vector<double> logits_of(Program& program, size_t n) {
  std::vector<double> out;
  for (size_t o = 0; o < n; ++o) {
    const std::span<const float> l = program.logits(static_cast<int32_t>(o));
    out.insert(out.end(), l.begin(), l.end());
  }
  return out;
}

/// Runs the passes on one instruction set and the evaluator; the worst NMSE.
double worst_nmse(const Shape& shape, const std::vector<Rowset>& passes, const std::string& isa, bool exact,
                  int threads = 2) {
  TinyModel model(shape);
  ProgramOptions options;
  options.n_ctx = 256;
  options.exact = exact;
  auto backend = make_cpu_backend(threads, isa);
  auto program = backend->compile(model.plan, options);
  auto state = program->new_state();
  reference::Evaluator evaluator(model.plan);
  double worst = 0;
  for (const Rowset& rows : passes) {
    const Pass pass = rows.pass();
    program->run(*state, pass);
    const std::vector<double> want = flat(evaluator.run(pass));
    if (!rows.outputs.empty())
      worst = std::max(worst, reference::nmse(logits_of(*program, rows.outputs.size()), want));
  }
  return worst;
}

void check_all_sets(const Shape& shape, const std::vector<Rowset>& passes) {
  for (const cpu::Kernels* k : cpu::usable_kernels())
    for (bool exact : {true, false}) {
      const double e = worst_nmse(shape, passes, k->name, exact);
      const double gate = exact ? kExactNmse : kFastNmse;
      if (!(e <= gate)) std::fprintf(stderr, "%s exact=%d: NMSE %.3g > %.3g\n", k->name, exact, e, gate);
      CHECK(e <= gate);
    }
}

}  // namespace

TEST(cpu_prompt_then_tokens) { check_all_sets({}, {chain(0, 9, {8}), chain(9, 1, {0}), chain(10, 1, {0})}); }

TEST(cpu_plain_variant_with_biases_and_adjacent_rope) {
  Shape s;
  s.qk_norm = false;
  s.bias = true;
  s.adjacent = true;
  check_all_sets(s, {chain(0, 5, {0, 2, 4}), chain(5, 3, {1, 2})});
}

TEST(cpu_uneven_head_sizes) {
  Shape s;
  s.hd = 10;
  s.hd_v = 7;
  s.n_heads = 6;
  s.n_kv_heads = 2;
  s.d = 37;
  s.ff = 45;
  check_all_sets(s, {chain(0, 33, {31, 32}), chain(33, 70, {0, 69})});
}

TEST(cpu_tree_rows_see_their_ancestors_only) {
  Rowset tree = chain(6, 5, {0, 1, 2, 3, 4});
  tree.parents = {5, 6, 5, 8, 8};
  tree.positions = {6, 7, 6, 7, 7};
  Rowset after = chain(11, 2, {0, 1});  // continues a branch, and starts a second one
  after.parents = {9, 2};
  after.positions = {8, 3};
  Rowset fresh = chain(13, 1, {0});  // sees nothing but itself
  fresh.parents = {-1};
  check_all_sets({}, {chain(0, 6, {}), tree, after, fresh});
}

TEST(cpu_pass_without_outputs_still_writes_states) {
  check_all_sets({}, {chain(0, 4, {}), chain(4, 4, {}), chain(8, 1, {0})});
}

TEST(cpu_gather_equals_full_head) {
  TinyModel model({});
  ProgramOptions options;
  options.n_ctx = 64;
  for (bool exact : {true, false}) {
    options.exact = exact;
    auto backend = make_cpu_backend(2);
    auto program = backend->compile(model.plan, options);
    auto state = program->new_state();
    const Rowset rows = chain(0, 7, {2, 6});
    program->run(*state, rows.pass());
    const std::vector<double> full = logits_of(*program, 2);
    const std::vector<int32_t> ids = {5, 100, 5, 0, 99}, begin = {0, 3, 5};
    Pass pass = rows.pass(HeadMode::gather);
    pass.gather_ids = ids;
    pass.gather_begin = begin;
    program->run(*state, pass);
    for (int32_t i = 0; i < 5; ++i) {
      const int32_t o = i < 3 ? 0 : 1;
      const double got = program->gathered(o)[static_cast<size_t>(i - begin[static_cast<size_t>(o)])];
      CHECK(std::abs(got - full[static_cast<size_t>(o * 101 + ids[static_cast<size_t>(i)])]) <= 1e-5);
    }
    CHECK_THROWS(ErrorKind::invalid_input, program->logits(0));
  }
}

TEST(cpu_same_bits_for_any_number_of_threads) {
  TinyModel model({});
  std::vector<double> first;
  for (int threads : {1, 2, 3, 5}) {
    ProgramOptions options;
    options.n_ctx = 128;
    auto program = make_cpu_backend(threads)->compile(model.plan, options);
    auto state = program->new_state();
    std::vector<double> got;
    for (const Rowset& rows : {chain(0, 37, {5, 36}), chain(37, 1, {0})}) {
      program->run(*state, rows.pass());
      const std::vector<double> l = logits_of(*program, rows.outputs.size());
      got.insert(got.end(), l.begin(), l.end());
    }
    if (first.empty()) first = got;
    CHECK(first == got);
  }
}

TEST(cpu_state_outgrows_its_context) {
  TinyModel model({});
  ProgramOptions options;
  options.n_ctx = 4;
  options.exact = true;
  auto program = make_cpu_backend(1)->compile(model.plan, options);
  auto state = program->new_state();
  reference::Evaluator evaluator(model.plan);
  for (const Rowset& rows : {chain(0, 3, {}), chain(3, 90, {89})}) {
    program->run(*state, rows.pass());
    const std::vector<double> want = flat(evaluator.run(rows.pass()));
    if (!rows.outputs.empty()) CHECK(reference::nmse(logits_of(*program, 1), want) <= kExactNmse);
  }
  CHECK(state->bytes() >= size_t{93} * 2 * 24 * 2 * 4);
}

TEST(cpu_truncated_state_is_overwritten) {
  TinyModel model({});
  ProgramOptions options;
  options.n_ctx = 64;
  auto program = make_cpu_backend(2)->compile(model.plan, options);
  auto a = program->new_state(), b = program->new_state();
  program->run(*a, chain(0, 20, {}).pass());
  a->truncate(6);
  program->run(*a, chain(6, 2, {1}).pass());
  const std::vector<double> after = logits_of(*program, 1);
  program->run(*b, chain(0, 6, {}).pass());
  program->run(*b, chain(6, 2, {1}).pass());
  CHECK(after == logits_of(*program, 1));
}

TEST(cpu_compile_names_the_tensor_that_does_not_fit) {
  const auto message = [](Plan plan) -> std::string {
    try {
      make_cpu_backend(1)->compile(std::move(plan), {});
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  TinyModel model({});
  CHECK_EQ(message(model.plan), "");
  Plan plan = model.plan;
  plan.weights[2].name = "blk.0.attn_q.weight";
  plan.weights[2].ne[0] = 47;
  CHECK_EQ(message(plan),
           "tensor 'blk.0.attn_q.weight' (weight): expected shape [48, 48, 1], found [47, 48, 1, 1]");
  plan = model.plan;
  plan.weights[0].type = GgmlType::I32;
  CHECK_EQ(message(plan), "tensor 'token_embd.weight': type I32 (26) cannot be computed with");
  plan = model.plan;
  plan.weights[0].nbytes -= 1;
  CHECK_EQ(message(plan), "tensor 'token_embd.weight': expected 19392 bytes of data, found 19391");
  plan = model.plan;
  plan.ops.erase(plan.ops.begin());
  CHECK_EQ(message(plan), "op 0 (RmsNorm): in (value 0) is read before it is written");
}

TEST(cpu_refuses_passes_that_do_not_fit) {
  TinyModel model({});
  ProgramOptions options;
  options.n_ctx = 64;
  options.max_rows = 8;
  auto program = make_cpu_backend(1)->compile(model.plan, options);
  auto state = program->new_state();
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, chain(0, 9, {}).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, chain(3, 2, {}).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, chain(0, 2, {2}).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, chain(0, 2, {1, 0}).pass()));
  Rowset rows = chain(0, 2, {1});
  rows.tokens[1] = 101;
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, rows.pass()));
  auto other = make_cpu_backend(1)->compile(model.plan, options);
  CHECK_THROWS(ErrorKind::invalid_input, other->run(*state, chain(0, 2, {1}).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->argmax(0));
}

TEST(cpu_unknown_instruction_set_is_unsupported) {
  CHECK_THROWS(ErrorKind::invalid_input, make_cpu_backend(1, "avx9"));
  CHECK_THROWS(ErrorKind::invalid_input, make_cpu_backend(-1));
}
