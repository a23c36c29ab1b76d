// A random dense decoder of any shape with weights of any type, for the tests of both backends.
#pragma once
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/half.h"
#include "plan_builder.h"
#include "quant/quantize.h"
#include "rowset.h"

namespace cuda_test {

using namespace reflex;
using native_test::Rowset;

struct Shape {
  int32_t d = 256, heads = 4, kv_heads = 2, hd = 64, ff = 512, vocab = 333, layers = 2;
  bool qk_norm = true, bias = false, adjacent = false, tied = true;
  GgmlType matrix = GgmlType::F32, value = GgmlType::F32, table = GgmlType::F32;
  int32_t hd_v = 0;  ///< 0: as hd
};

class Model : public native_test::PlanBuilder {
 public:
  explicit Model(const Shape& s, uint32_t seed = 1) : PlanBuilder(s.vocab, s.d, seed), s_(s) {
    plan.n_layers = s.layers;
    plan.n_ctx_train = 4096;
    RopeSpec rope{s.hd / 2 * 2, s.adjacent ? RopeSpec::Pairing::adjacent : RopeSpec::Pairing::half, {}, 1.1f};
    for (int i = 0; i < rope.n_rot / 2; ++i)
      rope.inv_freq.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(rope.n_rot)));
    plan.ropes.push_back(rope);
    const WeightId table = matrix("token_embd.weight", s.d, s.vocab, s.table);
    ValueId x = value(s.d);
    plan.ops.emplace_back(Embed{table, x});
    for (int32_t i = 0; i < s.layers; ++i) x = layer(i, x, i == s.layers - 1);
    x = norm(x, s.d);
    const WeightId head = s.tied ? table : matrix("output.weight", s.d, s.vocab, s.table);
    plan.ops.emplace_back(Head{x, head, s.bias ? vector("output.bias", s.vocab, 0.0f) : kNone});
  }

 protected:
  /// No ops yet: for models of other layers.
  Model(int32_t d, int32_t vocab, int32_t layers, uint32_t seed) : PlanBuilder(vocab, d, seed) {
    s_.d = d;
    s_.vocab = vocab;
    s_.layers = plan.n_layers = layers;
    plan.n_ctx_train = 4096;
  }

  WeightId vector(const std::string& name, int64_t n, float center) {
    return normal(name, n, 1, 1, center, 0.1f);
  }

  /// Values of about 1 / sqrt(n_in), whatever the type.
  WeightId matrix(const std::string& name, int64_t n_in, int64_t n_out, GgmlType type) {
    const float size = 1.0f / std::sqrt(static_cast<float>(n_in));
    const size_t stride = row_bytes(type, static_cast<size_t>(n_in));
    std::vector<uint8_t> bytes(stride * static_cast<size_t>(n_out));
    if (type == GgmlType::Q4_K || type == GgmlType::Q5_K || type == GgmlType::Q6_K) {
      random_blocks(type, size, bytes);
    } else {
      std::normal_distribution<float> normal(0, size);
      std::vector<float> row(static_cast<size_t>(n_in));
      for (size_t j = 0; j < static_cast<size_t>(n_out); ++j) {
        for (float& f : row) f = normal(rng_);
        quantize_row(type, row.data(), &bytes[j * stride], row.size());
      }
    }
    return add(name, type, n_in, n_out, std::move(bytes));
  }

  void random_blocks(GgmlType type, float size, std::vector<uint8_t>& bytes) {
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng_());
    const auto put = [&](size_t at, float f) {
      const uint16_t h = f32_to_f16(f);
      std::memcpy(&bytes[at], &h, 2);
    };
    const size_t step = type_info(type).block_bytes;
    for (size_t b = 0; b < bytes.size(); b += step) {
      if (type == GgmlType::Q6_K) {
        put(b + 208, size / 1300);
      } else {  // a mean near zero: scale * q about as large as the minimum
        const float top = type == GgmlType::Q4_K ? 15 : 31;
        put(b, size / (top * 10));
        put(b + 2, size / 20);
      }
    }
  }

  ValueId norm(ValueId x, int32_t group) {
    return push(like(x, width(x)), RmsNorm{x, kNone, vector("norm.weight", group, 1.0f), group, 1e-6f});
  }
  ValueId linear(ValueId x, int32_t n_out, GgmlType type, bool bias = false) {
    const WeightId w = matrix("matrix.weight", width(x), n_out, type);
    return push(like(x, n_out), Linear{x, kNone, w, bias ? vector("matrix.bias", n_out, 0.0f) : kNone});
  }
  ValueId rope(ValueId x, int32_t heads) { return push(like(x, width(x)), Rope{x, kNone, 0, heads}); }

  ValueId layer(int32_t i, ValueId x, bool last) {
    const ValueId h = norm(x, s_.d);
    ValueId q = linear(last ? select(h) : h, s_.heads * s_.hd, s_.matrix, s_.bias);
    ValueId k = linear(h, s_.kv_heads * s_.hd, s_.matrix, s_.bias);
    const int32_t hd_v = s_.hd_v > 0 ? s_.hd_v : s_.hd;
    const ValueId v = linear(h, s_.kv_heads * hd_v, s_.value, s_.bias);
    if (s_.qk_norm) {
      q = norm(q, s_.hd);
      k = norm(k, s_.hd);
    }
    q = rope(q, s_.heads);
    k = rope(k, s_.kv_heads);
    const auto kept = [&](const char* name, int32_t width) {
      return state(name + std::to_string(i), StateSpec::Kind::per_token, width, false);
    };
    const StateId ks = kept("k", s_.kv_heads * s_.hd), vs = kept("v", s_.kv_heads * hd_v);
    const ValueId o =
        push(like(q, s_.heads * hd_v), Attention{q, k, v, kNone, ks, vs, s_.heads, s_.kv_heads, s_.hd, hd_v,
                                                 1.0f / std::sqrt(static_cast<float>(s_.hd))});
    const ValueId a = linear(o, s_.d, s_.matrix);
    x = push(like(a, s_.d), Add{last ? select(x) : x, a, kNone});
    const ValueId f = norm(x, s_.d);
    const ValueId gate = linear(f, s_.ff, s_.matrix), up = linear(f, s_.ff, s_.matrix);
    const ValueId down = linear(push(like(x, s_.ff), SwiGlu{gate, up, kNone}), s_.d, s_.value);
    return push(like(x, s_.d), Add{x, down, kNone});
  }

  Shape s_;
};

}  // namespace cuda_test
