// Mixtures of experts and gates of the CUDA backend against the float64 evaluator. Without a GPU every
// case says so and checks nothing; tests/gpu/check.sh is where they must run.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <optional>

#include "check.h"
#include "cpu_reference.h"
#include "cuda_device.h"
#include "cuda_model.h"

using namespace reflex;
using namespace cuda_test;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr double kFastNmse = 5e-5;  // as test_cuda_program.cpp has it

std::unique_ptr<Program> compile(const Plan& plan, bool exact, const std::string& experts = "",
                                 uint64_t expert_bytes = 0, const std::string& load_mode = "") {
  ProgramOptions o;
  o.exact = exact;
  o.max_rows = 256;
  o.n_ctx = 512;
  o.experts = experts;
  o.expert_bytes = expert_bytes;
  o.load_mode = load_mode;
  return gpu().compile(plan, o);
}

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

/// embed -> gate of `gate_width` -> sigmoid gate -> head
struct Gated {
  Gated(int32_t width, int32_t gate_width) {
    plan.n_vocab = kVocab;
    plan.n_embd = width;
    const WeightId table = weight("table", width, kVocab), w = weight("gate", width, gate_width);
    plan.values = {
        {width, Rows::all}, {width, Rows::outputs}, {gate_width, Rows::outputs}, {width, Rows::outputs}};
    plan.ops.emplace_back(Embed{table, 0});
    plan.ops.emplace_back(SelectOutputs{0, 1});
    plan.ops.emplace_back(Linear{1, 2, w, kNone});
    plan.ops.emplace_back(SigmoidGate{1, 2, 3});
    plan.ops.emplace_back(Head{3, table, kNone});
  }
  WeightId weight(const char* name, int64_t n_in, int64_t n_out) {
    std::vector<float>& data = storage.emplace_back(static_cast<size_t>(n_in * n_out));
    std::normal_distribution<float> normal(0, 1);
    for (float& f : data) f = normal(rng);
    Weight w;
    w.name = name;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.data = data.data();
    w.nbytes = data.size() * sizeof(float);
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  static constexpr int32_t kVocab = 61;
  Plan plan;
  std::mt19937 rng{7};
  std::deque<std::vector<float>> storage;
};

/// Random blocks of any type, of about 1 / sqrt(n_in) a value.
std::vector<uint8_t> random_weight(GgmlType type, int64_t n_in, int64_t n_rows, std::mt19937& rng) {
  const TypeInfo& info = type_info(type);
  const size_t n_blocks = static_cast<size_t>(n_in / info.block_values * n_rows), size = info.block_bytes;
  std::vector<uint8_t> bytes(n_blocks * size);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  std::normal_distribution<float> normal(0, 1.0f / std::sqrt(static_cast<float>(n_in)));
  std::uniform_real_distribution<float> scale(0.0005f, 0.0015f);
  for (size_t i = 0; i < n_blocks; ++i) {
    uint8_t* b = &bytes[i * size];
    const auto put = [&](size_t at, float f) {
      const uint16_t h = f32_to_f16(f);
      std::memcpy(b + at, &h, 2);
    };
    switch (type) {
      case GgmlType::F32: {
        const float f = normal(rng);
        std::memcpy(b, &f, 4);
        break;
      }
      case GgmlType::F16:
        put(0, normal(rng));
        break;
      case GgmlType::BF16: {
        const uint16_t h = f32_to_bf16(normal(rng));
        std::memcpy(b, &h, 2);
        break;
      }
      case GgmlType::Q4_1:
      case GgmlType::Q5_1:
      case GgmlType::Q4_K:
      case GgmlType::Q5_K:
        put(0, scale(rng)), put(2, scale(rng));
        break;
      case GgmlType::Q2_K:
        put(80, scale(rng)), put(82, scale(rng));
        break;
      case GgmlType::Q3_K:
        put(108, scale(rng));
        break;
      case GgmlType::Q6_K:
        put(208, scale(rng));
        break;
      case GgmlType::TQ1_0:
        put(52, scale(rng));
        break;
      case GgmlType::TQ2_0:
        put(64, scale(rng));
        break;
      case GgmlType::MXFP4:  // an exponent: about a sixty-fourth
        b[0] = static_cast<uint8_t>(120 + rng() % 3);
        break;
      case GgmlType::NVFP4:
        for (int k = 0; k < 4; ++k) b[k] = static_cast<uint8_t>(0x10 + rng() % 16);
        break;
      case GgmlType::IQ1_M:  // the half lies in the top nibbles of four words: 0x1xxx is about 0.001
        for (int k = 0; k < 4; ++k)
          b[49 + 2 * k] = static_cast<uint8_t>((b[49 + 2 * k] & 0x0F) | (k == 3   ? 0x10
                                                                         : k == 2 ? rng() % 16 << 4
                                                                                  : 0));
        break;
      default:
        put(0, scale(rng));
    }
  }
  return bytes;
}

struct MixtureShape {
  int32_t width = 256, hidden = 256;
  GgmlType in = GgmlType::Q8_0, out = GgmlType::Q8_0, router = GgmlType::F32;
  std::optional<GgmlType> up;  ///< where it is not that of the gate
  bool norm = true, shared = false;
  int layers = 1;
};

/// embed -> layers of: x + experts(norm(x)) [+ a gated shared expert] -> norm -> head
class Mixture {
 public:
  Mixture(const Moe& op, const MixtureShape& s, uint32_t seed = 1) : s_(s), rng_(seed) {
    plan.n_vocab = kVocab;
    plan.n_embd = s.width;
    const WeightId table = weight("table", GgmlType::F32, s.width, kVocab);
    const ValueId e = value(s.width, Rows::all);
    ValueId x = value(s.width, Rows::outputs);
    plan.ops.emplace_back(Embed{table, e});
    plan.ops.emplace_back(SelectOutputs{e, x});
    for (int i = 0; i < s.layers; ++i) x = layer(op, x);
    const ValueId n = norm(x);
    plan.ops.emplace_back(Head{n, table, kNone});
  }
  static constexpr int32_t kVocab = 151;
  Plan plan;

 private:
  ValueId layer(Moe op, ValueId x) {
    op.in = s_.norm ? norm(x) : x;
    op.router = linear(op.in, op.n_experts, s_.router);
    op.gate = weight("gate", s_.in, s_.width, s_.hidden, op.n_experts);
    op.up = weight("up", s_.up.value_or(s_.in), s_.width, s_.hidden, op.n_experts);
    op.down = weight("down", s_.out, s_.hidden, s_.width, op.n_experts);
    if (op.bias != kNone) op.bias = weight("bias", GgmlType::F32, op.n_experts, 1);
    if (op.of_token != kNone) op.of_token = experts_of_tokens(op);
    op.out = value(s_.width, Rows::outputs);
    plan.ops.emplace_back(op);
    ValueId y = op.out;
    if (s_.shared) {
      const ValueId a = linear(op.in, s_.hidden, GgmlType::F32), b = linear(op.in, s_.hidden, GgmlType::F32);
      const ValueId h = value(s_.hidden, Rows::outputs), gated = value(s_.width, Rows::outputs);
      plan.ops.emplace_back(SwiGlu{a, b, h});
      const ValueId down = linear(h, s_.width, GgmlType::F32), gate = linear(op.in, 1, GgmlType::F32);
      plan.ops.emplace_back(SigmoidGate{down, gate, gated});
      y = add(y, gated);
    }
    return add(x, y);
  }
  /// In any order, and for some tokens one expert twice.
  WeightId experts_of_tokens(const Moe& op) {
    std::vector<uint8_t> bytes(static_cast<size_t>(op.n_used * kVocab) * sizeof(int32_t));
    for (size_t i = 0; i < bytes.size() / sizeof(int32_t); ++i) {
      const auto e = static_cast<int32_t>(rng_() % static_cast<uint32_t>(op.n_experts));
      std::memcpy(&bytes[i * sizeof e], &e, sizeof e);
    }
    storage_.push_back(std::move(bytes));
    Weight w;
    w.name = "experts of tokens";
    w.type = GgmlType::I32;
    w.ne[0] = op.n_used;
    w.ne[1] = kVocab;
    w.data = storage_.back().data();
    w.nbytes = storage_.back().size();
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  ValueId add(ValueId a, ValueId b) {
    const ValueId y = value(s_.width, Rows::outputs);
    plan.ops.emplace_back(Add{a, b, y});
    return y;
  }
  ValueId norm(ValueId x) {
    const ValueId y = value(s_.width, Rows::outputs);
    plan.ops.emplace_back(RmsNorm{x, y, weight("norm", GgmlType::F32, s_.width, 1), s_.width, 1e-6f});
    return y;
  }
  ValueId linear(ValueId x, int32_t n_out, GgmlType type) {
    const ValueId y = value(n_out, Rows::outputs);
    const int64_t n_in = plan.values[static_cast<size_t>(x)].width;
    plan.ops.emplace_back(Linear{x, y, weight("matrix", type, n_in, n_out), kNone});
    return y;
  }
  WeightId weight(const char* name, GgmlType type, int64_t n_in, int64_t n_out, int64_t members = 1) {
    const bool vector = n_out == 1 && members == 1;
    storage_.push_back(random_weight(type, vector ? 1 : n_in, vector ? n_in : n_out * members, rng_));
    Weight w;
    w.name = name;
    w.type = type;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.ne[2] = members;
    w.data = storage_.back().data();
    w.nbytes = storage_.back().size();
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  ValueId value(int32_t width, Rows rows) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }

  MixtureShape s_;
  std::mt19937 rng_;
  std::deque<std::vector<uint8_t>> storage_;
};

Moe mixture(int32_t n_experts, int32_t n_used) {
  Moe op{};
  op.n_experts = n_experts;
  op.n_used = n_used;
  return op;
}

/// The kinds of routing that the families have.
std::vector<std::pair<const char*, Moe>> routings() {
  Moe v3 = mixture(16, 4);
  v3.gating = Moe::Gating::sigmoid;
  v3.group_score = Moe::GroupScore::best_two;
  v3.n_groups = 4;
  v3.n_groups_used = 2;
  v3.bias = 0;  // any: there is one
  v3.renormalise = true;
  v3.scale = 2.5f;
  Moe v2 = mixture(12, 4);
  v2.n_groups = 3;
  v2.n_groups_used = 1;
  v2.scale = 16.0f;
  Moe qwen3 = mixture(8, 2);
  qwen3.renormalise = true;
  Moe v4 = mixture(24, 6);
  v4.gating = Moe::Gating::sqrt_softplus;
  v4.bias = 0;
  v4.renormalise = true;
  v4.scale = 1.5f;
  v4.limit = 0.3f;
  Moe by_token = v4;
  by_token.bias = kNone;
  by_token.of_token = 0;  // any: there is one
  Moe by_token_softmax = mixture(9, 3);
  by_token_softmax.of_token = 0;
  by_token_softmax.renormalise = true;
  return {{"8 of which 2, renormalised", qwen3},
          {"7 of which 3", mixture(7, 3)},
          {"1 of 1", mixture(1, 1)},
          {"5 of 5", mixture(5, 5)},
          {"sigmoid, bias, groups by their two best", v3},
          {"softmax, groups by their best", v2},
          {"64 of which 10", mixture(64, 10)},
          {"300 of which 3", mixture(300, 3)},
          {"root of softplus, bias, limits", v4},
          {"root of softplus, by token, limits", by_token},
          {"softmax, by token", by_token_softmax}};
}

void compare(const Mixture& m, Program& program, bool exact, std::initializer_list<int32_t> lengths,
             const std::string& what) {
  for (const int32_t rows : lengths) {
    const std::unique_ptr<State> state = program.new_state();
    const Rowset r = Rowset::chain(0, rows, Mixture::kVocab, false);
    program.run(*state, r.pass());
    expect_below(worst_row(program, reference::Evaluator(m.plan).run(r.pass())),
                 exact ? kExactNmse : kFastNmse,
                 format("%s, %s, %d rows", what.c_str(), exact ? "exact" : "fast", rows));
  }
}

/// All output rows' logits of some passes, one after the other.
std::vector<float> all_logits(Program& program, std::initializer_list<int32_t> lengths) {
  std::vector<float> all;
  for (const int32_t rows : lengths) {
    const std::unique_ptr<State> state = program.new_state();
    const Rowset r = Rowset::chain(0, rows, Mixture::kVocab, false);
    program.run(*state, r.pass());
    for (int32_t o = 0; o < rows; ++o)
      all.insert(all.end(), program.logits(o).begin(), program.logits(o).end());
  }
  return all;
}

}  // namespace

TEST(cuda_sigmoid_gates_of_one_value_and_of_many) {
  NEED_GPU();
  for (const int32_t width : {1, 24, 60})
    for (const int32_t gate_width : {1, width}) {
      const Gated g(width, gate_width);
      const std::unique_ptr<Program> program = compile(g.plan, true);
      for (const int32_t rows : {1, 2, 33}) {
        const std::unique_ptr<State> state = program->new_state();
        const Rowset r = Rowset::chain(0, rows, Gated::kVocab, false);
        program->run(*state, r.pass());
        expect_below(worst_row(*program, reference::Evaluator(g.plan).run(r.pass())), kExactNmse,
                     format("width %d, gate of %d, %d rows", width, gate_width, rows));
      }
    }
}

TEST(cuda_mixtures_route_as_float64_does) {
  NEED_GPU();
  for (const auto& [name, op] : routings())
    for (const bool exact : {true, false}) {
      const Mixture m(op, {});
      compare(m, *compile(m.plan, exact), exact, {1, 2, 17, 33, 130}, name);
    }
}

TEST(cuda_mixtures_of_odd_shapes_match_float64) {
  NEED_GPU();
  MixtureShape ragged;  // rows of an expert that fill no tile, widths that fill no unit
  ragged.width = 96;
  ragged.hidden = 100;
  ragged.in = GgmlType::Q4_0;
  ragged.out = GgmlType::F16;  // 100 is no multiple of 32: no tiles
  MixtureShape small = ragged;
  small.width = 60;
  small.hidden = 20;
  small.in = small.out = GgmlType::F32;
  MixtureShape unit = ragged;
  unit.hidden = 416;  // three units and a block
  unit.out = GgmlType::Q8_0;
  MixtureShape narrow;  // less than a unit: what pads fragments must be zero, after a single row too
  narrow.width = 64;
  narrow.hidden = 32;
  MixtureShape shared;
  shared.shared = true;
  shared.layers = 2;
  MixtureShape plain = shared;
  plain.norm = false;
  MixtureShape mixed;  // gate and up of two types
  mixed.up = GgmlType::Q5_0;
  MixtureShape other_router;
  other_router.router = GgmlType::F16;
  const std::pair<const char*, MixtureShape> shapes[] = {{"100 hidden", ragged},
                                                         {"60 wide", small},
                                                         {"416 hidden", unit},
                                                         {"shared", shared},
                                                         {"narrow", narrow},
                                                         {"no norm", plain},
                                                         {"gate and up differ", mixed},
                                                         {"f16 router", other_router}};
  for (const auto& [name, shape] : shapes)
    for (const bool exact : {true, false}) {
      // What lies behind a rounded layer may be routed otherwise: one layer, or exact.
      MixtureShape s = shape;
      if (!exact) s.layers = 1;
      const Mixture m(mixture(8, 2), s);
      compare(m, *compile(m.plan, exact), exact, {1, 2, 5, 40}, name);
    }
}

TEST(cuda_mixtures_of_every_type_match_float64) {
  NEED_GPU();
  const GgmlType types[] = {
#define REFLEX_KIND_plain(name) GgmlType::name,
#define REFLEX_KIND_packed(name) GgmlType::name,
#define REFLEX_KIND_other(name)
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_KIND_##kind(name)
#include "quant/types.def"
#undef REFLEX_TYPE
  };
  for (const GgmlType type : types)
    for (const bool exact : {true, false}) {
      MixtureShape s;
      s.in = s.out = type;
      s.width = 512;
      const Mixture m(mixture(8, 2), s);
      compare(m, *compile(m.plan, exact), exact, {1, 3, 70}, type_info(type).name);
    }
}

TEST(cuda_mixtures_with_limits_match_float64_in_every_type) {
  NEED_GPU();
  for (const GgmlType type : {GgmlType::F16, GgmlType::Q4_0, GgmlType::Q8_0, GgmlType::Q4_K, GgmlType::MXFP4})
    for (const bool exact : {true, false}) {
      MixtureShape s;
      s.in = s.out = type;
      s.width = 256;
      s.hidden = 288;  // fills no unit
      if (type_info(type).block_values > 32) s.hidden = 512;
      Moe op = mixture(6, 2);
      op.limit = 0.6f;
      const Mixture m(op, s);
      compare(m, *compile(m.plan, exact), exact, {1, 3, 40}, format("%s, limits", type_info(type).name));
    }
}

TEST(cuda_small_mixtures_by_token_and_with_limits) {
  NEED_GPU();
  const std::vector<std::pair<const char*, Moe>> all = routings();
  MixtureShape s;
  s.width = 64;
  s.hidden = 96;
  for (size_t i = all.size() - 3; i < all.size(); ++i)
    for (const bool exact : {true, false}) {
      const Mixture m(all[i].second, s);
      compare(m, *compile(m.plan, exact), exact, {1, 5}, all[i].first);
    }
}

TEST(cuda_mixtures_with_large_experts_take_large_blocks) {
  NEED_GPU();
  MixtureShape s;
  s.in = GgmlType::Q4_K;
  s.out = GgmlType::Q6_K;
  s.width = s.hidden = 768;
  const Mixture m(mixture(4, 2), s);  // 256 rows: 128 an expert
  compare(m, *compile(m.plan, false), false, {64, 256}, "4 experts");
}

TEST(cuda_mixtures_give_the_same_bits_launched_and_replayed) {
  NEED_GPU();
  MixtureShape s;
  s.layers = 3;
  const Mixture m(routings()[4].second, s);
  const std::unique_ptr<Program> program = compile(m.plan, false);
  const std::vector<float> first = all_logits(*program, {1, 20});
  program->finish_load();
  for (int again = 0; again < 3; ++again) CHECK(all_logits(*program, {1, 20}) == first);
}

TEST(cuda_experts_give_the_same_bits_however_they_come) {
  NEED_GPU();
  MixtureShape s;
  s.layers = 3;
  s.in = GgmlType::Q4_K;
  s.out = GgmlType::Q6_K;
  for (const bool exact : {false, true}) {
    const Mixture m(mixture(16, 3), s);
    // A file with every tensor at an odd place, as a GGUF has them.
    char path[] = "/tmp/reflex-cuda-moe-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    Plan plan = m.plan;
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
    const auto lengths = {2, 1, 40, 1};
    const std::vector<float> want = all_logits(*compile(plan, exact, "eager"), lengths);
    for (const char* mode : {"ring", "map", "direct"}) {
      const std::unique_ptr<Program> lazy = compile(plan, exact, "lazy", 0, mode);
      CHECK(all_logits(*lazy, lengths) == want);
      lazy->finish_load();
      const LoadStatus status = lazy->load_status();
      CHECK(status.finished);
      CHECK_EQ(status.done, status.total);
      CHECK(all_logits(*lazy, lengths) == want);
    }
    // Room for a few experts of each layer: 40 rows choose all 16, in waves.
    size_t one = 0;
    for (const Weight& w : plan.weights)
      if (w.ne[2] == 16) one += w.nbytes / 16;
    for (const size_t slots : {4u, 9u}) {
      const std::unique_ptr<Program> cached = compile(plan, exact, "", one * slots + one / 2);
      CHECK(cached->weight_bytes() < one * 10);
      CHECK(all_logits(*cached, lengths) == want);
      cached->finish_load();
      CHECK(all_logits(*cached, lengths) == want);
    }
    CHECK_THROWS(ErrorKind::out_of_memory, compile(plan, exact, "", one * 2));
    CHECK_THROWS(ErrorKind::invalid_input, compile(plan, exact, "hasty"));
    munmap(const_cast<char*>(base), at);
    close(fd);
    unlink(path);
  }
}
