// Random decoders whose layers are Gated DeltaNet or latent attention, of any shape, for the tests of both
// backends against the float64 evaluator.
#pragma once
#include "cuda_model.h"

namespace cuda_test {

struct DeltaShape {
  int32_t d = 64, vocab = 101, layers = 2;
  int32_t key_heads = 2, value_heads = 4, key_dim = 16, value_dim = 16, taps = 4;
  GatedDelta::Order order = GatedDelta::Order::tiled;
  GatedDelta::Gate gate = GatedDelta::Gate::silu;
  bool sliced = false;  ///< beta and alpha come from one matrix, interleaved per key head
  GgmlType matrix = GgmlType::F32;
};

struct LatentShape {
  int32_t d = 64, vocab = 101, layers = 2;
  int32_t heads = 4, latent = 32, nope = 16, rope = 8, v_dim = 16;
  bool split = true;  ///< k_b and v_b, else one kv_b
  RopeSpec::Pairing pairing = RopeSpec::Pairing::adjacent;
  GgmlType matrix = GgmlType::F32, key = GgmlType::F32, value = GgmlType::F32;
};

class MixerModel : public Model {
 public:
  explicit MixerModel(const DeltaShape& s, uint32_t seed = 1) : Model(s.d, s.vocab, s.layers, seed) {
    build(s.matrix, [&](int32_t i, ValueId h, bool last) { return delta(s, i, h, last); });
  }
  explicit MixerModel(const LatentShape& s, uint32_t seed = 1) : Model(s.d, s.vocab, s.layers, seed) {
    RopeSpec rope{s.rope, s.pairing, {}, 1.0f};
    for (int i = 0; i < s.rope / 2; ++i)
      rope.inv_freq.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(s.rope)));
    plan.ropes.push_back(rope);
    build(s.matrix, [&](int32_t i, ValueId h, bool last) { return latent(s, i, h, last); });
  }

 private:
  template <class Mixer>
  void build(GgmlType type, Mixer mixer) {
    ValueId x = value(s_.d);
    plan.ops.emplace_back(Embed{matrix("token_embd.weight", s_.d, s_.vocab, GgmlType::F32), x});
    for (int32_t i = 0; i < s_.layers; ++i) {
      const bool last = i + 1 == s_.layers;
      const ValueId a = linear(mixer(i, norm(x, s_.d), last), s_.d, type);
      x = push(like(a, s_.d), Add{last ? select(x) : x, a, kNone});
    }
    plan.ops.emplace_back(Head{norm(x, s_.d), matrix("output.weight", s_.d, s_.vocab, GgmlType::F32), kNone});
  }

  ValueId delta(const DeltaShape& s, int32_t i, ValueId h, bool last) {
    const int32_t inner = s.value_heads * s.value_dim, channels = 2 * s.key_heads * s.key_dim + inner;
    GatedDelta op{};
    op.qkv = linear(h, channels, s.matrix);
    op.z = linear(last ? select(h) : h, inner, s.matrix);
    if (s.sliced) {
      const int32_t each = s.value_heads / s.key_heads;
      const ValueId both = linear(h, 2 * s.value_heads, s.matrix);
      op.beta = push(value(s.value_heads), HeadSlice{both, kNone, s.key_heads, 0, each});
      op.alpha = push(value(s.value_heads), HeadSlice{both, kNone, s.key_heads, each, each});
    } else {
      op.beta = linear(h, s.value_heads, s.matrix);
      op.alpha = linear(h, s.value_heads, s.matrix);
    }
    op.conv = matrix("conv.weight", s.taps, channels, GgmlType::F32);
    op.decay = vector("decay", s.value_heads, -0.3f);
    op.dt_bias = vector("dt_bias", s.value_heads, 0.0f);
    op.norm = vector("norm.weight", s.value_dim, 1.0f);
    op.conv_state = state("conv" + std::to_string(i), StateSpec::Kind::fixed, (s.taps - 1) * channels, true);
    op.delta_state = state("delta" + std::to_string(i), StateSpec::Kind::fixed, inner * s.key_dim, true);
    op.n_key_heads = s.key_heads;
    op.n_value_heads = s.value_heads;
    op.key_dim = s.key_dim;
    op.value_dim = s.value_dim;
    op.n_taps = s.taps;
    op.order = s.order;
    op.gate = s.gate;
    op.qk_eps = op.norm_eps = 1e-6f;
    return push(like(op.z, inner), op);
  }

  WeightId stack(const std::string& name, int64_t n_in, int64_t n_out, int64_t members, GgmlType type) {
    const WeightId id = matrix(name, n_in, n_out * members, type);
    Weight& w = plan.weights[static_cast<size_t>(id)];
    w.ne[1] = n_out;
    w.ne[2] = members;
    return id;
  }

  ValueId latent(const LatentShape& s, int32_t i, ValueId h, bool last) {
    LatentAttention op{};
    op.q = linear(last ? select(h) : h, s.heads * (s.nope + s.rope), s.matrix);
    op.kv = linear(h, s.latent + s.rope, s.matrix);
    op.norm = vector("norm.weight", s.latent, 1.0f);
    op.eps = 1e-6f;
    if (s.split) {
      op.k_b = stack("k_b.weight", s.nope, s.latent, s.heads, s.key);
      op.v_b = stack("v_b.weight", s.latent, s.v_dim, s.heads, s.value);
    } else {
      op.kv_b = matrix("kv_b.weight", s.latent, int64_t{s.heads} * (s.nope + s.v_dim), s.key);
    }
    op.rope = 0;
    op.state = state("latent" + std::to_string(i), StateSpec::Kind::per_token, s.latent + s.rope, false);
    op.n_heads = s.heads;
    op.n_latent = s.latent;
    op.nope_dim = s.nope;
    op.rope_dim = s.rope;
    op.v_head_dim = s.v_dim;
    op.scale = 2.0f / std::sqrt(static_cast<float>(s.nope + s.rope));
    return push(like(op.q, s.heads * s.v_dim), op);
  }
};

}  // namespace cuda_test
