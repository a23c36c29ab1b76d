// What is read off the logits of the last pass: probabilities, the best, a draw.
//
// Nothing sorts the vocabulary: the n best come from one scan against a heap of n.
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/program.h"

namespace reflex::cpu {

namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kFirstTopP = 64;  ///< candidates looked at first for top_p, then 8 times more
constexpr int32_t kTopPGrowth = 8;

struct Scored {
  float value;
  int32_t id;
};
/// Better first: larger, the lower id on a tie.
bool better(const Scored& a, const Scored& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; }

/// The n best of x, best first; NaN is never among them, nor is anything equal to `floor` or less.
std::vector<Scored> best(std::span<const float> x, int32_t n, float floor) {
  std::vector<Scored> heap;  // worst on top
  const auto limit = static_cast<size_t>(std::clamp<int64_t>(n, 0, static_cast<int64_t>(x.size())));
  if (limit == 0) return heap;
  heap.reserve(limit);
  for (size_t i = 0; i < x.size(); ++i) {
    const Scored s{x[i], static_cast<int32_t>(i)};
    if (!(s.value > floor)) continue;
    if (heap.size() < limit) {
      heap.push_back(s);
      std::push_heap(heap.begin(), heap.end(), better);
    } else if (s.value > heap.front().value) {  // equal values lose: their id is higher
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.back() = s;
      std::push_heap(heap.begin(), heap.end(), better);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  return heap;
}

/// logit_bias, then penalties, then the mask.
void adjust(std::vector<float>& x, const SampleSpec& spec) {
  const auto size = static_cast<int32_t>(x.size());
  const auto known = [&](int32_t id) {
    if (id < 0 || id >= size)
      fail(ErrorKind::invalid_input, "sampling: token id %d is outside the vocabulary of %d", id, size);
    return static_cast<size_t>(id);
  };
  for (const SampleSpec::Bias& b : spec.bias) x[known(b.id)] += b.bias;
  for (const SampleSpec::Count& c : spec.counts) {
    float& v = x[known(c.id)];
    if (c.seen) v = v > 0 ? v / spec.repetition_penalty : v * spec.repetition_penalty;
    v -= spec.frequency_penalty * static_cast<float>(c.in_output);
    if (c.in_output > 0) v -= spec.presence_penalty;
  }
  if (spec.allowed.empty()) return;
  if (spec.allowed.size() < (x.size() + 31) / 32)
    fail(ErrorKind::invalid_input, "sampling: the mask has %zu words, expected %zu", spec.allowed.size(),
         (x.size() + 31) / 32);
  for (size_t i = 0; i < x.size(); ++i)
    if (!(spec.allowed[i / 32] >> (i % 32) & 1u)) x[i] = kNegInf;
}

/// The first of the largest; -1 when there is nothing but NaN and -inf.
int32_t first_largest(std::span<const float> x, float largest) {
  if (largest == kNegInf) return -1;
  return static_cast<int32_t>(std::find(x.begin(), x.end(), largest) - x.begin());
}

/// The shortest run of the best whose weights reach top_p of `total`; weights are exp(logit - max).
std::vector<Scored> nucleus(std::span<const float> weights, double total, float top_p) {
  const double want = static_cast<double>(top_p) * total;
  for (int64_t n = kFirstTopP;; n *= kTopPGrowth) {
    std::vector<Scored> top = best(weights, static_cast<int32_t>(std::min<int64_t>(n, INT32_MAX)), 0.0f);
    double sum = 0;
    for (size_t i = 0; i < top.size(); ++i) {
      sum += static_cast<double>(top[i].value);
      if (sum >= want) {
        top.resize(i + 1);
        return top;
      }
    }
    if (top.size() < static_cast<size_t>(n)) return top;  // that was all of them
  }
}

/// The first id, in order, at which the running sum passes random * total.
int32_t draw(std::span<const Scored> kept, float random) {
  double total = 0, sum = 0;
  for (const Scored& s : kept) total += static_cast<double>(s.value);
  const double at = static_cast<double>(random) * total;
  for (const Scored& s : kept) {
    sum += static_cast<double>(s.value);
    if (sum > at) return s.id;
  }
  return kept.back().id;
}

}  // namespace

std::span<const float> CpuProgram::logits(int32_t o) {
  if (head_ != HeadMode::full || o < 0 || o >= n_outputs_)
    fail(ErrorKind::invalid_input, "logits of output row %d: the last pass left %d", o,
         head_ == HeadMode::full ? n_outputs_ : 0);
  const auto v = static_cast<size_t>(plan_.n_vocab);
  return {reinterpret_cast<const float*>(logits_.data()) + static_cast<size_t>(o) * v, v};
}

std::span<const float> CpuProgram::gathered(int32_t o) {
  if (head_ != HeadMode::gather || o < 0 || o >= n_outputs_)
    fail(ErrorKind::invalid_input, "gathered logits of output row %d: the last pass left %d", o,
         head_ == HeadMode::gather ? n_outputs_ : 0);
  const auto begin = static_cast<size_t>(gather_begin_[static_cast<size_t>(o)]);
  const auto end = static_cast<size_t>(gather_begin_[static_cast<size_t>(o) + 1]);
  return {reinterpret_cast<const float*>(logits_.data()) + begin, end - begin};
}

double CpuProgram::log_sum_exp(int32_t o) {
  const std::span<const float> x = logits(o);
  const float top = kernels_.max_value(x.data(), static_cast<int32_t>(x.size()));
  if (!std::isfinite(top)) return static_cast<double>(top);
  return static_cast<double>(top) + std::log(kernels_.sum_exp(x.data(), static_cast<int32_t>(x.size()), top));
}

int32_t CpuProgram::argmax(int32_t o) {
  const std::span<const float> x = logits(o);
  return first_largest(x, kernels_.max_value(x.data(), static_cast<int32_t>(x.size())));
}

std::vector<TokenLogprob> CpuProgram::top_logprobs(int32_t o, int32_t n) {
  const double lse = log_sum_exp(o);
  std::vector<TokenLogprob> out;
  for (const Scored& s : best(logits(o), n, kNegInf))
    out.push_back({s.id, static_cast<float>(static_cast<double>(s.value) - lse)});
  return out;
}

int32_t CpuProgram::sample(int32_t o, const SampleSpec& spec) {
  const std::span<const float> row = logits(o);
  std::vector<float> x(row.begin(), row.end());
  const auto n = static_cast<int32_t>(x.size());
  adjust(x, spec);
  const float largest = kernels_.max_value(x.data(), n);
  const int32_t top = first_largest(x, largest);
  if (top < 0) return -1;
  if (!(spec.temperature > 0) || std::isinf(largest)) return top;

  // Weights relative to the best: exp((x - max) / T), NaN as 0.
  const float inv_t = 1.0f / spec.temperature;
  kernels_.exp_scaled(x.data(), n, largest, inv_t, x.data());
  std::vector<Scored> kept;
  if (spec.top_k > 0 && spec.top_k < n) kept = best(x, spec.top_k, 0.0f);
  if (spec.top_p < 1.0f) {
    if (kept.empty()) {
      double total = 0;
      for (float w : x) total += static_cast<double>(w);
      kept = nucleus(x, total, spec.top_p);
    } else {
      std::vector<float> weights;
      for (const Scored& s : kept) weights.push_back(s.value);
      double total = 0;
      for (float w : weights) total += static_cast<double>(w);
      kept.resize(std::max<size_t>(1, nucleus(weights, total, spec.top_p).size()));
    }
  }
  if (kept.empty())
    for (int32_t i = 0; i < n; ++i)
      if (x[static_cast<size_t>(i)] > 0) kept.push_back({x[static_cast<size_t>(i)], i});
  // The best has weight 1, so min_p is a bound on the weights themselves.
  std::erase_if(kept, [&](const Scored& s) { return s.id != top && s.value < spec.min_p; });
  if (kept.empty()) return top;  // 1 / T is not finite: as cold as greedy
  std::sort(kept.begin(), kept.end(), [](const Scored& a, const Scored& b) { return a.id < b.id; });
  return draw(kept, spec.random);
}

}  // namespace reflex::cpu
