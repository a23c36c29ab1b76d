// From a plan to steps: which ops are needed, which are done together, where values live.
//
// Fusions: linear maps of one input share its preparation; a norm whose only readers are those maps
// is part of it; a residual add and SwiGLU ride on the product that feeds them; per-head norm,
// rotary embedding and the state's write are one step per attention. What fits no pattern is a step
// of its own, so any valid plan runs.
#include <algorithm>

#include "backend/cpu/steps.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

constexpr int64_t kAlignFloats = 16;  // one cache line

const float* vector_f32(const Weight& w, int64_t n, Constants& constants) {
  if (w.type == GgmlType::F32 && reinterpret_cast<uintptr_t>(w.data) % alignof(float) == 0)
    return static_cast<const float*>(w.data);
  std::vector<float>& v = constants.vectors.emplace_back(static_cast<size_t>(n));
  dequantize_row(w.type, w.data, v.data(), static_cast<size_t>(n));
  return v.data();
}

class StepBuilder {
 public:
  StepBuilder(const Plan& plan, bool with_head, Constants& constants)
      : plan_(plan), with_head_(with_head), constants_(constants) {}

  StepList build() {
    find_needed();
    find_uses();
    mark_attention_chains();
    for (size_t i = 0; i < plan_.ops.size(); ++i)
      if (needed_[i] && !done_[i]) std::visit([&](const auto& op) { emit(op, i); }, plan_.ops[i]);
    return std::move(list_);
  }

 private:
  // ---- what is needed ------------------------------------------------------------------

  template <class F>
  static void for_inputs(const Op& op, bool out_needed, F f) {
    struct Visitor {
      bool out_needed;
      F& f;
      void operator()(const Embed&) {}
      void operator()(const RmsNorm& o) { f(o.in); }
      void operator()(const Linear& o) { f(o.in); }
      void operator()(const Rope& o) { f(o.in); }
      void operator()(const Attention& o) {
        if (out_needed) f(o.q);
        f(o.k);
        f(o.v);
      }
      void operator()(const SwiGlu& o) { f(o.gate), f(o.up); }
      void operator()(const Add& o) { f(o.a), f(o.b); }
      void operator()(const SelectOutputs& o) { f(o.in); }
      void operator()(const Head& o) { f(o.in); }
      void operator()(const SigmoidGate& o) { f(o.in), f(o.gate); }
      void operator()(const Moe& o) { f(o.in), f(o.router); }
      void operator()(const LatentAttention& o) {
        if (out_needed) f(o.q);
        if (out_needed && o.selection != kNone) f(o.selection);
        f(o.kv);
      }
      void operator()(const LayerNorm& o) { f(o.in); }
      void operator()(const Indexer& o) {
        if (out_needed) f(o.query), f(o.weights);
        if (o.key != kNone) f(o.key);
      }
      void operator()(const Compressor& o) { f(o.kv), f(o.gate); }
      void operator()(const WindowAttention& o) {
        if (out_needed) f(o.q);
        if (out_needed && o.selection != kNone) f(o.selection);
        f(o.kv);
      }
      void operator()(const UnitNorm& o) { f(o.in); }
      void operator()(const TailRope& o) { f(o.in); }
      void operator()(const GroupedLinear& o) { f(o.in); }
      void operator()(const ClampedSwiGlu& o) { f(o.gate), f(o.up); }
      void operator()(const HyperWeights& o) { f(o.in); }
      void operator()(const HyperRead& o) { f(o.streams), f(o.weights); }
      void operator()(const HyperWrite& o) { f(o.streams), f(o.weights), f(o.in); }
      void operator()(const HeadSlice& o) { f(o.in); }
      void operator()(const Concat& o) { f(o.a), f(o.b); }
      void operator()(const GatedDelta& o) {
        if (out_needed) f(o.z);
        f(o.qkv), f(o.beta), f(o.alpha);
      }
      void operator()(const Repeat& o) { f(o.in); }
      void operator()(const StreamNorm& o) { f(o.in); }
      void operator()(const Silu& o) { f(o.in); }
      void operator()(const StreamMix& o) { f(o.in), f(o.gate); }
      void operator()(const StreamInject& o) { f(o.in), f(o.logits), f(o.block); }
      void operator()(const StreamGate& o) { f(o.key), f(o.query), f(o.value); }
      void operator()(const NgramEmbed&) {}
      void operator()(const CausalConv& o) { f(o.in); }
      void operator()(const BlockAttention& o) {
        if (out_needed) f(o.q), f(o.index_q);
        f(o.k), f(o.v), f(o.index_k);
      }
    };
    std::visit(Visitor{out_needed, f}, op);
  }

  static ValueId out_of(const Op& op) {
    return std::visit(
        [](const auto& o) {
          if constexpr (requires { o.out; })
            return o.out;
          else
            return kNone;
        },
        op);
  }

  static bool writes_state(const Op& op) {
    if (const auto* indexer = std::get_if<Indexer>(&op)) return indexer->key != kNone;
    return std::holds_alternative<Attention>(op) || std::holds_alternative<LatentAttention>(op) ||
           std::holds_alternative<GatedDelta>(op) || std::holds_alternative<Compressor>(op) ||
           std::holds_alternative<WindowAttention>(op) || std::holds_alternative<NgramEmbed>(op) ||
           std::holds_alternative<CausalConv>(op) || std::holds_alternative<BlockAttention>(op);
  }

  // Backwards from the head and from every write to a state.
  void find_needed() {
    needed_.assign(plan_.ops.size(), false);
    value_needed_.assign(plan_.values.size(), false);
    for (size_t i = plan_.ops.size(); i-- > 0;) {
      const Op& op = plan_.ops[i];
      const ValueId out = out_of(op);
      const bool out_needed = out != kNone && value_needed_[static_cast<size_t>(out)];
      const bool head = std::holds_alternative<Head>(op);
      needed_[i] = out_needed || writes_state(op) || (head && with_head_);
      if (needed_[i])
        for_inputs(op, out_needed, [&](ValueId v) { value_needed_[static_cast<size_t>(v)] = true; });
    }
  }

  void find_uses() {
    done_.assign(plan_.ops.size(), false);
    stored_.assign(plan_.values.size(), false);
    producer_.assign(plan_.values.size(), -1);
    uses_.assign(plan_.values.size(), {});
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (!needed_[i]) continue;
      const ValueId out = out_of(plan_.ops[i]);
      if (out != kNone) producer_[static_cast<size_t>(out)] = static_cast<int>(i);
      for_inputs(plan_.ops[i], out == kNone || value_needed_[static_cast<size_t>(out)],
                 [&](ValueId v) { uses_[static_cast<size_t>(v)].push_back(static_cast<int>(i)); });
    }
  }

  bool used_once(ValueId v) const { return uses_[static_cast<size_t>(v)].size() == 1; }

  template <class T>
  const T* producer(ValueId v) const {
    const int i = producer_[static_cast<size_t>(v)];
    return i < 0 ? nullptr : std::get_if<T>(&plan_.ops[static_cast<size_t>(i)]);
  }
  template <class T>
  const T* only_user(ValueId v) const {
    return used_once(v) ? std::get_if<T>(&plan_.ops[static_cast<size_t>(uses_[static_cast<size_t>(v)][0])])
                        : nullptr;
  }
  void mark_done(ValueId out) { done_[static_cast<size_t>(producer_[static_cast<size_t>(out)])] = true; }

  int32_t width(ValueId v) const { return plan_.values[static_cast<size_t>(v)].width; }
  const Weight& weight(WeightId w) const { return plan_.weights[static_cast<size_t>(w)]; }
  const float* bias(WeightId w, int64_t n) const {
    return w == kNone ? nullptr : vector_f32(weight(w), n, constants_);
  }
  Norm norm(const RmsNorm& op) const {
    return {vector_f32(weight(op.weight), op.group, constants_), op.group, op.eps};
  }

  // ---- attention -----------------------------------------------------------------------

  // Peels rope and per-head norm off the value an attention reads, marking them done.
  HeadsStep::Item peel(ValueId v, int32_t n_heads) {
    HeadsStep::Item item;
    item.in = v;
    item.n_heads = n_heads;
    if (const Rope* rope = producer<Rope>(item.in); rope && used_once(item.in) && rope->n_heads == n_heads) {
      mark_done(item.in);
      item.rope = rope->rope;
      item.in = rope->in;
    }
    if (const RmsNorm* n = producer<RmsNorm>(item.in);
        n && used_once(item.in) && !done_[static_cast<size_t>(producer_[static_cast<size_t>(item.in)])]) {
      mark_done(item.in);
      item.norm = norm(*n);
      item.in = n->in;
    }
    return item;
  }

  // Rope and norm come before the attention in the plan: they must know that it will do them.
  void mark_attention_chains() {
    chains_.resize(plan_.ops.size());
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (const auto* op = std::get_if<Attention>(&plan_.ops[i])) mark_chain(*op, chains_[i]);
      if (const auto* op = std::get_if<BlockAttention>(&plan_.ops[i])) mark_chain(*op, chains_[i]);
    }
  }

  template <class T>
  void mark_chain(const T& op, HeadsStep& chain) {
    const auto query = [&](ValueId v, int32_t n_heads) {
      HeadsStep::Item q = peel(v, n_heads);
      if (q.in == v) return;
      q.out = v;
      chain.items.push_back(q);
    };
    if (value_needed_[static_cast<size_t>(op.out)]) {
      query(op.q, op.n_heads);
      if constexpr (requires { op.index_q; }) query(op.index_q, op.index_heads);
    }
    HeadsStep::Item k = peel(op.k, op.n_kv_heads), v = peel(op.v, op.n_kv_heads);
    k.state = op.k_state;
    v.state = op.v_state;
    chain.items.push_back(k);
    chain.items.push_back(v);
  }

  void emit(const Attention& op, size_t i) {
    push(std::move(chains_[i]));
    if (value_needed_[static_cast<size_t>(op.out)]) push(AttentionStep{op});
  }

  // ---- matrix products -----------------------------------------------------------------

  // Whether every reader of the norm takes it prepared: then the norm is part of preparing.
  bool norm_is_prologue(const RmsNorm& op) const {
    if (op.group != width(op.out)) return false;
    const std::vector<int>& uses = uses_[static_cast<size_t>(op.out)];
    return std::all_of(uses.begin(), uses.end(), [&](int u) {
      const Op& user = plan_.ops[static_cast<size_t>(u)];
      return std::holds_alternative<Linear>(user) || std::holds_alternative<Head>(user);
    });
  }

  template <class T>
  void set_input(ValueId in, T& step) const {
    step.in = in;
    if (const RmsNorm* n = producer<RmsNorm>(in); n && norm_is_prologue(*n)) {
      step.in = n->in;
      step.norm = norm(*n);
    }
  }

  void emit(const Linear& op, size_t) {
    MatmulStep step;
    set_input(op.in, step);
    for (int u : uses_[static_cast<size_t>(op.in)]) {
      const Linear* l = std::get_if<Linear>(&plan_.ops[static_cast<size_t>(u)]);
      if (!l || done_[static_cast<size_t>(u)]) continue;
      done_[static_cast<size_t>(u)] = true;
      step.parts.push_back({l->weight, bias(l->bias, width(l->out)), l->out, kNone});
    }
    fuse_swiglu(step);
    for (size_t i = 0; i < step.parts.size(); ++i)
      if (static_cast<int>(i) != step.gate && static_cast<int>(i) != step.up) fuse_residual(step.parts[i]);
    push(std::move(step));
  }

  void fuse_swiglu(MatmulStep& step) {
    for (size_t g = 0; g < step.parts.size(); ++g) {
      const SwiGlu* op = only_user<SwiGlu>(step.parts[g].out);
      if (!op || op->gate != step.parts[g].out || !used_once(op->up)) continue;
      for (size_t u = 0; u < step.parts.size(); ++u) {
        if (u == g || step.parts[u].out != op->up) continue;
        step.gate = static_cast<int>(g);
        step.up = static_cast<int>(u);
        step.swiglu = op->out;
        mark_done(op->out);
        return;
      }
    }
  }

  void fuse_residual(LinearPart& part) {
    const Add* op = only_user<Add>(part.out);
    if (!op || op->a == op->b) return;
    const ValueId other = op->a == part.out ? op->b : op->a;
    if (!stored_[static_cast<size_t>(other)]) return;
    part.residual = other;
    part.out = op->out;
    mark_done(op->out);
  }

  void emit(const Head& op, size_t) {
    HeadStep step;
    set_input(op.in, step);
    step.weight = op.weight;
    step.bias = bias(op.bias, plan_.n_vocab);
    push(step);
  }

  void emit(const Moe& op, size_t) { push(MoeStep{op, bias(op.bias, op.n_experts)}); }

  void emit(const LatentAttention& op, size_t) {
    const Norm n{vector_f32(weight(op.norm), op.n_latent, constants_), op.n_latent, op.eps};
    push(LatentStep{op, n, value_needed_[static_cast<size_t>(op.out)]});
  }

  void emit(const HeadSlice& op, size_t) { push(HeadSliceStep{op}); }
  void emit(const Concat& op, size_t) { push(ConcatStep{op}); }

  void emit(const LayerNorm& op, size_t) {
    push(LayerNormStep{op, bias(op.weight, width(op.out)), bias(op.bias, width(op.out))});
  }

  void emit(const Indexer& op, size_t) { push(IndexerStep{op, value_needed_[static_cast<size_t>(op.out)]}); }

  void emit(const GatedDelta& op, size_t) {
    const auto f32 = [&](WeightId w) {
      return vector_f32(weight(w), weight(w).n_in() * weight(w).n_out(), constants_);
    };
    push(DeltaStep{op, f32(op.conv), f32(op.decay), f32(op.dt_bias), f32(op.norm),
                   value_needed_[static_cast<size_t>(op.out)]});
  }

  // ---- streams, n-grams, chosen blocks ---------------------------------------------------

  bool is_needed(ValueId v) const { return value_needed_[static_cast<size_t>(v)]; }
  const float* matrix_f32(WeightId w) const {
    return vector_f32(weight(w), weight(w).n_in() * weight(w).n_out(), constants_);
  }
  void emit(const StreamNorm& op, size_t) { push(StreamNormStep{op, matrix_f32(op.weight)}); }
  void emit(const NgramEmbed& op, size_t) { push(NgramStep{op, is_needed(op.out)}); }
  void emit(const CausalConv& op, size_t) { push(ConvStep{op, matrix_f32(op.weight), is_needed(op.out)}); }
  void emit(const BlockAttention& op, size_t i) {
    push(std::move(chains_[i]));
    push(BlockAttentionStep{op, matrix_f32(op.index_norm), is_needed(op.out)});
  }
  void emit(const Repeat& op, size_t) { push(RepeatStep{op}); }
  void emit(const Silu& op, size_t) { push(SiluStep{op}); }
  void emit(const StreamMix& op, size_t) { push(StreamMixStep{op}); }
  void emit(const StreamInject& op, size_t) { push(StreamInjectStep{op}); }
  void emit(const StreamGate& op, size_t) { push(StreamGateStep{op}); }

  // ---- of DeepSeek-V4 ------------------------------------------------------------------

  void emit(const Compressor& op, size_t) {
    push(CompressorStep{op, matrix_f32(op.ape), {matrix_f32(op.norm), op.head_dim, op.eps}});
  }
  void emit(const WindowAttention& op, size_t) {
    push(WindowStep{op, matrix_f32(op.sinks), value_needed_[static_cast<size_t>(op.out)]});
  }
  void emit(const UnitNorm& op, size_t) {
    const std::vector<float>& ones = constants_.vectors.emplace_back(static_cast<size_t>(op.group), 1.0f);
    push(HeadsStep{{{op.in, {ones.data(), op.group, op.eps}, kNone, 1, op.out, kNone}}});
  }
  void emit(const TailRope& op, size_t) { push(TailRopeStep{op}); }
  void emit(const GroupedLinear& op, size_t) { push(GroupedStep{op}); }
  void emit(const ClampedSwiGlu& op, size_t) { push(ClampedSwiGluStep{op}); }
  void emit(const HyperWeights& op, size_t) {
    push(HyperWeightsStep{op, matrix_f32(op.scale), matrix_f32(op.base)});
  }
  void emit(const HyperRead& op, size_t) { push(HyperReadStep{op}); }
  void emit(const HyperWrite& op, size_t) { push(HyperWriteStep{op}); }

  // ---- the rest, as they are -----------------------------------------------------------

  void emit(const Embed& op, size_t) { push(EmbedStep{op.table, op.out}); }
  void emit(const RmsNorm& op, size_t) {
    if (!norm_is_prologue(op)) push(HeadsStep{{{op.in, norm(op), kNone, 1, op.out, kNone}}});
  }
  void emit(const Rope& op, size_t) { push(HeadsStep{{{op.in, {}, op.rope, op.n_heads, op.out, kNone}}}); }
  void emit(const SwiGlu& op, size_t) { push(SwiGluStep{op.gate, op.up, op.out}); }
  void emit(const SigmoidGate& op, size_t) { push(SigmoidGateStep{op.in, op.gate, op.out}); }
  void emit(const Add& op, size_t) { push(AddStep{op.a, op.b, op.out}); }
  void emit(const SelectOutputs& op, size_t) { push(SelectStep{op.in, op.out}); }

  void push(Step step);

  const Plan& plan_;
  const bool with_head_;
  Constants& constants_;
  StepList list_;
  std::vector<bool> needed_, value_needed_, done_;
  std::vector<bool> stored_;  // values some emitted step has written
  std::vector<int> producer_;
  std::vector<std::vector<int>> uses_;
  std::vector<HeadsStep> chains_;  // of op i, an Attention
};

// ---- where values live -------------------------------------------------------------------

struct Touches {
  std::vector<ValueId> reads, writes;
};

Touches touches(const Step& step) {
  struct Visitor {
    Touches t;
    void operator()(const EmbedStep& s) { t.writes = {s.out}; }
    void operator()(const MatmulStep& s) {
      t.reads = {s.in};
      for (size_t i = 0; i < s.parts.size(); ++i) {
        const bool paired = static_cast<int>(i) == s.gate || static_cast<int>(i) == s.up;
        if (!paired) t.writes.push_back(s.parts[i].out);
        if (s.parts[i].residual != kNone) t.reads.push_back(s.parts[i].residual);
      }
      if (s.swiglu != kNone) t.writes.push_back(s.swiglu);
    }
    void operator()(const HeadsStep& s) {
      for (const HeadsStep::Item& i : s.items) {
        t.reads.push_back(i.in);
        if (i.out != kNone) t.writes.push_back(i.out);
      }
    }
    void operator()(const AttentionStep& s) {
      t.reads = {s.op.q};
      t.writes = {s.op.out};
    }
    void operator()(const AddStep& s) {
      t.reads = {s.a, s.b};
      t.writes = {s.out};
    }
    void operator()(const SwiGluStep& s) {
      t.reads = {s.gate, s.up};
      t.writes = {s.out};
    }
    void operator()(const SigmoidGateStep& s) {
      t.reads = {s.in, s.gate};
      t.writes = {s.out};
    }
    void operator()(const MoeStep& s) {
      t.reads = {s.op.in, s.op.router};
      t.writes = {s.op.out};
    }
    void operator()(const LatentStep& s) {
      t.reads = {s.op.kv};
      if (!s.with_output) return;
      t.reads.push_back(s.op.q);
      if (s.op.selection != kNone) t.reads.push_back(s.op.selection);
      t.writes = {s.op.out};
    }
    void operator()(const LayerNormStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const IndexerStep& s) {
      if (s.op.key != kNone) t.reads = {s.op.key};
      if (!s.with_output) return;
      t.reads.insert(t.reads.end(), {s.op.query, s.op.weights});
      t.writes = {s.op.out};
    }
    void operator()(const ConcatStep& s) {
      t.reads = {s.op.a, s.op.b};
      t.writes = {s.op.out};
    }
    void operator()(const CompressorStep& s) { t.reads = {s.op.kv, s.op.gate}; }
    void operator()(const WindowStep& s) {
      t.reads = {s.op.kv};
      if (!s.with_output) return;
      t.reads.push_back(s.op.q);
      if (s.op.selection != kNone) t.reads.push_back(s.op.selection);
      t.writes = {s.op.out};
    }
    void operator()(const TailRopeStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const GroupedStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const ClampedSwiGluStep& s) {
      t.reads = {s.op.gate, s.op.up};
      t.writes = {s.op.out};
    }
    void operator()(const HyperWeightsStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const HyperReadStep& s) {
      t.reads = {s.op.streams, s.op.weights};
      t.writes = {s.op.out};
    }
    void operator()(const HyperWriteStep& s) {
      t.reads = {s.op.streams, s.op.weights, s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const HeadSliceStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const DeltaStep& s) {
      t.reads = {s.op.qkv, s.op.beta, s.op.alpha};
      if (!s.with_output) return;
      t.reads.push_back(s.op.z);
      t.writes = {s.op.out};
    }
    void operator()(const RepeatStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const SiluStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const StreamNormStep& s) {
      t.reads = {s.op.in};
      t.writes = {s.op.out};
    }
    void operator()(const StreamMixStep& s) {
      t.reads = {s.op.in, s.op.gate};
      t.writes = {s.op.out};
    }
    void operator()(const StreamInjectStep& s) {
      t.reads = {s.op.in, s.op.logits, s.op.block};
      t.writes = {s.op.out};
    }
    void operator()(const StreamGateStep& s) {
      t.reads = {s.op.key, s.op.query, s.op.value};
      t.writes = {s.op.out};
    }
    void operator()(const NgramStep& s) {
      if (s.with_output) t.writes = {s.op.out};
    }
    void operator()(const ConvStep& s) {
      t.reads = {s.op.in};
      if (s.with_output) t.writes = {s.op.out};
    }
    void operator()(const BlockAttentionStep& s) {
      t.reads = {s.op.index_k};
      if (!s.with_output) return;
      t.reads.insert(t.reads.end(), {s.op.q, s.op.index_q});
      t.writes = {s.op.out};
    }
    void operator()(const SelectStep& s) {
      t.reads = {s.in};
      t.writes = {s.out};
    }
    void operator()(const HeadStep& s) { t.reads = {s.in}; }
  };
  Visitor v;
  std::visit(v, step);
  return std::move(v.t);
}

void StepBuilder::push(Step step) {
  for (ValueId v : touches(step).writes) stored_[static_cast<size_t>(v)] = true;
  list_.steps.push_back(std::move(step));
}

// First fit: each value takes the lowest place that no value alive with it holds. A step's results
// never share memory with what it reads.
void place_values(const Plan& plan, StepList& list) {
  struct Live {
    int64_t begin, end;
    size_t last_use;
    Rows rows;
  };
  std::vector<size_t> last_use(plan.values.size(), 0);
  std::vector<Touches> all;
  for (size_t i = 0; i < list.steps.size(); ++i) {
    all.push_back(touches(list.steps[i]));
    for (ValueId v : all[i].reads) last_use[static_cast<size_t>(v)] = i;
  }
  list.offset.assign(plan.values.size(), -1);
  std::vector<Live> live;
  for (size_t i = 0; i < all.size(); ++i) {
    std::erase_if(live, [&](const Live& l) { return l.last_use < i; });
    for (ValueId v : all[i].writes) {
      const ValueSpec& spec = plan.values[static_cast<size_t>(v)];
      const int64_t size = (spec.width + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
      std::sort(live.begin(), live.end(), [](const Live& a, const Live& b) { return a.begin < b.begin; });
      int64_t at = 0;
      for (const Live& l : live)
        if (l.rows == spec.rows && l.begin < at + size && at < l.end) at = l.end;
      list.offset[static_cast<size_t>(v)] = at;
      live.push_back({at, at + size, std::max(last_use[static_cast<size_t>(v)], i), spec.rows});
      int64_t& total = spec.rows == Rows::all ? list.all_floats : list.output_floats;
      total = std::max(total, at + size);
    }
  }
}

}  // namespace

StepList build_steps(const Plan& plan, bool with_head, Constants& constants) {
  StepList list = StepBuilder(plan, with_head, constants).build();
  place_values(plan, list);
  return list;
}

}  // namespace reflex::cpu
