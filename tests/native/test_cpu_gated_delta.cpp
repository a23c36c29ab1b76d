// Gated DeltaNet on the CPU against the float64 recurrence: the chunked form and the single step, at and
// around the borders of chunks, over cuts into passes, over forks, and with memories of every length.
#include <string>

#include "plan_builder.h"
#include "sequence.h"

using namespace native_test;

namespace {

constexpr int32_t kVocab = 61, kWidth = 20;

struct Shape {
  int32_t key_heads = 2, value_heads = 4, key_dim = 16, value_dim = 12, taps = 4;
  GatedDelta::Order order = GatedDelta::Order::tiled;
  float decay_low = 0.02f, decay_high = 1.0f;  ///< -decay, drawn per head
  float key_scale = 1.0f;                      ///< of the channels of q and k
};

/// embed -> qkv, z, beta, alpha -> Gated DeltaNet -> head, with random weights.
class DeltaModel : public PlanBuilder {
 public:
  explicit DeltaModel(const Shape& s, Rows kind = Rows::all) : PlanBuilder(kVocab, kWidth, 1) {
    const int32_t keys = s.key_heads * s.key_dim, values = s.value_heads * s.value_dim;
    const int32_t channels = 2 * keys + values;
    const ValueId x = embed("table"), z_in = with_rows(x, kind);
    GatedDelta op{};
    op.qkv = linear(x, "qkv", channels);
    op.z = linear(z_in, "z", values);
    op.beta = linear(x, "beta", s.value_heads);
    op.alpha = linear(x, "alpha", s.value_heads);
    op.conv = normal("conv", s.taps, channels, 1, 0.0f, 0.5f);
    for (float& f : floats(op.conv).first(static_cast<size_t>(2 * keys * s.taps))) f *= s.key_scale;
    op.decay = weight("decay", s.value_heads, 1);
    std::uniform_real_distribution<float> spread(s.decay_low, s.decay_high);
    for (float& f : floats(op.decay)) f = -spread(rng_);
    op.dt_bias = normal("dt_bias", s.value_heads, 1, 1, 0.0f, 1.0f);
    op.norm = normal("norm", s.value_dim, 1, 1, 0.0f, 1.0f);
    op.conv_state = state("conv", StateSpec::Kind::fixed, (s.taps - 1) * channels, true);
    op.delta_state = state("delta", StateSpec::Kind::fixed, values * s.key_dim, true);
    op.n_key_heads = s.key_heads;
    op.n_value_heads = s.value_heads;
    op.key_dim = s.key_dim;
    op.value_dim = s.value_dim;
    op.n_taps = s.taps;
    op.order = s.order;
    op.qk_eps = op.norm_eps = 1e-6f;
    const ValueId out = with_rows(push(like(z_in, values), op), Rows::outputs);
    plan.ops.emplace_back(Head{out, normal("head", values, kVocab, 1, 0.0f, 1.0f), kNone});
  }
};

Rowset chain(int32_t first, int32_t n) { return Rowset::chain(first, n, kVocab); }

const Sequence::Options kUnchecked = {.checked = false};

/// The rows cut into passes as `cuts` says.
void compare(const Shape& s, std::initializer_list<int32_t> cuts, const std::string& isa = "") {
  const DeltaModel model(s);
  Sequence sequence(model.plan, {.isa = isa});
  int32_t at = 0;
  for (int32_t n : cuts) {
    sequence.run(chain(at, n));
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
    Sequence s(model.plan);
    const int32_t end = prompt;  // three share the prompt, of which one forks again
    s.run(chain(0, prompt).fork({end - 1, end, end - 1, end + 2, end + 3, end + 2, end - 1}, kVocab));
    s.state().truncate(prompt);
    s.run(chain(prompt, 20));
  }
}

TEST(cpu_gated_delta_of_output_rows_only) {
  const DeltaModel model({}, Rows::outputs);
  Rowset rows = chain(0, 70);
  rows.outputs = {3, 64, 69};
  Sequence(model.plan).run(rows);
}

TEST(cpu_gated_delta_same_bits_for_any_number_of_threads) {
  const DeltaModel model({.value_heads = 6});
  const Rowset first = chain(0, 77), second = chain(77, 1);
  Sequence one(model.plan, {.threads = 1, .checked = false});
  const std::vector<double> a = one.run(first), b = one.run(second);
  for (int threads : {2, 3}) {
    Sequence many(model.plan, {.threads = threads, .checked = false});
    CHECK(many.run(first) == a);
    CHECK(many.run(second) == b);
  }
}

// ---- where the state stands ----------------------------------------------------------------

TEST(cpu_gated_delta_goes_back_to_its_beginning_and_to_a_checkpoint_only) {
  const DeltaModel model({});
  Sequence machine(model.plan, kUnchecked);
  machine.run(chain(0, 40));
  machine.state().checkpoint();
  const std::vector<double> next = machine.run(chain(40, 30));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state().truncate(39));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state().truncate(41));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state().truncate(69));
  machine.state().truncate(70);  // where it stands: nothing to do
  machine.state().truncate(40);
  CHECK(machine.run(chain(40, 30)) == next);
  machine.state().truncate(40);  // and again
  CHECK(machine.run(chain(40, 30)) == next);
  machine.state().truncate(0);
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(chain(40, 30)));
  machine.run(chain(0, 41));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state().truncate(40));  // that checkpoint is gone
}

TEST(cpu_gated_delta_a_refused_truncation_changes_nothing) {
  const DeltaModel model({});
  Sequence machine(model.plan, kUnchecked), other(model.plan, kUnchecked);
  machine.run(chain(0, 40));
  other.run(chain(0, 40));
  CHECK_THROWS(ErrorKind::kv_cache, machine.state().truncate(7));
  CHECK(machine.run(chain(40, 13)) == other.run(chain(40, 13)));
}

TEST(cpu_gated_delta_refuses_rows_that_have_no_state_to_go_on_from) {
  const DeltaModel model({});
  Sequence machine(model.plan, kUnchecked), other(model.plan, kUnchecked);
  machine.run(chain(0, 10));
  other.run(chain(0, 10));
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(chain(9, 2)));   // behind where it stands
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(chain(12, 2)));  // past it
  Rowset middle = chain(10, 2);
  middle.fork({4}, kVocab);  // from the middle of the sequence
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(middle));
  Rowset broken = chain(10, 3);
  broken.parents[2] = 10;  // a chain with a gap
  CHECK_THROWS(ErrorKind::kv_cache, machine.run(broken));
  CHECK(machine.run(chain(10, 5)) == other.run(chain(10, 5)));  // none of it left a trace
}
