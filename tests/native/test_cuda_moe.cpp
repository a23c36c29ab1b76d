// Mixtures of experts and gates of the CUDA backend against the float64 evaluator. Without a GPU every
// case says so and checks nothing; tests/gpu/check.sh is where they must run.
#include <cstdio>

#include "check.h"
#include "cpu_reference.h"
#include "cuda_model.h"

using namespace reflex;
using namespace cuda_test;

namespace {

constexpr double kExactNmse = 1e-10;
constexpr double kFastNmse = 5e-5;  // as test_cuda_program.cpp has it

bool have_gpu(const char* name) {
  static const int count = cuda_device_count();
  if (count == 0) std::fprintf(stderr, "%s: skipped, there is no CUDA device\n", name);
  return count > 0;
}
#define NEED_GPU() \
  if (!have_gpu(__func__)) return

Backend& gpu() {
  static const std::unique_ptr<Backend> backend = make_cuda_backend(0);
  return *backend;
}

std::unique_ptr<Program> compile(const Plan& plan, bool exact) {
  ProgramOptions o;
  o.exact = exact;
  o.max_rows = 256;
  o.n_ctx = 512;
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
