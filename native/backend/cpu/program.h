// The CPU's Program: runs a step list over a pass with a team of threads.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/gated_delta.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/memory.h"
#include "backend/cpu/state.h"
#include "backend/cpu/steps.h"
#include "backend/cpu/thread_pool.h"

namespace reflex::cpu {

class CpuProgram final : public Program {
 public:
  CpuProgram(Plan plan, const ProgramOptions& options, std::shared_ptr<ThreadPool> pool,
             const Kernels& kernels);

  std::unique_ptr<State> new_state() override;
  int32_t max_rows() const override { return options_.max_rows; }
  void run(State& state, const Pass& pass) override;

  std::span<const float> logits(int32_t o) override;
  std::span<const float> gathered(int32_t o) override;
  double log_sum_exp(int32_t o) override;
  int32_t argmax(int32_t o) override;
  int32_t sample(int32_t o, const SampleSpec& spec) override;
  std::vector<TokenLogprob> top_logprobs(int32_t o, int32_t n) override;

  size_t weight_bytes() const override { return weight_bytes_; }
  size_t scratch_bytes() const override;

 private:
  friend class PassRun;
  void check_pass(const CpuState& state, const Pass& pass) const;

  const Plan plan_;
  const ProgramOptions options_;
  const std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;
  Constants constants_;
  StepList full_, states_only_;
  size_t weight_bytes_ = 0;

  int32_t n_taps_ = 0;  ///< rows that any op looks at, itself and its ancestors; 0: none has a fixed state
  DeltaPlan delta_;     ///< of the pass in progress

  // Of the last pass.
  HeadMode head_ = HeadMode::none;
  int32_t n_outputs_ = 0;
  std::vector<int32_t> gather_begin_;
  Region logits_;  // full: (O, V); gather: one float per id

  // Grown to what the largest pass so far needed.
  Region all_values_, output_values_;
  Region act_[kForms];
  Region rope_;                 // per RopeSpec: (R, n_rot) cosines then sines of each row
  Region scratch_;              // per thread
  Region parts_;                // attention of a few rows over a long context: per key head and part
  Region hidden_;               // Moe: (R * n_used, F), rows sorted by expert
  Region block_scores_;         // BlockAttention: (R, blocks)
  Region latent_q_, latent_o_;  // LatentAttention: (R, H, C + P) and (R, H, C)
};

}  // namespace reflex::cpu
