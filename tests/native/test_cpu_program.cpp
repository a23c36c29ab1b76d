// Whole passes of the CPU backend against the float64 evaluator: fusion, trees, heads, threads.
#include "backend/cpu/isa.h"
#include "cuda_model.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kVocab = 101;

/// A dense decoder of sizes that no vector width divides.
using Shape = cuda_test::Shape;
using TinyModel = cuda_test::Model;
const Shape kPlain = {
    .d = 48, .heads = 4, .kv_heads = 2, .hd = 12, .ff = 80, .vocab = kVocab, .layers = 2, .qk_norm = true};

Rowset chain(int32_t first, int32_t n, std::vector<int32_t> outputs) {
  Rowset r = Rowset::chain(first, n, kVocab);
  r.outputs = std::move(outputs);
  return r;
}

std::vector<double> logits_of(Program& program, size_t n) {
  std::vector<double> out;
  for (size_t o = 0; o < n; ++o) {
    const std::span<const float> l = program.logits(static_cast<int32_t>(o));
    out.insert(out.end(), l.begin(), l.end());
  }
  return out;
}

/// The passes on every instruction set, exact and fast, against the evaluator.
void check_all_sets(const Shape& shape, const std::vector<Rowset>& passes) {
  const TinyModel model(shape);
  for (const cpu::Kernels* k : cpu::usable_kernels())
    for (bool exact : {true, false}) {
      Sequence s(model.plan, {.isa = k->name, .exact = exact});
      for (const Rowset& rows : passes) s.run(rows);
    }
}

}  // namespace

TEST(cpu_prompt_then_tokens) {
  check_all_sets(kPlain, {chain(0, 9, {8}), chain(9, 1, {0}), chain(10, 1, {0})});
}

TEST(cpu_plain_variant_with_biases_and_adjacent_rope) {
  Shape s = kPlain;
  s.qk_norm = false;
  s.bias = true;
  s.adjacent = true;
  check_all_sets(s, {chain(0, 5, {0, 2, 4}), chain(5, 3, {1, 2})});
}

TEST(cpu_uneven_head_sizes) {
  Shape s = kPlain;
  s.hd = 10;
  s.hd_v = 7;
  s.heads = 6;
  s.kv_heads = 2;
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
  check_all_sets(kPlain, {chain(0, 6, {}), tree, after, fresh});
}

TEST(cpu_pass_without_outputs_still_writes_states) {
  check_all_sets(kPlain, {chain(0, 4, {}), chain(4, 4, {}), chain(8, 1, {0})});
}

TEST(cpu_gather_equals_full_head) {
  const TinyModel model(kPlain);
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
      CHECK(std::abs(got - full[static_cast<size_t>(o * kVocab + ids[static_cast<size_t>(i)])]) <= 1e-5);
    }
    CHECK_THROWS(ErrorKind::invalid_input, program->logits(0));
  }
}

TEST(cpu_same_bits_for_any_number_of_threads) {
  const TinyModel model(kPlain);
  std::vector<double> first;
  for (int threads : {1, 2, 3, 5}) {
    Sequence s(model.plan, {.threads = threads, .exact = false, .checked = false});
    std::vector<double> got = s.run(chain(0, 37, {5, 36}));
    const std::vector<double> next = s.run(chain(37, 1, {0}));
    got.insert(got.end(), next.begin(), next.end());
    if (first.empty()) first = got;
    CHECK(first == got);
  }
}

TEST(cpu_state_outgrows_its_context) {
  const TinyModel model(kPlain);
  Sequence s(model.plan, {.threads = 1, .n_ctx = 4});
  s.run(chain(0, 3, {}));
  s.run(chain(3, 90, {89}));
  CHECK(s.state().bytes() >= size_t{93} * 2 * 24 * 2 * 4);
}

TEST(cpu_truncated_state_is_overwritten) {
  const TinyModel model(kPlain);
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
  const TinyModel model(kPlain);
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
  const TinyModel model(kPlain);
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
  rows.tokens[1] = kVocab;
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, rows.pass()));
  auto other = make_cpu_backend(1)->compile(model.plan, options);
  CHECK_THROWS(ErrorKind::invalid_input, other->run(*state, chain(0, 2, {1}).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->argmax(0));
}

TEST(cpu_unknown_instruction_set_is_unsupported) {
  CHECK_THROWS(ErrorKind::invalid_input, make_cpu_backend(1, "avx9"));
  CHECK_THROWS(ErrorKind::invalid_input, make_cpu_backend(-1));
}
