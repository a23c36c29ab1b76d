// Multi-head latent attention, part of PassRun, absorbed: a query is carried into the latent space
// by its head's key matrix, all heads attend to the one state there, and each result is carried out
// by its head's value matrix. The state holds a token's normed latent and its rotated key. Many rows at once
// go another way: latent_prefill.cpp.
#include <cstring>

#include "backend/cpu/pass_run.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kLatentRows = 4;   ///< query rows of one attention task
constexpr int32_t kLatentHeads = 8;  ///< most heads of one attention task: they share the state's rows

int32_t heads_per_task(int32_t n_heads) {
  int32_t n = std::min(n_heads, kLatentHeads);
  while (n_heads % n != 0) --n;
  return n;
}

AttentionArgs latent_args(const LatentAttention& op) {
  AttentionArgs a;
  a.n_heads = heads_per_task(op.n_heads);
  a.n_kv_heads = 1;
  a.head_dim = op.n_latent + op.rope_dim;
  a.v_head_dim = op.n_latent;
  a.scale = op.scale;
  return a;
}

}  // namespace

void PassRun::reserve_latent(const LatentAttention& op, size_t& scratch) {
  scratch = std::max(scratch, static_cast<size_t>(width(op.kv)) * sizeof(float));
  if (decompressed(op)) return reserve_decompressed(op, scratch);
  const int32_t n = rows(op.q);
  const size_t heads = static_cast<size_t>(n) * static_cast<size_t>(op.n_heads);
  ensure(program_.latent_q_, heads * static_cast<size_t>(op.n_latent + op.rope_dim) * sizeof(float),
         "latent queries");
  ensure(program_.latent_o_, heads * static_cast<size_t>(op.n_latent) * sizeof(float), "latent results");
  const auto product = [&](WeightId w, int32_t n_in) {
    const size_t kernel = round_line(kernel_scratch(kernels_.matmul_scratch, n_in, n));
    scratch = std::max(scratch, kernel + kernels_.act_bytes(form_of(w, n), n_in, n));
  };
  if (op.kv_b == kNone) product(op.k_b, op.nope_dim);
  product(op.kv_b == kNone ? op.v_b : op.kv_b, op.n_latent);
  scratch = std::max(scratch, kernels_.attention_scratch(latent_args(op), kLatentRows) * sizeof(float));
}

// Row r of kv: the latent normed, the key rotated, into the state's slot.
void PassRun::latent_state(const LatentStep& s, int32_t r, int t) {
  const LatentAttention& op = s.op;
  const int32_t n = width(op.kv), c = op.n_latent, p = op.rope_dim;
  const float* x = value(op.kv) + static_cast<size_t>(r) * static_cast<size_t>(n);
  auto* y = reinterpret_cast<float*>(scratch(t));
  kernels_.rms_norm_rows(x, s.norm.weight, s.norm.eps, c, c, 1, y);
  std::memcpy(y + c, x + c, static_cast<size_t>(p) * sizeof(float));
  const bool adjacent =
      program_.plan_.ropes[static_cast<size_t>(op.rope)].pairing == RopeSpec::Pairing::adjacent;
  kernels_.rope(y + c, rope_row(op.rope, r), 1, p, p, adjacent);
  write_state(op.state, r, y, n);
}

// y[r, j - begin] = row j of w's member . x[r], prepared in this thread's scratch.
void PassRun::head_product(WeightId w, int32_t member, int32_t begin, int32_t end, const float* x, size_t ldx,
                           int32_t n_rows, float* y, size_t ldy, int t) {
  const Form form = form_of(w, n_rows);
  MatmulArgs a = matmul_args(w, n_rows, form, t, member);
  uint8_t* act = scratch(t) + round_line(kernel_scratch(kernels_.matmul_scratch, a.n_in, n_rows));
  kernels_.prepare(form, x, ldx, a.n_in, n_rows, 0, n_rows, act);
  a.act = act;
  a.y = y;
  a.ldy = ldy;
  kernels_.matmul(a, begin, end);
}

// latent_q[:, head] = [Kb^T qn ; rotate(qp)]
void PassRun::latent_query(const LatentAttention& op, int32_t head, int t) {
  const int32_t n = rows(op.q), c = op.n_latent, p = op.rope_dim, nope = op.nope_dim;
  const auto ldq = static_cast<size_t>(width(op.q));
  const auto ldy = static_cast<size_t>(op.n_heads) * static_cast<size_t>(c + p);
  const float* q = value(op.q) + static_cast<size_t>(head) * static_cast<size_t>(nope + p);
  float* y = reinterpret_cast<float*>(program_.latent_q_.data()) + head * static_cast<int64_t>(c + p);
  if (op.kv_b == kNone) {
    head_product(op.k_b, head, 0, c, q, ldq, n, y, ldy, t);
  } else {  // the file holds Kb by rows: their sum, each times its value of the query
    const Weight& w = program_.plan_.weights[static_cast<size_t>(op.kv_b)];
    const size_t bytes = row_bytes(w.type, static_cast<size_t>(c));
    const uint8_t* first =
        static_cast<const uint8_t*>(w.data) + static_cast<size_t>(head * (nope + op.v_head_dim)) * bytes;
    auto* row = reinterpret_cast<float*>(scratch(t));
    for (int32_t r = 0; r < n; ++r) std::fill_n(y + static_cast<size_t>(r) * ldy, c, 0.0f);
    for (int32_t i = 0; i < nope; ++i) {
      dequantize_row(w.type, first + static_cast<size_t>(i) * bytes, row, static_cast<size_t>(c));
      for (int32_t r = 0; r < n; ++r) {
        float* to = y + static_cast<size_t>(r) * ldy;
        const float by = q[static_cast<size_t>(r) * ldq + static_cast<size_t>(i)];
        for (int32_t k = 0; k < c; ++k) to[k] += by * row[k];
      }
    }
  }
  const bool adjacent =
      program_.plan_.ropes[static_cast<size_t>(op.rope)].pairing == RopeSpec::Pairing::adjacent;
  for (int32_t r = 0; r < n; ++r) {
    float* to = y + static_cast<size_t>(r) * ldy + c;
    std::memcpy(to, q + static_cast<size_t>(r) * ldq + nope, static_cast<size_t>(p) * sizeof(float));
    kernels_.rope(to, rope_row(op.rope, pass_row(op.q, r)), 1, p, p, adjacent);
  }
}

// out[:, head] = Vb latent_o[:, head]
void PassRun::latent_value(const LatentAttention& op, int32_t head, int t) {
  const int32_t n = rows(op.q), c = op.n_latent, v = op.v_head_dim;
  const auto ldx = static_cast<size_t>(op.n_heads) * static_cast<size_t>(c);
  const float* x = reinterpret_cast<const float*>(program_.latent_o_.data()) + head * static_cast<int64_t>(c);
  float* y = value(op.out) + head * static_cast<int64_t>(v);
  const auto ldy = static_cast<size_t>(width(op.out));
  if (op.kv_b == kNone) return head_product(op.v_b, head, 0, v, x, ldx, n, y, ldy, t);
  const int32_t first = head * (op.nope_dim + v) + op.nope_dim;
  head_product(op.kv_b, 0, first, first + v, x, ldx, n, y, ldy, t);
}

// Attention of one group of heads, from row `first` of the queries on.
AttentionArgs PassRun::latent_task(AttentionArgs a, const LatentAttention& op, int32_t group,
                                   int32_t first) const {
  const auto head = static_cast<size_t>(group * a.n_heads), row = static_cast<size_t>(first);
  a.ldq = static_cast<size_t>(op.n_heads) * static_cast<size_t>(a.head_dim);
  a.ldo = static_cast<size_t>(op.n_heads) * static_cast<size_t>(a.v_head_dim);
  a.q = reinterpret_cast<const float*>(program_.latent_q_.data()) + row * a.ldq +
        head * static_cast<size_t>(a.head_dim);
  a.out = reinterpret_cast<float*>(program_.latent_o_.data()) + row * a.ldo +
          head * static_cast<size_t>(a.v_head_dim);
  a.k = a.v = state_.buffer(op.state);
  a.ldk = a.ldv = static_cast<size_t>(a.head_dim);
  a.f16 = state_.is_f16(op.state);
  return a;
}

// latent_o = the latents that each row sees, weighted; rows in blocks, which share them.
void PassRun::latent_rows(const LatentAttention& op, Counter& counter, int t) {
  const int32_t n = rows(op.q), blocks = pieces(n, kLatentRows);
  const AttentionArgs shape = latent_args(op);
  const int32_t groups = op.n_heads / shape.n_heads;
  share(counter, blocks * groups, 1, [&](int32_t task, int32_t) {
    const int32_t block = blocks - 1 - task / groups;  // the longest first
    AttentionArgs a = latent_task(shape, op, task % groups, 0);
    a.row_of = rows_kind(op.q) == Rows::all ? nullptr : pass_.outputs.data();
    a.prefix = visibility_.prefix.data();
    a.extra = visibility_.extra.data();
    a.extra_begin = visibility_.extra_begin.data();
    kernels_.attention(a, block * kLatentRows, std::min(n, (block + 1) * kLatentRows), 0, 1,
                       reinterpret_cast<float*>(scratch(t)));
  });
}

// The same over the slots chosen for each row, which are a branch off nothing: one row a task, so that its
// sums do not depend on its neighbours' choices.
void PassRun::latent_selected(const LatentAttention& op, Counter& counter, int t) {
  const int32_t n = rows(op.q), top_k = width(op.selection);
  const AttentionArgs shape = latent_args(op);
  const int32_t groups = op.n_heads / shape.n_heads;
  const auto* selection = reinterpret_cast<const int32_t*>(value(op.selection));
  share(counter, n * groups, 1, [&](int32_t task, int32_t) {
    const int32_t i = n - 1 - task / groups;
    const int32_t* slots = selection + static_cast<size_t>(i) * static_cast<size_t>(top_k);
    const int32_t count = std::min(top_k, seen(pass_row(op.q, i)));
    const int32_t prefix = 0, extra_begin[2] = {0, count};
    AttentionArgs a = latent_task(shape, op, task % groups, i);
    a.prefix = &prefix;
    a.extra = slots;
    a.extra_begin = extra_begin;
    kernels_.attention(a, 0, 1, 0, 1, reinterpret_cast<float*>(scratch(t)));
  });
}

void PassRun::step(const LatentStep& s, Counter* counters, int t) {
  const LatentAttention& op = s.op;
  share(counters[0], n_rows_, 1, [&](int32_t r, int32_t) { latent_state(s, r, t); });
  if (!s.with_output) return;
  if (decompressed(op)) return latent_decompressed(op, counters + 1, t);
  share(counters[1], op.n_heads, 1, [&](int32_t head, int32_t) { latent_query(op, head, t); });
  program_.pool_->barrier();
  if (op.selection == kNone || most_seen() <= width(op.selection))
    latent_rows(op, counters[2], t);
  else
    latent_selected(op, counters[2], t);
  program_.pool_->barrier();
  share(counters[3], op.n_heads, 1, [&](int32_t head, int32_t) { latent_value(op, head, t); });
}

}  // namespace reflex::cpu
