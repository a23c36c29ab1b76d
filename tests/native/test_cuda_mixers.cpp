// Gated DeltaNet, latent attention and slices of heads on the GPU. Without one every case says so and
// checks nothing; tests/gpu/check.sh is where they must run.
#include "cuda_device.h"
#include "mixer_cases.h"

using namespace mixer_cases;

namespace {

Cases cases() { return Cases(gpu(), {}); }

/// Heads of V2 and V3 in full, but few of them.
LatentShape large_heads(bool split, GgmlType type) {
  LatentShape s = latent_shapes()[0].shape;
  s.heads = 2;
  s.split = split;
  s.key = s.value = type;
  return s;
}

/// Of every size that the decompressed form has a kernel for, its matrices split and whole.
std::vector<NamedLatent> decompressed_shapes() {
  std::vector<NamedLatent> all = latent_shapes();
  all.erase(all.begin());
  LatentShape uneven = all[0].shape;  // values in pairs nowhere
  uneven.nope = 11;
  uneven.v_dim = 13;
  uneven.split = false;
  uneven.latent = 33;
  all.push_back({"uneven", uneven});
  all.push_back({"2 heads of 128 + 64", large_heads(true, GgmlType::Q8_0)});
  all.push_back({"the same, unsplit", large_heads(false, GgmlType::Q4_K)});
  return all;
}

/// All logits of a prompt.
std::vector<float> logits_of(const Plan& plan, LatentForm form, int32_t rows, bool exact,
                             uint64_t bytes = 0) {
  Cases c = cases();
  c.set_latent(form, bytes);
  const std::unique_ptr<Program> program = c.compile(plan, exact);
  const std::unique_ptr<State> state = program->new_state();
  program->run(*state, Rowset::chain(0, rows, plan.n_vocab).pass());
  std::vector<float> all;
  for (int32_t o = 0; o < rows; ++o) {
    const std::span<const float> row = program->logits(o);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

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

// Exact programs stay absorbed whatever is asked for; they are here so that asking breaks nothing.
TEST(cuda_latent_decompressed_prompts_match_float64) {
  NEED_GPU();
  Cases c = cases();
  c.set_latent(LatentForm::decompressed);
  for (const NamedLatent& n : decompressed_shapes()) {
    const MixerModel model(n.shape);
    const bool large = n.shape.latent > 256;  // for the evaluator
    c.lengths(model.plan, false,
              large ? std::vector<int32_t>{65, 130} : std::vector<int32_t>{65, 70, 130, 257}, n.name);
  }
  c.lengths(MixerModel(latent_shapes()[1].shape).plan, true, {70}, "odd");
  c.report("latent, decompressed");
}

/// Slots of earlier passes are decompressed with the pass's own; few rows between them are absorbed.
TEST(cuda_latent_decompressed_after_earlier_passes_matches_float64) {
  NEED_GPU();
  Cases c = cases();
  c.set_latent(LatentForm::decompressed);
  for (const NamedLatent& n : decompressed_shapes()) {
    const MixerModel model(n.shape);
    const std::unique_ptr<Program> program = c.compile(model.plan, false);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    int32_t at = 0;
    for (const int32_t rows : {3, 70, 1, 129, 65, 2}) {
      if (n.shape.latent > 256 && at > 140) break;  // for the evaluator
      c.run(*program, *state, evaluator, Rowset::chain(at, rows, model.plan.n_vocab).pass(), false,
            format("%s, %d rows at %d", n.name, rows, at));
      at += rows;
    }
  }
  c.report("latent, decompressed, in passes");
}

/// Trees of more rows than a block has, off this pass's rows and off earlier ones; and of rows some alone, so
/// that the last layer's queries are fewer than its slots.
TEST(cuda_latent_decompressed_trees_see_their_ancestors_only) {
  NEED_GPU();
  Cases c = cases();
  c.set_latent(LatentForm::decompressed);
  for (const NamedLatent& n : decompressed_shapes()) {
    const MixerModel model(n.shape);
    std::vector<int32_t> bush, combs;  // every parent has two children; chains of 7 off the prompt's end
    for (int32_t i = 0; i < 90; ++i) {
      bush.push_back(i < 2 ? -1 : i / 2 - 1);
      combs.push_back(i % 7 == 0 ? -1 : i - 1);
    }
    for (const int32_t prompt : {5, 66})
      for (const bool apart : {false, true}) {
        if (n.shape.latent > 256 && (apart || prompt == 66)) continue;  // for the evaluator
        const std::unique_ptr<Program> program = c.compile(model.plan, false);
        const std::unique_ptr<State> state = program->new_state();
        for (const std::vector<int32_t>* tree : {&bush, &combs}) {
          const std::string what =
              format("%s, a tree after %d rows%s", n.name, prompt, apart ? " of another pass" : "");
          state->truncate(0);
          reference::Evaluator evaluator(model.plan);
          if (apart)
            c.run(*program, *state, evaluator, Rowset::chain(0, prompt, model.plan.n_vocab, true).pass(),
                  false, what);
          Rowset r = apart ? Cases::forked(prompt, 0, *tree, model.plan.n_vocab)
                           : Cases::forked(0, prompt, *tree, model.plan.n_vocab);
          if (prompt == 66) r.some_outputs();
          Pass pass = r.pass();
          pass.n_chain = apart ? 0 : prompt;
          c.run(*program, *state, evaluator, pass, false, what);
          state->truncate(prompt);
          c.run(*program, *state, evaluator, Rowset::chain(prompt, 2, model.plan.n_vocab).pass(), false,
                what + ", and on");
        }
      }
  }
  c.report("latent, decompressed, trees");
}

/// Where memory is short, some heads at a time give the bits of all at once.
TEST(cuda_latent_decompressed_in_groups_of_heads_gives_the_same_bits) {
  NEED_GPU();
  const MixerModel model(latent_shapes()[3].shape);
  // 130 slots of a head: matrices of 64 + 40 rows and 96 latents, keys of 64 and values in rows of 64.
  const uint64_t head = (64 + 40) * 96 * 2 + 130 * (64 + 64) * 2, beside = 1024;
  const std::vector<float> all = logits_of(model.plan, LatentForm::decompressed, 130, false);
  CHECK(all != logits_of(model.plan, LatentForm::absorbed, 130, false));
  for (const uint64_t heads : {7, 1})
    CHECK(all == logits_of(model.plan, LatentForm::decompressed, 130, false, heads * head + beside));
}

/// Long prompts of enough heads decompressed; short ones, and exact programs whatever is asked for, absorbed.
TEST(cuda_latent_prompts_take_the_form_that_is_less_work) {
  NEED_GPU();
  const MixerModel model(latent_shapes()[3].shape);
  const auto found = [&](LatentForm form, int32_t rows, bool exact) {
    return logits_of(model.plan, form, rows, exact);
  };
  const std::vector<float> absorbed = found(LatentForm::absorbed, 130, false);
  CHECK(found(LatentForm::chosen, 130, false) == found(LatentForm::decompressed, 130, false));
  CHECK(found(LatentForm::chosen, 130, false) != absorbed);
  CHECK(found(LatentForm::chosen, 66, false) == found(LatentForm::absorbed, 66, false));
  CHECK(found(LatentForm::decompressed, 66, false) != found(LatentForm::absorbed, 66, false));
  CHECK(found(LatentForm::decompressed, 70, true) == found(LatentForm::absorbed, 70, true));
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
    Cases decompressed = cases();
    decompressed.set_latent(LatentForm::decompressed);
    decompressed.lengths(whole.plan, exact, {70}, "unsplit, decompressed");
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
