// A plan evaluated op by op in float64, unfused and unthreaded: what every backend is held against.
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "quant/dequantize.h"

namespace reference {

using reflex::kNone;
using reflex::ValueId;
using Matrix = std::vector<std::vector<double>>;  // (rows, width)

class Evaluator {
 public:
  explicit Evaluator(const reflex::Plan& plan) : plan_(plan) {}

  /// Logits (O, V) of a pass; states are kept between passes.
  Matrix run(const reflex::Pass& pass) {
    pass_ = &pass;
    logits_.clear();
    values_.assign(plan_.values.size(), {});
    slots_.resize(static_cast<size_t>(pass.first_slot));
    for (int32_t p : pass.parents) slots_.push_back(p);
    for (const reflex::Op& op : plan_.ops) std::visit([this](const auto& o) { eval(o); }, op);
    return logits_;
  }

 private:
  std::vector<double> row(const reflex::Weight& w, size_t j) const {
    std::vector<float> f(static_cast<size_t>(w.n_in()));
    const size_t bytes = reflex::row_bytes(w.type, f.size());
    reflex::dequantize_row(w.type, static_cast<const uint8_t*>(w.data) + j * bytes, f.data(), f.size());
    return {f.begin(), f.end()};
  }
  const reflex::Weight& weight(reflex::WeightId id) const { return plan_.weights[static_cast<size_t>(id)]; }
  Matrix& value(ValueId v) { return values_[static_cast<size_t>(v)]; }
  int32_t pass_row(ValueId v, size_t i) const {
    return plan_.values[static_cast<size_t>(v)].rows == reflex::Rows::all ? static_cast<int32_t>(i)
                                                                          : pass_->outputs[i];
  }

  Matrix linear(const Matrix& x, reflex::WeightId w, reflex::WeightId bias) const {
    const auto n_out = static_cast<size_t>(weight(w).n_out());
    Matrix y(x.size(), std::vector<double>(n_out, 0.0));
    const std::vector<double> b = bias == kNone ? std::vector<double>(n_out, 0.0) : row(weight(bias), 0);
    for (size_t j = 0; j < n_out; ++j) {
      const std::vector<double> r = row(weight(w), j);
      for (size_t i = 0; i < x.size(); ++i) {
        double s = 0;
        for (size_t k = 0; k < r.size(); ++k) s += r[k] * x[i][k];
        y[i][j] = s + b[j];
      }
    }
    return y;
  }

  void eval(const reflex::Embed& o) {
    for (int32_t t : pass_->tokens) value(o.out).push_back(row(weight(o.table), static_cast<size_t>(t)));
  }
  void eval(const reflex::RmsNorm& o) {
    const std::vector<double> w = row(weight(o.weight), 0);
    Matrix y = value(o.in);
    const auto group = static_cast<size_t>(o.group);
    for (std::vector<double>& r : y)
      for (size_t g = 0; g < r.size(); g += group) {
        double s = 0;
        for (size_t i = 0; i < group; ++i) s += r[g + i] * r[g + i];
        const double scale = 1.0 / std::sqrt(s / static_cast<double>(group) + static_cast<double>(o.eps));
        for (size_t i = 0; i < group; ++i) r[g + i] *= scale * w[i];
      }
    value(o.out) = y;
  }
  void eval(const reflex::Linear& o) { value(o.out) = linear(value(o.in), o.weight, o.bias); }
  void eval(const reflex::Rope& o) {
    const reflex::RopeSpec& spec = plan_.ropes[static_cast<size_t>(o.rope)];
    Matrix y = value(o.in);
    for (size_t i = 0; i < y.size(); ++i) {
      const int32_t position = pass_->positions[static_cast<size_t>(pass_row(o.in, i))];
      const size_t hd = y[i].size() / static_cast<size_t>(o.n_heads);
      for (size_t h = 0; h < static_cast<size_t>(o.n_heads); ++h) rotate(spec, position, &y[i][h * hd]);
    }
    value(o.out) = y;
  }
  static void rotate(const reflex::RopeSpec& spec, int32_t position, double* x) {
    const auto half = static_cast<size_t>(spec.n_rot / 2);
    const bool adjacent = spec.pairing == reflex::RopeSpec::Pairing::adjacent;
    for (size_t k = 0; k < half; ++k) {
      double& a = x[adjacent ? 2 * k : k];
      double& b = x[adjacent ? 2 * k + 1 : k + half];
      const auto angle = static_cast<double>(static_cast<float>(position) * spec.inv_freq[k]);
      const double c = std::cos(angle) * static_cast<double>(spec.magnitude);
      const double s = std::sin(angle) * static_cast<double>(spec.magnitude);
      const double a0 = a, b0 = b;
      a = a0 * c - b0 * s;
      b = b0 * c + a0 * s;
    }
  }
  void eval(const reflex::Attention& o) {
    attend(o, [&](size_t i) { return seen_by(o.q, i); });
  }
  // seen(i): the slots that row i of q sees.
  template <class T, class F>
  void attend(const T& o, F seen_slots) {
    const Matrix& ks = written(o.k_state, value(o.k));
    const Matrix& vs = written(o.v_state, value(o.v));
    const auto hd = static_cast<size_t>(o.head_dim), hdv = static_cast<size_t>(o.v_head_dim);
    const auto rep = static_cast<size_t>(o.n_heads / o.n_kv_heads);
    Matrix out;
    for (size_t i = 0; i < value(o.q).size(); ++i) {
      const std::vector<size_t> seen = seen_slots(i);
      out.emplace_back(static_cast<size_t>(o.n_heads) * hdv, 0.0);
      for (size_t h = 0; h < static_cast<size_t>(o.n_heads); ++h) {
        std::vector<double> p;
        for (size_t s : seen) {
          double dot = 0;
          for (size_t d = 0; d < hd; ++d) dot += value(o.q)[i][h * hd + d] * ks[s][h / rep * hd + d];
          p.push_back(dot * static_cast<double>(o.scale));
        }
        const double top = *std::max_element(p.begin(), p.end());
        double total = 0;
        for (double& x : p) total += x = std::exp(x - top);
        for (size_t j = 0; j < seen.size(); ++j)
          for (size_t d = 0; d < hdv; ++d)
            out[i][h * hdv + d] += p[j] / total * vs[seen[j]][h / rep * hdv + d];
      }
    }
    value(o.out) = out;
  }
  void eval(const reflex::SwiGlu& o) {
    Matrix y = value(o.gate);
    for (size_t i = 0; i < y.size(); ++i)
      for (size_t j = 0; j < y[i].size(); ++j) y[i][j] *= value(o.up)[i][j] / (1.0 + std::exp(-y[i][j]));
    value(o.out) = y;
  }
  void eval(const reflex::Add& o) {
    Matrix y = value(o.a);
    for (size_t i = 0; i < y.size(); ++i)
      for (size_t j = 0; j < y[i].size(); ++j) y[i][j] += value(o.b)[i][j];
    value(o.out) = y;
  }
  void eval(const reflex::SigmoidGate& o) {
    Matrix y = value(o.in);
    for (size_t i = 0; i < y.size(); ++i)
      for (size_t j = 0; j < y[i].size(); ++j) {
        const std::vector<double>& gate = value(o.gate)[i];
        y[i][j] /= 1.0 + std::exp(-gate[gate.size() == 1 ? 0 : j]);
      }
    value(o.out) = y;
  }

  // Scores of one row's experts, then those chosen: plain loops over sorted pairs.
  std::vector<double> expert_weights(const reflex::Moe& o, const std::vector<double>& logits,
                                     int32_t token) const {
    const auto n = static_cast<size_t>(o.n_experts), size = n / static_cast<size_t>(o.n_groups);
    std::vector<double> score(n), weight_of(n, 0.0);
    double total = 0;
    for (size_t e = 0; e < n; ++e) total += std::exp(logits[e]);
    for (size_t e = 0; e < n; ++e) switch (o.gating) {
        case reflex::Moe::Gating::softmax:
          score[e] = std::exp(logits[e]) / total;
          break;
        case reflex::Moe::Gating::sigmoid:
          score[e] = 1.0 / (1.0 + std::exp(-logits[e]));
          break;
        case reflex::Moe::Gating::sqrt_softplus:
          score[e] = std::sqrt(std::log(1.0 + std::exp(logits[e])));
          break;
      }
    const std::vector<double> bias = o.bias == kNone ? std::vector<double>(n, 0.0) : row(weight(o.bias), 0);
    using Ranked = std::vector<std::pair<double, size_t>>;  // (minus the score, index): best first
    Ranked groups, experts;
    for (size_t g = 0; g < n / size; ++g) {
      std::vector<double> in_group;
      for (size_t e = g * size; e < (g + 1) * size; ++e) in_group.push_back(-(score[e] + bias[e]));
      std::sort(in_group.begin(), in_group.end());
      const bool two = o.group_score == reflex::Moe::GroupScore::best_two && size > 1;
      groups.emplace_back(in_group[0] + (two ? in_group[1] : 0), g);
    }
    std::sort(groups.begin(), groups.end());
    groups.resize(static_cast<size_t>(o.n_groups_used));
    for (const auto& group : groups)
      for (size_t e = group.second * size; e < (group.second + 1) * size; ++e)
        experts.emplace_back(-(score[e] + bias[e]), e);
    std::sort(experts.begin(), experts.end());
    experts.resize(static_cast<size_t>(o.n_used));
    if (o.of_token != kNone) {
      const auto* ids = static_cast<const int32_t*>(weight(o.of_token).data) + token * o.n_used;
      for (size_t k = 0; k < experts.size(); ++k) experts[k].second = static_cast<size_t>(ids[k]);
    }
    double sum = 0;
    for (const auto& x : experts) sum += score[x.second];
    for (const auto& x : experts)
      weight_of[x.second] += score[x.second] / (o.renormalise ? sum : 1.0) * static_cast<double>(o.scale);
    return weight_of;
  }

  std::vector<double> member_product(reflex::WeightId id, size_t member, const std::vector<double>& x) const {
    const auto n_out = static_cast<size_t>(weight(id).n_out());
    std::vector<double> y(n_out, 0.0);
    for (size_t j = 0; j < n_out; ++j) {
      const std::vector<double> r = row(weight(id), member * n_out + j);
      for (size_t k = 0; k < r.size(); ++k) y[j] += r[k] * x[k];
    }
    return y;
  }

  static void clamp(double& gate, double& up, float limit) {
    gate = std::min(gate, static_cast<double>(limit));
    up = std::clamp(up, -static_cast<double>(limit), static_cast<double>(limit));
  }

  void eval(const reflex::Moe& o) {
    Matrix out;
    for (size_t i = 0; i < value(o.in).size(); ++i) {
      const std::vector<double>& x = value(o.in)[i];
      const std::vector<double> w =
          expert_weights(o, value(o.router)[i], pass_->tokens[static_cast<size_t>(pass_row(o.in, i))]);
      std::vector<double> y(x.size(), 0.0);
      for (size_t e = 0; e < w.size(); ++e) {
        if (w[e] == 0) continue;
        std::vector<double> h = member_product(o.gate, e, x);
        std::vector<double> up = member_product(o.up, e, x);
        for (size_t j = 0; j < h.size() && o.limit > 0; ++j) clamp(h[j], up[j], o.limit);
        for (size_t j = 0; j < h.size(); ++j) h[j] *= up[j] / (1.0 + std::exp(-h[j]));
        const std::vector<double> down = member_product(o.down, e, h);
        for (size_t j = 0; j < y.size(); ++j) y[j] += w[e] * down[j];
      }
      out.push_back(y);
    }
    value(o.out) = out;
  }

  void eval(const reflex::LayerNorm& o) {
    const std::vector<double> w = row(weight(o.weight), 0), b = row(weight(o.bias), 0);
    Matrix y = value(o.in);
    for (std::vector<double>& r : y) {
      double mean = 0, variance = 0;
      for (double x : r) mean += x / static_cast<double>(r.size());
      for (double x : r) variance += (x - mean) * (x - mean) / static_cast<double>(r.size());
      for (size_t i = 0; i < r.size(); ++i)
        r[i] = (r[i] - mean) / std::sqrt(variance + static_cast<double>(o.eps)) * w[i] + b[i];
    }
    value(o.out) = y;
  }

  // The pass's rows behind what the state held.
  Matrix& written(reflex::StateId id, const Matrix& rows) {
    Matrix& m = states_[id];
    m.resize(static_cast<size_t>(pass_->first_slot));
    m.insert(m.end(), rows.begin(), rows.end());
    return m;
  }
  std::vector<size_t> seen_by(reflex::ValueId v, size_t i) const {  // ascending
    std::vector<size_t> seen;
    for (int32_t s = pass_->first_slot + pass_row(v, i); s >= 0; s = slots_[static_cast<size_t>(s)])
      seen.insert(seen.begin(), static_cast<size_t>(s));
    return seen;
  }

  void eval(const reflex::Indexer& o) {
    const Matrix& keys = o.key == kNone ? states_[o.state] : written(o.state, value(o.key));
    const auto ratio = static_cast<size_t>(o.ratio);
    Matrix out;
    for (size_t i = 0; i < value(o.query).size(); ++i) {
      std::vector<std::pair<double, size_t>> ranked;  // (minus the score, slot)
      const std::vector<size_t> seen = seen_by(o.query, i);
      for (size_t n = ratio; n <= seen.size(); n += ratio) {
        const size_t s = seen[n - 1];
        double score = 0;
        for (size_t h = 0; h < static_cast<size_t>(o.n_heads); ++h) {
          double dot = 0;
          for (size_t d = 0; d < keys[s].size(); ++d)
            dot += value(o.query)[i][h * keys[s].size() + d] * keys[s][d];
          score += value(o.weights)[i][h] * std::max(dot, 0.0);
        }
        ranked.emplace_back(-score, s);
      }
      std::sort(ranked.begin(), ranked.end());
      ranked.resize(std::min(ranked.size(), static_cast<size_t>(o.top_k)));
      std::vector<double> slots;
      for (const auto& x : ranked) slots.push_back(static_cast<double>(x.second));
      std::sort(slots.begin(), slots.end());
      slots.resize(static_cast<size_t>(o.top_k), -1.0);
      out.push_back(slots);
    }
    value(o.out) = out;
  }

  void eval(const reflex::HeadSlice& o) {
    const auto heads = static_cast<size_t>(o.n_heads), count = static_cast<size_t>(o.count);
    Matrix out;
    for (const std::vector<double>& x : value(o.in)) {
      const size_t stride = x.size() / heads;
      std::vector<double>& y = out.emplace_back();
      for (size_t h = 0; h < heads; ++h)
        for (size_t i = 0; i < count; ++i) y.push_back(x[h * stride + static_cast<size_t>(o.begin) + i]);
    }
    value(o.out) = out;
  }

  void rotate(std::vector<double>& x, size_t at, reflex::RopeId id, int32_t r) const {
    rotate_at(x, at, id, pass_->positions[static_cast<size_t>(r)]);
  }
  void rotate_at(std::vector<double>& x, size_t at, reflex::RopeId id, int32_t number) const {
    rotate(plan_.ropes[static_cast<size_t>(id)], number, &x[at]);
  }
  void turn(std::vector<double>& x, size_t at, reflex::RopeId id, int32_t position, int sign) const {
    const reflex::RopeSpec& spec = plan_.ropes[static_cast<size_t>(id)];
    const bool adjacent = spec.pairing == reflex::RopeSpec::Pairing::adjacent;
    for (size_t k = 0; k < spec.inv_freq.size(); ++k) {
      const auto angle = sign * static_cast<double>(static_cast<float>(position) * spec.inv_freq[k]);
      double& x0 = x[at + (adjacent ? 2 * k : k)];
      double& x1 = x[at + (adjacent ? 2 * k + 1 : k + spec.inv_freq.size())];
      const double a = x0, b = x1, c = std::cos(angle) * static_cast<double>(spec.magnitude);
      const double s = std::sin(angle) * static_cast<double>(spec.magnitude);
      x0 = a * c - b * s;
      x1 = b * c + a * s;
    }
  }

  /// Kb[h] (N, C), or Vb[h] (V, C) where `values`.
  Matrix latent_matrix(const reflex::LatentAttention& o, size_t h, bool values) const {
    const auto n = static_cast<size_t>(o.nope_dim), v = static_cast<size_t>(o.v_head_dim);
    const auto c = static_cast<size_t>(o.n_latent);
    Matrix m;
    for (size_t i = 0; i < (values ? v : n); ++i) {
      if (o.kv_b != reflex::kNone)
        m.push_back(row(weight(o.kv_b), h * (n + v) + (values ? n : 0) + i));
      else if (values)
        m.push_back(row(weight(o.v_b), h * v + i));
      else
        m.emplace_back(c);
    }
    if (o.kv_b == reflex::kNone && !values)
      for (size_t j = 0; j < c; ++j) {
        const std::vector<double> column = row(weight(o.k_b), h * c + j);
        for (size_t i = 0; i < n; ++i) m[i][j] = column[i];
      }
    return m;
  }

  // Not absorbed: the head's keys and values are made from the latents.
  void latent_head(const reflex::LatentAttention& o, size_t h, const Matrix& state, Matrix& out) {
    const auto c = static_cast<size_t>(o.n_latent), p = static_cast<size_t>(o.rope_dim);
    const auto nope = static_cast<size_t>(o.nope_dim), v = static_cast<size_t>(o.v_head_dim);
    const Matrix kb = latent_matrix(o, h, false), vb = latent_matrix(o, h, true);
    const auto times = [c](const Matrix& m, const std::vector<double>& x) {
      std::vector<double> y(m.size(), 0.0);
      for (size_t i = 0; i < y.size(); ++i)
        for (size_t k = 0; k < c; ++k) y[i] += m[i][k] * x[k];
      return y;
    };
    Matrix keys, values;
    for (const std::vector<double>& latent : state) {
      keys.push_back(times(kb, latent));
      keys.back().insert(keys.back().end(), latent.begin() + static_cast<std::ptrdiff_t>(c), latent.end());
      values.push_back(times(vb, latent));
    }
    for (size_t i = 0; i < out.size(); ++i) {
      std::vector<size_t> slots = seen_by(o.q, i);
      if (o.selection != reflex::kNone) {
        slots.clear();
        for (double s : value(o.selection)[i])
          if (s >= 0) slots.push_back(static_cast<size_t>(s));
      }
      const auto first = value(o.q)[i].begin() + static_cast<std::ptrdiff_t>(h * (nope + p));
      std::vector<double> q(first, first + static_cast<std::ptrdiff_t>(nope + p)), scores;
      rotate(q, nope, o.rope, pass_row(o.q, i));
      for (size_t s : slots) {
        double dot = 0;
        for (size_t d = 0; d < nope + p; ++d) dot += q[d] * keys[s][d];
        scores.push_back(dot * static_cast<double>(o.scale));
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double total = 0;
      for (double& x : scores) total += x = std::exp(x - top);
      for (size_t j = 0; j < slots.size(); ++j)
        for (size_t d = 0; d < v; ++d) out[i][h * v + d] += scores[j] / total * values[slots[j]][d];
    }
  }
  void eval(const reflex::LatentAttention& o) {
    const auto c = static_cast<size_t>(o.n_latent);
    const std::vector<double> w = row(weight(o.norm), 0);
    Matrix latents = value(o.kv);
    for (size_t r = 0; r < latents.size(); ++r) {
      double s = 0;
      for (size_t i = 0; i < c; ++i) s += latents[r][i] * latents[r][i] / static_cast<double>(c);
      for (size_t i = 0; i < c; ++i) latents[r][i] *= w[i] / std::sqrt(s + static_cast<double>(o.eps));
      rotate(latents[r], c, o.rope, static_cast<int32_t>(r));
    }
    const Matrix& state = written(o.state, latents);
    Matrix out(value(o.q).size(),
               std::vector<double>(static_cast<size_t>(o.n_heads) * static_cast<size_t>(o.v_head_dim), 0.0));
    for (size_t h = 0; h < static_cast<size_t>(o.n_heads); ++h) latent_head(o, h, state, out);
    value(o.out) = out;
  }

  void eval(const reflex::Concat& o) {
    Matrix y = value(o.a);
    for (size_t i = 0; i < y.size(); ++i) y[i].insert(y[i].end(), value(o.b)[i].begin(), value(o.b)[i].end());
    value(o.out) = y;
  }

  // What slot s has after it: the convolution's input, and every head's state (H, N, M).
  struct DeltaSlot {
    std::vector<double> input, state;
  };

  static double silu(double x) { return x / (1.0 + std::exp(-x)); }

  static void l2_norm(double* x, size_t n, double eps, double times) {
    double s = 0;
    for (size_t i = 0; i < n; ++i) s += x[i] * x[i];
    for (size_t i = 0; i < n; ++i) x[i] *= times / std::sqrt(s + eps);
  }

  /// The convolved row, q and k of each key head normed: (C).
  std::vector<double> delta_row(const reflex::GatedDelta& o, const std::vector<DeltaSlot>& slots,
                                int32_t slot) const {
    const std::vector<double>& own = slots[static_cast<size_t>(slot)].input;
    std::vector<double> x(own.size(), 0.0);
    for (int32_t j = o.n_taps - 1, s = slot; j >= 0 && s >= 0; --j, s = slots_[static_cast<size_t>(s)])
      for (size_t c = 0; c < x.size(); ++c)
        x[c] += row(weight(o.conv), c)[static_cast<size_t>(j)] * slots[static_cast<size_t>(s)].input[c];
    for (double& v : x) v = silu(v);
    const auto n = static_cast<size_t>(o.key_dim), heads = static_cast<size_t>(o.n_key_heads);
    const auto eps = static_cast<double>(o.qk_eps);
    for (size_t h = 0; h < heads; ++h) {
      l2_norm(&x[h * n], n, eps, 1.0 / std::sqrt(static_cast<double>(n)));
      l2_norm(&x[(heads + h) * n], n, eps, 1.0);
    }
    return x;
  }

  /// The recurrence, token by token: no chunks.
  void eval(const reflex::GatedDelta& o) {
    std::vector<DeltaSlot>& slots = delta_[o.delta_state];
    slots.resize(static_cast<size_t>(pass_->first_slot));
    const auto n = static_cast<size_t>(o.key_dim), m = static_cast<size_t>(o.value_dim);
    const auto n_key = static_cast<size_t>(o.n_key_heads), n_value = static_cast<size_t>(o.n_value_heads);
    const std::vector<double> decay = row(weight(o.decay), 0), bias = row(weight(o.dt_bias), 0),
                              norm = row(weight(o.norm), 0);
    Matrix all;  // of every row, ungated
    for (size_t r = 0; r < pass_->tokens.size(); ++r) {
      const int32_t slot = pass_->first_slot + static_cast<int32_t>(r), parent = pass_->parents[r];
      slots.push_back({value(o.qkv)[r], {}});
      const std::vector<double> x = delta_row(o, slots, slot);
      std::vector<double> state =
          parent < 0 ? std::vector<double>(n_value * n * m, 0.0) : slots[static_cast<size_t>(parent)].state;
      std::vector<double>& y = all.emplace_back(n_value * m, 0.0);
      for (size_t h = 0; h < n_value; ++h) {
        const bool grouped = o.order == reflex::GatedDelta::Order::grouped;
        const size_t key_head = grouped ? h / (n_value / n_key) : h % n_key;
        const double *q = &x[key_head * n], *k = &x[(n_key + key_head) * n], *v = &x[2 * n_key * n + h * m];
        const double g = std::exp(decay[h] * std::log1p(std::exp(value(o.alpha)[r][h] + bias[h])));
        const double b = 1.0 / (1.0 + std::exp(-value(o.beta)[r][h]));
        double* s = &state[h * n * m];
        for (size_t j = 0; j < m; ++j) {
          double read = 0;
          for (size_t i = 0; i < n; ++i) read += s[i * m + j] * k[i];
          const double d = b * (v[j] - g * read);
          for (size_t i = 0; i < n; ++i) {
            s[i * m + j] = g * s[i * m + j] + k[i] * d;
            y[h * m + j] += q[i] * s[i * m + j];
          }
        }
      }
      slots.back().state = std::move(state);
    }
    Matrix out;
    for (size_t i = 0; i < value(o.z).size(); ++i) {
      std::vector<double> y = all[static_cast<size_t>(pass_row(o.z, i))];
      for (size_t h = 0; h < n_value; ++h) {
        double s = 0;
        for (size_t j = 0; j < m; ++j) s += y[h * m + j] * y[h * m + j];
        const double scale = 1.0 / std::sqrt(s / static_cast<double>(m) + static_cast<double>(o.norm_eps));
        for (size_t j = 0; j < m; ++j) {
          const double z = value(o.z)[i][h * m + j];
          y[h * m + j] *= scale * norm[j] * (o.gate == reflex::GatedDelta::Gate::silu ? silu(z) : sigmoid(z));
        }
      }
      out.push_back(y);
    }
    value(o.out) = out;
  }

  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
  static std::vector<double> rms_norm(std::vector<double> x, const std::vector<double>& w, double eps) {
    double s = 0;
    for (double v : x) s += v * v / static_cast<double>(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] *= w[i] / std::sqrt(s + eps);
    return x;
  }

  void eval(const reflex::Repeat& o) {
    for (const std::vector<double>& x : value(o.in)) {
      value(o.out).emplace_back();
      for (int32_t k = 0; k < o.n; ++k)
        value(o.out).back().insert(value(o.out).back().end(), x.begin(), x.end());
    }
  }
  void eval(const reflex::StreamNorm& o) {
    const std::vector<double> w = row(weight(o.weight), 0);
    const auto d = static_cast<std::ptrdiff_t>(o.group);
    for (const std::vector<double>& x : value(o.in)) {
      std::vector<double> y;
      for (auto at = x.begin(), by = w.begin(); at != x.end(); at += d, by += d)
        for (double v : rms_norm({at, at + d}, {by, by + d}, static_cast<double>(o.eps))) y.push_back(v);
      value(o.out).push_back(y);
    }
  }
  void eval(const reflex::Silu& o) {
    value(o.out) = value(o.in);
    for (std::vector<double>& r : value(o.out))
      for (double& x : r) x = x * static_cast<double>(o.scale) * sigmoid(x * static_cast<double>(o.scale));
  }
  void eval(const reflex::StreamMix& o) {
    const auto n = static_cast<size_t>(o.n_streams);
    for (size_t i = 0; i < value(o.in).size(); ++i) {
      const std::vector<double>&x = value(o.in)[i], &gate = value(o.gate)[i];
      std::vector<double> y(x.size() / n, 0.0);
      for (size_t j = 0; j < x.size(); ++j)
        y[j % y.size()] += x[j] * sigmoid(gate[j]) / static_cast<double>(n);
      value(o.out).push_back(y);
    }
  }
  void eval(const reflex::StreamInject& o) {
    value(o.out) = value(o.in);
    for (size_t i = 0; i < value(o.out).size(); ++i) {
      const std::vector<double>&logits = value(o.logits)[i], &block = value(o.block)[i];
      for (size_t j = 0; j < value(o.out)[i].size(); ++j)
        value(o.out)[i][j] += 2 * sigmoid(logits[j / block.size()] / static_cast<double>(o.n_streams)) *
                              block[j % block.size()];
    }
  }
  void eval(const reflex::StreamGate& o) {
    for (size_t i = 0; i < value(o.key).size(); ++i) {
      const std::vector<double>&key = value(o.key)[i], &query = value(o.query)[i], &v = value(o.value)[i];
      std::vector<double> y;
      for (size_t s = 0; s < key.size(); s += v.size()) {
        double a = 0;
        for (size_t j = s; j < s + v.size(); ++j)
          a += key[j] * query[j] / std::sqrt(static_cast<double>(v.size()));
        const double root = std::sqrt(std::max(std::abs(a), 1e-6));
        for (double x : v) y.push_back(x * sigmoid(a > 0 ? root : a < 0 ? -root : 0.0));
      }
      value(o.out).push_back(y);
    }
  }
  void eval(const reflex::NgramEmbed& o) {
    Matrix tokens;
    for (int32_t t : pass_->tokens) tokens.push_back({static_cast<double>(t)});
    const Matrix& all = written(o.tokens, tokens);
    const size_t grams = o.multipliers.size(), per = o.sizes.size() / (grams - 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::vector<size_t> seen = seen_by(o.out, i);
      std::vector<uint64_t> t;  // the row's token, then its predecessors, newest first
      for (size_t j = 0; j < grams; ++j)
        t.push_back(j < seen.size() ? static_cast<uint64_t>(all[seen[seen.size() - 1 - j]][0]) : o.eos);
      for (size_t j = 2; j < grams; ++j)
        if (t[j - 1] == o.eos) t[j] = o.eos;
      std::vector<double> y;
      for (size_t h = 0; h < o.sizes.size(); ++h) {
        uint64_t hash = 0;
        for (size_t j = 0; j < 2 + h / per; ++j) hash ^= t[j] * o.multipliers[j];
        for (double x : row(weight(o.table), hash % o.sizes[h] + o.offsets[h])) y.push_back(x);
      }
      value(o.out).push_back(y);
    }
  }
  void eval(const reflex::CausalConv& o) {
    const Matrix& all = written(o.history, value(o.in));
    const auto taps = static_cast<size_t>(o.n_taps), apart = static_cast<size_t>(o.dilation);
    for (size_t i = 0; i < value(o.in).size(); ++i) {
      const std::vector<size_t> seen = seen_by(o.in, i);
      std::vector<double> y;
      for (size_t c = 0; c < value(o.in)[i].size(); ++c) {
        const std::vector<double> w = row(weight(o.weight), c);
        double sum = 0;
        for (size_t j = 0; j < taps && j * apart < seen.size(); ++j)
          sum += w[taps - 1 - j] * all[seen[seen.size() - 1 - j * apart]][c];
        y.push_back(sum * sigmoid(sum));
      }
      value(o.out).push_back(y);
    }
  }
  void eval(const reflex::BlockAttention& o) {
    const Matrix& raw = written(o.index_state, value(o.index_k));
    const std::vector<double> w = row(weight(o.index_norm), 0);
    const auto size = static_cast<size_t>(o.block_size), n = static_cast<size_t>(o.index_dim);
    const auto chosen = [&](size_t i) {
      const std::vector<size_t> all = seen_by(o.q, i);
      std::vector<std::pair<double, size_t>> ranked;  // (minus the score, block)
      for (size_t b = 0; b < all.size() / size; ++b) {
        std::vector<double> key(n, 0.0);
        for (size_t j = 0; j < size; ++j)
          for (size_t k = 0; k < n; ++k) key[k] += raw[all[b * size + j]][k] / static_cast<double>(size);
        key = rms_norm(key, w, static_cast<double>(o.index_eps));
        rotate_at(key, 0, o.index_rope, static_cast<int32_t>(b * size));
        double score = 0;
        for (size_t h = 0; h < static_cast<size_t>(o.index_heads); ++h) {
          double dot = 0;
          for (size_t k = 0; k < n; ++k) dot += value(o.index_q)[i][h * n + k] * key[k];
          score += std::max(dot, 0.0);
        }
        ranked.emplace_back(-score, b);
      }
      std::sort(ranked.begin(), ranked.end());
      ranked.resize(std::min(ranked.size(), static_cast<size_t>(o.n_blocks)));
      std::vector<size_t> slots;
      for (const auto& x : ranked)
        for (size_t j = 0; j < size; ++j) slots.push_back(all[x.second * size + j]);
      for (size_t j = all.size() / size * size; j < all.size(); ++j) slots.push_back(all[j]);
      return slots;
    };
    attend(o, chosen);
  }

  // ---- of DeepSeek-V4: eval() of Compressor to HyperWrite ----
#include "cpu_reference_deepseek4.inc"

  /// Ops without a reference here: their own tests bring one.
  template <class Other>
  void eval(const Other& o) {
    reflex::fail(reflex::ErrorKind::unsupported, "the evaluator does not know %s",
                 reflex::op_name(reflex::Op(o)));
  }
  void eval(const reflex::SelectOutputs& o) {
    for (int32_t r : pass_->outputs) value(o.out).push_back(value(o.in)[static_cast<size_t>(r)]);
  }
  void eval(const reflex::Head& o) { logits_ = linear(value(o.in), o.weight, o.bias); }

  const reflex::Plan& plan_;
  const reflex::Pass* pass_ = nullptr;
  std::vector<Matrix> values_;
  std::map<reflex::StateId, Matrix> states_;
  std::map<reflex::StateId, Matrix> entries_;                // of Compressors; empty where a slot holds none
  std::map<reflex::StateId, std::vector<DeltaSlot>> delta_;  // by delta_state
  std::vector<int32_t> slots_;                               // parent of each
  Matrix logits_;
};

/// sum (a - b)^2 / sum b^2
inline double nmse(const std::vector<double>& got, const std::vector<double>& want) {
  double err = 0, all = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    err += (got[i] - want[i]) * (got[i] - want[i]);
    all += want[i] * want[i];
  }
  return all > 0 ? err / all : err;
}

}  // namespace reference
