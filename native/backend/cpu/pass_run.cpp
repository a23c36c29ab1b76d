#include "backend/cpu/pass_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/dequantize.h"

namespace reflex::cpu {

PassRun::PassRun(CpuProgram& program, CpuState& state, const Pass& pass, const Visibility& visibility,
                 const StepList& list)
    : program_(program),
      kernels_(program.kernels_),
      state_(state),
      pass_(pass),
      visibility_(visibility),
      list_(list),
      n_rows_(static_cast<int32_t>(pass.tokens.size())),
      n_outputs_(static_cast<int32_t>(pass.outputs.size())),
      counters_(new Counter[list.steps.size() * kCountersPerStep + 1]),
      parts_(new Part[2 * kStreamsPerStep * static_cast<size_t>(program.pool_->size())]) {
  reserve();
}

float* PassRun::value(ValueId v) const {
  const bool all = rows_kind(v) == Rows::all;
  const Region& arena = all ? program_.all_values_ : program_.output_values_;
  return reinterpret_cast<float*>(arena.data()) +
         list_.offset[static_cast<size_t>(v)] * (all ? n_rows_ : n_outputs_);
}

Form PassRun::form_of(WeightId id, int32_t n_rows) const {
  const Weight& w = program_.plan_.weights[static_cast<size_t>(id)];
  return kernels_.form(static_cast<uint32_t>(w.type), static_cast<int32_t>(w.n_in()), n_rows,
                       program_.options_.exact);
}

// ---- memory ------------------------------------------------------------------------------

void PassRun::reserve_matmul(ValueId in, std::span<const WeightId> weights, bool pair, size_t& scratch) {
  const int32_t n_in = width(in), n = rows(in);
  for (WeightId w : weights) {
    // A gather takes single rows of a product of any size.
    for (int32_t r : {n, int32_t{1}}) {
      const Form form = form_of(w, r);
      ensure(program_.act_[static_cast<int>(form)], kernels_.act_bytes(form, n_in, n),
             "prepared activations");
    }
  }
  size_t need = round_line(kernels_.matmul_scratch(n_in, n));
  if (pair) need += 2 * round_line(static_cast<size_t>(n) * kMatmulRows * sizeof(float));
  int32_t unit = 1;
  for (int f = 0; f < kForms; ++f) unit = std::max(unit, kernels_.act_unit(static_cast<Form>(f)));
  scratch = std::max({scratch, need, static_cast<size_t>(unit) * static_cast<size_t>(n_in) * sizeof(float)});
}

void PassRun::reserve() {
  const Plan& plan = program_.plan_;
  ensure(program_.all_values_,
         static_cast<size_t>(list_.all_floats) * static_cast<size_t>(n_rows_) * sizeof(float), "activations");
  ensure(program_.output_values_,
         static_cast<size_t>(list_.output_floats) * static_cast<size_t>(n_outputs_) * sizeof(float),
         "activations");
  size_t rope = 0, scratch = kLine;
  for (const RopeSpec& r : plan.ropes) {
    rope_at_.push_back(rope);
    rope += static_cast<size_t>(r.n_rot) * static_cast<size_t>(n_rows_);
  }
  ensure(program_.rope_, rope * sizeof(float), "rotary tables");
  for (const Step& s : list_.steps) {
    if (const auto* m = std::get_if<MatmulStep>(&s)) {
      std::vector<WeightId> weights;
      for (const LinearPart& p : m->parts) weights.push_back(p.weight);
      reserve_matmul(m->in, weights, m->gate >= 0, scratch);
    } else if (const auto* h = std::get_if<HeadStep>(&s)) {
      reserve_matmul(h->in, {&h->weight, 1}, false, scratch);
      const size_t floats = pass_.head == HeadMode::full
                                ? static_cast<size_t>(plan.n_vocab) * static_cast<size_t>(n_outputs_)
                                : pass_.gather_ids.size();
      ensure(program_.logits_, floats * sizeof(float), "logits");
    } else if (const auto* a = std::get_if<AttentionStep>(&s)) {
      AttentionArgs args;
      args.n_heads = a->op.n_heads;
      args.n_kv_heads = a->op.n_kv_heads;
      args.head_dim = a->op.head_dim;
      args.v_head_dim = a->op.v_head_dim;
      scratch = std::max(scratch, kernels_.attention_scratch(args, kAttentionRows) * sizeof(float));
      const int32_t n = rows(a->op.q);
      args.prefix = visibility_.prefix.data();
      const auto parts = static_cast<size_t>(attention_parts(args, n));
      ensure(program_.parts_, parts * kernels_.attention_part_floats(args, n) * sizeof(float),
             "attention parts");
    } else if (const auto* moe = std::get_if<MoeStep>(&s)) {
      reserve_moe(*moe, scratch);
    } else if (const auto* latent = std::get_if<LatentStep>(&s)) {
      reserve_latent(latent->op, scratch);
    } else if (const auto* delta = std::get_if<DeltaStep>(&s)) {
      reserve_delta(delta->op, scratch);
    } else if (const auto* indexer = std::get_if<IndexerStep>(&s)) {
      reserve_indexer(indexer->op, scratch);
    } else if (const auto* blocks = std::get_if<BlockAttentionStep>(&s)) {
      reserve_blocks(blocks->op, scratch);
    } else if (const auto* conv = std::get_if<ConvStep>(&s)) {
      scratch = std::max(scratch, static_cast<size_t>(conv->op.n_taps + 1) * kConvChannels * sizeof(float));
    } else if (const auto* mix = std::get_if<StreamMixStep>(&s)) {
      scratch = std::max(scratch, static_cast<size_t>(width(mix->op.in)) * sizeof(float));
    } else if (const auto* compressor = std::get_if<CompressorStep>(&s)) {
      reserve_compressor(compressor->op, scratch);
    } else if (const auto* window = std::get_if<WindowStep>(&s)) {
      reserve_window(window->op, scratch);
    } else if (const auto* grouped = std::get_if<GroupedStep>(&s)) {
      reserve_grouped(grouped->op, scratch);
    } else if (const auto* p = std::get_if<HeadsStep>(&s)) {
      for (const HeadsStep::Item& i : p->items)
        scratch = std::max(scratch, static_cast<size_t>(width(i.in)) * sizeof(float));
    }
  }
  scratch_stride_ = round_line(scratch);
  ensure(program_.scratch_, scratch_stride_ * static_cast<size_t>(program_.pool_->size()), "thread scratch");
}

// ---- the team ----------------------------------------------------------------------------

void PassRun::run() {
  program_.pool_->run([this](int t) { thread_main(t); });
}

void PassRun::thread_main(int t) {
  Counter* counter = counters_.get();
  compute_ropes(*counter++);
  for (const Step& s : list_.steps) {
    for (int i = 0; i < kStreamsPerStep; ++i)
      parts_of(counter + kCountersPerStep, i)[t].taken.store(0, std::memory_order_relaxed);
    std::visit([&](const auto& x) { step(x, counter, t); }, s);
    program_.pool_->barrier();
    counter += kCountersPerStep;
  }
}

void rope_angles(const RopeSpec& spec, int32_t position, float* cs) {
  const int32_t half = spec.n_rot / 2;
  for (int32_t k = 0; k < half; ++k) {
    const double angle = static_cast<float>(position) * spec.inv_freq[static_cast<size_t>(k)];
    cs[k] = static_cast<float>(std::cos(angle)) * spec.magnitude;
    cs[half + k] = static_cast<float>(std::sin(angle)) * spec.magnitude;
  }
}

void PassRun::compute_ropes(Counter& counter) {
  share(counter, n_rows_, 8, [&](int32_t begin, int32_t end) {
    for (size_t i = 0; i < rope_at_.size(); ++i) {
      const RopeSpec& spec = program_.plan_.ropes[i];
      for (int32_t r = begin; r < end; ++r)
        rope_angles(spec, pass_.positions[static_cast<size_t>(r)],
                    reinterpret_cast<float*>(program_.rope_.data()) + rope_at_[i] +
                        static_cast<size_t>(r) * static_cast<size_t>(spec.n_rot));
    }
  });
}

// ---- steps -------------------------------------------------------------------------------

void PassRun::step(const EmbedStep& s, Counter* counters, int) {
  const Weight& table = program_.plan_.weights[static_cast<size_t>(s.table)];
  const auto d = static_cast<size_t>(width(s.out));
  const size_t bytes = row_bytes(table.type, d);
  float* out = value(s.out);
  share(counters[0], n_rows_, 4, [&](int32_t begin, int32_t end) {
    for (int32_t r = begin; r < end; ++r)
      dequantize_row(table.type,
                     static_cast<const uint8_t*>(table.data) +
                         static_cast<size_t>(pass_.tokens[static_cast<size_t>(r)]) * bytes,
                     out + static_cast<size_t>(r) * d, d);
  });
}

// Norms and prepares `in` for the forms asked, in the team's shared buffers.
void PassRun::prepare(ValueId in, const Norm& norm, const bool (&forms)[kForms], Counter& counter, int t) {
  const int32_t n_in = width(in), n = rows(in);
  int32_t unit = 1;
  for (int f = 0; f < kForms; ++f)
    if (forms[f]) unit = std::max(unit, kernels_.act_unit(static_cast<Form>(f)));
  const float* x = value(in);
  auto* normed = reinterpret_cast<float*>(scratch(t));
  share(counter, n, unit, [&](int32_t begin, int32_t end) {
    const float* from = x + static_cast<size_t>(begin) * static_cast<size_t>(n_in);
    if (norm.weight) {
      kernels_.rms_norm_rows(from, norm.weight, norm.eps, norm.group, n_in, end - begin, normed);
      from = normed;
    }
    for (int f = 0; f < kForms; ++f)
      if (forms[f])
        kernels_.prepare(static_cast<Form>(f), from, static_cast<size_t>(n_in), n_in, n, begin, end,
                         program_.act_[f].data());
  });
}

MatmulArgs PassRun::matmul_args(WeightId id, int32_t n_rows, Form form, int t, int32_t member) const {
  const Weight& w = program_.plan_.weights[static_cast<size_t>(id)];
  MatmulArgs a;
  a.type = static_cast<uint32_t>(w.type);
  a.w = static_cast<const uint8_t*>(w.data);
  a.row_bytes = row_bytes(w.type, static_cast<size_t>(w.n_in()));
  a.w += static_cast<size_t>(w.n_out() * member) * a.row_bytes;
  a.n_in = static_cast<int32_t>(w.n_in());
  a.form = form;
  a.act = program_.act_[static_cast<int>(form)].data();
  a.n_rows = n_rows;
  a.scratch = scratch(t);
  return a;
}

// Rows [begin, end) of one part, then what rides on them.
void PassRun::matmul_chunk(const MatmulStep& s, int part, int32_t begin, int32_t end, int t) {
  const LinearPart& p = s.parts[static_cast<size_t>(part)];
  const int32_t n = rows(s.in);
  const auto n_out = static_cast<size_t>(width(p.out));
  MatmulArgs a = matmul_args(p.weight, n, form_of(p.weight, n), t);
  a.y = value(p.out) + begin;
  a.ldy = n_out;
  kernels_.matmul(a, begin, end);
  const float* residual = p.residual == kNone ? nullptr : value(p.residual) + begin;
  for (int32_t r = 0; r < n && (p.bias || residual); ++r) {
    float* y = a.y + static_cast<size_t>(r) * n_out;
    if (p.bias) kernels_.add(y, p.bias + begin, end - begin, y);
    if (residual) kernels_.add(y, residual + static_cast<size_t>(r) * n_out, end - begin, y);
  }
}

// Rows [begin, end) of gate and up into scratch, silu(gate) * up into the step's value.
void PassRun::pair_chunk(const MatmulStep& s, int32_t begin, int32_t end, int t) {
  const int32_t n = rows(s.in), count = end - begin;
  const auto n_out = static_cast<size_t>(width(s.swiglu));
  const size_t half = round_line(static_cast<size_t>(n) * kMatmulRows * sizeof(float));
  uint8_t* base = scratch(t) + round_line(kernels_.matmul_scratch(width(s.in), n));
  float* y[2] = {reinterpret_cast<float*>(base), reinterpret_cast<float*>(base + half)};
  const int which[2] = {s.gate, s.up};
  for (int i = 0; i < 2; ++i) {
    const LinearPart& p = s.parts[static_cast<size_t>(which[i])];
    MatmulArgs a = matmul_args(p.weight, n, form_of(p.weight, n), t);
    a.y = y[i];
    a.ldy = static_cast<size_t>(count);
    kernels_.matmul(a, begin, end);
    for (int32_t r = 0; r < n && p.bias; ++r) {
      float* row = y[i] + static_cast<size_t>(r) * a.ldy;
      kernels_.add(row, p.bias + begin, count, row);
    }
  }
  for (int32_t r = 0; r < n; ++r)
    kernels_.swiglu(y[0] + r * count, y[1] + r * count, count,
                    value(s.swiglu) + static_cast<size_t>(r) * n_out + begin);
}

// Asks for what a thread will read first of weight rows [row, end): the stream itself looks ahead from there.
void PassRun::begin_stream(WeightId id, int32_t row, int32_t end, int32_t member) const {
  const Weight& w = program_.plan_.weights[static_cast<size_t>(id)];
  const size_t bytes = row_bytes(w.type, static_cast<size_t>(w.n_in()));
  const auto* from =
      static_cast<const uint8_t*>(w.data) +
      (static_cast<size_t>(member) * static_cast<size_t>(w.ne[1]) + static_cast<size_t>(row)) * bytes;
  const size_t all = static_cast<size_t>(end - row) * bytes;
  for (size_t i = 0; i < std::min(all, 2 * kPageBatch); i += kPage) __builtin_prefetch(from + i, 0, 2);
  for (size_t i = 0; i < std::min(all, kPage); i += kLine) __builtin_prefetch(from + i, 0, 2);
}

void PassRun::step(const MatmulStep& s, Counter* counters, int t) {
  const int32_t n = rows(s.in);
  const int threads = program_.pool_->size();
  // Pieces of all parts in one sequence, so that the parts need no barrier between them.
  int32_t total = 0;
  for (const LinearPart& p : s.parts) total += width(p.out);
  const bool few = n <= kFewRows;
  const int32_t g = few ? kMatvecRows : grain(total, threads);
  std::vector<PieceRange> ranges;
  int32_t n_pieces = 0;
  for (int i = 0; i < static_cast<int>(s.parts.size()); ++i) {
    if (i == s.up) continue;
    const int32_t n_out = width(s.parts[static_cast<size_t>(i)].out), first = n_pieces;
    n_pieces += pieces(n_out, g);
    ranges.push_back({i, n_out, first, n_pieces});
  }
  if (few) {
    const int32_t begin = part_begin(n_pieces, t), end = part_begin(n_pieces, t + 1);
    for (const PieceRange& r : ranges) {
      const int32_t from = (std::max(begin, r.first) - r.first) * g;
      const int32_t to = std::min((std::min(end, r.end) - r.first) * g, r.n_out);
      if (from >= to) continue;
      begin_stream(s.parts[static_cast<size_t>(r.part)].weight, from, to);
      if (r.part == s.gate) begin_stream(s.parts[static_cast<size_t>(s.up)].weight, from, to);
    }
  }
  bool forms[kForms] = {};
  for (const LinearPart& p : s.parts) forms[static_cast<int>(form_of(p.weight, n))] = true;
  prepare(s.in, s.norm, forms, counters[0], t);
  program_.pool_->barrier();
  stream(counters, n_pieces, few ? kMatmulRows / kMatvecRows : 1, t, [&](int32_t begin, int32_t end) {
    for (const PieceRange& r : ranges) {
      const int32_t from = std::max(begin, r.first), to = std::min(end, r.end);
      if (from >= to) continue;
      const int32_t row = (from - r.first) * g, row_end = std::min((to - r.first) * g, r.n_out);
      if (r.part == s.gate)
        pair_chunk(s, row, row_end, t);
      else
        matmul_chunk(s, r.part, row, row_end, t);
    }
  });
}

const float* PassRun::rope_row(RopeId rope, int32_t r) const {
  const auto n_rot = static_cast<size_t>(program_.plan_.ropes[static_cast<size_t>(rope)].n_rot);
  return reinterpret_cast<const float*>(program_.rope_.data()) + rope_at_[static_cast<size_t>(rope)] +
         static_cast<size_t>(r) * n_rot;
}

// Row i of an item's input: norm, rope, then to its value and state.
void PassRun::heads_row(const HeadsStep::Item& item, int32_t i, int t) {
  const int32_t n = width(item.in);
  const int32_t r = pass_row(item.in, i);
  const float* x = value(item.in) + static_cast<size_t>(i) * static_cast<size_t>(n);
  float* y = item.out == kNone ? reinterpret_cast<float*>(scratch(t))
                               : value(item.out) + static_cast<size_t>(i) * static_cast<size_t>(n);
  if (item.norm.weight)
    kernels_.rms_norm_rows(x, item.norm.weight, item.norm.eps, item.norm.group, n, 1, y);
  else
    std::memcpy(y, x, static_cast<size_t>(n) * sizeof(float));
  if (item.rope != kNone) {
    const RopeSpec& spec = program_.plan_.ropes[static_cast<size_t>(item.rope)];
    kernels_.rope(y, rope_row(item.rope, r), item.n_heads, n / item.n_heads, spec.n_rot,
                  spec.pairing == RopeSpec::Pairing::adjacent);
  }
  if (item.state != kNone) write_state(item.state, r, y, n);
}

// n values of pass row r into its slot of a state of `width` values, from `offset` on.
void PassRun::write_state(StateId state, int32_t r, const float* x, int32_t n, int32_t width,
                          int32_t offset) {
  const auto slot = static_cast<size_t>(pass_.first_slot + r);
  const bool f16 = state_.is_f16(state);
  const size_t at = slot * static_cast<size_t>(width) + static_cast<size_t>(offset);
  uint8_t* to = state_.buffer(state) + at * (f16 ? 2 : 4);
  if (f16)
    kernels_.to_f16(x, n, reinterpret_cast<uint16_t*>(to));
  else
    std::memcpy(to, x, static_cast<size_t>(n) * sizeof(float));
}

/// How many slots pass row r sees.
int32_t PassRun::seen(int32_t r) const {
  const auto i = static_cast<size_t>(r);
  return visibility_.prefix[i] + visibility_.extra_begin[i + 1] - visibility_.extra_begin[i];
}

/// The i-th of them, from 0.
int32_t PassRun::slot_seen(int32_t r, int32_t i) const {
  const int32_t prefix = visibility_.prefix[static_cast<size_t>(r)];
  if (i < prefix) return i;
  return visibility_.extra[static_cast<size_t>(visibility_.extra_begin[static_cast<size_t>(r)] + i - prefix)];
}

int32_t PassRun::most_seen() const {
  int32_t most = 0;
  for (int32_t r = 0; r < n_rows_; ++r) most = std::max(most, seen(r));
  return most;
}

void PassRun::step(const HeadsStep& s, Counter* counters, int t) {
  int32_t total = 0;
  for (const HeadsStep::Item& i : s.items) total += rows(i.in);
  share(counters[0], total, 1, [&](int32_t i, int32_t) {
    size_t k = 0;
    for (; i >= rows(s.items[k].in); ++k) i -= rows(s.items[k].in);
    heads_row(s.items[k], i, t);
  });
}

void PassRun::step(const AttentionStep& s, Counter* counters, int t) {
  attend(attention_args(s.op, visibility_), rows(s.op.q), counters, t);
}

// n queries, by two counters.
void PassRun::attend(const AttentionArgs& a, int32_t n, Counter* counters, int t) {
  const int32_t blocks = pieces(n, kAttentionRows);
  auto* own = reinterpret_cast<float*>(scratch(t));
  if (const int32_t parts = attention_parts(a, n); parts > 1) {
    auto* all = reinterpret_cast<float*>(program_.parts_.data());
    const size_t stride = kernels_.attention_part_floats(a, n);
    share(counters[0], parts, 1, [&](int32_t part, int32_t) {
      kernels_.attention_part(a, n, part * kPartSlots, (part + 1) * kPartSlots, part == parts - 1,
                              all + static_cast<size_t>(part) * stride, own);
    });
    program_.pool_->barrier();
    share(counters[1], a.n_kv_heads, 1,
          [&](int32_t g, int32_t) { kernels_.attention_merge(a, n, g, all, parts); });
    return;
  }
  // Few rows: a thread takes neighbouring heads together, whose keys and values lie side by side.
  const int32_t together = blocks > 1 ? 1 : pieces(a.n_kv_heads, program_.pool_->size());
  const int32_t groups = pieces(a.n_kv_heads, together);
  share(counters[0], blocks * groups, 1, [&](int32_t task, int32_t) {
    const int32_t block = blocks - 1 - task / groups;  // the longest first
    const int32_t g = task % groups * together;
    kernels_.attention(a, block * kAttentionRows, std::min(n, (block + 1) * kAttentionRows), g,
                       std::min(g + together, a.n_kv_heads), own);
  });
}

// Into how many parts the context of a few rows is cut: by its length alone, so that the sums are the
// same for any number of threads.
int32_t PassRun::attention_parts(const AttentionArgs& a, int32_t n_rows) const {
  if (n_rows == 0 || kernels_.attention_part_floats(a, n_rows) == 0) return 1;
  const int32_t longest = *std::max_element(a.prefix, a.prefix + n_rows_);
  return longest < kLongContext ? 1 : pieces(longest, kPartSlots);
}

void PassRun::step(const AddStep& s, Counter* counters, int) {
  const auto n = static_cast<size_t>(width(s.out));
  share(counters[0], rows(s.out), 4, [&](int32_t begin, int32_t end) {
    const size_t at = static_cast<size_t>(begin) * n;
    kernels_.add(value(s.a) + at, value(s.b) + at, static_cast<int32_t>(n) * (end - begin),
                 value(s.out) + at);
  });
}

void PassRun::step(const SwiGluStep& s, Counter* counters, int) {
  const auto n = static_cast<size_t>(width(s.out));
  share(counters[0], rows(s.out), 4, [&](int32_t begin, int32_t end) {
    const size_t at = static_cast<size_t>(begin) * n;
    kernels_.swiglu(value(s.gate) + at, value(s.up) + at, static_cast<int32_t>(n) * (end - begin),
                    value(s.out) + at);
  });
}

void PassRun::step(const SelectStep& s, Counter* counters, int) {
  const auto n = static_cast<size_t>(width(s.out));
  share(counters[0], n_outputs_, 4, [&](int32_t begin, int32_t end) {
    for (int32_t o = begin; o < end; ++o)
      std::memcpy(value(s.out) + static_cast<size_t>(o) * n,
                  value(s.in) + static_cast<size_t>(pass_.outputs[static_cast<size_t>(o)]) * n,
                  n * sizeof(float));
  });
}

void PassRun::step(const HeadStep& s, Counter* counters, int t) {
  const bool gather = pass_.head == HeadMode::gather;
  const Form form = form_of(s.weight, gather ? 1 : n_outputs_);
  const int32_t vocab = program_.plan_.n_vocab;
  const bool few = n_outputs_ <= kFewRows;
  const int32_t g = few ? kMatvecRows : kMatmulRows;
  if (few && !gather) begin_stream(s.weight, part_begin(pieces(vocab, g), t) * g, vocab);
  bool forms[kForms] = {};
  forms[static_cast<int>(form)] = true;
  prepare(s.in, s.norm, forms, counters[0], t);
  program_.pool_->barrier();
  if (gather) return head_gather(s, counters[1], t);
  stream(counters, pieces(vocab, g), few ? kMatmulRows / kMatvecRows : 1, t,
         [&](int32_t first, int32_t last) {
           const int32_t begin = first * g, end = std::min(last * g, vocab);
           MatmulArgs a = matmul_args(s.weight, n_outputs_, form, t);
           a.y = reinterpret_cast<float*>(program_.logits_.data()) + begin;
           a.ldy = static_cast<size_t>(vocab);
           kernels_.matmul(a, begin, end);
           for (int32_t o = 0; o < n_outputs_ && s.bias; ++o) {
             float* y = a.y + static_cast<size_t>(o) * a.ldy;
             kernels_.add(y, s.bias + begin, end - begin, y);
           }
         });
}

// Single rows of the head, each against the output row that asks for it.
void PassRun::head_gather(const HeadStep& s, Counter& counter, int t) {
  const Form form = form_of(s.weight, 1);
  const std::span<const int32_t> begin = pass_.gather_begin;
  share(counter, static_cast<int32_t>(pass_.gather_ids.size()), 1, [&](int32_t i, int32_t) {
    const auto o = static_cast<int32_t>(std::upper_bound(begin.begin(), begin.end(), i) - begin.begin()) - 1;
    const int32_t id = pass_.gather_ids[static_cast<size_t>(i)];
    MatmulArgs a = matmul_args(s.weight, 1, form, t);
    a.act = kernels_.act_row(form, a.act, a.n_in, o);
    a.y = reinterpret_cast<float*>(program_.logits_.data()) + i;
    kernels_.matmul(a, id, id + 1);
    if (s.bias) *a.y += s.bias[id];
  });
}

}  // namespace reflex::cpu
