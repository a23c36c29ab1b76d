// DeepSeek-V4's layers on the GPU: hyper-connections, a window and entries, experts by token and with limits.
// Without one every case says so and checks nothing; tests/gpu/check.sh is where they must run.
#include "compressed_model.h"
#include "cuda_device.h"
#include "mixer_cases.h"

using namespace mixer_cases;

namespace {

Cases cases() { return Cases(gpu(), {}); }

struct Named {
  const char* name;
  CompressedShape shape;
};
std::vector<Named> shapes() {
  CompressedShape overlap;  // blocks of 4 that overlap, all entries seen
  overlap.layers = 2;
  CompressedShape chosen = overlap;  // of them those that an indexer chooses
  chosen.layers = 1;
  chosen.indexed = true;
  CompressedShape apart;  // odd sizes, blocks that stand for themselves, all rows' queries
  apart.d = 36;
  apart.streams = 3;
  apart.heads = 18;  // more than a block takes
  apart.dim = 10;
  apart.rot = 4;
  apart.window = 5;
  apart.ratio = 7;
  apart.overlap = false;
  apart.outputs = false;
  apart.pairing = RopeSpec::Pairing::half;
  apart.hidden = 20;
  CompressedShape window;
  window.ratio = 0;
  window.window = 33;
  window.experts = 0;
  window.rot = window.dim;
  window.streams = 6;  // whose weights take a launch for each step
  CompressedShape quantised;
  quantised.d = 128;
  quantised.dim = 64;
  quantised.hidden = 64;
  quantised.group_out = 32;
  quantised.matrix = GgmlType::Q8_0;
  quantised.expert = GgmlType::Q8_0;
  return {{"overlapping", overlap},
          {"overlapping, chosen", chosen},
          {"blocks apart", apart},
          {"a window alone", window},
          {"quantised", quantised}};
}

}  // namespace

TEST(cuda_compressed_prompts_of_every_length_match_float64) {
  NEED_GPU();
  Cases c = cases();
  for (const Named& n : shapes())
    for (const bool exact : {true, false}) c.lengths(CompressedModel(n.shape).plan, exact, kLengths, n.name);
  c.report("compressed, every length");
}

TEST(cuda_compressed_pieces_of_every_size_leave_the_same_entries) {
  NEED_GPU();
  Cases c = cases();
  for (const Named& n : shapes())
    if (n.shape.indexed || !n.shape.overlap) c.pieces(CompressedModel(n.shape).plan, true, 30, n.name);
  c.report("compressed, every piece");
}

TEST(cuda_compressed_trees_end_blocks_in_their_branches) {
  NEED_GPU();
  Cases c = cases();
  for (const Named& n : shapes())
    for (const bool exact : {true, false})
      if (exact || n.shape.indexed) c.forks(CompressedModel(n.shape).plan, exact, n.name);
  c.report("compressed, trees");
}

TEST(cuda_compressed_gives_the_bits_of_a_fresh_program) {
  NEED_GPU();
  for (const bool exact : {true, false}) cases().same_bits(CompressedModel(shapes()[4].shape).plan, exact);
}

/// The model's own head: 64 heads of 512 values, a window of 128; and long lists in splits.
TEST(cuda_compressed_heads_of_512_values) {
  NEED_GPU();
  CompressedShape s;
  s.heads = 20;
  s.dim = 512;
  s.rot = 64;
  s.window = 128;
  s.experts = 0;
  s.matrix = GgmlType::Q8_0;
  s.groups = 4;
  Cases c = cases();
  for (const bool exact : {true, false})
    c.lengths(CompressedModel(s).plan, exact, {1, 33, 200}, "heads of 512");
  c.report("compressed, heads of 512");
}

/// Every kernel once, in sizes that a sanitizer gets through.
TEST(cuda_small_compressed) {
  NEED_GPU();
  Cases c = cases();
  for (const bool exact : {true, false})
    for (const Named& n : shapes()) {
      if (n.shape.layers > 1) continue;
      const CompressedModel model(n.shape);
      c.lengths(model.plan, exact, {3, 40}, n.name);
      const std::unique_ptr<Program> program = c.compile(model.plan, exact);
      const std::unique_ptr<State> state = program->new_state();
      reference::Evaluator evaluator(model.plan);
      c.run(*program, *state, evaluator,
            Cases::forked(0, 5, {-1, 0, 1, 1, 0, 4, -1}, model.plan.n_vocab).pass(), exact, "forks");
    }
}

TEST(cuda_compressed_refuses_sizes_that_its_kernels_do_not_take) {
  NEED_GPU();
  CompressedShape wide;
  wide.dim = 520;
  CHECK_THROWS(ErrorKind::unsupported, cases().compile(CompressedModel(wide).plan, false));
  CompressedShape old;
  old.ratio = 60000;
  CHECK_THROWS(ErrorKind::unsupported, cases().compile(CompressedModel(old).plan, false));
}
