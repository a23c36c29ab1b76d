#include "models/builder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace reflex {

namespace {

std::string shape_text(const uint64_t* ne, uint32_t n_dims) {
  std::string s = "[";
  for (uint32_t i = 0; i < n_dims; ++i) s += (i ? ", " : "") + std::to_string(ne[i]);
  return s + "]";
}

// n_members 0: a matrix or vector of two dimensions or fewer
const gguf::TensorInfo& require(const gguf::File& file, const std::string& name, int64_t n_in, int64_t n_out,
                                int64_t n_members = 0) {
  const gguf::TensorInfo* t = file.find_tensor(name);
  const uint64_t want[3] = {static_cast<uint64_t>(n_in), static_cast<uint64_t>(n_out),
                            static_cast<uint64_t>(n_members > 0 ? n_members : 1)};
  const std::string expected = shape_text(want, n_members > 0 ? 3 : n_out == 1 ? 1 : 2);
  if (!t) fail(ErrorKind::gguf, "tensor '%s' is missing (expected shape %s)", name.c_str(), expected.c_str());
  if (t->ne[0] != want[0] || t->ne[1] != want[1] || t->ne[2] != want[2] || t->ne[3] != 1)
    fail(ErrorKind::gguf, "tensor '%s': expected shape %s, found %s", name.c_str(), expected.c_str(),
         shape_text(t->ne, t->n_dims).c_str());
  if (type_info(t->type).kind == TypeKind::other)
    fail(ErrorKind::unsupported, "tensor '%s': type %s holds no weights that can be computed with",
         name.c_str(), type_info(t->type).name);
  return *t;
}

const gguf::TensorInfo& require_f32(const gguf::File& file, const std::string& name, int64_t n) {
  const gguf::TensorInfo& t = require(file, name, n, 1);
  if (t.type != GgmlType::F32)
    fail(ErrorKind::unsupported, "tensor '%s': expected type F32, found %s", name.c_str(),
         type_info(t.type).name);
  return t;
}

}  // namespace

std::string block_name(int32_t layer, std::string_view name) {
  return "blk." + std::to_string(layer) + "." + std::string(name);
}

Builder::Builder(const gguf::File& file, Config config) : file_(file), config_(std::move(config)) {
  plan_.n_layers = config_.n_layers;
  plan_.n_embd = config_.n_embd;
  plan_.n_vocab = config_.n_vocab;
  plan_.n_ctx_train = config_.n_ctx_train;
  plan_.ops.reserve(static_cast<size_t>(config_.n_layers) * 20 + 8);
  read_.resize(file_.tensors().size());
}

WeightId Builder::bind(const gguf::TensorInfo& t) {
  read_[static_cast<size_t>(&t - file_.tensors().data())] = true;
  Weight w;
  w.name = std::string(t.name);
  w.type = t.type;
  for (int i = 0; i < 4; ++i) w.ne[i] = static_cast<int64_t>(t.ne[i]);
  w.data = t.data;
  w.nbytes = t.nbytes;
  w.fd = file_.parts()[t.part].fd;
  w.offset = t.offset;
  plan_.weights.push_back(std::move(w));
  return static_cast<WeightId>(plan_.weights.size()) - 1;
}

WeightId Builder::matrix(const std::string& name, int64_t n_in, int64_t n_out) {
  return bind(require(file_, name, n_in, n_out));
}

WeightId Builder::stack(const std::string& name, int64_t n_in, int64_t n_out, int64_t n_members) {
  return bind(require(file_, name, n_in, n_out, n_members));
}

WeightId Builder::indices(const std::string& name, int64_t n_in, int64_t n_out) {
  const gguf::TensorInfo* t = file_.find_tensor(name);
  if (!t)
    fail(ErrorKind::gguf, "tensor '%s' is missing (expected I32 of shape [%lld, %lld])", name.c_str(),
         static_cast<long long>(n_in), static_cast<long long>(n_out));
  if (t->type != GgmlType::I32 || t->ne[0] != static_cast<uint64_t>(n_in) ||
      t->ne[1] != static_cast<uint64_t>(n_out))
    fail(ErrorKind::gguf, "tensor '%s': expected I32 of shape [%lld, %lld], found %s of shape %s",
         name.c_str(), static_cast<long long>(n_in), static_cast<long long>(n_out), type_info(t->type).name,
         shape_text(t->ne, t->n_dims).c_str());
  return bind(*t);
}

WeightId Builder::vector(const std::string& name, int64_t n) { return bind(require_f32(file_, name, n)); }

std::vector<float> Builder::host_vector(const std::string& name, int64_t n) {
  std::vector<float> v(static_cast<size_t>(n));
  const gguf::TensorInfo& t = require_f32(file_, name, n);
  read_[static_cast<size_t>(&t - file_.tensors().data())] = true;
  std::memcpy(v.data(), t.data, v.size() * sizeof(float));
  return v;
}

WeightId Builder::optional_vector(const std::string& name, int64_t n) {
  return has(name) ? vector(name, n) : kNone;
}

ValueId Builder::value(int32_t width, Rows rows) {
  plan_.values.push_back({width, rows});
  return static_cast<ValueId>(plan_.values.size()) - 1;
}

template <class T>
ValueId Builder::push(int32_t width, Rows rows, T op) {
  const ValueId out = value(width, rows);
  op.out = out;
  plan_.ops.emplace_back(std::move(op));
  return out;
}

ValueId Builder::embed(WeightId table) { return push(config_.n_embd, Rows::all, Embed{table, kNone}); }

ValueId Builder::rms_norm(ValueId x, WeightId w, int32_t group, float eps) {
  return push(spec(x).width, spec(x).rows, RmsNorm{x, kNone, w, group, eps > 0 ? eps : config_.norm_eps});
}

ValueId Builder::linear(ValueId x, WeightId w, WeightId bias) {
  const auto n_out = static_cast<int32_t>(plan_.weights[static_cast<size_t>(w)].n_out());
  return push(n_out, spec(x).rows, Linear{x, kNone, w, bias});
}

RopeId Builder::rope_table(RopeSpec::Pairing pairing, const std::vector<float>& divisors) {
  return rope_table(
      {config_.n_rot, pairing, rope_inv_freq(config_, divisors), rope_magnitude(config_.rope_scaling)});
}

RopeId Builder::rope_table(RopeSpec spec) {
  plan_.ropes.push_back(std::move(spec));
  return static_cast<RopeId>(plan_.ropes.size()) - 1;
}

ValueId Builder::rope(ValueId x, RopeId table, int32_t n_heads) {
  return push(spec(x).width, spec(x).rows, Rope{x, kNone, table, n_heads});
}

ValueId Builder::attention(int32_t layer, ValueId q, ValueId k, ValueId v) {
  const Config& c = config_;
  const auto state = static_cast<StateId>(plan_.states.size());
  plan_.states.push_back(
      {block_name(layer, "k"), StateSpec::Kind::per_token, c.n_kv_heads * c.head_dim, false});
  plan_.states.push_back(
      {block_name(layer, "v"), StateSpec::Kind::per_token, c.n_kv_heads * c.v_head_dim, false});
  return push(c.n_heads * c.v_head_dim, spec(q).rows,
              Attention{q, k, v, kNone, state, state + 1, c.n_heads, c.n_kv_heads, c.head_dim, c.v_head_dim,
                        c.attn_scale});
}

ValueId Builder::swiglu(ValueId gate, ValueId up) {
  return push(spec(gate).width, spec(gate).rows, SwiGlu{gate, up, kNone});
}

ValueId Builder::add(ValueId a, ValueId b) { return push(spec(a).width, spec(a).rows, Add{a, b, kNone}); }

ValueId Builder::sigmoid_gate(ValueId x, ValueId gate) {
  return push(spec(x).width, spec(x).rows, SigmoidGate{x, gate, kNone});
}

ValueId Builder::moe(Moe op) { return push(spec(op.in).width, spec(op.in).rows, op); }

ValueId Builder::latent_attention(int32_t layer, LatentAttention op) {
  op.state = static_cast<StateId>(plan_.states.size());
  plan_.states.push_back(
      {block_name(layer, "latent"), StateSpec::Kind::per_token, op.n_latent + op.rope_dim, false});
  return push(op.n_heads * op.v_head_dim, spec(op.q).rows, op);
}

ValueId Builder::head_slice(ValueId x, int32_t n_heads, int32_t begin, int32_t count) {
  return push(n_heads * count, spec(x).rows, HeadSlice{x, kNone, n_heads, begin, count});
}

ValueId Builder::concat(ValueId a, ValueId b) {
  return push(spec(a).width + spec(b).width, spec(a).rows, Concat{a, b, kNone});
}

ValueId Builder::gated_delta(int32_t layer, GatedDelta op) {
  op.conv_state = static_cast<StateId>(plan_.states.size());
  op.delta_state = op.conv_state + 1;
  plan_.states.push_back(
      {block_name(layer, "conv"), StateSpec::Kind::fixed, (op.n_taps - 1) * spec(op.qkv).width, true});
  plan_.states.push_back(
      {block_name(layer, "delta"), StateSpec::Kind::fixed, spec(op.z).width * op.key_dim, true});
  return push(spec(op.z).width, spec(op.z).rows, op);
}

ValueId Builder::layer_norm(ValueId x, WeightId w, WeightId bias, float eps) {
  return push(spec(x).width, spec(x).rows, LayerNorm{x, kNone, w, bias, eps});
}

StateId Builder::state_per_token(int32_t layer, const char* name, int32_t width) {
  return state(layer, name, StateSpec::Kind::per_token, width, false);
}

ValueId Builder::indexer(int32_t layer, Indexer op) {
  if (op.key != kNone) op.state = state_per_token(layer, "index", op.head_dim);
  return push(op.top_k, spec(op.query).rows, op);
}

StateId Builder::state(int32_t layer, const char* name, StateSpec::Kind kind, int32_t width,
                       bool always_f32) {
  plan_.states.push_back({block_name(layer, name), kind, width, always_f32});
  return static_cast<StateId>(plan_.states.size()) - 1;
}

ValueId Builder::repeat(ValueId x, int32_t n) {
  return push(spec(x).width * n, spec(x).rows, Repeat{x, kNone, n});
}

ValueId Builder::stream_norm(ValueId x, WeightId w) {
  return push(spec(x).width, spec(x).rows, StreamNorm{x, kNone, w, config_.n_embd, config_.norm_eps});
}

ValueId Builder::silu(ValueId x, float scale) {
  return push(spec(x).width, spec(x).rows, Silu{x, kNone, scale});
}

ValueId Builder::stream_mix(ValueId x, ValueId gate) {
  return push(config_.n_embd, spec(x).rows, StreamMix{x, gate, kNone, spec(x).width / config_.n_embd});
}

ValueId Builder::stream_inject(ValueId x, ValueId logits, ValueId block) {
  return push(spec(x).width, spec(x).rows, StreamInject{x, logits, block, kNone, spec(logits).width});
}

ValueId Builder::stream_gate(ValueId key, ValueId query, ValueId value) {
  return push(spec(key).width, spec(key).rows,
              StreamGate{key, query, value, kNone, spec(key).width / spec(value).width});
}

ValueId Builder::ngram_embed(int32_t layer, NgramEmbed op) {
  op.tokens =
      state(layer, "tokens", StateSpec::Kind::fixed, static_cast<int32_t>(op.multipliers.size()) - 1, true);
  const int64_t width =
      plan_.weights[static_cast<size_t>(op.table)].n_in() * static_cast<int64_t>(op.sizes.size());
  return push(static_cast<int32_t>(width), Rows::all, std::move(op));
}

ValueId Builder::causal_conv(int32_t layer, ValueId x, WeightId w, int32_t n_taps, int32_t dilation) {
  const StateId history =
      state(layer, "history", StateSpec::Kind::fixed, (n_taps - 1) * dilation * spec(x).width, true);
  return push(spec(x).width, spec(x).rows, CausalConv{x, kNone, w, history, n_taps, dilation});
}

ValueId Builder::block_attention(int32_t layer, BlockAttention op) {
  op.k_state = state(layer, "k", StateSpec::Kind::per_token, spec(op.k).width, false);
  op.v_state = state(layer, "v", StateSpec::Kind::per_token, spec(op.v).width, false);
  op.index_state = state(layer, "index", StateSpec::Kind::per_token, spec(op.index_k).width, false);
  return push(op.n_heads * op.v_head_dim, spec(op.q).rows, op);
}

void Builder::compressor(Compressor op) { plan_.ops.emplace_back(op); }

ValueId Builder::window_attention(WindowAttention op) { return push(spec(op.q).width, spec(op.q).rows, op); }

ValueId Builder::unit_norm(ValueId x, int32_t group, float eps) {
  return push(spec(x).width, spec(x).rows, UnitNorm{x, kNone, group, eps});
}

ValueId Builder::tail_rope(ValueId x, RopeId table, int32_t n_heads, bool inverse) {
  return push(spec(x).width, spec(x).rows, TailRope{x, kNone, table, n_heads, inverse});
}

ValueId Builder::grouped_linear(ValueId x, WeightId w, int32_t n_groups) {
  const auto n_out = static_cast<int32_t>(plan_.weights[static_cast<size_t>(w)].n_out());
  return push(n_out, spec(x).rows, GroupedLinear{x, kNone, w, n_groups});
}

ValueId Builder::clamped_swiglu(ValueId gate, ValueId up, float limit) {
  if (limit == 0) return swiglu(gate, up);
  return push(spec(gate).width, spec(gate).rows, ClampedSwiGlu{gate, up, kNone, limit});
}

ValueId Builder::hyper_weights(HyperWeights op) { return push(spec(op.in).width, spec(op.in).rows, op); }

ValueId Builder::hyper_read(ValueId streams, ValueId weights, int32_t n_streams) {
  return push(spec(streams).width / n_streams, spec(streams).rows,
              HyperRead{streams, weights, kNone, n_streams});
}

ValueId Builder::hyper_write(ValueId streams, ValueId weights, ValueId x, int32_t n_streams) {
  return push(spec(streams).width, spec(streams).rows, HyperWrite{streams, weights, x, kNone, n_streams});
}

ValueId Builder::select_outputs(ValueId x) {
  return push(spec(x).width, Rows::outputs, SelectOutputs{x, kNone});
}

void Builder::head(ValueId x, WeightId w) { plan_.ops.emplace_back(Head{x, w, kNone}); }

// A bias, a norm or a scale that the steps know nothing of would give other logits than the model's, and no
// sign of it. Blocks behind the last layer predict further tokens.
void Builder::check_nothing_is_left() const {
  for (size_t i = 0; i < read_.size(); ++i) {
    const std::string_view name = file_.tensors()[i].name;
    const auto begins = [&](const std::string& s) { return name.substr(0, s.size()) == s; };
    if (read_[i] || std::any_of(unread_.begin(), unread_.end(), begins)) continue;
    if (name.substr(0, 4) == "blk." && std::atoll(std::string(name.substr(4)).c_str()) >= config_.n_layers)
      continue;
    fail(ErrorKind::unsupported_architecture,
         "tensor '%s': not one that %s is known to have, so what it does is not computed",
         std::string(name).c_str(), config_.arch.c_str());
  }
}

Plan Builder::finish() && {
  check_nothing_is_left();
  return std::move(plan_);
}

}  // namespace reflex
