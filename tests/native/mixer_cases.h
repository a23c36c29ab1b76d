// What every backend must do with layers that mix rows otherwise than plain attention: the same cases for
// the CPU and the GPU, against the float64 evaluator.
#pragma once
#include <cstdio>

#include "check.h"
#include "cpu_reference.h"
#include "mixer_model.h"

namespace mixer_cases {

using namespace reflex;
using namespace cuda_test;

struct Bounds {
  double exact = 1e-10, fast = 5e-5;
};

class Cases {
 public:
  Cases(Backend& backend, Bounds bounds) : backend_(backend), bounds_(bounds) {}

  /// From here on; `bytes` as ProgramOptions::latent_bytes.
  void set_latent(LatentForm form, uint64_t bytes = 0) { latent_ = form, latent_bytes_ = bytes; }

  std::unique_ptr<Program> compile(const Plan& plan, bool exact, int32_t max_rows = 320) {
    ProgramOptions o;
    o.exact = exact;
    o.max_rows = max_rows;
    o.n_ctx = 1024;
    o.latent = latent_;
    o.latent_bytes = latent_bytes_;
    return backend_.compile(plan, o);
  }

  /// Runs the rows on both and compares every output row.
  void run(Program& program, State& state, reference::Evaluator& evaluator, const Pass& pass, bool exact,
           const std::string& what) {
    program.run(state, pass);
    const reference::Matrix want = evaluator.run(pass);
    if (pass.head != HeadMode::none) compare(program, want, exact, what);
  }

  void compare(Program& program, const reference::Matrix& want, bool exact, const std::string& what) {
    double worst = 0;
    for (size_t o = 0; o < want.size(); ++o) {
      const std::span<const float> row = program.logits(static_cast<int32_t>(o));
      double error = reference::nmse({row.begin(), row.end()}, want[o]);
      for (float f : row)
        if (!std::isfinite(f)) error = 1e30;
      worst = std::max(worst, error);
    }
    const double bound = exact ? bounds_.exact : bounds_.fast;
    if (!(worst <= bound)) std::fprintf(stderr, "%s: NMSE %.3g, bound %.3g\n", what.c_str(), worst, bound);
    CHECK(worst <= bound);
    worst_[exact] = std::max(worst_[exact], worst);
  }

  /// Prompts of the lengths, then a few tokens one by one (launched, captured, replayed).
  void lengths(const Plan& plan, bool exact, const std::vector<int32_t>& lengths, const std::string& name) {
    const std::unique_ptr<Program> program = compile(plan, exact);
    const std::unique_ptr<State> state = program->new_state();
    for (const int32_t rows : lengths) {
      state->truncate(0);
      reference::Evaluator evaluator(plan);
      const std::string what = format("%s, %s, %d rows", name.c_str(), exact ? "exact" : "fast", rows);
      run(*program, *state, evaluator, Rowset::chain(0, rows, plan.n_vocab, rows > 33).pass(), exact, what);
      program->finish_load();
      for (int32_t slot = rows; slot < rows + 3; ++slot)
        run(*program, *state, evaluator, Rowset::chain(slot, 1, plan.n_vocab, true).pass(), exact,
            what + " and one by one");
    }
  }

  /// The rows behind every border, for pieces of each size.
  void pieces(const Plan& plan, bool exact, int32_t rows, const std::string& name) {
    const std::unique_ptr<Program> program = compile(plan, exact);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(plan);
    const reference::Matrix want = evaluator.run(Rowset::chain(0, rows, plan.n_vocab, false).pass());
    for (int32_t size = 1; size <= rows; ++size) {
      state->truncate(0);
      for (int32_t at = 0; at < rows; at += size) {
        const Rowset r = Rowset::chain(at, std::min(size, rows - at), plan.n_vocab, false);
        program->run(*state, r.pass());
        compare(*program, {want.begin() + at, want.begin() + at + static_cast<int32_t>(r.tokens.size())},
                exact, format("%s, pieces of %d at %d", name.c_str(), size, at));
      }
    }
  }

  /// `chain` rows after `before` of them, then forks off their end in one pass; slots of parents by fork,
  /// counted from the chain's end, -1: the end itself.
  static Rowset forked(int32_t before, int32_t chain, const std::vector<int32_t>& parents, int32_t vocab) {
    Rowset r = Rowset::chain(before, chain, vocab, false);
    const int32_t end = before + chain;
    for (size_t i = 0; i < parents.size(); ++i) {
      const int32_t parent = parents[i] < 0 ? end - 1 : end + parents[i];
      r.tokens.push_back(static_cast<int32_t>(31 * i + 7) % vocab);
      r.positions.push_back(parent < end ? end : r.positions[static_cast<size_t>(parent - before)] + 1);
      r.parents.push_back(parent);
      r.outputs.push_back(static_cast<int32_t>(r.tokens.size()) - 1);
    }
    return r;
  }

  /// Forks leave no trace, whatever their tree; and the sequence goes on after them.
  void forks(const Plan& plan, bool exact, const std::string& name) {
    const std::vector<std::vector<int32_t>> trees = {
        {-1, -1, -1},                                        // candidates of one token
        {-1, 0, 1, -1, 3, -1},                               // chains
        {-1, 0, 1, 1, 0, 4, -1, 6, 6, 7, 8, 7, 2, 4},        // branches that share beginnings, interleaved
        {-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6}};  // a bush
    const std::unique_ptr<Program> program = compile(plan, exact);
    const std::unique_ptr<State> state = program->new_state();
    for (const int32_t prompt : {1, 5, 70})
      for (size_t t = 0; t < trees.size(); ++t)
        for (const bool apart : {false, true}) {  // the prompt in the pass of the forks, or before it
          const std::string what =
              format("%s, %s, tree %zu after %d rows%s", name.c_str(), exact ? "exact" : "fast", t, prompt,
                     apart ? " of another pass" : "");
          state->truncate(0);
          reference::Evaluator evaluator(plan);
          if (apart)
            run(*program, *state, evaluator, Rowset::chain(0, prompt, plan.n_vocab, true).pass(), exact,
                what);
          const Rowset r =
              apart ? forked(prompt, 0, trees[t], plan.n_vocab) : forked(0, prompt, trees[t], plan.n_vocab);
          Pass pass = r.pass();
          pass.n_chain = apart ? 0 : prompt;
          run(*program, *state, evaluator, pass, exact, what);
          state->truncate(prompt);
          run(*program, *state, evaluator, Rowset::chain(prompt, 2, plan.n_vocab, false).pass(), exact,
              what + ", and on");
        }
  }

  /// Back to a checkpoint, to the beginning, and nowhere else.
  void checkpoints(const Plan& plan, bool exact, const std::string& name) {
    const std::unique_ptr<Program> program = compile(plan, exact);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(plan);
    run(*program, *state, evaluator, Rowset::chain(0, 40, plan.n_vocab, true).pass(), exact, name);
    state->checkpoint();
    CHECK(state->bytes() > 0);
    for (int again = 0; again < 3; ++again) {
      Rowset r = Rowset::chain(40, 30 - again, plan.n_vocab, true);
      for (int32_t& t : r.tokens) t = (t + again) % plan.n_vocab;
      run(*program, *state, evaluator, r.pass(), exact, name + ", from the checkpoint");
      CHECK_THROWS(ErrorKind::kv_cache, state->truncate(39));
      CHECK_THROWS(ErrorKind::kv_cache, state->truncate(50));
      state->truncate(40);
    }
    CHECK_THROWS(ErrorKind::kv_cache, program->run(*state, Rowset::chain(39, 1, plan.n_vocab, true).pass()));
    Rowset astray = Rowset::chain(40, 3, plan.n_vocab, true);
    astray.parents[2] = 39;
    CHECK_THROWS(ErrorKind::kv_cache, program->run(*state, astray.pass()));
    state->truncate(0);
    CHECK_THROWS(ErrorKind::kv_cache, program->run(*state, Rowset::chain(40, 1, plan.n_vocab, true).pass()));
    run(*program, *state, evaluator, Rowset::chain(0, 3, plan.n_vocab, true).pass(), exact,
        name + ", from the beginning");
  }

  /// After anything else has run, a request gives the bits that it gives in a fresh program.
  void same_bits(const Plan& plan, bool exact) {
    std::vector<float> first;
    const std::unique_ptr<Program> program = compile(plan, exact), fresh = compile(plan, exact);
    const std::unique_ptr<State> state = program->new_state(), fresh_state = fresh->new_state();
    program->run(*state, Rowset::chain(0, 200, plan.n_vocab, true).pass());
    Pass pass = {};
    const Rowset r = forked(200, 2, {-1, 0, -1, 0}, plan.n_vocab);
    pass = r.pass();
    pass.n_chain = 2;
    program->run(*state, pass);
    for (int again = 0; again < 4; ++again) {
      state->truncate(0);
      Program& p = again == 0 ? *fresh : *program;
      State& s = again == 0 ? *fresh_state : *state;
      std::vector<float> all;
      for (const Rowset& rows :
           {Rowset::chain(0, 21, plan.n_vocab, true), Rowset::chain(21, 1, plan.n_vocab, true),
            Rowset::chain(22, 1, plan.n_vocab, true)}) {
        p.run(s, rows.pass());
        const std::span<const float> row = p.logits(0);
        all.insert(all.end(), row.begin(), row.end());
      }
      if (again == 0) first = all;
      CHECK(all == first);
      p.finish_load();
    }
  }

  void report(const char* what) const {
    std::fprintf(stderr, "%s: worst NMSE exact %.2g, fast %.2g\n", what, worst_[1], worst_[0]);
  }

 private:
  Backend& backend_;
  Bounds bounds_;
  LatentForm latent_ = LatentForm::chosen;
  uint64_t latent_bytes_ = 0;
  double worst_[2] = {};
};

struct NamedDelta {
  const char* name;
  DeltaShape shape;
};
inline std::vector<NamedDelta> delta_shapes() {
  DeltaShape real;  // heads as the models have them
  real.key_dim = real.value_dim = 128;
  real.layers = 1;
  DeltaShape odd;
  odd.d = 36;
  odd.value_heads = 6;
  odd.key_dim = 12;
  odd.value_dim = 20;
  odd.taps = 3;
  odd.order = GatedDelta::Order::grouped;
  odd.sliced = true;
  DeltaShape tall = odd;  // more of a state than a thread's registers take at first
  tall.key_heads = 1;
  tall.value_heads = 3;
  tall.key_dim = 200;
  tall.value_dim = 40;
  tall.taps = 5;
  tall.order = GatedDelta::Order::tiled;
  tall.layers = 1;
  DeltaShape wide;  // as many key heads as value heads, values wider than one block's columns
  wide.key_heads = wide.value_heads = 3;
  wide.value_dim = 144;
  wide.taps = 2;
  wide.layers = 1;
  DeltaShape gated = odd;  // qwen4exp's gate
  gated.gate = GatedDelta::Gate::sigmoid;
  gated.layers = 1;
  return {{"heads of 128", real},
          {"odd, grouped", odd},
          {"keys of 200", tall},
          {"values of 144", wide},
          {"sigmoid gate", gated}};
}

struct NamedLatent {
  const char* name;
  LatentShape shape;
};
inline std::vector<NamedLatent> latent_shapes() {
  LatentShape real;  // DeepSeek-V2-Lite's heads
  real.heads = 16;
  real.latent = 512;
  real.nope = real.v_dim = 128;
  real.rope = 64;
  real.layers = 1;
  real.key = real.value = GgmlType::Q8_0;
  LatentShape odd;
  odd.d = 36;
  odd.heads = 3;
  odd.latent = 20;
  odd.nope = 10;
  odd.rope = 6;
  odd.v_dim = 14;
  LatentShape whole = odd;  // files with one attn_kv_b
  whole.split = false;
  whole.latent = 64;
  whole.key = GgmlType::Q4_0;
  whole.pairing = RopeSpec::Pairing::half;
  LatentShape many;  // more heads than a block takes
  many.heads = 20;
  many.latent = 96;
  many.nope = 64;
  many.v_dim = 40;
  many.layers = 1;
  many.key = GgmlType::F16;
  many.value = GgmlType::Q8_0;
  return {{"heads of 128 + 64", real}, {"odd", odd}, {"unsplit", whole}, {"20 heads", many}};
}

inline const std::vector<int32_t> kLengths = {1, 2, 7, 31, 32, 33, 63, 64, 65, 70, 130, 257};

}  // namespace mixer_cases
