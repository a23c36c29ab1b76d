// Multi-head latent attention of many rows, part of PassRun, decompressed: each head's keys and values are
// made once, from the latents of all slots, and its queries attend to those. Absorbed (latent_attention.cpp),
// a row meets a slot in 2 C + P products a head; decompressed, in N + P + V, and every slot costs C (N + V)
// before.
//
// A head is one task, so its keys and values live in one thread's scratch and no sum is shared.
#include <cstring>

#include "backend/cpu/pass_run.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

constexpr size_t kDecompressedBytes = 32u << 20;  ///< most that one head's keys and values may take

/// What a thread's scratch holds for one head of S slots.
struct HeadMemory {
  size_t keys, values, weight, work, bytes;  ///< offsets, then all of it
};

HeadMemory head_memory(const LatentAttention& op, int32_t n_slots, size_t kernel, size_t attention) {
  const auto s = static_cast<size_t>(n_slots);
  const auto floats = [](size_t n) { return round_line(n * sizeof(float)); };
  HeadMemory m{};
  m.keys = round_line(kernel);  // before it the products' own
  m.values = m.keys + floats(s * static_cast<size_t>(op.nope_dim + op.rope_dim));
  m.weight = m.values + floats(s * static_cast<size_t>(op.v_head_dim));
  const bool transposed = op.kv_b == kNone;
  m.work = m.weight + (transposed ? 2 * floats(static_cast<size_t>(op.n_latent * op.nope_dim)) : 0);
  m.bytes = m.work + attention;
  return m;
}

AttentionArgs head_args(const LatentAttention& op) {
  AttentionArgs a;
  a.n_heads = a.n_kv_heads = 1;
  a.head_dim = op.nope_dim + op.rope_dim;
  a.v_head_dim = op.v_head_dim;
  a.scale = op.scale;
  a.ldk = static_cast<size_t>(a.head_dim);
  a.ldv = static_cast<size_t>(a.v_head_dim);
  a.ldq = static_cast<size_t>(op.n_heads) * a.ldk;
  a.ldo = static_cast<size_t>(op.n_heads) * a.ldv;
  return a;
}

}  // namespace

// Whether the rows are so many that what each of them saves pays for every slot's keys and values. Where the
// sizes are such that a row saves nothing, never.
bool PassRun::decompressed(const LatentAttention& op) const {
  const int64_t saved = 2ll * op.n_latent - op.nope_dim - op.v_head_dim;
  const size_t head = static_cast<size_t>(op.nope_dim + op.rope_dim + op.v_head_dim) * sizeof(float);
  return op.selection == kNone && rows(op.q) * saved > static_cast<int64_t>(op.n_latent) * op.nope_dim &&
         head * static_cast<size_t>(n_slots()) <= kDecompressedBytes;
}

int32_t PassRun::n_slots() const { return pass_.first_slot + n_rows_; }

// The form of the latents that a head's keys are made from: k_b lies transposed and is turned round in f32.
Form PassRun::latent_key_form(const LatentAttention& op) const {
  return op.kv_b == kNone ? kernels_.form(static_cast<uint32_t>(GgmlType::F32), op.n_latent, n_slots(),
                                          program_.options_.exact)
                          : form_of(op.kv_b, n_slots());
}

void PassRun::reserve_decompressed(const LatentAttention& op, size_t& scratch) {
  const int32_t n = n_slots(), c = op.n_latent;
  const auto queries = static_cast<size_t>(rows(op.q)) * static_cast<size_t>(width(op.q));
  ensure(program_.latent_q_, queries * sizeof(float), "latent queries");
  ensure(program_.latent_o_, static_cast<size_t>(n) * static_cast<size_t>(c) * sizeof(float), "latents");
  for (Form form : {latent_key_form(op), form_of(op.kv_b == kNone ? op.v_b : op.kv_b, n)})
    ensure(program_.act_[static_cast<size_t>(form)], kernels_.act_bytes(form, c, n), "prepared latents");
  const HeadMemory m = head_memory(op, n, kernel_scratch(kernels_.matmul_scratch, c, n),
                                   kernels_.attention_scratch(head_args(op), kAttentionRows) * sizeof(float));
  scratch = std::max(scratch, m.bytes);
}

// latent_q[i] = q[i], each head's last P values turned by the row's position.
void PassRun::rotate_queries(const LatentAttention& op, int32_t i) {
  const auto n = static_cast<size_t>(width(op.q));
  float* y = reinterpret_cast<float*>(program_.latent_q_.data()) + static_cast<size_t>(i) * n;
  std::memcpy(y, value(op.q) + static_cast<size_t>(i) * n, n * sizeof(float));
  const bool adjacent =
      program_.plan_.ropes[static_cast<size_t>(op.rope)].pairing == RopeSpec::Pairing::adjacent;
  const float* cs = rope_row(op.rope, pass_row(op.q, i));
  for (int32_t h = 0; h < op.n_heads; ++h)
    kernels_.rope(y + h * (op.nope_dim + op.rope_dim) + op.nope_dim, cs, 1, op.rope_dim, op.rope_dim,
                  adjacent);
}

// The latents of slots [begin, end), in f32 and as the products want them.
void PassRun::prepare_latents(const LatentAttention& op, int32_t begin, int32_t end) {
  const int32_t c = op.n_latent;
  const auto n = static_cast<size_t>(c), stride = static_cast<size_t>(c + op.rope_dim);
  float* first = reinterpret_cast<float*>(program_.latent_o_.data()) + static_cast<size_t>(begin) * n;
  for (int32_t s = begin; s < end; ++s)
    read_state(op.state, static_cast<size_t>(s) * stride, first + static_cast<size_t>(s - begin) * n, n);
  const Form key = latent_key_form(op), val = form_of(op.kv_b == kNone ? op.v_b : op.kv_b, n_slots());
  for (int i = 0; i < (key == val ? 1 : 2); ++i) {
    const Form form = i == 0 ? key : val;
    kernels_.prepare(form, first, n, c, n_slots(), begin, end,
                     program_.act_[static_cast<size_t>(form)].data());
  }
}

// n values of a state from its `at`-th, in f32.
void PassRun::read_state(StateId state, size_t at, float* y, size_t n) const {
  const bool f16 = state_.is_f16(state);
  const uint8_t* from = state_.buffer(state) + at * (f16 ? 2 : 4);
  dequantize_row(f16 ? GgmlType::F16 : GgmlType::F32, from, y, n);
}

// keys (S, N + P): [Kb c ; the rotated key], values (S, V): Vb c, of one head.
void PassRun::decompress(const LatentAttention& op, int32_t head, float* keys, float* values, float* weight,
                         int t) {
  const int32_t n = n_slots(), c = op.n_latent, nope = op.nope_dim, p = op.rope_dim, v = op.v_head_dim;
  const auto product = [&](MatmulArgs a, int32_t begin, int32_t count, float* y, int32_t ldy) {
    a.y = y;
    a.ldy = static_cast<size_t>(ldy);
    kernels_.matmul(a, begin, begin + count);
  };
  if (op.kv_b != kNone) {
    const MatmulArgs a = matmul_args(op.kv_b, n, form_of(op.kv_b, n), t);
    product(a, head * (nope + v), nope, keys, nope + p);
    product(a, head * (nope + v) + nope, v, values, v);
  } else {
    const Weight& w = program_.plan_.weights[static_cast<size_t>(op.k_b)];
    const auto count = static_cast<size_t>(c) * static_cast<size_t>(nope);
    const size_t bytes = row_bytes(w.type, static_cast<size_t>(nope)) * static_cast<size_t>(c);
    float* plain = weight + round_line(count * sizeof(float)) / sizeof(float);
    const auto* from = static_cast<const uint8_t*>(w.data) + static_cast<size_t>(head) * bytes;
    for (int32_t i = 0; i < c; ++i)
      dequantize_row(w.type, from + static_cast<size_t>(i) * (bytes / static_cast<size_t>(c)),
                     plain + static_cast<size_t>(i * nope), static_cast<size_t>(nope));
    for (int32_t i = 0; i < nope; ++i)
      for (int32_t k = 0; k < c; ++k) weight[i * c + k] = plain[k * nope + i];
    MatmulArgs a = matmul_args(op.k_b, n, latent_key_form(op), t);
    a.type = static_cast<uint32_t>(GgmlType::F32);
    a.w = reinterpret_cast<const uint8_t*>(weight);
    a.row_bytes = static_cast<size_t>(c) * sizeof(float);
    a.n_in = c;
    product(a, 0, nope, keys, nope + p);
    product(matmul_args(op.v_b, n, form_of(op.v_b, n), t, head), 0, v, values, v);
  }
  for (int32_t s = 0; s < n; ++s)
    read_state(op.state, static_cast<size_t>(s) * static_cast<size_t>(c + p) + static_cast<size_t>(c),
               keys + static_cast<size_t>(s) * static_cast<size_t>(nope + p) + nope, static_cast<size_t>(p));
}

void PassRun::latent_head(const LatentAttention& op, int32_t head, int t) {
  const HeadMemory m =
      head_memory(op, n_slots(), kernel_scratch(kernels_.matmul_scratch, op.n_latent, n_slots()), 0);
  const auto floats = [&](size_t at) { return reinterpret_cast<float*>(scratch(t) + at); };
  decompress(op, head, floats(m.keys), floats(m.values), floats(m.weight), t);
  AttentionArgs a = head_args(op);
  a.k = scratch(t) + m.keys;
  a.v = scratch(t) + m.values;
  a.q = reinterpret_cast<const float*>(program_.latent_q_.data()) + static_cast<size_t>(head) * a.ldk;
  a.out = value(op.out) + static_cast<size_t>(head) * a.ldv;
  a.row_of = rows_kind(op.q) == Rows::all ? nullptr : pass_.outputs.data();
  a.prefix = visibility_.prefix.data();
  a.extra = visibility_.extra.data();
  a.extra_begin = visibility_.extra_begin.data();
  const int32_t n = rows(op.q);
  for (int32_t i = 0; i < n; i += kAttentionRows)
    kernels_.attention(a, i, std::min(n, i + kAttentionRows), 0, 1, floats(m.work));
}

// counters: four. Every row's state is written before.
void PassRun::latent_decompressed(const LatentAttention& op, Counter* counters, int t) {
  share(counters[0], rows(op.q), 4, [&](int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) rotate_queries(op, i);
  });
  program_.pool_->barrier();
  int32_t unit = 1;
  for (int f = 0; f < kForms; ++f) unit = std::max(unit, kernels_.act_unit(static_cast<Form>(f)));
  share(counters[1], n_slots(), unit, [&](int32_t begin, int32_t end) { prepare_latents(op, begin, end); });
  program_.pool_->barrier();
  share(counters[2], op.n_heads, 1, [&](int32_t head, int32_t) { latent_head(op, head, t); });
}

}  // namespace reflex::cpu
