// One pass in progress: the steps, run by every thread of the team in the same order, with
// barriers where one step reads what another thread wrote.
#pragma once
#include <atomic>
#include <memory>

#include "backend/cpu/program.h"

namespace reflex::cpu {

class PassRun {
 public:
  PassRun(CpuProgram& program, CpuState& state, const Pass& pass, const Visibility& visibility,
          const StepList& list);
  void run();

 private:
  /// Work of one phase, handed out piece by piece.
  struct alignas(64) Counter {
    std::atomic<int32_t> next{0};
  };
  /// What a matmul step needs besides its inputs.
  struct Prepared {
    bool used[kForms] = {};
  };

  void reserve();
  void reserve_matmul(ValueId in, std::span<const WeightId> weights, bool pair, size_t& scratch);
  void thread_main(int t);

  void step(const EmbedStep& s, Counter* counters, int t);
  void step(const MatmulStep& s, Counter* counters, int t);
  void step(const HeadsStep& s, Counter* counters, int t);
  void step(const AttentionStep& s, Counter* counters, int t);
  void step(const AddStep& s, Counter* counters, int t);
  void step(const SwiGluStep& s, Counter* counters, int t);
  void step(const SelectStep& s, Counter* counters, int t);
  void step(const HeadStep& s, Counter* counters, int t);

  void prepare(ValueId in, const Norm& norm, const bool (&forms)[kForms], Counter& counter, int t);
  void matmul_chunk(const MatmulStep& s, int part, int32_t begin, int32_t end, int t);
  void pair_chunk(const MatmulStep& s, int32_t begin, int32_t end, int t);
  void head_gather(const HeadStep& s, Counter& counter, int t);
  void heads_row(const HeadsStep::Item& item, int32_t r, int t);
  void compute_ropes(Counter& counter);
  MatmulArgs matmul_args(WeightId w, int32_t n_rows, Form form, int t) const;
  Form form_of(WeightId w, int32_t n_rows) const;

  /// Calls f(begin, end) on pieces of [0, n) until none is left, in the order handed out.
  template <class F>
  void share(Counter& counter, int32_t n, int32_t grain, F f) {
    for (;;) {
      const int32_t begin = counter.next.fetch_add(1, std::memory_order_relaxed) * grain;
      if (begin >= n) return;
      f(begin, begin + grain < n ? begin + grain : n);
    }
  }

  float* value(ValueId v) const;
  int32_t width(ValueId v) const { return program_.plan_.values[static_cast<size_t>(v)].width; }
  Rows rows_kind(ValueId v) const { return program_.plan_.values[static_cast<size_t>(v)].rows; }
  int32_t rows(ValueId v) const { return rows_kind(v) == Rows::all ? n_rows_ : n_outputs_; }
  /// The pass row that row i of a value stands for.
  int32_t pass_row(ValueId v, int32_t i) const {
    return rows_kind(v) == Rows::all ? i : pass_.outputs[static_cast<size_t>(i)];
  }
  uint8_t* scratch(int t) const {
    return program_.scratch_.data() + static_cast<size_t>(t) * scratch_stride_;
  }

  CpuProgram& program_;
  const Kernels& kernels_;
  CpuState& state_;
  const Pass& pass_;
  const Visibility& visibility_;
  const StepList& list_;
  const int32_t n_rows_, n_outputs_;
  size_t scratch_stride_ = 0;
  std::vector<size_t> rope_at_;  // floats into rope_, per RopeSpec
  std::unique_ptr<Counter[]> counters_;
};

}  // namespace reflex::cpu
