// From a plan to steps: which ops are done together, where values live.
//
// Fusions: linear maps of one input are one step; a norm whose only readers are such maps is part of
// them, also where output rows are selected in between (a norm is per row, so select(norm(x)) is
// norm(select(x))); SwiGLU and a residual add ride on the product that feeds them; per-head norm,
// rotary embedding, the state's write and attention are one step; so are the weights of a mix of streams,
// what they come from and what is read by them. What fits no pattern is a step of its own, so any valid
// plan runs.
#include <algorithm>

#include "backend/cuda/hyper_params.h"
#include "backend/cuda/operands.h"
#include "backend/cuda/params.h"
#include "backend/cuda/steps.h"
#include "backend/cuda/tile.h"

namespace reflex::cuda {

namespace {

constexpr int64_t kAlignFloats = 64;

class StepBuilder {
 public:
  explicit StepBuilder(const Plan& plan) : plan_(plan) { list_.values = plan.values; }

  StepList build() {
    find_uses();
    mark_attention_chains();
    mark_turns();
    mark_mixes();
    mark_mixtures();
    for (size_t i = 0; i < plan_.ops.size(); ++i)
      if (!done_[i]) std::visit([&](const auto& op) { emit(op, i); }, plan_.ops[i]);
    list_.select_of.assign(list_.values.size(), kNone);
    for (const Step& s : list_.steps)
      if (const auto* select = std::get_if<SelectStep>(&s)) list_.select_of[index(select->out)] = select->in;
    return std::move(list_);
  }

 private:
  static size_t index(int32_t id) { return static_cast<size_t>(id); }

  void find_uses() {
    done_.assign(plan_.ops.size(), false);
    producer_.assign(plan_.values.size(), -1);
    uses_.assign(plan_.values.size(), {});
    stored_.assign(plan_.values.size(), false);
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      std::visit(
          [&](const auto& o) {
            if constexpr (requires { o.out; }) producer_[index(o.out)] = static_cast<int>(i);
          },
          plan_.ops[i]);
      std::visit(
          [&](const auto& o) {
            for_inputs(o, [&](ValueId v) { uses_[index(v)].push_back(static_cast<int>(i)); });
          },
          plan_.ops[i]);
    }
  }

  bool used_once(ValueId v) const { return uses_[index(v)].size() == 1; }
  template <class T>
  const T* op_at(int i) const {
    return i < 0 ? nullptr : std::get_if<T>(&plan_.ops[index(i)]);
  }
  template <class T>
  const T* producer(ValueId v) const {
    return op_at<T>(producer_[index(v)]);
  }
  template <class T>
  const T* only_user(ValueId v) const {
    return used_once(v) ? op_at<T>(uses_[index(v)][0]) : nullptr;
  }
  bool made(ValueId v) const { return done_[index(producer_[index(v)])]; }
  void mark_done(ValueId out) { done_[index(producer_[index(out)])] = true; }
  int32_t width(ValueId v) const { return list_.values[index(v)].width; }
  static NormSpec norm(const RmsNorm& op) { return {op.weight, op.group, op.eps}; }

  // ---- attention ---------------------------------------------------------------------------

  // Peels rope and per-head norm off the value an attention reads, marking them done.
  HeadSpec peel(ValueId v, int32_t n_heads) {
    HeadSpec item{v, v, {}, kNone, n_heads};
    const int32_t head_dim = width(v) / n_heads;
    if (const Rope* rope = producer<Rope>(v); rope && used_once(v) && rope->n_heads == n_heads) {
      mark_done(v);
      item.rope = rope->rope;
      item.in = rope->in;
    }
    if (const RmsNorm* n = producer<RmsNorm>(item.in);
        n && used_once(item.in) && !made(item.in) && n->group == head_dim) {
      mark_done(item.in);
      item.norm = norm(*n);
      item.in = n->in;
    }
    return item;
  }

  AttentionStep chain_of(const Attention& op) {
    return {op, peel(op.q, op.n_heads), peel(op.k, op.n_kv_heads), peel(op.v, op.n_kv_heads)};
  }
  // Rope and norm come before the attention in the plan: they must know that it will do them.
  void mark_attention_chains() {
    chains_.resize(plan_.ops.size());
    blocks_.resize(plan_.ops.size());
    for (size_t i = 0; i < plan_.ops.size(); ++i)
      if (const auto* op = std::get_if<Attention>(&plan_.ops[i]))
        chains_[i] = chain_of(*op);
      else if (const auto* block = std::get_if<BlockAttention>(&plan_.ops[i]))
        blocks_[i] = {
            *block,
            chain_of({block->q, block->k, block->v, block->out, block->k_state, block->v_state,
                      block->n_heads, block->n_kv_heads, block->head_dim, block->v_head_dim, block->scale}),
            peel(block->index_q, block->index_heads)};
  }
  void emit(const BlockAttention& op, size_t i) { store(blocks_[i], op.out); }
  void emit(const Attention& op, size_t i) {
    push(chains_[i]);
    stored_[index(op.out)] = true;
  }

  // ---- heads whose tail is rotated -------------------------------------------------------------

  // A per-head norm before the rotation comes earlier in the plan: it must know that it is done here; and so
  // must the rotation of what a WindowAttention alone reads.
  void mark_turns() {
    turns_.resize(plan_.ops.size());
    windows_.resize(plan_.ops.size());
    for (size_t i = 0; i < plan_.ops.size(); ++i)
      if (const auto* op = std::get_if<TailRope>(&plan_.ops[i])) turns_[i] = turn(*op);
    for (size_t i = 0; i < plan_.ops.size(); ++i)
      if (const auto* op = std::get_if<WindowAttention>(&plan_.ops[i]))
        windows_[i] = {*op, turned(op->q, op->n_heads), turned(op->kv, 1)};
  }
  TurnSpec turn(const TailRope& op) {
    TurnSpec t{op.in, op.out, false, {}, op.rope, op.n_heads, op.inverse};
    const int32_t head_dim = width(op.in) / op.n_heads;
    if (!used_once(op.in) || made(op.in)) return t;
    if (const auto* n = producer<UnitNorm>(op.in); n && n->group == head_dim)
      t.norm = {kNone, n->group, n->eps}, t.in = n->in;
    else if (const auto* w = producer<RmsNorm>(op.in); w && w->group == head_dim)
      t.norm = norm(*w), t.in = w->in;
    else
      return t;
    t.normed = true;
    mark_done(op.in);
    return t;
  }
  TurnSpec turned(ValueId v, int32_t n_heads) {
    const auto* op = producer<TailRope>(v);
    if (!op || !used_once(v) || op->n_heads != n_heads) return {v, v, false, {}, kNone, n_heads, false};
    mark_done(v);
    return turns_[index(producer_[index(v)])];
  }
  void emit(const TailRope& op, size_t i) { store(TurnStep{turns_[i]}, op.out); }
  void emit(const WindowAttention& op, size_t i) { store(windows_[i], op.out); }

  // ---- hyper-connections -------------------------------------------------------------------------

  // The norm and the product that weights come from, and what is read by them. They come before and after the
  // weights in the plan; all are made where the weights are.
  void mark_mixes() {
    mixes_.resize(plan_.ops.size());
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const auto* op = std::get_if<HyperWeights>(&plan_.ops[i]);
      const auto* fn = op ? producer<Linear>(op->in) : nullptr;
      const auto* unit = fn ? producer<UnitNorm>(fn->in) : nullptr;
      if (!unit || !used_once(op->in) || !used_once(fn->in) || fn->bias != kNone ||
          plan_.weights[index(fn->weight)].type != GgmlType::F32 || unit->group != width(unit->in) ||
          unit->group % 4 != 0 || width(op->in) > kMixOutputs)
        continue;
      for (int u : uses_[index(op->out)])
        if (const auto* read = op_at<HyperRead>(u);
            read && read->streams == unit->in && read->n_streams == op->n_streams) {
          mixes_[i] = HyperMixStep{*unit, *fn, *op, *read};
          for (ValueId v : {unit->out, fn->out, read->out}) mark_done(v);
          break;
        }
    }
  }
  void emit(const HyperWeights& op, size_t i) {
    if (mixes_[i].fn.weight == kNone) {
      store(HyperWeightsStep{op}, op.out);
      return;
    }
    stored_[index(mixes_[i].read.out)] = true;
    store(mixes_[i], op.out);
  }

  // ---- mixtures of experts -------------------------------------------------------------------

  // The router, and the norm before it where nothing reads that norm earlier, come before the mixture in
  // the plan: they must know that it will do them.
  void mark_mixtures() {
    mixtures_.resize(plan_.ops.size());
    int32_t n = 0;
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const auto* op = std::get_if<Moe>(&plan_.ops[i]);
      if (!op) continue;
      MoeStep& s = mixtures_[i];
      s.op = *op;
      s.in = op->in;
      s.out = op->out;
      s.index = n++;
      const Linear* router = producer<Linear>(op->router);
      if (!router || !used_once(op->router) || router->in != op->in || router->bias != kNone ||
          plan_.weights[index(router->weight)].type != GgmlType::F32 || width(op->in) % 4 != 0)
        continue;
      mark_done(op->router);
      s.router = router->weight;
      const RmsNorm* before = producer<RmsNorm>(op->in);
      if (!before || before->group != width(op->in) ||
          !only_read_from(op->in, producer_[index(op->router)], i))
        continue;
      mark_done(op->in);
      s.norm = norm(*before);
      s.in = before->in;
    }
  }
  // Whether, of all ops, `router` alone reads v before op i.
  bool only_read_from(ValueId v, int router, size_t i) const {
    const std::vector<int>& uses = uses_[index(v)];
    return std::all_of(uses.begin(), uses.end(), [&](int u) { return u == router || index(u) >= i; });
  }
  void emit(const Moe&, size_t i) {
    MoeStep& s = mixtures_[i];
    fuse_residual(s.out, s.residual);
    stored_[index(s.out)] = stored_[index(s.op.in)] = true;
    push(s);
  }

  // ---- matrix products -----------------------------------------------------------------------

  bool read_by_products(ValueId v) const {
    const std::vector<int>& uses = uses_[index(v)];
    return std::all_of(uses.begin(), uses.end(), [&](int u) { return op_at<Linear>(u) || op_at<Head>(u); });
  }
  // Whether every reader takes the norm as part of its product.
  bool norm_is_prologue(const RmsNorm& op) const {
    if (op.group != width(op.out)) return false;
    const std::vector<int>& uses = uses_[index(op.out)];
    return std::all_of(uses.begin(), uses.end(), [&](int u) {
      const auto* select = op_at<SelectOutputs>(u);
      return op_at<Linear>(u) || op_at<Head>(u) || (select && read_by_products(select->out));
    });
  }

  // select(x), made now where it is not yet.
  ValueId selected(ValueId x) {
    for (int u : uses_[index(x)])
      if (const auto* select = op_at<SelectOutputs>(u)) {
        if (!done_[index(u)]) {
          done_[index(u)] = true;
          emit(*select, index(u));
        }
        return select->out;
      }
    for (const Step& s : list_.steps)
      if (const auto* select = std::get_if<SelectStep>(&s); select && select->in == x) return select->out;
    const auto out = static_cast<ValueId>(list_.values.size());
    list_.values.push_back({width(x), Rows::outputs});
    push(SelectStep{x, out});
    return out;
  }

  template <class T>
  void set_input(ValueId in, T& step) {
    step.in = in;
    const auto* n = producer<RmsNorm>(in);
    if (n && norm_is_prologue(*n)) {
      step.in = n->in;
      step.norm = norm(*n);
      return;
    }
    const auto* select = producer<SelectOutputs>(in);
    n = select ? producer<RmsNorm>(select->in) : nullptr;
    if (n && norm_is_prologue(*n)) {
      step.in = selected(n->in);
      step.norm = norm(*n);
    }
  }

  void emit(const Linear& op, size_t) {
    MatmulStep step;
    set_input(op.in, step);
    const Linear* partner = swiglu_partner(op);
    for (int u : uses_[index(op.in)]) {
      const Linear* l = op_at<Linear>(u);
      if (!l || done_[index(u)] || step.parts.size() == kMaxParts) continue;
      // A gate and its up are a step of their own.
      if (partner ? l != &op && l != partner : swiglu_partner(*l) != nullptr) continue;
      done_[index(u)] = true;
      step.parts.push_back({l->weight, l->bias, l->out, kNone});
    }
    fuse_swiglu(step);
    if (step.swiglu == kNone) {
      // None adds what another part gives: the parts are written at once.
      for (MatmulPart& part : step.parts) fuse_residual(part.out, part.residual);
      for (const MatmulPart& part : step.parts) stored_[index(part.out)] = true;
    }
    push(std::move(step));
  }

  /// The other half of the SwiGLU that `l` feeds, where both are maps of one input for it alone.
  const Linear* swiglu_partner(const Linear& l) const {
    const auto* op = only_user<SwiGlu>(l.out);
    if (!op) return nullptr;
    const ValueId other = op->gate == l.out ? op->up : op->gate;
    const auto* p = producer<Linear>(other);
    return p && used_once(other) && p->in == l.in ? p : nullptr;
  }

  void fuse_swiglu(MatmulStep& step) {
    if (step.parts.size() != 2) return;
    const auto* op = only_user<SwiGlu>(step.parts[0].out);
    if (!op || !used_once(op->gate) || !used_once(op->up)) return;
    if (op->gate == step.parts[1].out) std::swap(step.parts[0], step.parts[1]);
    if (op->gate != step.parts[0].out || op->up != step.parts[1].out) return;
    step.swiglu = op->out;
    stored_[index(op->out)] = true;
    mark_done(op->out);
  }

  void fuse_residual(ValueId& out, ValueId& residual) {
    const Add* op = only_user<Add>(out);
    if (!op || op->a == op->b) return;
    const ValueId other = op->a == out ? op->b : op->a;
    // The add waits for whichever comes last; what it adds may not be there yet, or be a selection
    // that only this add asked for and that can be made now.
    if (!stored_[index(other)]) {
      const auto* select = producer<SelectOutputs>(other);
      if (!select || !stored_[index(select->in)]) return;
      selected(select->in);
      if (!stored_[index(other)]) return;
    }
    residual = other;
    out = op->out;
    mark_done(op->out);
  }

  void emit(const Head& op, size_t) {
    HeadStep step;
    set_input(op.in, step);
    step.weight = op.weight;
    step.bias = op.bias;
    push(step);
  }

  // ---- the rest, as they are -----------------------------------------------------------------

  void emit(const Embed& op, size_t) { store(EmbedStep{op.table, op.out}, op.out); }
  void emit(const RmsNorm& op, size_t) {
    if (!norm_is_prologue(op)) store(NormStep{op.in, op.out, norm(op)}, op.out);
  }
  void emit(const Rope& op, size_t) { store(HeadsStep{{op.in, op.out, {}, op.rope, op.n_heads}}, op.out); }
  void emit(const SwiGlu& op, size_t) { store(SwiGluStep{op.gate, op.up, op.out}, op.out); }
  void emit(const Add& op, size_t) { store(AddStep{op.a, op.b, op.out}, op.out); }
  void emit(const SigmoidGate& op, size_t) { store(SigmoidGateStep{op.in, op.gate, op.out}, op.out); }
  void emit(const GatedDelta& op, size_t) { store(DeltaStep{op}, op.out); }
  void emit(const LatentAttention& op, size_t) { store(LatentStep{op}, op.out); }
  void emit(const Indexer& op, size_t) {
    const std::vector<int>& uses = uses_[index(op.out)];
    const bool latent =
        std::all_of(uses.begin(), uses.end(), [&](int u) { return op_at<LatentAttention>(u); });
    store(IndexStep{op, latent}, op.out);
  }
  void emit(const HeadSlice& op, size_t) { store(HeadSliceStep{op}, op.out); }
  void emit(const StreamInject& op, size_t) {
    StreamInjectStep step{op};
    for (int u : uses_[index(op.out)])
      if (const auto* n = op_at<StreamNorm>(u); n && !done_[index(u)] && n->group == width(op.block)) {
        done_[index(u)] = stored_[index(n->out)] = true;
        step.norm = *n;
        break;
      }
    store(step, op.out);
  }
  void emit(const SelectOutputs& op, size_t) {
    // Of a norm that is never stored: its products select the norm's input instead.
    const auto* n = producer<RmsNorm>(op.in);
    if (!(n && norm_is_prologue(*n))) store(SelectStep{op.in, op.out}, op.out);
  }

  template <StepOfItsOwn T>
  void emit(const T& op, size_t) {
    push(OpStep<T>{op});
    if constexpr (requires { op.out; }) stored_[index(op.out)] = true;
  }
  template <class T>
  void emit(const T& op, size_t i) {
    fail(ErrorKind::unsupported, "op %zu (%s) does not run on CUDA yet", i, op_name(Op(op)));
  }

  void store(Step step, ValueId out) {
    stored_[index(out)] = true;
    push(std::move(step));
  }
  void push(Step step) { list_.steps.push_back(std::move(step)); }

  const Plan& plan_;
  StepList list_;
  std::vector<bool> done_;
  std::vector<bool> stored_;  // values that some emitted step has written
  std::vector<int> producer_;
  std::vector<std::vector<int>> uses_;
  std::vector<AttentionStep> chains_;       // of op i, an Attention
  std::vector<MoeStep> mixtures_;           // of op i, a Moe
  std::vector<HyperMixStep> mixes_;         // of op i, a HyperWeights; without fn: none
  std::vector<TurnSpec> turns_;             // of op i, a TailRope
  std::vector<WindowStep> windows_;         // of op i, a WindowAttention
  std::vector<BlockAttentionStep> blocks_;  // of op i, a BlockAttention
};

// ---- where values live ---------------------------------------------------------------------

struct Touches {
  std::vector<ValueId> reads, writes;
  std::vector<ValueId> plain_reads;  // of `reads`: as the input of a product without a norm
};

struct TouchVisitor {
  Touches t;
  void operator()(const EmbedStep& s) { t.writes = {s.out}; }
  void operator()(const MatmulStep& s) {
    t.reads = {s.in};
    if (s.norm.weight == kNone) t.plain_reads = {s.in};
    for (const MatmulPart& p : s.parts) {
      t.writes.push_back(p.out);  // gate and up too: some types go through f32
      if (p.residual != kNone) t.reads.push_back(p.residual);
    }
    if (s.swiglu != kNone) t.writes.push_back(s.swiglu);
  }
  void operator()(const HeadsStep& s) { t.reads = {s.item.in}, t.writes = {s.item.out}; }
  void operator()(const AttentionStep& s) {
    t.reads = {s.q.in, s.k.in, s.v.in};
    if (s.q.out != s.q.in) t.writes.push_back(s.q.out);
    t.writes.push_back(s.op.out);
  }
  void operator()(const BlockAttentionStep& s) {
    (*this)(s.plain);
    t.reads.insert(t.reads.end(), {s.index_q.in, s.op.index_k});
    if (s.index_q.out != s.index_q.in) t.writes.push_back(s.index_q.out);
  }
  void operator()(const NormStep& s) { t.reads = {s.in}, t.writes = {s.out}; }
  void operator()(const AddStep& s) { t.reads = {s.a, s.b}, t.writes = {s.out}; }
  void operator()(const SwiGluStep& s) { t.reads = {s.gate, s.up}, t.writes = {s.out}; }
  void operator()(const SigmoidGateStep& s) { t.reads = {s.in, s.gate}, t.writes = {s.out}; }
  void operator()(const MoeStep& s) {
    t.reads = {s.in};
    if (s.residual != kNone) t.reads.push_back(s.residual);
    t.writes = {s.out};
    if (s.norm.weight != kNone) t.writes.push_back(s.op.in);
    (s.router != kNone ? t.writes : t.reads).push_back(s.op.router);
  }
  void operator()(const DeltaStep& s) {
    t.reads = {s.op.qkv, s.op.z, s.op.beta, s.op.alpha}, t.writes = {s.op.out};
  }
  void operator()(const HyperMixStep& s) { t.reads = {s.norm.in}, t.writes = {s.op.out, s.read.out}; }
  void operator()(const TurnStep& s) { t.reads = {s.item.in}, t.writes = {s.item.out}; }
  void operator()(const WindowStep& s) {
    t.reads = {s.q.in, s.kv.in};
    if (s.op.selection != kNone) t.reads.push_back(s.op.selection);
    if (s.q.out != s.q.in) t.writes.push_back(s.q.out);
    t.writes.push_back(s.op.out);
  }
  void operator()(const LatentStep& s) { take(s.op); }
  void operator()(const IndexStep& s) { take(s.op); }
  void operator()(const HeadSliceStep& s) { t.reads = {s.op.in}, t.writes = {s.op.out}; }
  void operator()(const StreamInjectStep& s) {
    t.reads = {s.op.in, s.op.logits, s.op.block}, t.writes = {s.op.out};
    if (s.norm.out != kNone) t.writes.push_back(s.norm.out);
  }
  void operator()(const SelectStep& s) { t.reads = {s.in}, t.writes = {s.out}; }
  void operator()(const HeadStep& s) { t.reads = {s.in}; }
  template <class T>
  void operator()(const OpStep<T>& s) {
    take(s.op);
  }

 private:
  template <class T>
  void take(const T& op) {
    for_inputs(op, [&](ValueId v) { t.reads.push_back(v); });
    if constexpr (requires { op.out; }) t.writes = {op.out};
  }
};

Touches touches(const Step& step) {
  TouchVisitor v;
  std::visit(v, step);
  return std::move(v.t);
}

// First fit: each value takes the lowest place that no value alive with it holds. A step's results
// never share memory with what it reads.
void place_values(StepList& list) {
  struct Live {
    int64_t begin, end;
    size_t last_use;
  };
  const auto at = [](ValueId v) { return static_cast<size_t>(v); };
  std::vector<size_t> last_use(list.values.size(), 0);
  std::vector<int> reads(list.values.size(), 0), plain(list.values.size(), 0);
  std::vector<Touches> all;
  for (size_t i = 0; i < list.steps.size(); ++i) {
    all.push_back(touches(list.steps[i]));
    for (ValueId v : all[i].reads) last_use[at(v)] = i, ++reads[at(v)];
    for (ValueId v : all[i].plain_reads) ++plain[at(v)];
  }
  // Where all rows are output rows a selection is its input, which then lives as long.
  for (size_t v = list.values.size(); v-- > 0;)
    if (list.select_of[v] != kNone)
      last_use[at(list.select_of[v])] = std::max(last_use[at(list.select_of[v])], last_use[v]);
  list.fragments.resize(list.values.size());
  for (size_t v = 0; v < list.values.size(); ++v) list.fragments[v] = reads[v] > 0 && reads[v] == plain[v];

  list.offset.assign(list.values.size(), -1);
  std::vector<Live> live;
  for (size_t i = 0; i < all.size(); ++i) {
    std::erase_if(live, [&](const Live& l) { return l.last_use < i; });
    for (ValueId v : all[i].writes) {
      const int64_t width = list.values[at(v)].width;
      // As f16 fragments a row takes whole units of 128 halves.
      const int64_t floats = std::max(width, (width + kUnit - 1) / kUnit * kUnit / 2);
      const int64_t size = (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
      std::sort(live.begin(), live.end(), [](const Live& a, const Live& b) { return a.begin < b.begin; });
      int64_t begin = 0;
      for (const Live& l : live)
        if (l.begin < begin + size && begin < l.end) begin = l.end;
      list.offset[at(v)] = begin;
      live.push_back({begin, begin + size, std::max(last_use[at(v)], i)});
      list.floats = std::max(list.floats, begin + size);
    }
  }
}

}  // namespace

StepList build_steps(const Plan& plan) {
  StepList list = StepBuilder(plan).build();
  place_values(list);
  return list;
}

}  // namespace reflex::cuda
