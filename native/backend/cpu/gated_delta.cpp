// Gated DeltaNet, part of PassRun: one task per value head, from the convolution to the gated norm.
// The kernels (kernels/gated_delta.cpp) know the maths; this file knows rows, forks and states.
#include "backend/cpu/gated_delta.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "backend/cpu/pass_run.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kShiftChannels = 1024;  // channels of one task that moves a convolution's history

const DeltaKernels& kernels_of(const Kernels& k) {
  [[maybe_unused]] const std::string_view name = k.name;
#if defined(REFLEX_CPU_HAS_avx512vnni)
  if (name == "avx512vnni") return avx512vnni::delta_kernels();
#endif
#if defined(REFLEX_CPU_HAS_avx2)
  if (name == "avx2") return avx2::delta_kernels();
#endif
  return portable::delta_kernels();
}

DeltaArgs shape_of(const GatedDelta& op) {
  DeltaArgs a;
  a.n_key_heads = op.n_key_heads;
  a.n_value_heads = op.n_value_heads;
  a.key_dim = op.key_dim;
  a.value_dim = op.value_dim;
  a.n_taps = op.n_taps;
  a.grouped = op.order == GatedDelta::Order::grouped;
  a.sigmoid_gate = op.gate == GatedDelta::Gate::sigmoid;
  a.qk_eps = op.qk_eps;
  a.norm_eps = op.norm_eps;
  return a;
}

}  // namespace

void DeltaPlan::build(const Pass& pass, int32_t length, int32_t n_taps) {
  const auto rows = static_cast<int32_t>(pass.tokens.size());
  n_taps_ = n_taps;
  n_chain_ = check_forks(pass, length);
  sources_.resize(static_cast<size_t>(rows) * static_cast<size_t>(n_taps));
  for (int32_t r = 0; r < rows; ++r) {
    int32_t slot = pass.first_slot + r;
    for (int32_t back = 0; back < n_taps; ++back) {
      const int32_t row = slot - pass.first_slot;
      sources_[static_cast<size_t>(r * n_taps + back)] = row;
      slot = row >= 0 ? pass.parents[static_cast<size_t>(row)] : slot - 1;
      // Before the pass there is but the sequence; -1 is also what a first row's parent is.
      if (row >= 0 && row < n_chain_) slot = pass.first_slot + row - 1;
    }
  }
  out_row_.assign(static_cast<size_t>(rows), -1);
  for (size_t o = 0; o < pass.outputs.size(); ++o)
    out_row_[static_cast<size_t>(pass.outputs[o])] = static_cast<int32_t>(o);
  build_forks(pass);
}

// A fork's state lives until the last row that hangs off it; that row takes its place.
void DeltaPlan::build_forks(const Pass& pass) {
  const auto n = static_cast<int32_t>(pass.tokens.size()) - n_chain_;
  const int32_t first = pass.first_slot + n_chain_;
  std::vector<int32_t> last_child(static_cast<size_t>(n), -1);
  const auto parent_of = [&](int32_t i) { return pass.parents[static_cast<size_t>(n_chain_ + i)] - first; };
  for (int32_t i = 0; i < n; ++i)
    if (const int32_t p = parent_of(i); p >= 0) last_child[static_cast<size_t>(p)] = i;
  forks_.assign(static_cast<size_t>(n), {});
  n_kept_ = 0;
  std::vector<int32_t> unused;
  for (int32_t i = 0; i < n; ++i) {
    DeltaFork& f = forks_[static_cast<size_t>(i)];
    const int32_t p = parent_of(i);
    if (p >= 0) f.from = forks_[static_cast<size_t>(p)].to;
    const bool kept = last_child[static_cast<size_t>(i)] >= 0;
    const bool last = p >= 0 && last_child[static_cast<size_t>(p)] == i;
    if (last && kept) {
      f.to = f.from;
    } else if (last) {
      unused.push_back(f.from);
    } else if (kept && !unused.empty()) {
      f.to = unused.back();
      unused.pop_back();
    } else if (kept) {
      f.to = n_kept_++;
    }
  }
}

void PassRun::reserve_delta(const GatedDelta& op, size_t& scratch) {
  DeltaArgs a = shape_of(op);
  a.n_rows = n_rows_;
  a.n_kept = program_.delta_.n_kept();
  scratch = std::max(scratch, kernels_of(kernels_).scratch(a) * sizeof(float));
}

void PassRun::step(const DeltaStep& s, Counter* counters, int t) {
  const GatedDelta& op = s.op;
  const DeltaPlan& plan = program_.delta_;
  DeltaArgs a = shape_of(op);
  a.conv = s.conv;
  a.decay = s.decay;
  a.dt_bias = s.dt_bias;
  a.norm = s.norm;
  a.n_rows = n_rows_;
  a.n_chain = plan.n_chain();
  a.qkv = value(op.qkv);
  a.beta = value(op.beta);
  a.alpha = value(op.alpha);
  if (s.with_output) {
    a.z = value(op.z);
    a.out = value(op.out);
    a.out_row = rows_kind(op.out) == Rows::all ? nullptr : plan.out_row().data();
  }
  a.sources = plan.sources().data();
  a.source_stride = plan.n_taps();
  a.forks = plan.forks().data();
  a.n_kept = plan.n_kept();
  a.history = reinterpret_cast<float*>(state_.buffer(op.conv_state));
  a.state = reinterpret_cast<float*>(state_.buffer(op.delta_state));
  const DeltaKernels& kernels = kernels_of(kernels_);
  share(counters[0], op.n_value_heads, 1,
        [&](int32_t h, int32_t) { kernels.head(a, h, reinterpret_cast<float*>(scratch(t))); });
  program_.pool_->barrier();
  // The history's new rows, oldest first: what the chain's last row would look back on.
  const int32_t n_channels = width(op.qkv), history = op.n_taps - 1, n = a.n_chain;
  share(counters[1], n_channels, kShiftChannels, [&](int32_t begin, int32_t end) {
    for (int32_t i = 0; i < history; ++i) {
      const int32_t row = n - history + i;  // of the pass; before it: of the old history
      const float* from = row >= 0 ? a.qkv + static_cast<size_t>(row) * static_cast<size_t>(n_channels)
                                   : a.history + static_cast<size_t>(i + n) * static_cast<size_t>(n_channels);
      float* to = a.history + static_cast<size_t>(i) * static_cast<size_t>(n_channels);
      if (to != from) std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(float));
    }
  });
}

void PassRun::step(const ConcatStep& s, Counter* counters, int) {
  const auto a = static_cast<size_t>(width(s.op.a)), b = static_cast<size_t>(width(s.op.b));
  share(counters[0], rows(s.op.out), 4, [&](int32_t begin, int32_t end) {
    for (auto r = static_cast<size_t>(begin); r < static_cast<size_t>(end); ++r) {
      float* to = value(s.op.out) + r * (a + b);
      std::memcpy(to, value(s.op.a) + r * a, a * sizeof(float));
      std::memcpy(to + a, value(s.op.b) + r * b, b * sizeof(float));
    }
  });
}

void PassRun::step(const HeadSliceStep& s, Counter* counters, int) {
  const HeadSlice& op = s.op;
  const auto stride = static_cast<size_t>(width(op.in) / op.n_heads), n = static_cast<size_t>(op.count);
  const auto heads = static_cast<size_t>(op.n_heads);
  share(counters[0], rows(op.out), 4, [&](int32_t begin, int32_t end) {
    const float* from = value(op.in) + static_cast<size_t>(begin) * heads * stride + op.begin;
    float* to = value(op.out) + static_cast<size_t>(begin) * heads * n;
    for (size_t i = 0; i < heads * static_cast<size_t>(end - begin); ++i, from += stride, to += n)
      std::memcpy(to, from, n * sizeof(float));
  });
}

}  // namespace reflex::cpu
