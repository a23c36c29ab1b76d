// DeepSeek-V4's attention, part of PassRun: which rows a query reads (the last slots it sees and the entries
// that its blocks' last slots hold), the turn of a head's tail, and the grouped product behind it.
#include <cstring>
#include <string_view>

#include "backend/cpu/pass_run.h"
#include "backend/cpu/window_kernels.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kWindowHeads = 8;  ///< most heads of one task: they share the rows brought to f32

const WindowKernels& kernels_of(const Kernels& k) {
  [[maybe_unused]] const std::string_view name = k.name;
#if defined(REFLEX_CPU_HAS_avx512vnni)
  if (name == "avx512vnni") return avx512vnni::window_kernels();
#endif
#if defined(REFLEX_CPU_HAS_avx2)
  if (name == "avx2") return avx2::window_kernels();
#endif
  return portable::window_kernels();
}

}  // namespace

void PassRun::reserve_window(const WindowAttention& op, size_t& scratch) {
  WindowArgs a;
  a.n_heads = std::min(op.n_heads, kWindowHeads);
  a.head_dim = op.head_dim;
  const int32_t most = most_seen();
  a.n = std::min(op.window, most) + (op.ratio > 0 ? most / op.ratio : 0);
  scratch = std::max(scratch, round_line(static_cast<size_t>(a.n) * sizeof(int32_t)) +
                                  kernels_of(kernels_).scratch(a) * sizeof(float));
}

// The rows that query i reads, of the state taken as rows of D values; returns how many. With a ratio a slot
// is two rows, its kv and its entry.
int32_t PassRun::window_rows(const WindowAttention& op, int32_t i, int32_t* at) const {
  const int32_t r = pass_row(op.q, i), n = seen(r), per_slot = op.ratio > 0 ? 2 : 1;
  int32_t count = 0;
  for (int32_t j = std::max(0, n - op.window); j < n; ++j) at[count++] = slot_seen(r, j) * per_slot;
  if (op.ratio == 0) return count;
  const int32_t entries = n / op.ratio;
  if (op.selection == kNone) {
    for (int32_t e = 0; e < entries; ++e) at[count++] = slot_seen(r, (e + 1) * op.ratio - 1) * 2 + 1;
    return count;
  }
  const int32_t top_k = width(op.selection);
  const auto* chosen = reinterpret_cast<const int32_t*>(value(op.selection)) +
                       static_cast<size_t>(i) * static_cast<size_t>(top_k);
  for (int32_t e = 0; e < std::min(entries, top_k); ++e) at[count++] = chosen[e] * 2 + 1;
  return count;
}

void PassRun::step(const WindowStep& s, Counter* counters, int t) {
  const WindowAttention& op = s.op;
  const int32_t dim = op.head_dim, slot_width = (op.ratio > 0 ? 2 : 1) * dim;
  share(counters[0], n_rows_, 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r)
      write_state(op.state, r, value(op.kv) + static_cast<size_t>(r) * static_cast<size_t>(dim), dim,
                  slot_width, 0);
  });
  if (!s.with_output) return;
  program_.pool_->barrier();
  const int32_t n = rows(op.q), groups = pieces(op.n_heads, kWindowHeads);
  share(counters[1], n * groups, 1, [&](int32_t task, int32_t) {
    const int32_t i = n - 1 - task / groups, head = task % groups * kWindowHeads;  // the longest first
    auto* at = reinterpret_cast<int32_t*>(scratch(t));
    WindowArgs a;
    a.n = window_rows(op, i, at);
    a.at = at;
    a.n_heads = std::min(kWindowHeads, op.n_heads - head);
    a.head_dim = dim;
    const size_t first = static_cast<size_t>(i) * static_cast<size_t>(width(op.q)) +
                         static_cast<size_t>(head) * static_cast<size_t>(dim);
    a.q = value(op.q) + first;
    a.out = value(op.out) + first;
    a.sinks = s.sinks + head;
    a.state = state_.buffer(op.state);
    a.f16 = state_.is_f16(op.state);
    a.scale = op.scale;
    kernels_of(kernels_).attention(
        a, reinterpret_cast<float*>(scratch(t) + round_line(static_cast<size_t>(a.n) * sizeof(int32_t))));
  });
}

void PassRun::step(const TailRopeStep& s, Counter* counters, int) {
  const TailRope& op = s.op;
  const RopeSpec& spec = program_.plan_.ropes[static_cast<size_t>(op.rope)];
  const auto n = static_cast<size_t>(width(op.in)), n_rot = static_cast<size_t>(spec.n_rot);
  const size_t dim = n / static_cast<size_t>(op.n_heads), half = n_rot / 2;
  share(counters[0], rows(op.in), 1, [&](int32_t i, int32_t) {
    float* y = value(op.out) + static_cast<size_t>(i) * n;
    std::memcpy(y, value(op.in) + static_cast<size_t>(i) * n, n * sizeof(float));
    const float* cs = rope_row(op.rope, pass_row(op.in, i));
    std::vector<float> back;
    if (op.inverse) {
      back.assign(cs, cs + n_rot);
      for (size_t k = half; k < n_rot; ++k) back[k] = -back[k];
      cs = back.data();
    }
    for (size_t h = 0; h < static_cast<size_t>(op.n_heads); ++h)
      kernels_.rope(y + (h + 1) * dim - n_rot, cs, 1, spec.n_rot, spec.n_rot,
                    spec.pairing == RopeSpec::Pairing::adjacent);
  });
}

void PassRun::reserve_grouped(const GroupedLinear& op, size_t& scratch) {
  const int32_t n = rows(op.in), n_in = width(op.in) / op.n_groups;
  const size_t kernel = round_line(kernel_scratch(kernels_.matmul_scratch, n_in, n));
  scratch = std::max(scratch, kernel + kernels_.act_bytes(form_of(op.weight, n), n_in, n));
}

void PassRun::step(const GroupedStep& s, Counter* counters, int t) {
  const GroupedLinear& op = s.op;
  const auto ldx = static_cast<size_t>(width(op.in)), ldy = static_cast<size_t>(width(op.out));
  const int32_t n_in = width(op.in) / op.n_groups, n_out = width(op.out) / op.n_groups;
  share(counters[0], op.n_groups, 1, [&](int32_t g, int32_t) {
    head_product(op.weight, 0, g * n_out, (g + 1) * n_out, value(op.in) + g * static_cast<int64_t>(n_in), ldx,
                 rows(op.in), value(op.out) + g * static_cast<int64_t>(n_out), ldy, t);
  });
}

}  // namespace reflex::cpu
