// Gated DeltaNet, latent attention and slices of heads on the GPU. Without one every case says so and
// checks nothing; tests/gpu/check.sh is where they must run.
#include "cuda_device.h"
#include "mixer_cases.h"

using namespace mixer_cases;

namespace {

Cases cases() { return Cases(gpu(), {}); }

}  // namespace

TEST(cuda_delta_prompts_of_every_length_match_float64) {
  NEED_GPU();
  Cases c = cases();
  for (const NamedDelta& n : delta_shapes())
    for (const bool exact : {true, false}) c.lengths(MixerModel(n.shape).plan, exact, kLengths, n.name);
  c.report("delta, every length");
}

TEST(cuda_delta_pieces_of_every_size_leave_the_same_state) {
  NEED_GPU();
  Cases c = cases();
  c.pieces(MixerModel(delta_shapes()[1].shape).plan, true, 70, "odd, grouped");
  c.report("delta, every piece");
}

TEST(cuda_delta_forks_start_from_their_parents_state) {
  NEED_GPU();
  Cases c = cases();
  for (const NamedDelta& n : delta_shapes())
    for (const bool exact : {true, false}) c.forks(MixerModel(n.shape).plan, exact, n.name);
  c.report("delta, forks");
}

TEST(cuda_delta_goes_back_to_its_checkpoint_only) {
  NEED_GPU();
  cases().checkpoints(MixerModel(delta_shapes()[1].shape).plan, true, "odd, grouped");
}

TEST(cuda_delta_gives_the_bits_of_a_fresh_program) {
  NEED_GPU();
  for (const bool exact : {true, false}) cases().same_bits(MixerModel(delta_shapes()[0].shape).plan, exact);
}

TEST(cuda_latent_prompts_of_every_length_match_float64) {
  NEED_GPU();
  Cases c = cases();
  for (const NamedLatent& n : latent_shapes()) {
    const bool large = n.shape.latent > 256;  // for the evaluator
    const MixerModel model(n.shape);
    for (const bool exact : {true, false})
      c.lengths(model.plan, exact, large ? std::vector<int32_t>{1, 7, 33, 65} : kLengths, n.name);
  }
  c.report("latent, every length");
}

TEST(cuda_latent_trees_see_their_ancestors_only) {
  NEED_GPU();
  Cases c = cases();
  for (const NamedLatent& n : latent_shapes()) {
    if (n.shape.latent > 256) continue;  // for the evaluator's sake
    const MixerModel model(n.shape);
    for (const bool exact : {true, false}) c.forks(model.plan, exact, n.name);
  }
  c.report("latent, trees");
}

TEST(cuda_latent_takes_every_type_of_its_matrices) {
  NEED_GPU();
  Cases c = cases();
  for (const GgmlType type : {GgmlType::F32, GgmlType::F16, GgmlType::BF16, GgmlType::Q4_0, GgmlType::Q8_0,
                              GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K})
    for (const bool split : {true, false}) {
      LatentShape s;
      s.layers = 1;
      s.heads = 2;
      s.latent = s.nope = 256;
      s.split = split;
      s.key = s.value = type;
      const MixerModel model(s);
      for (const bool exact : {true, false})
        c.lengths(model.plan, exact, {1, 3, 9},
                  format("%s, %s", type_info(type).name, split ? "split" : "whole"));
    }
  c.report("latent, types");
}

TEST(cuda_latent_gives_the_bits_of_a_fresh_program) {
  NEED_GPU();
  for (const bool exact : {true, false}) cases().same_bits(MixerModel(latent_shapes()[0].shape).plan, exact);
}

/// Every kernel once, in sizes that a sanitizer gets through.
TEST(cuda_small_mixers) {
  NEED_GPU();
  Cases c = cases();
  for (const bool exact : {true, false}) {
    const MixerModel delta(delta_shapes()[1].shape), latent(latent_shapes()[1].shape),
        whole(latent_shapes()[2].shape);
    c.lengths(delta.plan, exact, {3, 70}, "odd, grouped");
    c.lengths(MixerModel(delta_shapes()[4].shape).plan, exact, {3, 70}, "sigmoid gate");
    c.lengths(latent.plan, exact, {3, 40}, "odd");
    c.lengths(whole.plan, exact, {3, 40}, "unsplit");
    const std::unique_ptr<Program> program = c.compile(delta.plan, exact);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(delta.plan);
    const Rowset r = Cases::forked(0, 5, {-1, 0, 1, 1, 0, 4, -1}, delta.plan.n_vocab);
    Pass pass = r.pass();
    pass.n_chain = 5;
    c.run(*program, *state, evaluator, pass, exact, "forks");
  }
}

TEST(cuda_refuses_sizes_that_its_mixers_do_not_take) {
  NEED_GPU();
  DeltaShape tall;
  tall.key_dim = 1040;
  CHECK_THROWS(ErrorKind::unsupported, cases().compile(MixerModel(tall).plan, false));
  LatentShape large;
  large.latent = 520;
  CHECK_THROWS(ErrorKind::unsupported, cases().compile(MixerModel(large).plan, false));
}
