// What sparse attention and older files add, on the GPU against the float64 evaluator: layer norm, rows side
// by side, silu, the indexer's choice of slots and latent attention over it. Without a GPU every case says so
// and checks nothing; tests/gpu/check.sh is where they must run.
#include <limits>

#include "cuda_device.h"
#include "mixer_cases.h"

using namespace mixer_cases;

namespace {

Cases cases() { return Cases(gpu(), {}); }

/// embed -> [layer norm ; what it read] -> silu -> head, on all rows or on output rows alone.
class Elements : public Model {
 public:
  Elements(int32_t d, Rows rows) : Model(d, 53, 1, 3) {
    const ValueId embedded = value(d);
    plan.ops.emplace_back(Embed{matrix("token_embd.weight", d, 53, GgmlType::F32), embedded});
    const ValueId x = rows == Rows::all ? embedded : select(embedded);
    const WeightId weight = vector("norm.weight", d, 1.0f), bias = vector("norm.bias", d, 0.5f);
    const ValueId y = push(like(x, d), LayerNorm{x, kNone, weight, bias, 1e-3f});
    const ValueId narrow = linear(x, 5, GgmlType::F32);
    ValueId z = push(like(x, d + 5), Concat{y, narrow, kNone});
    z = push(like(z, width(z)), Silu{z, kNone, 1.7f});
    if (rows == Rows::all) z = select(z);
    plan.ops.emplace_back(Head{z, matrix("output.weight", d + 5, 53, GgmlType::F32), kNone});
  }
};

struct IndexShape {
  int32_t heads = 3, dim = 10, top_k = 7, ratio = 1;
  Rows rows = Rows::all;
  bool nan = false;   ///< the embedding of token 3 is no number
  bool same = false;  ///< all heads have one query: a narrow product makes it
};

/// An indexer over small whole numbers, whose scores are exact in f16 and often equal, and a head that reads
/// place `place` of its result: slot * 2^-23, since a slot's bits are a float of slot * 2^-149; NaN where it
/// is -1. With a ratio another indexer writes the keys.
class Choice : public Model {
 public:
  static constexpr int32_t kVocab = 53, kWidth = 6;

  Choice(const IndexShape& s, int32_t place) : Model(kWidth, kVocab, 1, 11) {
    const ValueId x = value(kWidth);
    plan.ops.emplace_back(Embed{whole(kWidth, kVocab, s.nan), x});
    plan.states.push_back({"index", StateSpec::Kind::per_token, s.dim, false});
    const ValueId q = s.rows == Rows::all ? x : select(x);
    Indexer op{};
    op.query = product(q, s.same ? s.dim : s.heads * s.dim);
    if (s.same) op.query = push(like(q, s.heads * s.dim), Repeat{op.query, kNone, s.heads});
    op.weights = product(q, s.heads);
    op.key = product(x, s.dim);
    op.n_heads = s.heads;
    op.head_dim = s.dim;
    op.top_k = s.top_k;
    ValueId chosen = push(like(q, s.top_k), op);
    if (s.ratio > 1) {
      op.key = kNone;
      op.ratio = s.ratio;
      chosen = push(like(q, s.top_k), op);
    }
    ValueId y = push(like(q, 1), HeadSlice{chosen, kNone, 1, place, 1});
    if (s.rows == Rows::all) y = select(y);
    std::vector<float> large(kVocab, 0x1p126f);
    plan.ops.emplace_back(Head{y, floats(1, kVocab, large), kNone});
  }

 private:
  WeightId floats(int64_t n_in, int64_t n_out, const std::vector<float>& f) {
    std::vector<uint8_t> bytes(f.size() * sizeof(float));
    std::memcpy(bytes.data(), f.data(), bytes.size());
    return add("whole numbers", GgmlType::F32, n_in, n_out, std::move(bytes));
  }
  WeightId whole(int64_t n_in, int64_t n_out, bool nan = false) {
    std::vector<float> f(static_cast<size_t>(n_in * n_out));
    for (float& v : f) v = static_cast<float>(static_cast<int32_t>(rng_() % 5) - 2);
    if (nan) std::fill_n(f.begin() + 3 * n_in, n_in, std::numeric_limits<float>::quiet_NaN());
    return floats(n_in, n_out, f);
  }
  ValueId product(ValueId x, int32_t n_out) {
    return push(like(x, n_out), Linear{x, kNone, whole(width(x), n_out), kNone});
  }
};

/// The slots at `place` of every output row: of the GPU's program, and of the evaluator (-1 below 0).
std::vector<int32_t> chosen_by(Program& program, size_t rows) {
  std::vector<int32_t> slots;
  for (size_t o = 0; o < rows; ++o) {
    const float f = program.logits(static_cast<int32_t>(o))[0];
    slots.push_back(std::isnan(f) ? -1 : static_cast<int32_t>(std::lround(f * 0x1p23f)));
  }
  return slots;
}
std::vector<int32_t> chosen_by(const reference::Matrix& logits) {
  std::vector<int32_t> slots;
  for (const std::vector<double>& row : logits)
    slots.push_back(row[0] < 0 ? -1 : static_cast<int32_t>(std::lround(row[0] * 0x1p-126)));
  return slots;
}

/// embed -> an indexer, latent attention over its choice -> head. The index's values are small whole numbers,
/// so that fast mode chooses as float64 does.
struct SparseShape {
  int32_t d = 24, heads = 3, latent = 14, nope = 6, rope = 4, v_dim = 5, index_heads = 9, index_dim = 10,
          top_k = 7;
  Rows rows = Rows::all;
  GgmlType key = GgmlType::F32;
};
class Sparse : public Model {
 public:
  static constexpr int32_t kVocab = 61;

  explicit Sparse(const SparseShape& s) : Model(s.d, kVocab, 1, 5) {
    plan.ropes = {{s.rope, RopeSpec::Pairing::adjacent, {}, 1.0f}};
    for (int i = 0; i < s.rope / 2; ++i) plan.ropes[0].inv_freq.push_back(std::pow(0.1f, i));
    plan.states = {{"index", StateSpec::Kind::per_token, s.index_dim, false},
                   {"latent", StateSpec::Kind::per_token, s.latent + s.rope, false}};
    const ValueId x = value(s.d);
    plan.ops.emplace_back(Embed{whole(s.d, kVocab), x});
    const ValueId hq = s.rows == Rows::all ? x : select(x);
    Indexer index{};
    index.query = push(like(hq, s.index_heads * s.index_dim), product(hq, s.index_heads * s.index_dim));
    index.weights = push(like(hq, s.index_heads), product(hq, s.index_heads));
    index.key = push(value(s.index_dim), product(x, s.index_dim));
    index.state = 0;
    index.n_heads = s.index_heads;
    index.head_dim = s.index_dim;
    index.top_k = s.top_k;
    LatentAttention op{};
    op.selection = push(like(hq, s.top_k), index);
    op.q = linear(hq, s.heads * (s.nope + s.rope), GgmlType::F32);
    op.kv = linear(x, s.latent + s.rope, GgmlType::F32);
    op.norm = vector("norm.weight", s.latent, 1.0f);
    op.eps = 1e-6f;
    op.kv_b = matrix("kv_b.weight", s.latent, int64_t{s.heads} * (s.nope + s.v_dim), s.key);
    op.state = 1;
    op.n_heads = s.heads;
    op.n_latent = s.latent;
    op.nope_dim = s.nope;
    op.rope_dim = s.rope;
    op.v_head_dim = s.v_dim;
    op.scale = 0.3f;
    ValueId y = linear(push(like(op.q, s.heads * s.v_dim), op), s.d, GgmlType::F32);
    if (s.rows == Rows::all) y = select(y);
    plan.ops.emplace_back(Head{y, matrix("output.weight", s.d, kVocab, GgmlType::F32), kNone});
  }

 private:
  WeightId whole(int64_t n_in, int64_t n_out) {
    std::vector<uint8_t> bytes(static_cast<size_t>(n_in * n_out) * sizeof(float));
    for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
      const auto f = static_cast<float>(static_cast<int32_t>(rng_() % 3) - 1);
      std::memcpy(&bytes[i], &f, sizeof f);
    }
    return add("whole numbers", GgmlType::F32, n_in, n_out, std::move(bytes));
  }
  Linear product(ValueId x, int32_t n_out) { return {x, kNone, whole(width(x), n_out), kNone}; }
};

/// Chains of the lengths, a few rows one by one (launched, captured, replayed), then a tree off their end.
void compare_choices(const IndexShape& s, const std::vector<int32_t>& lengths, int32_t max_rows,
                     const std::vector<int32_t>& places) {
  for (const int32_t place : places) {
    const Choice model(s, place);
    for (const bool exact : {true, false}) {
      ProgramOptions options;
      options.exact = exact;
      options.max_rows = max_rows;
      options.n_ctx = 8192;
      const std::unique_ptr<Program> program = gpu().compile(model.plan, options);
      const std::unique_ptr<State> state = program->new_state();
      for (const int32_t n : lengths) {
        state->truncate(0);
        reference::Evaluator evaluator(model.plan);
        const auto run = [&](const Rowset& r) {
          program->run(*state, r.pass());
          const std::vector<int32_t> want = chosen_by(evaluator.run(r.pass()));
          const bool same = chosen_by(*program, r.outputs.size()) == want;
          if (!same)
            std::fprintf(stderr, "%d heads of %d, %d of every %d-th, place %d, %d rows%s\n", s.heads, s.dim,
                         s.top_k, s.ratio, place, n, exact ? ", exact" : "");
          CHECK(same);
        };
        int32_t at = 0;
        for (; at < n; at += max_rows)
          run(Rowset::chain(at, std::min(max_rows, n - at), Choice::kVocab, n > 100));
        for (at = n; at < n + 3; ++at) run(Rowset::chain(at, 1, Choice::kVocab, true));
        run(Cases::forked(at, 0, {-1, 0, 1, 1, 0, 4, -1, 6, 6, 7, 8, 7, 2, 4, 13}, Choice::kVocab));
        program->finish_load();
      }
    }
  }
}

void compare_choices(const IndexShape& s, const std::vector<int32_t>& lengths) {
  compare_choices(s, lengths, 320, {0, s.top_k / 2, s.top_k - 1});
}

}  // namespace

TEST(cuda_small_choices_of_slots_are_those_of_float64) {
  NEED_GPU();
  IndexShape s;
  s.top_k = 5;
  compare_choices(s, {3, 9});
  s.ratio = 3;
  s.top_k = 2;
  compare_choices(s, {11});
}

TEST(cuda_choices_of_slots_are_those_of_float64_at_every_length) {
  NEED_GPU();
  for (const int32_t ratio : {1, 4}) {
    IndexShape s;
    s.rows = ratio == 1 ? Rows::all : Rows::outputs;
    s.ratio = ratio;
    compare_choices(s, {1, 8, 33, 70});
  }
}

TEST(cuda_choices_among_thousands_of_slots_are_those_of_float64) {
  NEED_GPU();
  IndexShape s;
  s.heads = 2;
  s.dim = 5;
  s.top_k = 300;
  s.rows = Rows::outputs;
  for (const int32_t ratio : {1, 3}) {
    s.ratio = ratio;
    compare_choices(s, {4500}, 512, {0, 123, 299});
  }
}

/// More rows than the queries' scratch holds at once, of heads too wide to be kept in registers.
TEST(cuda_choices_of_many_wide_rows_are_made_in_turn) {
  NEED_GPU();
  IndexShape s;
  s.heads = 256;
  s.dim = 250;
  s.top_k = 1;
  s.same = true;
  const Choice model(s, 0);
  for (const bool exact : {true, false}) {
    ProgramOptions options;
    options.exact = exact;
    options.max_rows = 80;
    options.n_ctx = 128;
    const std::unique_ptr<Program> program = gpu().compile(model.plan, options);
    const std::unique_ptr<State> state = program->new_state();
    reference::Evaluator evaluator(model.plan);
    const Rowset r = Cases::forked(0, 1, std::vector<int32_t>(66, -1), Choice::kVocab);
    program->run(*state, r.pass());
    CHECK(chosen_by(*program, r.outputs.size()) == chosen_by(evaluator.run(r.pass())));
  }
}

TEST(cuda_small_scores_that_are_no_numbers_are_the_worst) {
  NEED_GPU();
  IndexShape s;
  s.nan = true;
  const std::unique_ptr<Backend> cpu = make_cpu_backend(1);
  for (const int32_t place : {0, 3, 6}) {
    const Choice model(s, place);
    ProgramOptions options;
    options.exact = true;
    options.n_ctx = 128;
    std::vector<int32_t> chosen[2];
    const Rowset r = Rowset::chain(0, 70, Choice::kVocab, false);
    for (Backend* backend : {cpu.get(), &gpu()}) {
      const std::unique_ptr<Program> program = backend->compile(model.plan, options);
      const std::unique_ptr<State> state = program->new_state();
      program->run(*state, r.pass());
      chosen[backend == &gpu()] = chosen_by(*program, r.outputs.size());
    }
    CHECK(chosen[0] == chosen[1]);
    // A row of the token itself has no score at all: the earliest slots.
    const auto row =
        static_cast<size_t>(std::find(r.tokens.begin() + 20, r.tokens.end(), 3) - r.tokens.begin());
    CHECK(row < r.tokens.size());
    CHECK(chosen[1][row] == place);
  }
}

TEST(cuda_refuses_an_indexer_of_wider_heads_than_it_takes) {
  NEED_GPU();
  IndexShape s;
  s.dim = 257;
  const Choice model(s, 0);
  ProgramOptions options;
  options.n_ctx = 64;
  CHECK_THROWS(ErrorKind::unsupported, gpu().compile(model.plan, options));
}

TEST(cuda_small_latent_attention_over_a_choice_matches_float64) {
  NEED_GPU();
  Cases c = cases();
  for (const Rows rows : {Rows::all, Rows::outputs})
    for (const bool exact : {true, false}) {
      SparseShape s;
      s.rows = rows;
      c.lengths(Sparse(s).plan, exact, {1, 5, 12, 40}, "a choice");
    }
  c.report("latent attention over a choice");
}

TEST(cuda_latent_attention_over_a_choice_matches_float64_on_chains_and_trees) {
  NEED_GPU();
  Cases c = cases();
  SparseShape real;  // heads as DeepSeek-V3.2 has them, fewer of them
  real.d = 32;
  real.heads = 18;
  real.latent = 512;
  real.nope = 16;
  real.rope = 64;
  real.v_dim = 8;
  real.index_heads = 20;
  real.index_dim = 128;
  real.top_k = 40;
  real.key = GgmlType::Q8_0;
  real.rows = Rows::outputs;
  for (const bool exact : {true, false}) {
    SparseShape s;
    s.rows = exact ? Rows::outputs : Rows::all;
    const Sparse model(s);
    c.lengths(model.plan, exact, kLengths, "a choice of 7");
    c.forks(model.plan, exact, "a choice of 7");
    c.pieces(Sparse({}).plan, exact, 40, "a choice of 7");
    c.lengths(Sparse(real).plan, exact, {39, 65}, "a choice of 40");
  }
  c.report("latent attention over a choice");
}

TEST(cuda_latent_attention_over_a_choice_gives_the_bits_of_a_fresh_program) {
  NEED_GPU();
  for (const bool exact : {true, false}) cases().same_bits(Sparse({}).plan, exact);
}

TEST(cuda_small_layer_norm_concat_and_silu_match_float64) {
  NEED_GPU();
  Cases c = cases();
  for (const Rows rows : {Rows::all, Rows::outputs})
    for (const int32_t d : {1, 36, 300})
      for (const bool exact : {true, false})
        c.lengths(Elements(d, rows).plan, exact, {1, 3, 40}, format("width %d", d));
  c.report("elements");
}
