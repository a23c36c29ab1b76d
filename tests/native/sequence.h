// A program on one sequence, of the CPU backend unless told otherwise, with the float64 evaluator beside it.
//
// Owns: running rows, and the comparison of each output with the evaluator's. Refuses: which rows, which
// plan.
#pragma once
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "check.h"
#include "cpu_reference.h"
#include "rowset.h"

namespace native_test {

using namespace reflex;

constexpr double kExactNmse = 1e-10;
// f16 keys and values, and activations of 8 bits where the weights are quantised.
constexpr double kFastNmse = 1e-4;

class Sequence {
 public:
  struct Options {
    Backend* backend = nullptr;  ///< else a CPU's of so many threads
    int threads = 2;
    std::string isa = "";  ///< the machine's best
    bool exact = true;
    int32_t n_ctx = 2048;
    bool checked = true;  ///< against the evaluator
    double gate = 0;      ///< of the NMSE; 0: the mode's own
  };

  explicit Sequence(const Plan& plan, Options options)
      : exact_(options.exact),
        gate_(options.gate > 0 ? options.gate
              : options.exact  ? kExactNmse
                               : kFastNmse) {
    if (!options.backend) own_ = make_cpu_backend(options.threads, options.isa);
    backend_ = options.backend ? options.backend : own_.get();
    ProgramOptions o;
    o.n_ctx = options.n_ctx;
    o.exact = options.exact;
    program_ = backend_->compile(plan, o);
    state_ = program_->new_state();
    if (options.checked) evaluator_.emplace(plan);
  }
  explicit Sequence(const Plan& plan) : Sequence(plan, Options{}) {}

  /// The logits of each output row, one after another.
  std::vector<double> run(const Rowset& rows) {
    program_->run(*state_, rows.pass());
    std::vector<double> got;
    for (size_t o = 0; o < rows.outputs.size(); ++o) {
      const std::span<const float> row = program_->logits(static_cast<int32_t>(o));
      got.insert(got.end(), row.begin(), row.end());
    }
    if (evaluator_) compare(rows, got);
    return got;
  }

  State& state() { return *state_; }
  Program& program() { return *program_; }

 private:
  void compare(const Rowset& rows, const std::vector<double>& got) {
    std::vector<double> want;
    for (const std::vector<double>& row : evaluator_->run(rows.pass()))
      want.insert(want.end(), row.begin(), row.end());
    if (rows.outputs.empty()) return;
    const double error = reference::nmse(got, want);
    if (!(error <= gate_))
      std::fprintf(stderr, "%s%s, %zu rows after %d: NMSE %.1e (gate %.0e)\n",
                   backend_->description().c_str(), exact_ ? ", exact" : "", rows.tokens.size(),
                   rows.first_slot, error, gate_);
    CHECK(error <= gate_);
  }

  std::unique_ptr<Backend> own_;
  Backend* backend_ = nullptr;
  std::unique_ptr<Program> program_;
  std::unique_ptr<State> state_;
  std::optional<reference::Evaluator> evaluator_;
  const bool exact_;
  const double gate_;
};

}  // namespace native_test
