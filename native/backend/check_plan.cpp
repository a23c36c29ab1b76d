// A plan against itself: ids in range, widths that fit, weights of the right shape and a type that
// can be computed with. After this no step needs to look again.
#include <algorithm>
#include <cstring>
#include <string>

#include "backend/backend.h"
#include "quant/dequantize.h"

namespace reflex {

namespace {

constexpr int32_t kMaxExactInteger = 1 << 24;  // up to which f32 holds every integer
constexpr int32_t kMaxStreams = 64;
int32_t hyper_width(int32_t n_streams) { return (2 + n_streams) * n_streams; }

class Checker {
 public:
  explicit Checker(const Plan& plan) : plan_(plan), written_(plan.values.size(), false) {}

  void run() {
    for (const ValueSpec& v : plan_.values)
      if (v.width < 1)
        fail(ErrorKind::unsupported, "plan: a value has width %d, expected 1 or more", v.width);
    for (index_ = 0; index_ < plan_.ops.size(); ++index_)
      std::visit([this](const auto& op) { check(op); }, plan_.ops[index_]);
  }

 private:
  [[noreturn]] void bad(const std::string& what) const {
    fail(ErrorKind::unsupported, "op %zu (%s): %s", index_, op_name(plan_.ops[index_]), what.c_str());
  }

  const ValueSpec& spec(ValueId v, const char* role) const {
    if (v < 0 || static_cast<size_t>(v) >= plan_.values.size())
      bad(format("%s is value %d, expected one of %zu", role, v, plan_.values.size()));
    return plan_.values[static_cast<size_t>(v)];
  }
  const ValueSpec& input(ValueId v, const char* role) const {
    const ValueSpec& s = spec(v, role);
    if (!written_[static_cast<size_t>(v)]) bad(format("%s (value %d) is read before it is written", role, v));
    return s;
  }
  const ValueSpec& output(ValueId v) {
    const ValueSpec& s = spec(v, "out");
    if (written_[static_cast<size_t>(v)]) bad(format("value %d is written twice", v));
    written_[static_cast<size_t>(v)] = true;
    return s;
  }
  void same(const ValueSpec& a, const ValueSpec& b, const char* role) const {
    if (a.width != b.width || a.rows != b.rows)
      bad(format("%s: expected width %d and the same rows, found width %d", role, b.width, a.width));
  }

  const Weight& weight(WeightId w, const char* role) const {
    if (w < 0 || static_cast<size_t>(w) >= plan_.weights.size())
      bad(format("%s is weight %d, expected one of %zu", role, w, plan_.weights.size()));
    return plan_.weights[static_cast<size_t>(w)];
  }
  // ne = {n_in, n_out, n_stack}, a computable type, whole blocks per row, and all the bytes there.
  void shape(WeightId id, const char* role, int64_t n_in, int64_t n_out, int64_t n_stack = 1) const {
    const Weight& w = weight(id, role);
    if (w.ne[0] != n_in || w.ne[1] != n_out || w.ne[2] != n_stack || w.ne[3] != 1)
      fail(ErrorKind::gguf,
           "tensor '%s' (%s): expected shape [%lld, %lld, %lld], found [%lld, %lld, %lld, %lld]",
           w.name.c_str(), role, static_cast<long long>(n_in), static_cast<long long>(n_out),
           static_cast<long long>(n_stack), static_cast<long long>(w.ne[0]), static_cast<long long>(w.ne[1]),
           static_cast<long long>(w.ne[2]), static_cast<long long>(w.ne[3]));
    const TypeInfo* type = find_type(static_cast<uint32_t>(w.type));
    if (!type || !can_dequantize(w.type))
      fail(ErrorKind::unsupported, "tensor '%s': type %s (%u) cannot be computed with", w.name.c_str(),
           type ? type->name : "unknown", static_cast<unsigned>(w.type));
    if (n_in % type->block_values != 0)
      fail(ErrorKind::gguf, "tensor '%s': rows of %lld values, expected a multiple of %u for type %s",
           w.name.c_str(), static_cast<long long>(n_in), type->block_values, type->name);
    const size_t need = row_bytes(w.type, static_cast<size_t>(n_in)) * static_cast<size_t>(n_out * n_stack);
    if (!w.data || w.nbytes < need)
      fail(ErrorKind::gguf, "tensor '%s': expected %zu bytes of data, found %zu", w.name.c_str(), need,
           w.data ? w.nbytes : 0);
  }
  void optional_vector(WeightId id, const char* role, int64_t n) const {
    if (id != kNone) shape(id, role, n, 1);
  }

  void check(const Embed& op) {
    const ValueSpec& out = output(op.out);
    shape(op.table, "table", out.width, plan_.n_vocab);
    if (out.rows != Rows::all) bad("out: expected all rows");
  }
  void check(const RmsNorm& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (op.group < 1 || in.width % op.group != 0)
      bad(format("group: expected a divisor of width %d, found %d", in.width, op.group));
    shape(op.weight, "weight", op.group, 1);
  }
  void check(const Linear& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& out = output(op.out);
    if (in.rows != out.rows) bad("out: expected the same rows as in");
    shape(op.weight, "weight", in.width, out.width);
    optional_vector(op.bias, "bias", out.width);
  }
  void check(const Rope& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (op.n_heads < 1 || in.width % op.n_heads != 0)
      bad(format("n_heads: expected a divisor of width %d, found %d", in.width, op.n_heads));
    rope_table(op.rope, in.width / op.n_heads);
  }
  void rope_table(RopeId id, int32_t head_dim) const {
    if (id < 0 || static_cast<size_t>(id) >= plan_.ropes.size())
      bad(format("rope is table %d, expected one of %zu", id, plan_.ropes.size()));
    const RopeSpec& r = plan_.ropes[static_cast<size_t>(id)];
    if (r.n_rot < 2 || r.n_rot % 2 != 0 || r.n_rot > head_dim)
      bad(format("n_rot: expected even and at most %d, found %d", head_dim, r.n_rot));
    if (r.inv_freq.size() != static_cast<size_t>(r.n_rot / 2))
      bad(format("inv_freq: expected %d values, found %zu", r.n_rot / 2, r.inv_freq.size()));
  }
  void check(const Attention& op) {
    const ValueSpec& q = input(op.q, "q");
    const ValueSpec& k = input(op.k, "k");
    const ValueSpec& v = input(op.v, "v");
    const ValueSpec& out = output(op.out);
    if (op.n_heads < 1 || op.n_kv_heads < 1 || op.n_heads % op.n_kv_heads != 0)
      bad(format("expected n_heads a multiple of n_kv_heads, found %d and %d", op.n_heads, op.n_kv_heads));
    width(q, "q", op.n_heads, op.head_dim);
    width(k, "k", op.n_kv_heads, op.head_dim);
    width(v, "v", op.n_kv_heads, op.v_head_dim);
    width(out, "out", op.n_heads, op.v_head_dim);
    if (k.rows != Rows::all || v.rows != Rows::all) bad("k and v: expected all rows");
    if (q.rows != out.rows) bad("out: expected the same rows as q");
    state(op.k_state, "k_state", k.width);
    state(op.v_state, "v_state", v.width);
  }
  void width(const ValueSpec& v, const char* role, int32_t heads, int32_t dim) const {
    if (dim < 1 || static_cast<int64_t>(heads) * dim != v.width)
      bad(format("%s: expected width %d * %d, found %d", role, heads, dim, v.width));
  }
  const StateSpec& per_token(StateId id, const char* role) const {
    if (id < 0 || static_cast<size_t>(id) >= plan_.states.size())
      bad(format("%s is state %d, expected one of %zu", role, id, plan_.states.size()));
    const StateSpec& s = plan_.states[static_cast<size_t>(id)];
    if (s.kind != StateSpec::Kind::per_token)
      bad(format("%s ('%s'): expected a state per token", role, s.name.c_str()));
    return s;
  }
  void state(StateId id, const char* role, int32_t want) const {
    const StateSpec& s = per_token(id, role);
    if (s.width != want)
      bad(format("%s ('%s'): expected %d values per token, found %d", role, s.name.c_str(), want, s.width));
  }
  void check(const SwiGlu& op) {
    const ValueSpec& gate = input(op.gate, "gate");
    same(input(op.up, "up"), gate, "up");
    same(output(op.out), gate, "out");
  }
  void check(const Add& op) {
    const ValueSpec& a = input(op.a, "a");
    same(input(op.b, "b"), a, "b");
    same(output(op.out), a, "out");
  }
  void check(const SigmoidGate& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& gate = input(op.gate, "gate");
    if (gate.rows != in.rows || (gate.width != 1 && gate.width != in.width))
      bad(format("gate: expected width 1 or %d and the same rows, found width %d", in.width, gate.width));
    same(output(op.out), in, "out");
  }
  void check(const Moe& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& router = input(op.router, "router");
    same(output(op.out), in, "out");
    if (router.rows != in.rows || op.n_experts < 1 || router.width != op.n_experts)
      bad(format("router: expected width %d and the same rows, found width %d", op.n_experts, router.width));
    if (op.n_used < 1 || op.n_used > op.n_experts)
      bad(format("n_used: expected 1 to %d, found %d", op.n_experts, op.n_used));
    if (op.n_groups < 1 || op.n_experts % op.n_groups != 0)
      bad(format("n_groups: expected a divisor of %d, found %d", op.n_experts, op.n_groups));
    if (op.n_groups_used < 1 || op.n_groups_used > op.n_groups ||
        op.n_experts / op.n_groups * op.n_groups_used < op.n_used)
      bad(format("n_groups_used: expected 1 to %d, holding %d experts, found %d", op.n_groups, op.n_used,
                 op.n_groups_used));
    const int64_t n_ff = weight(op.gate, "gate").n_out();
    shape(op.gate, "gate", in.width, n_ff, op.n_experts);
    shape(op.up, "up", in.width, n_ff, op.n_experts);
    shape(op.down, "down", n_ff, in.width, op.n_experts);
    optional_vector(op.bias, "bias", op.n_experts);
    if (op.of_token != kNone) experts_of_tokens(op);
  }
  // The file's numbers are indices: none may lead out of the stacks.
  void experts_of_tokens(const Moe& op) const {
    const Weight& w = weight(op.of_token, "of_token");
    const auto n = static_cast<size_t>(op.n_used) * static_cast<size_t>(plan_.n_vocab);
    if (w.type != GgmlType::I32 || w.ne[0] != op.n_used || w.ne[1] != plan_.n_vocab || w.ne[2] != 1 ||
        w.ne[3] != 1 || !w.data || w.nbytes < n * sizeof(int32_t))
      fail(ErrorKind::gguf, "tensor '%s' (of_token): expected I32 of shape [%d, %d], found [%lld, %lld]",
           w.name.c_str(), op.n_used, plan_.n_vocab, static_cast<long long>(w.ne[0]),
           static_cast<long long>(w.ne[1]));
    for (size_t i = 0; i < n; ++i) {
      int32_t e = 0;
      std::memcpy(&e, static_cast<const uint8_t*>(w.data) + i * sizeof e, sizeof e);
      if (e < 0 || e >= op.n_experts)
        fail(ErrorKind::gguf, "tensor '%s': expected experts below %d, found %d for token %zu",
             w.name.c_str(), op.n_experts, e, i / static_cast<size_t>(op.n_used));
    }
  }
  void check(const LatentAttention& op) {
    const ValueSpec& q = input(op.q, "q");
    const ValueSpec& kv = input(op.kv, "kv");
    const ValueSpec& out = output(op.out);
    if (op.n_heads < 1 || op.n_latent < 1 || op.nope_dim < 1 || op.rope_dim < 2 || op.v_head_dim < 1)
      bad(format("expected positive sizes, found %d heads of %d + %d, %d, latent %d", op.n_heads, op.nope_dim,
                 op.rope_dim, op.v_head_dim, op.n_latent));
    width(q, "q", op.n_heads, op.nope_dim + op.rope_dim);
    width(kv, "kv", 1, op.n_latent + op.rope_dim);
    width(out, "out", op.n_heads, op.v_head_dim);
    if (kv.rows != Rows::all) bad("kv: expected all rows");
    if (q.rows != out.rows) bad("out: expected the same rows as q");
    state(op.state, "state", kv.width);
    rope_table(op.rope, op.rope_dim);
    if (plan_.ropes[static_cast<size_t>(op.rope)].n_rot != op.rope_dim)
      bad(format("rope: expected to turn all %d values", op.rope_dim));
    shape(op.norm, "norm", op.n_latent, 1);
    if (op.selection != kNone) selection(op.selection, q.rows, 1);
    if (op.kv_b != kNone) {
      shape(op.kv_b, "kv_b", op.n_latent, static_cast<int64_t>(op.n_heads) * (op.nope_dim + op.v_head_dim));
    } else {
      shape(op.k_b, "k_b", op.nope_dim, op.n_latent, op.n_heads);
      shape(op.v_b, "v_b", op.n_latent, op.v_head_dim, op.n_heads);
    }
  }
  // Slots are read as they stand there: nobody but an Indexer may have written them.
  void selection(ValueId id, Rows rows, int32_t ratio) const {
    const ValueSpec& v = input(id, "selection");
    const bool indexed = std::any_of(plan_.ops.begin(), plan_.ops.end(), [&](const Op& o) {
      const auto* indexer = std::get_if<Indexer>(&o);
      return indexer && indexer->out == id && indexer->ratio == ratio;
    });
    if (!indexed || v.rows != rows)
      bad(format("selection: expected the result of an Indexer of ratio %d on the rows of q", ratio));
  }
  void check(const LayerNorm& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    shape(op.weight, "weight", in.width, 1);
    shape(op.bias, "bias", in.width, 1);
  }
  void check(const Indexer& op) {
    const ValueSpec& query = input(op.query, "query");
    const ValueSpec& weights = input(op.weights, "weights");
    const ValueSpec& out = output(op.out);
    if (op.n_heads < 1 || op.top_k < 1)
      bad(format("expected 1 or more heads and slots, found %d and %d", op.n_heads, op.top_k));
    if (op.key != kNone ? op.ratio != 1 : op.ratio < 2)
      bad(format("ratio: expected 1 with a key and more without, found %d", op.ratio));
    width(query, "query", op.n_heads, op.head_dim);
    width(weights, "weights", op.n_heads, 1);
    width(out, "out", 1, op.top_k);
    if (op.key != kNone) {
      const ValueSpec& key = input(op.key, "key");
      width(key, "key", 1, op.head_dim);
      if (key.rows != Rows::all) bad("key: expected all rows");
    }
    if (weights.rows != query.rows || out.rows != query.rows)
      bad("weights and out: expected the same rows as query");
    state(op.state, "state", op.head_dim);
  }
  void check(const Compressor& op) {
    const ValueSpec& kv = input(op.kv, "kv");
    same(input(op.gate, "gate"), kv, "gate");
    if (op.head_dim < 2 || op.ratio < 2 || op.offset < 0)
      bad(format("expected 2 or more values and rows, found %d, %d and offset %d", op.head_dim, op.ratio,
                 op.offset));
    width(kv, "kv", op.overlap ? 2 : 1, op.head_dim);
    if (kv.rows != Rows::all) bad("kv and gate: expected all rows");
    shape(op.ape, "ape", kv.width, op.ratio);
    shape(op.norm, "norm", op.head_dim, 1);
    rope_table(op.rope, op.head_dim);
    state(op.raw, "raw", 2 * kv.width);
    const StateSpec& entries = per_token(op.entries, "entries");
    if (entries.width - op.head_dim < op.offset)
      bad(format("entries ('%s'): expected room for %d values from %d on, found %d per token",
                 entries.name.c_str(), op.head_dim, op.offset, entries.width));
  }
  void check(const WindowAttention& op) {
    const ValueSpec& q = input(op.q, "q");
    const ValueSpec& kv = input(op.kv, "kv");
    same(output(op.out), q, "out");
    if (op.n_heads < 1 || op.window < 1 || op.ratio < 0 || op.ratio == 1)
      bad(format("expected heads, a window and no ratio of 1, found %d, %d and %d", op.n_heads, op.window,
                 op.ratio));
    width(q, "q", op.n_heads, op.head_dim);
    width(kv, "kv", 1, op.head_dim);
    if (kv.rows != Rows::all) bad("kv: expected all rows");
    shape(op.sinks, "sinks", op.n_heads, 1);
    state(op.state, "state", (op.ratio > 0 ? 2 : 1) * op.head_dim);
    if (op.selection == kNone) return;
    if (op.ratio == 0) bad("selection: expected none without a ratio");
    selection(op.selection, q.rows, op.ratio);
  }
  void check(const UnitNorm& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (op.group < 1 || in.width % op.group != 0)
      bad(format("group: expected a divisor of width %d, found %d", in.width, op.group));
  }
  void check(const TailRope& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (op.n_heads < 1 || in.width % op.n_heads != 0)
      bad(format("n_heads: expected a divisor of width %d, found %d", in.width, op.n_heads));
    rope_table(op.rope, in.width / op.n_heads);
  }
  void check(const GroupedLinear& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& out = output(op.out);
    if (op.n_groups < 1 || in.width % op.n_groups != 0 || out.width % op.n_groups != 0 || in.rows != out.rows)
      bad(format("n_groups: expected a divisor of widths %d and %d on the same rows, found %d", in.width,
                 out.width, op.n_groups));
    shape(op.weight, "weight", in.width / op.n_groups, out.width);
  }
  void check(const ClampedSwiGlu& op) {
    const ValueSpec& gate = input(op.gate, "gate");
    same(input(op.up, "up"), gate, "up");
    same(output(op.out), gate, "out");
    if (!(op.limit > 0)) bad("limit: expected a positive number");
  }
  void check(const HyperWeights& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (op.n_streams < 1 || op.n_streams > kMaxStreams || op.n_iterations < 1)
      bad(format("expected 1 to %d streams and 1 or more iterations, found %d and %d", kMaxStreams,
                 op.n_streams, op.n_iterations));
    const bool pre_alone = in.width == op.n_streams;
    if (!pre_alone && in.width != hyper_width(op.n_streams))
      bad(format("in: expected width %d or %d, found %d", op.n_streams, hyper_width(op.n_streams), in.width));
    shape(op.scale, "scale", pre_alone ? 1 : 3, 1);
    shape(op.base, "base", in.width, 1);
  }
  void check(const HyperRead& op) {
    const ValueSpec& streams = input(op.streams, "streams");
    const ValueSpec& weights = input(op.weights, "weights");
    const ValueSpec& out = output(op.out);
    if (op.n_streams < 1 || weights.width < op.n_streams)
      bad(format("weights: expected %d or more, found %d", op.n_streams, weights.width));
    width(streams, "streams", op.n_streams, out.width);
    if (weights.rows != streams.rows || out.rows != streams.rows) bad("expected the same rows in all");
  }
  void check(const HyperWrite& op) {
    const ValueSpec& streams = input(op.streams, "streams");
    const ValueSpec& weights = input(op.weights, "weights");
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), streams, "out");
    if (op.n_streams < 1 || weights.width != hyper_width(op.n_streams))
      bad(format("weights: expected %d, found %d", hyper_width(op.n_streams), weights.width));
    width(streams, "streams", op.n_streams, in.width);
    if (weights.rows != streams.rows || in.rows != streams.rows) bad("expected the same rows in all");
  }
  void check(const HeadSlice& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& out = output(op.out);
    if (op.n_heads < 1 || in.width % op.n_heads != 0)
      bad(format("n_heads: expected a divisor of width %d, found %d", in.width, op.n_heads));
    if (op.begin < 0 || op.count < 1 || op.begin > in.width / op.n_heads - op.count)
      bad(format("begin and count: expected a part of %d values, found %d and %d", in.width / op.n_heads,
                 op.begin, op.count));
    width(out, "out", op.n_heads, op.count);
    if (in.rows != out.rows) bad("out: expected the same rows as in");
  }
  void check(const Concat& op) {
    const ValueSpec& a = input(op.a, "a");
    const ValueSpec& b = input(op.b, "b");
    const ValueSpec& out = output(op.out);
    if (a.rows != out.rows || b.rows != out.rows) bad("a and b: expected the same rows as out");
    if (static_cast<int64_t>(a.width) + b.width != out.width)
      bad(format("out: expected width %d + %d, found %d", a.width, b.width, out.width));
  }
  void check(const GatedDelta& op) {
    const ValueSpec& qkv = input(op.qkv, "qkv");
    const ValueSpec& z = input(op.z, "z");
    const ValueSpec& beta = input(op.beta, "beta");
    const ValueSpec& alpha = input(op.alpha, "alpha");
    if (op.n_key_heads < 1 || op.n_value_heads < 1 || op.n_value_heads % op.n_key_heads != 0)
      bad(format("expected n_value_heads a multiple of n_key_heads, found %d and %d", op.n_value_heads,
                 op.n_key_heads));
    if (op.key_dim < 1 || op.value_dim < 1 || op.n_taps < 2)
      bad(format("expected heads of 1 or more values and 2 or more taps, found %d, %d and %d", op.key_dim,
                 op.value_dim, op.n_taps));
    width(z, "z", op.n_value_heads, op.value_dim);
    same(output(op.out), z, "out");
    width(beta, "beta", op.n_value_heads, 1);
    width(alpha, "alpha", op.n_value_heads, 1);
    width(qkv, "qkv", 1, 2 * op.n_key_heads * op.key_dim + op.n_value_heads * op.value_dim);
    if (qkv.rows != Rows::all || beta.rows != Rows::all || alpha.rows != Rows::all)
      bad("qkv, beta and alpha: expected all rows");
    shape(op.conv, "conv", op.n_taps, qkv.width);
    shape(op.decay, "decay", op.n_value_heads, 1);
    shape(op.dt_bias, "dt_bias", op.n_value_heads, 1);
    shape(op.norm, "norm", op.value_dim, 1);
    fixed_state(op.conv_state, "conv_state", static_cast<int64_t>(op.n_taps - 1) * qkv.width);
    fixed_state(op.delta_state, "delta_state", static_cast<int64_t>(z.width) * op.key_dim);
  }
  void fixed_state(StateId id, const char* role, int64_t want) const {
    if (id < 0 || static_cast<size_t>(id) >= plan_.states.size())
      bad(format("%s is state %d, expected one of %zu", role, id, plan_.states.size()));
    const StateSpec& s = plan_.states[static_cast<size_t>(id)];
    if (s.kind != StateSpec::Kind::fixed || s.width != want || !s.always_f32)
      bad(format("%s ('%s'): expected %lld fixed f32 values, found %d", role, s.name.c_str(),
                 static_cast<long long>(want), s.width));
  }
  // A value of n streams, and one stream of it.
  void streams(const ValueSpec& all, const char* role, int32_t n, const ValueSpec& one) const {
    if (n < 1 || static_cast<int64_t>(one.width) * n != all.width || one.rows != all.rows)
      bad(format("%s: expected %d streams of width %d and the same rows, found width %d", role, n, one.width,
                 all.width));
  }
  void check(const Repeat& op) {
    const ValueSpec& in = input(op.in, "in");
    streams(output(op.out), "out", op.n, in);
  }
  void check(const StreamNorm& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (op.group < 1 || in.width % op.group != 0)
      bad(format("group: expected a divisor of width %d, found %d", in.width, op.group));
    shape(op.weight, "weight", in.width, 1);
  }
  void check(const Silu& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
  }
  void check(const StreamMix& op) {
    const ValueSpec& in = input(op.in, "in");
    same(input(op.gate, "gate"), in, "gate");
    streams(in, "in", op.n_streams, output(op.out));
  }
  void check(const StreamInject& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& logits = input(op.logits, "logits");
    streams(in, "in", op.n_streams, input(op.block, "block"));
    if (logits.width != op.n_streams || logits.rows != in.rows)
      bad(format("logits: expected width %d and the same rows, found width %d", op.n_streams, logits.width));
    same(output(op.out), in, "out");
  }
  void check(const StreamGate& op) {
    const ValueSpec& key = input(op.key, "key");
    same(input(op.query, "query"), key, "query");
    streams(key, "key", op.n_streams, input(op.value, "value"));
    same(output(op.out), key, "out");
  }
  void check(const NgramEmbed& op) {
    const ValueSpec& out = output(op.out);
    const size_t heads = op.sizes.size(), grams = op.multipliers.size();
    if (out.rows != Rows::all) bad("out: expected all rows");
    if (grams < 2 || heads < 1 || heads % (grams - 1) != 0 || op.offsets.size() != heads)
      bad(format(
          "expected 2 or more multipliers and as many heads for each n-gram, found %zu, %zu sizes and %zu "
          "offsets",
          grams, heads, op.offsets.size()));
    if (static_cast<size_t>(out.width) % heads != 0)
      bad(format("out: expected a multiple of the %zu heads, found width %d", heads, out.width));
    const int64_t rows = weight(op.table, "table").n_out();
    shape(op.table, "table", out.width / static_cast<int64_t>(heads), rows);
    for (size_t h = 0; h < heads; ++h)
      if (op.sizes[h] < 1 || op.offsets[h] > static_cast<uint64_t>(rows) ||
          op.sizes[h] > static_cast<uint64_t>(rows) - op.offsets[h])
        bad(format("head %zu: expected rows within the %lld of tensor '%s', found %llu from %llu", h,
                   static_cast<long long>(rows), weight(op.table, "table").name.c_str(),
                   static_cast<unsigned long long>(op.sizes[h]),
                   static_cast<unsigned long long>(op.offsets[h])));
    if (plan_.n_vocab >= kMaxExactInteger)
      bad(format("tokens: expected ids below %d, which f32 holds, found %d", kMaxExactInteger,
                 plan_.n_vocab));
    fixed_state(op.tokens, "tokens", static_cast<int64_t>(grams) - 1);
  }
  void check(const CausalConv& op) {
    const ValueSpec& in = input(op.in, "in");
    same(output(op.out), in, "out");
    if (in.rows != Rows::all) bad("in: expected all rows");
    if (op.n_taps < 2 || op.dilation < 1)
      bad(format("expected 2 or more taps, 1 or more apart, found %d and %d", op.n_taps, op.dilation));
    shape(op.weight, "weight", op.n_taps, in.width);
    fixed_state(op.history, "history", (op.n_taps - 1ll) * op.dilation * in.width);
  }
  void check(const BlockAttention& op) {
    const ValueSpec& q = input(op.q, "q");
    const ValueSpec& k = input(op.k, "k");
    const ValueSpec& v = input(op.v, "v");
    const ValueSpec& index_q = input(op.index_q, "index_q");
    const ValueSpec& index_k = input(op.index_k, "index_k");
    const ValueSpec& out = output(op.out);
    if (op.n_heads < 1 || op.n_kv_heads < 1 || op.n_heads % op.n_kv_heads != 0)
      bad(format("expected n_heads a multiple of n_kv_heads, found %d and %d", op.n_heads, op.n_kv_heads));
    if (op.index_heads < 1 || op.block_size < 1 || op.n_blocks < 1)
      bad(format("expected 1 or more index heads, blocks and tokens of a block, found %d, %d and %d",
                 op.index_heads, op.n_blocks, op.block_size));
    width(q, "q", op.n_heads, op.head_dim);
    width(k, "k", op.n_kv_heads, op.head_dim);
    width(v, "v", op.n_kv_heads, op.v_head_dim);
    width(out, "out", op.n_heads, op.v_head_dim);
    width(index_q, "index_q", op.index_heads, op.index_dim);
    width(index_k, "index_k", 1, op.index_dim);
    if (k.rows != Rows::all || v.rows != Rows::all || index_k.rows != Rows::all)
      bad("k, v and index_k: expected all rows");
    if (q.rows != out.rows || q.rows != index_q.rows) bad("index_q and out: expected the same rows as q");
    state(op.k_state, "k_state", k.width);
    state(op.v_state, "v_state", v.width);
    state(op.index_state, "index_state", index_k.width);
    shape(op.index_norm, "index_norm", op.index_dim, 1);
    rope_table(op.index_rope, op.index_dim);
  }
  void check(const SelectOutputs& op) {
    const ValueSpec& in = input(op.in, "in");
    const ValueSpec& out = output(op.out);
    if (in.rows != Rows::all || out.rows != Rows::outputs) bad("expected all rows in and output rows out");
    if (in.width != out.width) bad(format("out: expected width %d, found %d", in.width, out.width));
  }
  void check(const Head& op) {
    const ValueSpec& in = input(op.in, "in");
    if (in.rows != Rows::outputs) bad("in: expected output rows");
    if (index_ + 1 != plan_.ops.size()) bad("expected to be the last op");
    shape(op.weight, "weight", in.width, plan_.n_vocab);
    optional_vector(op.bias, "bias", plan_.n_vocab);
  }

  const Plan& plan_;
  std::vector<bool> written_;
  size_t index_ = 0;
};

}  // namespace

const char* op_name(const Op& op) {
  static const char* const names[] = {"Embed",          "RmsNorm",     "Linear",        "Rope",
                                      "Attention",      "SwiGlu",      "Add",           "SelectOutputs",
                                      "Head",           "SigmoidGate", "Moe",           "LatentAttention",
                                      "HeadSlice",      "GatedDelta",  "LayerNorm",     "Indexer",
                                      "Repeat",         "StreamNorm",  "Silu",          "StreamMix",
                                      "StreamInject",   "StreamGate",  "NgramEmbed",    "CausalConv",
                                      "BlockAttention", "Concat",      "Compressor",    "WindowAttention",
                                      "UnitNorm",       "TailRope",    "GroupedLinear", "ClampedSwiGlu",
                                      "HyperWeights",   "HyperRead",   "HyperWrite"};
  static_assert(std::variant_size_v<Op> == sizeof(names) / sizeof(names[0]));
  return names[op.index()];
}

void check_plan(const Plan& plan) { Checker(plan).run(); }

}  // namespace reflex
