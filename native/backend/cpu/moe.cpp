// A mixture of experts, part of PassRun: routing, then the chosen experts' products, each expert's
// rows together. An expert that no row chose is never read, so the mapping loads none of its pages;
// of those that were, the file is read at once and without what lies around them.
//
// The sum over a row's experts goes in ascending order of the expert, whatever rows share the pass
// and whatever thread works: the same row gives the same bits.
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/pass_run.h"

namespace reflex::cpu {

namespace {

/// An expert's pages are asked for at its first use and again at every such: they may have been dropped.
constexpr uint8_t kFetchEvery = 32;

/// Of few rows' down products, weight rows of one expert that are read before the next expert's.
constexpr int32_t kDownRows = 256;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

/// sqrt(log(1 + e^x)), the logarithm as max(x, 0) + log(1 + e^-|x|).
float sqrt_softplus(float x) { return std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x)))); }

void softmax(const float* x, int32_t n, float* y) {
  const float top = *std::max_element(x, x + n);
  float sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += y[i] = std::exp(x[i] - top);
  for (int32_t i = 0; i < n; ++i) y[i] /= sum;
}

/// The largest of x (n), or the sum of the two largest.
float group_score(const float* x, int32_t n, Moe::GroupScore kind) {
  float first = kMinusInfinity, second = kMinusInfinity;
  for (int32_t i = 0; i < n; ++i) {
    if (x[i] > first) {
      second = first;
      first = x[i];
    } else if (x[i] > second) {
      second = x[i];
    }
  }
  return kind == Moe::GroupScore::maximum || n == 1 ? first : first + second;
}

/// The best entry of x (n) that is not -inf, the first on a tie; 0 where all are.
int32_t best(const float* x, int32_t n) { return static_cast<int32_t>(std::max_element(x, x + n) - x); }

/// Masks all but the n_groups_used best groups of `choice` with -inf.
void keep_best_groups(const Moe& op, float* choice, float* groups) {
  const int32_t size = op.n_experts / op.n_groups;
  for (int32_t g = 0; g < op.n_groups; ++g) groups[g] = group_score(choice + g * size, size, op.group_score);
  for (int32_t k = 0; k < op.n_groups_used; ++k) groups[best(groups, op.n_groups)] = kMinusInfinity;
  for (int32_t g = 0; g < op.n_groups; ++g)
    if (groups[g] != kMinusInfinity) std::fill_n(choice + g * size, size, kMinusInfinity);
}

/// Advises the whole pages of w's member (of all of w: -1), where w lies in a file.
void advise(const Weight& w, int32_t member, int advice) {
  if (w.fd < 0) return;
  const size_t each = w.nbytes / static_cast<size_t>(w.ne[2]);
  const auto* data = static_cast<const uint8_t*>(w.data);
  if (member < 0)
    advise_pages(data, w.nbytes, advice);
  else
    advise_pages(data + static_cast<size_t>(member) * each, each, advice);
}

}  // namespace

// The system reads megabytes around a page that is missing: right for a weight that is read from end
// to end, eight times too much for experts that lie scattered.
void PassRun::fetch_chosen(const MoeStep& s) {
  for (const Routing::Chosen& c : routing_.chosen) {
    uint8_t& uses = (*s.uses)[static_cast<size_t>(c.expert)];
    if (uses++ % kFetchEvery != 0) continue;
    for (WeightId w : {s.op.gate, s.op.up, s.op.down})
      advise(program_.plan_.weights[static_cast<size_t>(w)], c.expert, MADV_WILLNEED);
  }
}

void PassRun::reserve_moe(const MoeStep& s, size_t& scratch) {
  const Moe& op = s.op;
  if (s.uses->empty()) {
    s.uses->resize(static_cast<size_t>(op.n_experts));
    for (WeightId w : {op.gate, op.up, op.down})
      advise(program_.plan_.weights[static_cast<size_t>(w)], -1, MADV_RANDOM);
  }
  const int32_t n = rows(op.in), d = width(op.in);
  const auto n_ff = static_cast<int32_t>(program_.plan_.weights[static_cast<size_t>(op.down)].n_in());
  const size_t pairs = static_cast<size_t>(n) * static_cast<size_t>(op.n_used);
  routing_.expert.resize(std::max(routing_.expert.size(), pairs));
  routing_.weight.resize(routing_.expert.size());
  routing_.rows.resize(routing_.expert.size());
  routing_.of_row.resize(routing_.expert.size());
  ensure(program_.hidden_, pairs * static_cast<size_t>(n_ff) * sizeof(float), "experts' activations");
  int32_t unit = 1;
  for (int f = 0; f < kForms; ++f) unit = std::max(unit, kernels_.act_unit(static_cast<Form>(f)));
  const size_t products = std::max(2 * round_line(static_cast<size_t>(n) * kMatmulRows * sizeof(float)),
                                   static_cast<size_t>(std::min(n, kFewRows)) * kDownRows * sizeof(float));
  const size_t gathered = static_cast<size_t>(unit) * static_cast<size_t>(std::max(d, n_ff)) * sizeof(float);
  const size_t scores = 3 * static_cast<size_t>(op.n_experts) * sizeof(float);
  const size_t kernel = round_line(std::max(kernel_scratch(kernels_.matmul_scratch, d, n),
                                            kernel_scratch(kernels_.matmul_scratch, n_ff, n)));
  scratch = std::max({scratch, kernel + products, gathered, scores});
}

// ---- routing -----------------------------------------------------------------------------

// scores: room for (3, E)
void PassRun::route_row(const MoeStep& s, int32_t r, float* scores) {
  const Moe& op = s.op;
  const int32_t n = op.n_experts;
  const float* logits = value(op.router) + static_cast<size_t>(r) * static_cast<size_t>(n);
  float* choice = scores + n;
  if (op.gating == Moe::Gating::softmax)
    softmax(logits, n, scores);
  else
    for (int32_t e = 0; e < n; ++e)
      scores[e] = op.gating == Moe::Gating::sigmoid ? sigmoid(logits[e]) : sqrt_softplus(logits[e]);
  for (int32_t e = 0; e < n; ++e) {
    choice[e] = s.bias ? scores[e] + s.bias[e] : scores[e];
    if (std::isnan(choice[e])) choice[e] = std::numeric_limits<float>::lowest();
  }
  if (op.n_groups_used < op.n_groups) keep_best_groups(op, choice, choice + n);

  const size_t at = static_cast<size_t>(r) * static_cast<size_t>(op.n_used);
  int32_t* expert = routing_.expert.data() + at;
  float* weight = routing_.weight.data() + at;
  if (op.of_token != kNone) {
    const Weight& table = program_.plan_.weights[static_cast<size_t>(op.of_token)];
    const auto token = static_cast<size_t>(pass_.tokens[static_cast<size_t>(pass_row(op.in, r))]);
    const size_t bytes = static_cast<size_t>(op.n_used) * sizeof(int32_t);
    std::memcpy(expert, static_cast<const uint8_t*>(table.data) + token * bytes, bytes);
  } else {
    for (int32_t k = 0; k < op.n_used; ++k) {
      expert[k] = best(choice, n);
      choice[expert[k]] = kMinusInfinity;
    }
  }
  std::sort(expert, expert + op.n_used);
  float sum = 0;
  for (int32_t k = 0; k < op.n_used; ++k) sum += weight[k] = scores[expert[k]];
  for (int32_t k = 0; k < op.n_used; ++k) {
    if (op.renormalise) weight[k] /= sum;
    weight[k] *= op.scale;
  }
}

// From each row's experts to each expert's rows, ascending in both.
void PassRun::sort_by_expert(int32_t n_rows, const Moe& op) {
  Routing& to = routing_;
  std::vector<int32_t> count(static_cast<size_t>(op.n_experts), 0);
  const size_t pairs = static_cast<size_t>(n_rows) * static_cast<size_t>(op.n_used);
  for (size_t i = 0; i < pairs; ++i) ++count[static_cast<size_t>(to.expert[i])];
  to.chosen.clear();
  int32_t begin = 0;
  for (int32_t e = 0; e < op.n_experts; ++e) {
    int32_t& c = count[static_cast<size_t>(e)];
    if (c > 0) to.chosen.push_back({e, begin, begin + c, {}});
    begin += c;
    c = begin - c;  // from here on: where its next row goes
  }
  for (size_t i = 0; i < pairs; ++i) {
    const auto place = static_cast<size_t>(count[static_cast<size_t>(to.expert[i])]++);
    to.rows[place] = static_cast<int32_t>(i) / op.n_used;
    to.of_row[place] = to.weight[i];
  }
}

// Where each chosen expert's prepared rows go. shared: all of them prepare the same single row.
void PassRun::place_activations(int32_t n_in, std::span<const WeightId> weights, bool shared) {
  size_t end[kForms] = {};
  for (Routing::Chosen& c : routing_.chosen) {
    bool placed[kForms] = {};
    for (WeightId w : weights) {
      const Form form = form_of(w, c.n_rows());
      const auto f = static_cast<size_t>(form);
      if (placed[f]) continue;
      placed[f] = true;
      c.act_at[f] = shared ? 0 : end[f];
      end[f] = c.act_at[f] + round_line(kernels_.act_bytes(form, n_in, c.n_rows()));
    }
  }
  for (size_t f = 0; f < kForms; ++f) ensure(program_.act_[f], end[f], "prepared activations");
}

// ---- products ----------------------------------------------------------------------------

// x: rows of n_in values; those numbered by `rows`, or the expert's own where nullptr.
void PassRun::prepare_expert(const Routing::Chosen& c, std::span<const WeightId> weights, const float* x,
                             const int32_t* rows, int t) {
  const auto n_in = static_cast<int32_t>(program_.plan_.weights[static_cast<size_t>(weights[0])].n_in());
  const auto ldx = static_cast<size_t>(n_in);
  bool used[kForms] = {};
  int32_t unit = 1;
  for (WeightId w : weights) {
    const Form form = form_of(w, c.n_rows());
    used[static_cast<size_t>(form)] = true;
    unit = std::max(unit, kernels_.act_unit(form));
  }
  auto* gathered = reinterpret_cast<float*>(scratch(t));
  for (int32_t i = 0; i < c.n_rows(); i += unit) {
    const int32_t end = std::min(i + unit, c.n_rows());
    const float* from = x + static_cast<size_t>(c.begin + i) * ldx;
    if (rows) {
      for (int32_t k = i; k < end; ++k)
        std::memcpy(gathered + static_cast<size_t>(k - i) * ldx,
                    x + static_cast<size_t>(rows[c.begin + k]) * ldx, ldx * sizeof(float));
      from = gathered;
    }
    for (size_t f = 0; f < kForms; ++f)
      if (used[f])
        kernels_.prepare(static_cast<Form>(f), from, ldx, n_in, c.n_rows(), i, end,
                         program_.act_[f].data() + c.act_at[f]);
  }
}

MatmulArgs PassRun::expert_args(WeightId w, const Routing::Chosen& c, int t) const {
  const Form form = form_of(w, c.n_rows());
  MatmulArgs a = matmul_args(w, c.n_rows(), form, t, c.expert);
  a.act += c.act_at[static_cast<size_t>(form)];
  return a;
}

// Asks for what a thread will read first of an expert's gate and up, from weight row `row` on.
void PassRun::begin_expert(const Moe& op, const Routing::Chosen& c, int32_t row) const {
  const auto n_ff = static_cast<int32_t>(program_.plan_.weights[static_cast<size_t>(op.gate)].n_out());
  for (WeightId w : {op.gate, op.up}) begin_stream(w, row, n_ff, c.expert);
}

// hidden[expert's rows, begin:end] = silu(gate x) * up x
void PassRun::expert_gate_up(const Moe& op, const Routing::Chosen& c, int32_t begin, int32_t end, int t) {
  const int32_t n = c.n_rows(), count = end - begin;
  const Weight& gate = program_.plan_.weights[static_cast<size_t>(op.gate)];
  const size_t kernel =
      round_line(kernel_scratch(kernels_.matmul_scratch, static_cast<int32_t>(gate.n_in()), n));
  const size_t half = round_line(static_cast<size_t>(n) * kMatmulRows * sizeof(float));
  float* y[2] = {reinterpret_cast<float*>(scratch(t) + kernel),
                 reinterpret_cast<float*>(scratch(t) + kernel + half)};
  const WeightId which[2] = {op.gate, op.up};
  for (int i = 0; i < 2; ++i) {
    MatmulArgs a = expert_args(which[i], c, t);
    a.y = y[i];
    a.ldy = static_cast<size_t>(count);
    kernels_.matmul(a, begin, end);
  }
  const auto n_ff = static_cast<size_t>(gate.n_out());
  auto* hidden = reinterpret_cast<float*>(program_.hidden_.data());
  if (op.limit > 0)
    for (int32_t i = 0; i < n * count; ++i) {
      y[0][i] = std::min(y[0][i], op.limit);
      y[1][i] = std::clamp(y[1][i], -op.limit, op.limit);
    }
  for (int32_t r = 0; r < n; ++r)
    kernels_.swiglu(y[0] + r * count, y[1] + r * count, count,
                    hidden + static_cast<size_t>(c.begin + r) * n_ff + begin);
}

// out[:, begin:end] = the weighted sum of all chosen experts' down products.
void PassRun::experts_down(const Moe& op, int32_t begin, int32_t end, int t) {
  const auto d = static_cast<size_t>(width(op.out));
  const int32_t count = end - begin;
  float* out = value(op.out) + begin;
  for (int32_t r = 0; r < rows(op.out); ++r) std::fill_n(out + static_cast<size_t>(r) * d, count, 0.0f);
  const auto n_ff = static_cast<int32_t>(program_.plan_.weights[static_cast<size_t>(op.down)].n_in());
  for (size_t k = 0; k < routing_.chosen.size(); ++k) {
    const Routing::Chosen& c = routing_.chosen[k];
    if (k + 1 < routing_.chosen.size()) begin_stream(op.down, begin, end, routing_.chosen[k + 1].expert);
    MatmulArgs a = expert_args(op.down, c, t);
    a.y = reinterpret_cast<float*>(scratch(t) +
                                   round_line(kernel_scratch(kernels_.matmul_scratch, n_ff, c.n_rows())));
    a.ldy = static_cast<size_t>(count);
    kernels_.matmul(a, begin, end);
    for (int32_t i = 0; i < c.n_rows(); ++i) {
      const auto at = static_cast<size_t>(c.begin + i);
      float* to = out + static_cast<size_t>(routing_.rows[at]) * d;
      const float* y = a.y + i * count;
      const float weight = routing_.of_row[at];
      for (int32_t j = 0; j < count; ++j) to[j] += weight * y[j];
    }
  }
}

void PassRun::step(const MoeStep& s, Counter* counters, int t) {
  const Moe& op = s.op;
  const int32_t n = rows(op.in), threads = program_.pool_->size();
  const WeightId in_weights[2] = {op.gate, op.up}, down[1] = {op.down};
  const auto n_ff = static_cast<int32_t>(program_.plan_.weights[static_cast<size_t>(op.down)].n_in());
  const bool shared = n == 1;
  share(counters[0], n, 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r) route_row(s, r, reinterpret_cast<float*>(scratch(t)));
  });
  program_.pool_->barrier();
  if (t == 0) {
    sort_by_expert(n, op);
    fetch_chosen(s);
    place_activations(width(op.in), in_weights, shared);
  }
  program_.pool_->barrier();
  const auto n_chosen = static_cast<int32_t>(routing_.chosen.size());
  const auto chosen = [&](int32_t i) -> const Routing::Chosen& {
    return routing_.chosen[static_cast<size_t>(i)];
  };
  const bool few = n <= kFewRows;
  const int32_t g = few ? kMatvecRows : grain(n_ff * n_chosen, threads), per_expert = pieces(n_ff, g);
  if (few) {
    const int32_t first = part_begin(n_chosen * per_expert, t);
    begin_expert(op, chosen(std::min(first / per_expert, n_chosen - 1)), first % per_expert * g);
  }
  share(counters[1], shared ? 1 : n_chosen, 1, [&](int32_t i, int32_t) {
    prepare_expert(chosen(i), in_weights, value(op.in), routing_.rows.data(), t);
  });
  program_.pool_->barrier();
  const auto gate_up = [&](int32_t begin, int32_t end) {
    while (begin < end) {
      const int32_t e = begin / per_expert, to = std::min(end, (e + 1) * per_expert);
      if (few && to == (e + 1) * per_expert && e + 1 < n_chosen) begin_expert(op, chosen(e + 1), 0);
      expert_gate_up(op, chosen(e), (begin - e * per_expert) * g, std::min((to - e * per_expert) * g, n_ff),
                     t);
      begin = to;
    }
  };
  if (few)
    stream(counters, n_chosen * per_expert, kMatmulRows / kMatvecRows, t, gate_up);
  else
    share(counters[2], n_chosen * per_expert, 1, gate_up);
  program_.pool_->barrier();
  if (t == 0) place_activations(n_ff, down, false);
  program_.pool_->barrier();
  share(counters[3], n_chosen, 1, [&](int32_t i, int32_t) {
    prepare_expert(chosen(i), down, reinterpret_cast<const float*>(program_.hidden_.data()), nullptr, t);
  });
  program_.pool_->barrier();
  const int32_t d = width(op.out), g_out = few ? kMatvecRows : grain(d, threads);
  const auto out = [&](int32_t begin, int32_t end) {
    experts_down(op, begin * g_out, std::min(end * g_out, d), t);
  };
  if (few)
    stream(counters, pieces(d, g_out), kDownRows / kMatvecRows, t, out, 1);
  else
    share(counters[4], pieces(d, g_out), 1, out);
}

void PassRun::step(const SigmoidGateStep& s, Counter* counters, int) {
  const auto n = static_cast<size_t>(width(s.out)), n_gate = static_cast<size_t>(width(s.gate));
  share(counters[0], rows(s.out), 1, [&](int32_t r, int32_t) {
    const float* x = value(s.in) + static_cast<size_t>(r) * n;
    const float* gate = value(s.gate) + static_cast<size_t>(r) * n_gate;
    float* y = value(s.out) + static_cast<size_t>(r) * n;
    const float one = sigmoid(gate[0]);
    for (size_t i = 0; i < n; ++i) y[i] = x[i] * (n_gate == 1 ? one : sigmoid(gate[i]));
  });
}

}  // namespace reflex::cpu
