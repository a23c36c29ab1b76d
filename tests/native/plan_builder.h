// A plan written op by op with random weights: what the tests' models are made of.
//
// Owns: the plan, the memory behind its weights, and the steps that every model takes (a value, a weight, a
// product). Refuses: architectures, which each test writes itself, and running a plan (sequence.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "backend/backend.h"

namespace native_test {

using namespace reflex;

/// Derive from it and write the ops in the constructor.
class PlanBuilder {
 public:
  Plan plan;
  PlanBuilder(const PlanBuilder&) = delete;  // the plan points into storage_
  PlanBuilder& operator=(const PlanBuilder&) = delete;

  /// The plan's first op of a kind, to be changed.
  template <class T>
  T& op() {
    for (Op& o : plan.ops)
      if (auto* found = std::get_if<T>(&o)) return *found;
    throw std::logic_error("no such op");
  }

 protected:
  /// Weights are drawn with this spread; kByWidth: 1 / sqrt(n_in), which keeps rows' sizes.
  static constexpr float kByWidth = 0;
  PlanBuilder(int32_t vocab, int32_t width, uint32_t seed, float spread = kByWidth)
      : rng_(seed), spread_(spread) {
    plan.n_vocab = vocab;
    plan.n_embd = width;
  }

  /// (members, n_out, n_in) of any type.
  WeightId add(const std::string& name, GgmlType type, int64_t n_in, int64_t n_out,
               std::vector<uint8_t> bytes, int64_t members = 1) {
    Weight w;
    w.name = name;
    w.type = type;
    w.ne[0] = n_in;
    w.ne[1] = n_out;
    w.ne[2] = members;
    storage_.push_back(std::move(bytes));
    w.data = storage_.back().data();
    w.nbytes = storage_.back().size();
    plan.weights.push_back(w);
    return static_cast<WeightId>(plan.weights.size()) - 1;
  }
  /// F32 of a normal distribution.
  WeightId normal(const std::string& name, int64_t n_in, int64_t n_out, int64_t members, float center,
                  float spread) {
    std::vector<float> data(static_cast<size_t>(n_in * n_out * members));
    std::normal_distribution<float> draw(center, spread);
    for (float& f : data) f = draw(rng_);
    const std::span<const std::byte> bytes = std::as_bytes(std::span(data));
    const auto* begin = reinterpret_cast<const uint8_t*>(bytes.data());
    return add(name, GgmlType::F32, n_in, n_out, {begin, begin + bytes.size()}, members);
  }
  /// F32 of the spread that the builder was made with.
  WeightId weight(const std::string& name, int64_t n_in, int64_t n_out, int64_t members = 1) {
    const float spread = spread_ == kByWidth ? 1.0f / std::sqrt(static_cast<float>(n_in)) : spread_;
    return normal(name, n_in, n_out, members, 0.0f, spread);
  }
  /// The values of an F32 weight, to be changed.
  std::span<float> floats(WeightId id) {
    std::vector<uint8_t>& bytes = storage_[static_cast<size_t>(id)];
    return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
  }

  StateId state(const std::string& name, StateSpec::Kind kind, int32_t width, bool always_f32) {
    plan.states.push_back({name, kind, width, always_f32});
    return static_cast<StateId>(plan.states.size()) - 1;
  }
  ValueId value(int32_t width, Rows rows = Rows::all) {
    plan.values.push_back({width, rows});
    return static_cast<ValueId>(plan.values.size()) - 1;
  }
  int32_t width(ValueId x) const { return plan.values[static_cast<size_t>(x)].width; }
  Rows rows(ValueId x) const { return plan.values[static_cast<size_t>(x)].rows; }
  ValueId like(ValueId x, int32_t width) { return value(width, rows(x)); }

  /// An op that writes `out`.
  template <class T>
  ValueId push(ValueId out, T op) {
    op.out = out;
    plan.ops.emplace_back(op);
    return out;
  }
  ValueId embed(const std::string& table) {
    const WeightId w = weight(table, plan.n_embd, plan.n_vocab);
    return push(value(plan.n_embd), Embed{w, kNone});
  }
  ValueId linear(ValueId x, const std::string& name, int32_t n_out) {
    const WeightId w = weight(name, width(x), n_out);
    return push(like(x, n_out), Linear{x, kNone, w, kNone});
  }
  ValueId select(ValueId x) { return push(value(width(x), Rows::outputs), SelectOutputs{x, kNone}); }
  /// x itself where its rows are these; only outputs are ever chosen from all.
  ValueId with_rows(ValueId x, Rows wanted) { return rows(x) == wanted ? x : select(x); }

  std::mt19937 rng_;

 private:
  const float spread_;
  std::deque<std::vector<uint8_t>> storage_;  ///< behind each weight of the plan, in its order
};

}  // namespace native_test
