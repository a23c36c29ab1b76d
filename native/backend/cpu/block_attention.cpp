// Attention over the blocks that an indexer chooses, part of PassRun. A slot's index state holds its raw key
// or, where the slot ends a block along its row's ancestors, the block's key: so a block is made once, by the
// row that ends it, whatever passes or branches of a tree its tokens came in, and is there as long as that
// slot is. The blocks of a chain lie evenly apart, so their scores are a matrix product.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/cpu/pass_run.h"
#include "quant/dequantize.h"

namespace reflex::cpu {

namespace {

constexpr int32_t kIndexRows = 8;      ///< query rows of one task that scores
constexpr int32_t kIndexBlocks = 512;  ///< and blocks: a single row's are shared among threads

/// The n best of scores (as many as `order` has), ties to the lower id, ascending, into the front of `order`.
void best_blocks(const float* scores, int32_t n, std::vector<int32_t>& order) {
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
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
    Sight& s = sights_.emplace_back(Sight{op.block_size, op.n_blocks, most_seen() / op.block_size, {}});
    s.sees.extra_begin.push_back(0);
    for (int32_t r = 0; r < n_rows_; ++r) {
      const int32_t n = seen(r), prefix = visibility_.prefix[static_cast<size_t>(r)];
      const bool all = n / op.block_size <= op.n_blocks;
      s.sees.prefix.push_back(all ? prefix : 0);
      const int32_t listed = all ? n - prefix : op.n_blocks * op.block_size + n % op.block_size;
      s.sees.extra.resize(s.sees.extra.size() + static_cast<size_t>(listed));
      for (int32_t i = 0; all && i < listed; ++i)
        s.sees.extra[static_cast<size_t>(s.sees.extra_begin.back() + i)] = slot_at(r, prefix + i);
      s.sees.extra_begin.push_back(static_cast<int32_t>(s.sees.extra.size()));
    }
  }
  const Sight& sight = sights_[static_cast<size_t>(sight_of(op))];
  if (sight.most > op.n_blocks)
    ensure(program_.block_scores_,
           static_cast<size_t>(rows(op.q)) * static_cast<size_t>(sight.most) * sizeof(float),
           "blocks' scores");
  AttentionArgs a;
  a.n_heads = op.n_heads;
  a.n_kv_heads = op.n_kv_heads;
  a.head_dim = op.head_dim;
  a.v_head_dim = op.v_head_dim;
  a.prefix = sight.sees.prefix.data();
  const int32_t n = rows(op.q), parts = std::max(attention_parts(a, n), list_parts(op, a));
  ensure(program_.parts_, static_cast<size_t>(parts) * kernels_.attention_part_floats(a, n) * sizeof(float),
         "attention parts");
  size_t product = 0;
  for (int32_t q = op.index_heads; q <= kIndexRows * op.index_heads; q += op.index_heads)
    for (GgmlType type : {GgmlType::F32, GgmlType::F16}) {
      const Form form = kernels_.form(static_cast<uint32_t>(type), op.index_dim, q, true);
      product = std::max(product, round_line(kernels_.act_bytes(form, op.index_dim, q)) +
                                      round_line(kernel_scratch(kernels_.matmul_scratch, op.index_dim, q)));
    }
  product += static_cast<size_t>(kIndexRows * op.index_heads) * kIndexBlocks * sizeof(float);
  const size_t key = (2 * static_cast<size_t>(op.index_dim) +
                      static_cast<size_t>(program_.plan_.ropes[static_cast<size_t>(op.index_rope)].n_rot)) *
                     sizeof(float);
  scratch = std::max({scratch, product, key, kernels_.attention_scratch(a, kAttentionRows) * sizeof(float)});
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

/// (blocks) of row i of q.
float* PassRun::block_scores(const BlockAttention& op, int32_t i) const {
  return reinterpret_cast<float*>(program_.block_scores_.data()) +
         static_cast<size_t>(i) * static_cast<size_t>(sights_[static_cast<size_t>(sight_of(op))].most);
}

// Of rows [begin, end) of q: the scores of blocks [first, first + kIndexBlocks) that end on their chain.
void PassRun::score_chain(const BlockAttention& op, int32_t begin, int32_t end, int32_t first, int t) {
  const int32_t block = op.block_size, n = op.index_dim;
  int32_t last = first;
  for (int32_t i = begin; i < end; ++i)
    if (const int32_t r = pass_row(op.q, i); seen(r) / block > op.n_blocks)
      last = std::max(last, visibility_.prefix[static_cast<size_t>(r)] / block);
  last = std::min(last, first + kIndexBlocks);
  if (last == first) return;
  const bool f16 = state_.is_f16(op.index_state);
  const size_t slot_bytes = static_cast<size_t>(n) * (f16 ? 2 : 4);
  MatmulArgs a;
  a.type = static_cast<uint32_t>(state_type(f16));
  a.row_bytes = static_cast<size_t>(block) * slot_bytes;
  a.w = state_.buffer(op.index_state) + static_cast<size_t>(block - 1) * slot_bytes;
  a.n_in = n;
  a.n_rows = (end - begin) * op.index_heads;
  a.form = kernels_.form(a.type, n, a.n_rows, true);
  a.scratch = scratch(t);
  uint8_t* act = a.scratch + round_line(kernel_scratch(kernels_.matmul_scratch, n, a.n_rows));
  const float* q = value(op.index_q) + static_cast<size_t>(begin) * static_cast<size_t>(width(op.index_q));
  kernels_.prepare(a.form, q, static_cast<size_t>(n), n, a.n_rows, 0, a.n_rows, act);
  a.act = act;
  a.y = reinterpret_cast<float*>(act + round_line(kernels_.act_bytes(a.form, n, a.n_rows)));
  a.ldy = static_cast<size_t>(last - first);
  kernels_.matmul(a, first, last);
  for (int32_t i = begin; i < end; ++i) {
    const int32_t r = pass_row(op.q, i);
    if (seen(r) / block <= op.n_blocks) continue;
    float* scores = block_scores(op, i) + first;
    const int32_t count = std::min(last, visibility_.prefix[static_cast<size_t>(r)] / block) - first;
    const float* products = a.y + static_cast<size_t>((i - begin) * op.index_heads) * a.ldy;
    for (int32_t b = 0; b < count; ++b) scores[b] = positive(products[b]);
    for (int32_t h = 1; h < op.index_heads; ++h)
      for (int32_t b = 0; b < count; ++b)
        scores[b] += positive(products[static_cast<size_t>(h) * a.ldy + static_cast<size_t>(b)]);
  }
}

// Of row i of q: the scores of blocks that end on a branch.
void PassRun::score_branch(const BlockAttention& op, int32_t i) const {
  const int32_t r = pass_row(op.q, i), n = op.index_dim, block = op.block_size;
  const bool f16 = state_.is_f16(op.index_state);
  const size_t slot_bytes = static_cast<size_t>(n) * (f16 ? 2 : 4);
  std::vector<float> key(static_cast<size_t>(n));
  const float* q = value(op.index_q) + static_cast<size_t>(i) * static_cast<size_t>(width(op.index_q));
  float* scores = block_scores(op, i);
  for (int32_t b = visibility_.prefix[static_cast<size_t>(r)] / block; b < seen(r) / block; ++b) {
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

// The list of row i of q.
void PassRun::choose_blocks(const BlockAttention& op, int32_t i) {
  const int32_t r = pass_row(op.q, i), block = op.block_size, length = seen(r);
  if (length / block <= op.n_blocks) return;
  score_branch(op, i);
  std::vector<int32_t> order(static_cast<size_t>(length / block));
  best_blocks(block_scores(op, i), op.n_blocks, order);
  Visibility& sees = sights_[static_cast<size_t>(sight_of(op))].sees;
  int32_t* to = sees.extra.data() + sees.extra_begin[static_cast<size_t>(r)];
  for (int32_t k = 0; k < op.n_blocks; ++k)
    for (int32_t j = 0; j < block; ++j) *to++ = slot_at(r, order[static_cast<size_t>(k)] * block + j);
  for (int32_t j = length / block * block; j < length; ++j) *to++ = slot_at(r, j);
}

// ---- the step ----------------------------------------------------------------------------

// Into how many parts a single row's list is cut (decoding), by its length alone; 1: it is not.
int32_t PassRun::list_parts(const BlockAttention& op, const AttentionArgs& a) const {
  if (rows(op.q) != 1 || kernels_.attention_part_floats(a, 1) == 0) return 1;
  const Visibility& sees = sights_[static_cast<size_t>(sight_of(op))].sees;
  const auto r = static_cast<size_t>(pass_row(op.q, 0));
  const int32_t n = sees.prefix[r] > 0 ? 0 : sees.extra_begin[r + 1] - sees.extra_begin[r];
  return n < 2 * kPartSlots ? 1 : pieces(n, kPartSlots);
}

// A single row over its list, in parts.
void PassRun::attend_list(const BlockAttention& op, const AttentionArgs& all, int32_t parts,
                          Counter* counters, int t) {
  const auto r = static_cast<size_t>(pass_row(op.q, 0));
  const int32_t none = 0, begin = all.extra_begin[r], end = all.extra_begin[r + 1];
  int32_t cut[2] = {begin, end};
  AttentionArgs a = all;
  a.row_of = nullptr;
  a.prefix = &none;
  a.extra_begin = cut;
  auto* results = reinterpret_cast<float*>(program_.parts_.data());
  const size_t stride = kernels_.attention_part_floats(a, 1);
  share(counters[0], parts, 1, [&](int32_t part, int32_t) {
    cut[0] = begin + part * kPartSlots;
    cut[1] = std::min(end, cut[0] + kPartSlots);
    kernels_.attention_part(a, 1, 0, 0, true, results + static_cast<size_t>(part) * stride,
                            reinterpret_cast<float*>(scratch(t)));
  });
  program_.pool_->barrier();
  share(counters[1], op.n_kv_heads, 1,
        [&](int32_t g, int32_t) { kernels_.attention_merge(a, 1, g, results, parts); });
}

void PassRun::step(const BlockAttentionStep& s, Counter* counters, int t) {
  const BlockAttention& op = s.op;
  for (const bool ends : {false, true}) {  // raw keys first: those of blocks are made of them
    share(counters[ends ? 1 : 0], n_rows_, 1, [&](int32_t r, int32_t) {
      if ((seen(r) % op.block_size == 0) == ends) block_key(s, r, t);
    });
    program_.pool_->barrier();
  }
  if (!s.with_output) return;
  const Sight& sight = sights_[static_cast<size_t>(sight_of(op))];
  const int32_t n = rows(op.q), most = sight.most;
  if (most > op.n_blocks) {
    const int32_t groups = pieces(n, kIndexRows);
    share(counters[2], groups * pieces(most, kIndexBlocks), 1, [&](int32_t task, int32_t) {
      const int32_t begin = task % groups * kIndexRows;
      score_chain(op, begin, std::min(n, begin + kIndexRows), task / groups * kIndexBlocks, t);
    });
    program_.pool_->barrier();
    share(counters[3], n, 1, [&](int32_t i, int32_t) { choose_blocks(op, i); });
    program_.pool_->barrier();
  }
  const AttentionArgs a = attention_args(op, sight.sees);
  if (const int32_t parts = list_parts(op, a); parts > 1) return attend_list(op, a, parts, counters + 4, t);
  attend(a, n, counters + 4, t);
}

}  // namespace reflex::cpu
