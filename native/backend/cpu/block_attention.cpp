// Attention over the blocks that an indexer chooses, part of PassRun. A slot's index state holds its raw key
// or, where the slot ends a block along its row's ancestors, the block's key: so a block is made once, by the
// row that ends it, whatever passes or branches of a tree its tokens came in, and is there as long as that
// slot is. The blocks of a chain lie evenly apart, so their scores are one matrix product.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/cpu/pass_run.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kIndexRows = 8;  ///< query rows of one task that chooses

/// The n best of `scores`, ties to the lower id, ascending, into the front of `order`.
void best_blocks(const std::vector<float>& scores, int32_t n, std::vector<int32_t>& order) {
  order.resize(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::nth_element(order.begin(), order.begin() + n, order.end(), better);
  std::sort(order.begin(), order.begin() + n);
}

GgmlType state_type(bool f16) { return f16 ? GgmlType::F16 : GgmlType::F32; }

float positive(float x) { return x > 0 ? x : 0.0f; }  // of NaN: 0, so that scores can be ordered

}  // namespace

// ---- what a row looks back on ------------------------------------------------------------

/// The slot of token number `depth` along row r's ancestors.
int32_t PassRun::slot_at(int32_t r, int32_t depth) const {
  const auto i = static_cast<size_t>(r);
  const int32_t prefix = visibility_.prefix[i];
  return depth < prefix ? depth
                        : visibility_.extra[static_cast<size_t>(visibility_.extra_begin[i] + depth - prefix)];
}

int32_t PassRun::sight_of(const BlockAttention& op) const {
  for (size_t i = 0; i < sights_.size(); ++i)
    if (sights_[i].block_size == op.block_size && sights_[i].n_blocks == op.n_blocks)
      return static_cast<int32_t>(i);
  return -1;
}

void PassRun::reserve_blocks(const BlockAttention& op, size_t& scratch) {
  if (sight_of(op) < 0) {
    Sight& s = sights_.emplace_back(Sight{op.block_size, op.n_blocks, {}});
    s.sees.extra_begin.push_back(0);
    for (int32_t r = 0; r < n_rows_; ++r) {
      const int32_t n = seen(r), prefix = visibility_.prefix[static_cast<size_t>(r)];
      const bool all = n / op.block_size <= op.n_blocks;
      s.sees.prefix.push_back(all ? prefix : 0);
      const int32_t listed = all ? n - prefix : op.n_blocks * op.block_size + n % op.block_size;
      for (int32_t i = 0; i < listed; ++i) s.sees.extra.push_back(all ? slot_at(r, prefix + i) : 0);
      s.sees.extra_begin.push_back(static_cast<int32_t>(s.sees.extra.size()));
    }
  }
  AttentionArgs a;
  a.n_heads = op.n_heads;
  a.n_kv_heads = op.n_kv_heads;
  a.head_dim = op.head_dim;
  a.v_head_dim = op.v_head_dim;
  const int32_t longest = *std::max_element(visibility_.prefix.begin(), visibility_.prefix.end());
  const int32_t queries = kIndexRows * op.index_heads;
  size_t choice = static_cast<size_t>(queries) * static_cast<size_t>(longest / op.block_size) * sizeof(float);
  size_t product = 0;
  for (int32_t n = op.index_heads; n <= queries; n += op.index_heads)
    for (GgmlType type : {GgmlType::F32, GgmlType::F16}) {
      const Form form = kernels_.form(static_cast<uint32_t>(type), op.index_dim, n, true);
      product = std::max(product, round_line(kernels_.act_bytes(form, op.index_dim, n)) +
                                      round_line(kernel_scratch(kernels_.matmul_scratch, op.index_dim, n)));
    }
  const size_t key = (2 * static_cast<size_t>(op.index_dim) +
                      static_cast<size_t>(program_.plan_.ropes[static_cast<size_t>(op.index_rope)].n_rot)) *
                     sizeof(float);
  scratch = std::max(
      {scratch, product + choice, key, kernels_.attention_scratch(a, kAttentionRows) * sizeof(float)});
}

// ---- the index ---------------------------------------------------------------------------

// Row r's index state: its raw key or, where it ends a block, the block's. The raw keys of the block's other
// rows are there already.
void PassRun::block_key(const BlockAttentionStep& s, int32_t r, int t) {
  const BlockAttention& op = s.op;
  const int32_t n = op.index_dim, block = op.block_size, length = seen(r);
  const bool f16 = state_.is_f16(op.index_state);
  const size_t slot_bytes = static_cast<size_t>(n) * (f16 ? 2 : 4);
  uint8_t* states = state_.buffer(op.index_state);
  const float* key = value(op.index_k) + static_cast<size_t>(r) * static_cast<size_t>(n);
  auto* sum = reinterpret_cast<float*>(scratch(t));
  if (length % block == 0) {
    float *other = sum + n, *cs = other + n;
    std::fill_n(sum, n, 0.0f);
    for (int32_t i = 0; i < block; ++i) {
      const float* x = key;
      if (i < block - 1) {
        const auto slot = static_cast<size_t>(slot_at(r, length - block + i));
        dequantize_row(state_type(f16), states + slot * slot_bytes, other, static_cast<size_t>(n));
        x = other;
      }
      for (int32_t k = 0; k < n; ++k) sum[k] += x[k];
    }
    for (int32_t k = 0; k < n; ++k) sum[k] /= static_cast<float>(block);
    kernels_.rms_norm_rows(sum, s.index_norm, op.index_eps, n, n, 1, sum);
    const RopeSpec& rope = program_.plan_.ropes[static_cast<size_t>(op.index_rope)];
    rope_angles(rope, pass_.positions[static_cast<size_t>(r)] - (block - 1), cs);
    kernels_.rope(sum, cs, 1, n, rope.n_rot, rope.pairing == RopeSpec::Pairing::adjacent);
    key = sum;
  }
  write_state(op.index_state, r, key, n);
}

// scores (blocks of row i of q): those of its chain from `chain`, a row of ld for each head; those that end
// on a branch by themselves.
void PassRun::block_scores(const BlockAttention& op, int32_t i, const float* chain, size_t ld,
                           float* scores) const {
  const int32_t r = pass_row(op.q, i), n = op.index_dim, block = op.block_size;
  const int32_t n_blocks = seen(r) / block, on_chain = visibility_.prefix[static_cast<size_t>(r)] / block;
  for (int32_t b = 0; b < on_chain; ++b) {
    scores[b] = 0;
    for (int32_t h = 0; h < op.index_heads; ++h)
      scores[b] += positive(chain[static_cast<size_t>(h) * ld + static_cast<size_t>(b)]);
  }
  const bool f16 = state_.is_f16(op.index_state);
  const size_t slot_bytes = static_cast<size_t>(n) * (f16 ? 2 : 4);
  std::vector<float> key(static_cast<size_t>(n));
  const float* q = value(op.index_q) + static_cast<size_t>(i) * static_cast<size_t>(width(op.index_q));
  for (int32_t b = on_chain; b < n_blocks; ++b) {
    const auto slot = static_cast<size_t>(slot_at(r, b * block + block - 1));
    dequantize_row(state_type(f16), state_.buffer(op.index_state) + slot * slot_bytes, key.data(),
                   key.size());
    scores[b] = 0;
    for (int32_t h = 0; h < op.index_heads; ++h) {
      float sum = 0;
      for (int32_t k = 0; k < n; ++k) sum += q[h * n + k] * key[static_cast<size_t>(k)];
      scores[b] += positive(sum);
    }
  }
}

// The lists of rows [begin, end) of q.
void PassRun::choose_blocks(const BlockAttention& op, int32_t begin, int32_t end, int t) {
  Visibility& sees = sights_[static_cast<size_t>(sight_of(op))].sees;
  const int32_t block = op.block_size, n = op.index_dim;
  int32_t longest = 0;  // blocks on a chain
  bool any = false;
  for (int32_t i = begin; i < end; ++i) {
    const int32_t r = pass_row(op.q, i);
    longest = std::max(longest, visibility_.prefix[static_cast<size_t>(r)] / block);
    any = any || seen(r) / block > op.n_blocks;
  }
  if (!any) return;
  const bool f16 = state_.is_f16(op.index_state);
  MatmulArgs a;
  a.type = static_cast<uint32_t>(state_type(f16));
  a.row_bytes = static_cast<size_t>(block) * static_cast<size_t>(n) * (f16 ? 2 : 4);
  a.w = state_.buffer(op.index_state) +
        a.row_bytes / static_cast<size_t>(block) * static_cast<size_t>(block - 1);
  a.n_in = n;
  a.n_rows = (end - begin) * op.index_heads;
  a.form = kernels_.form(a.type, n, a.n_rows, true);
  a.scratch = scratch(t);
  uint8_t* act = a.scratch + round_line(kernel_scratch(kernels_.matmul_scratch, n, a.n_rows));
  const float* q = value(op.index_q) + static_cast<size_t>(begin) * static_cast<size_t>(width(op.index_q));
  kernels_.prepare(a.form, q, static_cast<size_t>(n), n, a.n_rows, 0, a.n_rows, act);
  a.act = act;
  a.y = reinterpret_cast<float*>(act + round_line(kernels_.act_bytes(a.form, n, a.n_rows)));
  a.ldy = static_cast<size_t>(longest);
  if (longest > 0) kernels_.matmul(a, 0, longest);

  std::vector<float> scores;
  std::vector<int32_t> order;
  for (int32_t i = begin; i < end; ++i) {
    const int32_t r = pass_row(op.q, i), length = seen(r);
    if (length / block <= op.n_blocks) continue;
    scores.resize(static_cast<size_t>(length / block));
    block_scores(op, i, a.y + static_cast<size_t>(i - begin) * static_cast<size_t>(op.index_heads) * a.ldy,
                 a.ldy, scores.data());
    best_blocks(scores, op.n_blocks, order);
    int32_t* to = sees.extra.data() + sees.extra_begin[static_cast<size_t>(r)];
    for (int32_t k = 0; k < op.n_blocks; ++k)
      for (int32_t j = 0; j < block; ++j) *to++ = slot_at(r, order[static_cast<size_t>(k)] * block + j);
    for (int32_t j = length / block * block; j < length; ++j) *to++ = slot_at(r, j);
  }
}

// ---- the step ----------------------------------------------------------------------------

void PassRun::step(const BlockAttentionStep& s, Counter* counters, int t) {
  const BlockAttention& op = s.op;
  for (const bool ends : {false, true}) {  // raw keys first: those of blocks are made of them
    share(counters[ends ? 1 : 0], n_rows_, 1, [&](int32_t r, int32_t) {
      if ((seen(r) % op.block_size == 0) == ends) block_key(s, r, t);
    });
    program_.pool_->barrier();
  }
  if (!s.with_output) return;
  const int32_t n = rows(op.q), blocks = pieces(n, kAttentionRows);
  share(counters[2], n, kIndexRows, [&](int32_t begin, int32_t end) { choose_blocks(op, begin, end, t); });
  program_.pool_->barrier();
  const AttentionArgs a = attention_args(op, sights_[static_cast<size_t>(sight_of(op))].sees);
  share(counters[3], blocks * op.n_kv_heads, 1, [&](int32_t task, int32_t) {
    const int32_t block = blocks - 1 - task / op.n_kv_heads;  // the longest first
    const int32_t g = task % op.n_kv_heads;
    kernels_.attention(a, block * kAttentionRows, std::min(n, (block + 1) * kAttentionRows), g, g + 1,
                       reinterpret_cast<float*>(scratch(t)));
  });
}

}  // namespace reflex::cpu
