// Whole passes of the CUDA backend against the float64 evaluator. Without a GPU every case says so
// and checks nothing; tests/gpu/check.sh is where they must run.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "check.h"
#include "cpu_reference.h"
#include "cuda_device.h"
#include "cuda_model.h"

using namespace reflex;
using namespace cuda_test;

namespace {

constexpr double kExactNmse = 1e-10;
// f16 activations, keys and values, and a 4-bit scale and minimum rounded to f16; design.md allows 1e-4.
constexpr double kFastNmse = 5e-5;

std::unique_ptr<Program> compile(const Plan& plan, bool exact, int32_t max_rows = 256, int32_t n_ctx = 2048,
                                 const std::string& load_mode = "") {
  ProgramOptions o;
  o.exact = exact;
  o.max_rows = max_rows;
  o.n_ctx = n_ctx;
  o.load_mode = load_mode;
  return gpu().compile(plan, o);
}

/// The worst error of the output rows' logits.
double worst_row(Program& p, const reference::Matrix& want) {
  double worst = 0;
  for (size_t o = 0; o < want.size(); ++o) {
    const std::span<const float> row = p.logits(static_cast<int32_t>(o));
    worst = std::max(worst, reference::nmse({row.begin(), row.end()}, want[o]));
    for (float f : row)
      if (!std::isfinite(f)) worst = 1e30;
  }
  return worst;
}

void expect_below(double error, double bound, const std::string& what) {
  if (!(error <= bound)) std::fprintf(stderr, "%s: NMSE %.3g, bound %.3g\n", what.c_str(), error, bound);
  CHECK(error <= bound);
}

struct Named {
  const char* name;
  Shape shape;
};

std::vector<Named> shapes() {
  Shape fast;
  fast.matrix = fast.value = fast.table = GgmlType::Q8_0;
  Shape k_mix = fast;  // as Q4_K_M has it: v and down in more bits
  k_mix.matrix = GgmlType::Q4_K;
  k_mix.value = k_mix.table = GgmlType::Q6_K;
  k_mix.hd = 128;
  k_mix.tied = false;
  Shape group7 = fast;  // qwen2 7B: 7 query heads a key head, biases, no norm
  group7.heads = 7;
  group7.kv_heads = 1;
  group7.qk_norm = false;
  group7.bias = true;
  group7.matrix = group7.value = GgmlType::Q4_0;
  Shape odd;  // nothing that a fast kernel likes
  odd.d = 60;
  odd.hd = 12;
  odd.ff = 84;
  odd.heads = 6;
  odd.kv_heads = 2;
  odd.vocab = 101;
  odd.adjacent = true;
  Shape half = fast;
  half.matrix = GgmlType::F16;
  half.value = GgmlType::BF16;
  half.adjacent = true;
  half.heads = 8;
  half.kv_heads = 8;
  Shape narrow = fast;  // widths that end within a unit of 128
  narrow.d = 64;
  narrow.hd = 16;
  narrow.ff = 96;
  return {{"q8_0", fast},   {"q4_k mix", k_mix}, {"q4_0, 7 heads", group7},
          {"odd f32", odd}, {"f16, bf16", half}, {"narrow q8_0", narrow}};
}

}  // namespace

TEST(cuda_prompts_of_every_length_match_float64) {
  NEED_GPU();
  for (const Named& n : shapes())
    for (const bool exact : {true, false}) {
      const Model model(n.shape);
      const std::unique_ptr<Program> program = compile(model.plan, exact);
      for (const int32_t rows : {1, 2, 5, 17, 33, 65, 130}) {
        const std::unique_ptr<State> state = program->new_state();
        reference::Evaluator evaluator(model.plan);
        const Rowset r = Rowset::chain(0, rows, n.shape.vocab, rows > 33);
        program->run(*state, r.pass());
        expect_below(worst_row(*program, evaluator.run(r.pass())), exact ? kExactNmse : kFastNmse,
                     format("%s, %s, %d rows", n.name, exact ? "exact" : "fast", rows));
      }
    }
}

TEST(cuda_decoding_after_a_prompt_matches_float64) {
  NEED_GPU();
  for (const Named& n : shapes())
    for (const bool exact : {true, false}) {
      const Model model(n.shape);
      const std::unique_ptr<Program> program = compile(model.plan, exact);
      const std::unique_ptr<State> state = program->new_state();
      reference::Evaluator evaluator(model.plan);
      Rowset r = Rowset::chain(0, 5, n.shape.vocab, true);
      program->run(*state, r.pass());
      evaluator.run(r.pass());
      program->finish_load();  // from here on passes are captured and replayed
      for (int32_t slot = 5; slot < 12; ++slot) {
        r = Rowset::chain(slot, 1, n.shape.vocab, true);
        program->run(*state, r.pass());
        expect_below(worst_row(*program, evaluator.run(r.pass())), exact ? kExactNmse : kFastNmse,
                     format("%s, %s, slot %d", n.name, exact ? "exact" : "fast", slot));
      }
    }
}

TEST(cuda_prompt_in_chunks_is_the_prompt_whole) {
  NEED_GPU();
  const Named n = shapes()[0];
  const Model model(n.shape);
  const std::unique_ptr<Program> program = compile(model.plan, false);
  reference::Evaluator evaluator(model.plan);
  const reference::Matrix want = evaluator.run(Rowset::chain(0, 70, n.shape.vocab, true).pass());
  for (const int32_t chunk : {1, 2, 16, 31, 64, 69}) {
    const std::unique_ptr<State> state = program->new_state();
    for (int32_t at = 0; at < 70; at += chunk) {
      const Rowset r = Rowset::chain(at, std::min(chunk, 70 - at), n.shape.vocab, true);
      const bool last = at + chunk >= 70;
      program->run(*state, r.pass(last ? HeadMode::full : HeadMode::none));
    }
    expect_below(worst_row(*program, want), kFastNmse, format("chunks of %d", chunk));
  }
}

TEST(cuda_long_sequences_grow_their_state_and_split) {
  NEED_GPU();
  for (const int32_t hd : {64, 128}) {
    Shape shape = shapes()[0].shape;
    shape.hd = hd;
    shape.layers = 1;
    const Model model(shape);
    const std::unique_ptr<Program> program = compile(model.plan, false);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    constexpr int32_t kLong = 1100;  // beyond the first room of a state, and of the next
    for (int32_t at = 0; at < kLong; at += 220) {
      const Rowset r = Rowset::chain(at, 220, shape.vocab, true);
      program->run(*state, r.pass(at ? HeadMode::full : HeadMode::none));
      const reference::Matrix want = evaluator.run(r.pass());
      if (at) expect_below(worst_row(*program, want), kFastNmse, format("head size %d, chunk at %d", hd, at));
    }
    program->finish_load();
    for (int32_t slot = kLong; slot < kLong + 4; ++slot) {
      const Rowset r = Rowset::chain(slot, 1, shape.vocab, true);
      program->run(*state, r.pass());
      expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse,
                   format("head size %d, slot %d", hd, slot));
    }
  }
}

TEST(cuda_trees_of_rows_see_their_ancestors_only) {
  NEED_GPU();
  for (const Named& n : shapes())
    for (const bool exact : {true, false}) {
      const Model model(n.shape);
      const std::unique_ptr<Program> program = compile(model.plan, exact);
      const std::unique_ptr<State> state = program->new_state();
      reference::Evaluator evaluator(model.plan);
      const Rowset prompt = Rowset::chain(0, 40, n.shape.vocab, true);
      program->run(*state, prompt.pass());
      evaluator.run(prompt.pass());
      Rowset tree;  // three branches off the prompt, one of them forked
      tree.first_slot = 40;
      tree.parents = {39, 40, 39, 42, 42, 44, 39};
      for (size_t i = 0; i < tree.parents.size(); ++i) {
        tree.tokens.push_back(static_cast<int32_t>(17 * i + 5) % n.shape.vocab);
        int32_t depth = 0;
        for (int32_t s = tree.parents[i]; s >= 40; s = tree.parents[static_cast<size_t>(s - 40)]) ++depth;
        tree.positions.push_back(40 + depth);
        tree.outputs.push_back(static_cast<int32_t>(i));
      }
      program->run(*state, tree.pass());
      const std::string what = format("%s, %s", n.name, exact ? "exact" : "fast");
      expect_below(worst_row(*program, evaluator.run(tree.pass())), exact ? kExactNmse : kFastNmse, what);
      Rowset next;  // a later pass continues a branch
      next.first_slot = 47;
      next.tokens = {3};
      next.positions = {43};
      next.parents = {45};
      next.outputs = {0};
      program->run(*state, next.pass());
      expect_below(worst_row(*program, evaluator.run(next.pass())), exact ? kExactNmse : kFastNmse,
                   what + ", branch continued");
    }
}

TEST(cuda_some_outputs_among_many_rows) {
  NEED_GPU();
  const Named n = shapes()[1];
  const Model model(n.shape);
  const std::unique_ptr<Program> program = compile(model.plan, false);
  const std::unique_ptr<State> state = program->new_state();
  reference::Evaluator evaluator(model.plan);
  Rowset r = Rowset::chain(0, 50, n.shape.vocab, true);
  r.outputs = {0, 7, 8, 31, 49};
  program->run(*state, r.pass());
  expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse, "five of fifty rows");
}

TEST(cuda_gathered_logits_are_those_of_the_whole_head) {
  NEED_GPU();
  for (const Named& n : shapes()) {
    const Model model(n.shape);
    const std::unique_ptr<Program> program = compile(model.plan, false);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    Rowset r = Rowset::chain(0, 9, n.shape.vocab, true);
    r.outputs = {2, 8};
    const std::vector<int32_t> ids = {5, 0, 100, 7}, begin = {0, 1, 4};
    Pass pass = r.pass(HeadMode::gather);
    pass.gather_ids = ids;
    pass.gather_begin = begin;
    const reference::Matrix want = evaluator.run(r.pass());
    for (int again = 0; again < 4; ++again) {
      state->truncate(0);
      program->run(*state, pass);
      for (int32_t o = 0; o < 2; ++o) {
        const std::span<const float> got = program->gathered(o);
        CHECK_EQ(got.size(), static_cast<size_t>(begin[o + 1] - begin[o]));
        double size = 0;
        for (double x : want[static_cast<size_t>(o)]) size += x * x / static_cast<double>(want[0].size());
        for (size_t i = 0; i < got.size(); ++i) {
          const double expect =
              want[static_cast<size_t>(o)][static_cast<size_t>(ids[static_cast<size_t>(begin[o]) + i])];
          CHECK(std::abs(static_cast<double>(got[i]) - expect) <= 0.01 * std::sqrt(size));
        }
      }
      program->finish_load();
    }
  }
}

TEST(cuda_same_pass_gives_the_same_bits_launched_and_replayed) {
  NEED_GPU();
  for (const Named& n : shapes()) {
    const Model model(n.shape);
    const std::unique_ptr<Program> program = compile(model.plan, false);
    const std::unique_ptr<State> state = program->new_state();
    std::vector<std::vector<float>> first;
    for (int again = 0; again < 4; ++again) {
      state->truncate(0);
      size_t i = 0;
      for (const Rowset& r :
           {Rowset::chain(0, 20, n.shape.vocab, true), Rowset::chain(20, 1, n.shape.vocab, true)}) {
        program->run(*state, r.pass());
        const std::span<const float> row = program->logits(0);
        if (again == 0)
          first.emplace_back(row.begin(), row.end());
        else
          CHECK(std::equal(row.begin(), row.end(), first[i].begin()));
        ++i;
      }
      program->finish_load();
    }
  }
}

TEST(cuda_products_of_narrow_values_read_nothing_beyond_them) {
  NEED_GPU();
  Shape shape;  // f16 fragments of 64 and 96 values end within a unit
  shape.matrix = shape.value = shape.table = GgmlType::Q8_0;
  shape.d = 64;
  shape.hd = 16;
  shape.ff = 96;
  const Model model(shape);
  const std::unique_ptr<Program> program = compile(model.plan, false);
  for (int again = 0; again < 3; ++again) {  // the memory beyond holds what passes left there
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    const Rowset r = Rowset::chain(0, 130, shape.vocab, true);
    program->run(*state, r.pass());
    expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse, format("pass %d", again));
  }
}

// Two tiles a warp (matvec_two.cu): more items than workers, odd numbers of tiles of either type, shares of
// unequal length, biases and residuals; the first of the vocabulary's best among all blocks.
TEST(cuda_one_row_takes_tiles_in_twos) {
  NEED_GPU();
  Shape mix;
  mix.d = 1024;
  mix.heads = 32;
  mix.kv_heads = 1;
  mix.hd = 24;  // 99 tiles of q and k, 3 of v
  mix.ff = 2304;
  mix.vocab = 301;
  mix.layers = 1;
  mix.matrix = GgmlType::Q4_K;
  mix.value = mix.table = GgmlType::Q6_K;
  Shape biased = mix;
  biased.bias = true;
  biased.qk_norm = false;
  biased.matrix = GgmlType::Q5_K;
  Shape wide = mix;  // 5,001 tiles of one cell
  wide.d = 256;
  wide.ff = 256;
  wide.vocab = 40'001;
  for (const Named& n :
       {Named{"q4_k and q6_k", mix}, {"q5_k and q6_k, biases", biased}, {"a wide head", wide}}) {
    const Model model(n.shape);
    const std::unique_ptr<Program> program = compile(model.plan, false, 64, 256);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    for (int32_t slot = 0; slot < 3; ++slot) {
      const Rowset r = Rowset::chain(slot, 1, n.shape.vocab, true);
      program->run(*state, r.pass());
      const reference::Matrix want = evaluator.run(r.pass());
      expect_below(worst_row(*program, want), kFastNmse, format("%s, slot %d", n.name, slot));
      const std::span<const float> logits = program->logits(0);
      CHECK_EQ(program->argmax(0), std::max_element(logits.begin(), logits.end()) - logits.begin());
    }
  }
}

/// logits = W (A x + B x), A and B of any types.
class TwoOfOneInput : public Model {
 public:
  TwoOfOneInput(GgmlType a, GgmlType b) : Model(kWidth, kVocab, 1, 1) {
    const ValueId x = value(kWidth);
    plan.ops.emplace_back(Embed{matrix("token_embd.weight", kWidth, kVocab, GgmlType::F32), x});
    const ValueId h = norm(select(x), kWidth);
    const ValueId first = linear(h, kOut, a), second = linear(h, kOut, b);
    const ValueId sum = push(like(first, kOut), Add{first, second, kNone});
    plan.ops.emplace_back(Head{sum, matrix("output.weight", kOut, kVocab, GgmlType::F32), kNone});
  }
  static constexpr int32_t kWidth = 256, kOut = 96, kVocab = 50;
};

// The second was written with the first added to it, which the same launch had not yet written.
TEST(cuda_small_sums_of_two_products_of_one_input) {
  NEED_GPU();
  for (const auto& [a, b] : {std::pair{GgmlType::Q8_0, GgmlType::Q8_0}, {GgmlType::F32, GgmlType::Q4_K}}) {
    const TwoOfOneInput model(a, b);
    const std::unique_ptr<Program> program = compile(model.plan, false, 64, 256);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    for (const auto& [slot, rows] : {std::pair{0, 1}, {1, 5}}) {
      const Rowset r = Rowset::chain(slot, rows, TwoOfOneInput::kVocab, true);
      program->run(*state, r.pass());
      expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse, format("%d rows", rows));
    }
  }
}

TEST(cuda_small_passes_of_every_kind) {  // what the sanitizers run: a kernel of each sort, few blocks
  NEED_GPU();
  for (Shape shape : {shapes()[1].shape, shapes()[4].shape}) {
    shape.layers = 1;
    const Model model(shape);
    const std::unique_ptr<Program> program = compile(model.plan, false, 64, 256);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    Rowset r = Rowset::chain(0, 9, shape.vocab, true);
    program->run(*state, r.pass());
    expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse, "a prompt");
    program->finish_load();
    for (int32_t slot = 9; slot < 12; ++slot) {  // launched, captured, replayed
      r = Rowset::chain(slot, 1, shape.vocab, true);
      program->run(*state, r.pass());
      expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse, "a token");
    }
    Rowset tree;
    tree.first_slot = 12;
    tree.tokens = {1, 2, 3};
    tree.positions = {12, 12, 13};
    tree.parents = {11, 11, 13};
    tree.outputs = {0, 1, 2};
    program->run(*state, tree.pass());
    expect_below(worst_row(*program, evaluator.run(tree.pass())), kFastNmse, "a tree");
    CHECK(std::isfinite(program->log_sum_exp(0)));
  }
}

TEST(cuda_reads_off_logits_what_the_host_would) {
  NEED_GPU();
  const Named n = shapes()[0];
  const Model model(n.shape);
  const std::unique_ptr<Program> program = compile(model.plan, false);
  const std::unique_ptr<State> state = program->new_state();
  program->run(*state, Rowset::chain(0, 6, n.shape.vocab, false).pass());
  for (int32_t o : {0, 3, 5}) {
    const std::span<const float> row = program->logits(o);
    const auto best = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    CHECK_EQ(program->argmax(o), best);
    double sum = 0;
    for (float x : row)
      sum += std::exp(static_cast<double>(x) - static_cast<double>(row[static_cast<size_t>(best)]));
    const double lse = static_cast<double>(row[static_cast<size_t>(best)]) + std::log(sum);
    CHECK(std::abs(program->log_sum_exp(o) - lse) < 1e-6);
    std::vector<int32_t> order(row.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)];
    });
    for (const int32_t k : {1, 20, 128, 200}) {
      const std::vector<TokenLogprob> top = program->top_logprobs(o, k);
      CHECK_EQ(top.size(), static_cast<size_t>(k));
      for (size_t i = 0; i < top.size(); ++i) {
        CHECK_EQ(top[i].id, order[i]);
        CHECK(std::abs(static_cast<double>(top[i].logprob) -
                       (static_cast<double>(row[static_cast<size_t>(order[i])]) - lse)) < 1e-5);
      }
    }
  }
}

TEST(cuda_draws_are_those_of_the_cpu) {
  NEED_GPU();
  Named n = shapes()[3];  // exact F32 on both: the same logits but for rounding
  n.shape.vocab = 1500;
  const Model model(n.shape);
  ProgramOptions options;
  options.n_ctx = 64;
  options.exact = true;
  const std::unique_ptr<Backend> host = make_cpu_backend(1);
  const std::unique_ptr<Program> cpu = host->compile(model.plan, options);
  const std::unique_ptr<Program> cuda = compile(model.plan, true);
  const std::unique_ptr<State> cpu_state = cpu->new_state(), cuda_state = cuda->new_state();
  const Rowset r = Rowset::chain(0, 4, n.shape.vocab, true);
  cpu->run(*cpu_state, r.pass());
  cuda->run(*cuda_state, r.pass());
  std::vector<uint32_t> allowed((1500 + 31) / 32, 0x5A5A5A5Au);
  const std::vector<SampleSpec::Count> counts = {{3, 2, true}, {77, 0, true}, {400, 1, true}};
  const std::vector<SampleSpec::Bias> bias = {{9, 1.5f}, {3, -2.0f}};
  int differ = 0, all = 0;
  for (int variant = 0; variant < 12; ++variant)
    for (int draw = 0; draw < 25; ++draw) {
      SampleSpec s;
      s.temperature = variant == 11 ? 0.0f : 0.7f + 0.3f * static_cast<float>(variant % 3);
      s.top_k = variant % 4 == 1 ? 40 : variant % 4 == 3 ? 3 : 0;
      s.top_p = variant % 4 >= 2 ? 0.8f : 1.0f;
      s.min_p = variant % 5 == 4 ? 0.1f : 0.0f;
      s.random = (static_cast<float>(draw) + 0.37f) / 25.0f;
      if (variant >= 6) {
        s.repetition_penalty = 1.3f;
        s.frequency_penalty = 0.2f;
        s.presence_penalty = 0.1f;
        s.counts = counts;
        s.bias = bias;
      }
      if (variant >= 9) s.allowed = allowed;
      ++all;
      differ += cpu->sample(0, s) != cuda->sample(0, s);
    }
  // A draw that falls within rounding of a border may go either way.
  CHECK(differ <= all / 50);
}

TEST(cuda_loads_the_same_weights_every_way) {
  NEED_GPU();
  Shape shape = shapes()[1].shape;
  shape.vocab = 5000;  // the head spans several of the upload's slots
  const Model model(shape);
  // A file with every tensor at an odd place, as a GGUF has them.
  char path[] = "/tmp/reflex-cuda-load-XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  Plan plan = model.plan;
  uint64_t at = 4096 + 32;
  for (Weight& w : plan.weights) {
    CHECK_EQ(pwrite(fd, w.data, w.nbytes, static_cast<off_t>(at)), static_cast<ssize_t>(w.nbytes));
    w.fd = fd;
    w.offset = at;
    at += (w.nbytes + 31) / 32 * 32;
  }
  fsync(fd);
  auto* base = static_cast<const char*>(mmap(nullptr, at, PROT_READ, MAP_SHARED, fd, 0));
  for (Weight& w : plan.weights) w.data = base + w.offset;
  std::vector<float> want;
  for (const char* mode : {"", "ring", "map", "read", "direct"}) {
    const std::unique_ptr<Program> program = compile(plan, false, 256, 512, mode);
    const std::unique_ptr<State> state = program->new_state();
    program->run(*state, Rowset::chain(0, 3, shape.vocab, true).pass());
    const std::span<const float> row = program->logits(0);
    if (want.empty()) want.assign(row.begin(), row.end());
    CHECK(std::equal(row.begin(), row.end(), want.begin()));
    program->finish_load();
    const LoadStatus status = program->load_status();
    CHECK(status.finished);
    CHECK_EQ(status.done, status.total);
  }
  CHECK_THROWS(ErrorKind::invalid_input, compile(plan, false, 256, 512, "carrier pigeon"));
  munmap(const_cast<char*>(base), at);
  close(fd);
  unlink(path);
}

TEST(cuda_out_of_memory_is_an_error_and_leaves_the_gpu_usable) {
  NEED_GPU();
  const Model model(shapes()[0].shape);
  Plan plan = model.plan;
  for (Weight& w : plan.weights)
    if (w.name == "token_embd.weight") {
      w.ne[1] = int64_t{1} << 38;
      w.nbytes = row_bytes(w.type, static_cast<size_t>(w.ne[0])) << 38;
    }
  plan.n_vocab = INT32_MAX;
  bool typed = false;
  try {
    compile(plan, false);
  } catch (const Error& e) {
    typed = e.kind() == ErrorKind::out_of_memory || e.kind() == ErrorKind::gguf ||
            e.kind() == ErrorKind::unsupported;
    std::fprintf(stderr, "%s\n", e.what());
  }
  CHECK(typed);
  const std::unique_ptr<Program> program = compile(model.plan, false);
  const std::unique_ptr<State> state = program->new_state();
  program->run(*state, Rowset::chain(0, 2, shapes()[0].shape.vocab, true).pass());
  CHECK(program->argmax(0) >= 0);
}

TEST(cuda_refuses_what_a_pass_must_not_be) {
  NEED_GPU();
  const Shape shape = shapes()[0].shape;
  const Model model(shape);
  const std::unique_ptr<Program> program = compile(model.plan, false, 16, 64);
  const std::unique_ptr<State> state = program->new_state();
  CHECK_THROWS(ErrorKind::invalid_input,
               program->run(*state, Rowset::chain(0, 17, shape.vocab, true).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, Rowset::chain(0, 0, shape.vocab, true).pass()));
  Rowset r = Rowset::chain(0, 3, shape.vocab, true);
  r.tokens[1] = shape.vocab;
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, r.pass()));
  r = Rowset::chain(0, 3, shape.vocab, true);
  r.outputs = {2, 1};
  CHECK_THROWS(ErrorKind::invalid_input, program->run(*state, r.pass()));
  for (int32_t at = 0; at < 64; at += 16)
    program->run(*state, Rowset::chain(at, 16, shape.vocab, true).pass());
  CHECK_THROWS(ErrorKind::context_overflow,
               program->run(*state, Rowset::chain(64, 1, shape.vocab, true).pass()));
  CHECK_THROWS(ErrorKind::invalid_input, program->gathered(0));
  CHECK_THROWS(ErrorKind::invalid_input, program->logits(1));
}

TEST(cuda_values_narrower_than_a_unit_never_bring_nan) {
  NEED_GPU();
  Shape shape = shapes()[0].shape;  // Q8_0
  shape.d = 64;
  shape.ff = 96;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.hd = 32;
  const Model model(shape);
  const std::unique_ptr<Program> program = compile(model.plan, false);
  for (const int32_t rows : {1, 33, 130, 2}) {
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    const Rowset r = Rowset::chain(0, rows, shape.vocab, false);
    program->run(*state, r.pass());
    expect_below(worst_row(*program, evaluator.run(r.pass())), kFastNmse, format("%d rows", rows));
  }
}
