// Gated DeltaNet on the CPU against the float64 recurrence: the chunked form and the single step, at and
// around the borders of chunks, over cuts into passes, over forks, and with memories of every length.
#include <cstring>
#include <random>
#include <string>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "check.h"
#include "cpu_reference.h"

using namespace reflex;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr int32_t kVocab = 61, kWidth = 20;

struct Shape {
  int32_t key_heads = 2, value_heads = 4, key_dim = 16, value_dim = 12, taps = 4;
  GatedDelta::Order order = GatedDelta::Order::tiled;
  float decay_low = 0.02f, decay_high = 1.0f;  ///< -decay, drawn per head
  float key_scale = 1.0f;                      ///< of the channels of q and k
};

/// embed -> qkv, z, beta, alpha -> Gated DeltaNet -> head, with random weights.
class DeltaModel {
 public:
  explicit DeltaModel(const Shape& s, bool all_rows = true, uint32_t seed = 1) : rng_(seed) {
    plan.n_vocab = kVocab;
    plan.n_embd = kWidth;
    const int32_t keys = s.key_heads * s.key_dim, values = s.value_heads * s.value_dim;
    const int32_t channels = 2 * keys + values;
    const ValueId x = value(kWidth, Rows::all);
    plan.ops.emplace_back(Embed{weight("table", kWidth, kVocab), x});
    ValueId z_in = x;
    const Rows kind = all_rows ? Rows::all : Rows::outputs;
    if (!all_rows) plan.ops.emplace_back(SelectOutputs{x, z_in = value(kWidth, Rows::outputs)});
    GatedDelta op{};
    op.qkv = linear(x, channels, Rows::all);
    op.z = linear(z_in, values, kind);
    op.beta = linear(x, s.value_heads, Rows::all);
    op.alpha = linear(x, s.value_heads, Rows::all);
    op.conv = weight("conv", s.taps, channels, 0.5f);
    std::vector<float>& conv = storage_.back();
    for (size_t i = 0; i < static_cast<size_t>(2 * keys * s.taps); ++i) conv[i] *= s.key_scale;
    op.decay = weight("decay", s.value_heads, 1);
    std::uniform_real_distribution<float> spread(s.decay_low, s.decay_high);
    for (float& f : storage_.back()) f = -spread(rng_);
    op.dt_bias = weight("dt_bias", s.value_heads, 1);
    op.norm = weight("norm", s.value_dim, 1);
    op.conv_state = 0;
    op.delta_state = 1;
    plan.states.push_back({"conv", StateSpec::Kind::fixed, (s.taps - 1) * channels, true});
    plan.states.push_back({"delta", StateSpec::Kind::fixed, values * s.key_dim, true});
    op.n_key_heads = s.key_heads;
    op.n_value_heads = s.value_heads;
    op.key_dim = s.key_dim;
    op.value_dim = s.value_dim;
    op.n_taps = s.taps;
    op.order = s.order;
    op.qk_eps = op.norm_eps = 1e-6f;
    op.out = value(values, kind);
    plan.ops.emplace_back(op);
    ValueId out = op.out;
    if (all_rows) plan.ops.emplace_back(SelectOutputs{op.out, out = value(values, Rows::outputs)});
    plan.ops.emplace_back(Head{out, weight("head", values, kVocab), kNone});
  }

  Plan plan;

 private:
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, float std = 1.0f) {
    std::vector<float>& data = storage_.emplace_back(static_cast<size_t>(n_in * n_out));
    std::normal_distribution<float> normal(0, std);
    for (float& f : data) f = normal(rng_);
    Weight w;
    w.name = name;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.data = data.data();
    w.nbytes = data.size() * sizeof(float);
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  ValueId value(int32_t width, Rows rows) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  ValueId linear(ValueId in, int32_t n_out, Rows rows) {
    const ValueId out = value(n_out, rows);
    const float std = 1.0f / std::sqrt(static_cast<float>(kWidth));
    plan.ops.emplace_back(Linear{in, out, weight("matrix", kWidth, n_out, std), kNone});
    return out;
  }

  std::mt19937 rng_;
  std::vector<std::vector<float>> storage_;
};

/// The rows of a pass, owned; the first n_chain a chain behind first_slot, each an output.
struct Rowset {
  std::vector<int32_t> tokens, positions, parents, outputs;
  int32_t first_slot, n_chain;

  Rowset(int32_t first, int32_t n) : first_slot(first), n_chain(n) {
    for (int32_t i = 0; i < n; ++i) add(first + i - 1);
  }
  void add(int32_t parent) {
    const auto i = static_cast<int32_t>(tokens.size());
    tokens.push_back((7 * (first_slot + i) + 3 * parent + 5) % kVocab);
    positions.push_back(parent + 1);
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
    p.n_chain = n_chain;
    p.head = HeadMode::full;
    return p;
  }
};

struct Machine {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Program> program;
  std::unique_ptr<State> state;

  explicit Machine(const Plan& plan, const std::string& isa = "", int threads = 2)
      : backend(make_cpu_backend(threads, isa)) {
    ProgramOptions options;
    options.n_ctx = 2048;
    options.max_rows = 1024;
    options.exact = true;
    program = backend->compile(plan, options);
    state = program->new_state();
  }
  std::vector<double> run(const Rowset& rows) {
    program->run(*state, rows.pass());
    std::vector<double> all;
    for (size_t o = 0; o < rows.outputs.size(); ++o) {
      const auto r = program->logits(static_cast<int32_t>(o));
      all.insert(all.end(), r.begin(), r.end());
    }
    return all;
  }
};

std::vector<double> flat(const reference::Matrix& m) {
  std::vector<double> all;
  for (const std::vector<double>& r : m) all.insert(all.end(), r.begin(), r.end());
  return all;
}

/// The rows cut into passes as `cuts` says; prints the case where it fails.
void compare(const Shape& s, std::initializer_list<int32_t> cuts, const std::string& isa = "") {
  const DeltaModel model(s);
  Machine machine(model.plan, isa);
  reference::Evaluator evaluator(model.plan);
  int32_t at = 0;
  for (int32_t n : cuts) {
    const Rowset rows(at, n);
    const double error = reference::nmse(machine.run(rows), flat(evaluator.run(rows.pass())));
    if (!(error < kExactNmse))
      std::fprintf(stderr, "%d rows after %d: NMSE %.1e (gate %.0e)\n", n, at, error, kExactNmse);
    CHECK(error < kExactNmse);
    at += n;
  }
}

}  // namespace

TEST(cpu_gated_delta_around_the_borders_of_chunks) {
  for (int32_t n : {1, 2, 11, 12, 13, 16, 17, 63, 64, 65, 76, 127, 128, 129, 140, 257}) compare({}, {n});
}

TEST(cpu_gated_delta_over_cuts_into_passes) {
  compare({}, {64, 1, 63, 2, 65, 3});
  compare({}, {1, 1, 1, 1, 1, 12, 11, 64, 128, 5});
  compare({}, {70, 70, 12, 1, 130});
}

TEST(cpu_gated_delta_of_odd_sizes) {
  for (const GatedDelta::Order order : {GatedDelta::Order::tiled, GatedDelta::Order::grouped}) {
    compare({.key_heads = 1, .value_heads = 1, .key_dim = 1, .value_dim = 1, .taps = 2, .order = order},
            {3, 70});
    compare({.key_heads = 3, .value_heads = 6, .key_dim = 7, .value_dim = 5, .taps = 3, .order = order},
            {65, 2, 14});
    compare({.key_heads = 2, .value_heads = 6, .key_dim = 20, .value_dim = 33, .taps = 4, .order = order},
            {130, 1});
    compare({.key_heads = 1, .value_heads = 2, .key_dim = 128, .value_dim = 128, .taps = 4, .order = order},
            {100, 1, 30});
  }
}

// A head that forgets nothing, one that keeps thousands of tokens, one that forgets at once, and all of
// them side by side: quotients of decays over a chunk neither overflow nor lose what is small.
TEST(cpu_gated_delta_with_memories_of_every_length) {
  for (const auto& [low, high] :
       {std::pair{0.0f, 0.0f}, {1e-5f, 1e-3f}, {0.5f, 2.0f}, {5.0f, 20.0f}, {100.0f, 400.0f}, {0.0f, 100.0f}})
    compare({.value_heads = 6, .decay_low = low, .decay_high = high}, {300, 1, 64, 300});
}

TEST(cpu_gated_delta_with_keys_near_the_norms_eps) {
  compare({.key_scale = 1e-3f}, {70, 1});
  compare({.key_scale = 0.0f}, {70, 1});
}

TEST(cpu_gated_delta_on_every_instruction_set) {
  for (const char* isa : {"portable", "avx2", "avx512vnni"}) {
    try {
      make_cpu_backend(1, isa);
    } catch (const Error&) {
      continue;  // this machine has no such instructions
    }
    compare({}, {65, 1, 12}, isa);
    compare({.key_heads = 3, .value_heads = 6, .key_dim = 7, .value_dim = 37, .taps = 3}, {130, 2}, isa);
  }
}

TEST(cpu_gated_delta_forks_leave_no_trace_in_the_sequence) {
  for (int32_t prompt : {1, 3, 40, 65}) {
    const DeltaModel model({});
    Machine machine(model.plan);
    reference::Evaluator evaluator(model.plan);
    Rowset rows(0, prompt);  // then three that share the prompt, of which one forks again
    const int32_t end = prompt;
    rows.add(end - 1);
    rows.add(end);
    rows.add(end - 1);
    rows.add(end + 2);
    rows.add(end + 3);
    rows.add(end + 2);
    rows.add(end - 1);
    CHECK(reference::nmse(machine.run(rows), flat(evaluator.run(rows.pass()))) < kExactNmse);
    machine.state->truncate(prompt);
    const Rowset on(prompt, 20);
    CHECK(reference::nmse(machine.run(on), flat(evaluator.run(on.pass()))) < kExactNmse);
  }
}

TEST(cpu_gated_delta_of_output_rows_only) {
  const DeltaModel model({}, false);
  Machine machine(model.plan);
  reference::Evaluator evaluator(model.plan);
  Rowset rows(0, 70);
  rows.outputs = {3, 64, 69};
  CHECK(reference::nmse(machine.run(rows), flat(evaluator.run(rows.pass()))) < kExactNmse);
}

TEST(cpu_gated_delta_same_bits_for_any_number_of_threads) {
  const DeltaModel model({.value_heads = 6});
  const Rowset first(0, 77), second(77, 1);
  Machine one(model.plan, "", 1);
  const std::vector<double> a = one.run(first), b = one.run(second);
  for (int threads : {2, 3}) {
    Machine many(model.plan, "", threads);
    CHECK(many.run(first) == a);
    CHECK(many.run(second) == b);
  }
}

// ---- where the state stands ----------------------------------------------------------------

TEST(cpu_gated_delta_goes_back_to_its_beginning_and_to_a_checkpoint_only) {
  const DeltaModel model({});
  Machine machine(model.plan);
  machine.run(Rowset(0, 40));
  machine.state->checkpoint();
  const std::vector<double> next = machine.run(Rowset(40, 30));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state->truncate(39));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state->truncate(41));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state->truncate(69));
  machine.state->truncate(70);  // where it stands: nothing to do
  machine.state->truncate(40);
  CHECK(machine.run(Rowset(40, 30)) == next);
  machine.state->truncate(40);  // and again
  CHECK(machine.run(Rowset(40, 30)) == next);
  machine.state->truncate(0);
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(Rowset(40, 30)));
  machine.run(Rowset(0, 41));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state->truncate(40));  // that checkpoint is gone
}

TEST(cpu_gated_delta_a_refused_truncation_changes_nothing) {
  const DeltaModel model({});
  Machine machine(model.plan), other(model.plan);
  machine.run(Rowset(0, 40));
  other.run(Rowset(0, 40));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state->truncate(7));
  CHECK(machine.run(Rowset(40, 13)) == other.run(Rowset(40, 13)));
}

TEST(cpu_gated_delta_refuses_rows_that_have_no_state_to_go_on_from) {
  const DeltaModel model({});
  Machine machine(model.plan), other(model.plan);
  machine.run(Rowset(0, 10));
  other.run(Rowset(0, 10));
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(Rowset(9, 2)));   // behind where it stands
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(Rowset(12, 2)));  // past it
  Rowset middle(10, 2);
  middle.add(4);  // a fork from the middle of the sequence
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(middle));
  Rowset broken(10, 3);
  broken.parents[2] = 10;  // a chain with a gap
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(broken));
  CHECK(machine.run(Rowset(10, 5)) == other.run(Rowset(10, 5)));  // none of it left a trace
}
