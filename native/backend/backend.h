// The op contract: what a model may ask of a device, with every shape written once, here.
//
// A model file describes its unfused steps as a Plan (plain data). A Backend turns the plan
// into a Program: it owns the weights' residence, the activations, and every fusion. A State
// is one sequence's memory. A Pass pushes rows through a program.
//
// Letters: R rows in this pass, O output rows, d model width, V vocabulary, hd head size,
// H query heads, G key/value heads, S slots of a state. Row-major, f32 activations.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "quant/types.h"

namespace reflex {

// ---- operands ------------------------------------------------------------------------

using WeightId = int32_t;  ///< index into Plan::weights; kNone = absent
using ValueId = int32_t;   ///< index into Plan::values
using StateId = int32_t;   ///< index into Plan::states
using RopeId = int32_t;    ///< index into Plan::ropes
inline constexpr int32_t kNone = -1;

/// A weight exactly as the file holds it. A matrix W (n_out, n_in) has ne = {n_in, n_out};
/// row j is n_in values of `type` at data + j * row_bytes(type, n_in). No alignment is
/// promised beyond the file's (32 bytes by default for the tensor, none for a row).
struct Weight {
  std::string name;
  GgmlType type = GgmlType::F32;
  int64_t ne[4] = {1, 1, 1, 1};
  const void* data = nullptr;  ///< in the mapping
  size_t nbytes = 0;
  int fd = -1;          ///< the file it lies in, for loaders that read
  uint64_t offset = 0;  ///< of data, in that file

  int64_t n_in() const { return ne[0]; }
  int64_t n_out() const { return ne[1]; }
};

/// Which rows a value exists for: all R rows of the pass, or only its O output rows.
enum class Rows : uint8_t { all, outputs };

/// An activation of `width` f32 per row. Single assignment: one op writes it.
struct ValueSpec {
  int32_t width = 0;
  Rows rows = Rows::all;
};

/// One named piece of a sequence's memory.
struct StateSpec {
  enum class Kind : uint8_t { per_token, fixed };
  std::string name;  ///< e.g. "blk.3.k"
  Kind kind = Kind::per_token;
  int32_t width = 0;        ///< values per slot (per_token) or in all (fixed)
  bool always_f32 = false;  ///< else f16 in fast mode, f32 in exact mode
};

/// Rotary embedding over the first n_rot dims of each head:
/// theta_i = position * inv_freq[i], cos and sin times `magnitude`.
struct RopeSpec {
  enum class Pairing : uint8_t { adjacent, half };  ///< (2i, 2i+1) or (i, i + n_rot/2)
  int32_t n_rot = 0;
  Pairing pairing = Pairing::half;
  std::vector<float> inv_freq;  ///< n_rot / 2
  float magnitude = 1.0f;
};

// ---- ops -----------------------------------------------------------------------------

/// y[r] = E[token[r]]                                   E (V, d); y (R, d)
struct Embed {
  WeightId table;
  ValueId out;
};

/// y[r, g] = x[r, g] * rsqrt(mean(x[r, g]^2) + eps) * w   over groups of `group` values;
/// w (group); group == width of x for a plain norm, hd for a per-head norm
struct RmsNorm {
  ValueId in, out;
  WeightId weight;
  int32_t group;
  float eps;
};

/// y[r] = W x[r] + b                                    W (n_out, n_in), b (n_out) or kNone
struct Linear {
  ValueId in, out;
  WeightId weight;
  WeightId bias = kNone;
};

/// y = rotate(x) per head by the row's position          x, y (R, n_heads * hd)
struct Rope {
  ValueId in, out;
  RopeId rope;
  int32_t n_heads;
};

/// Each row writes k, v to its slot, then, with s over the row's ancestors and itself:
/// o[r, h] = sum_s softmax_s(scale * q[r, h] . K[s, h / (H/G)]) V[s, h / (H/G)]
/// q, out (R or O, H * hd); k (R, G * hd); v (R, G * hd_v); K, V are the states' slots.
/// q may live on output rows only while k, v are on all rows.
struct Attention {
  ValueId q, k, v, out;
  StateId k_state, v_state;
  int32_t n_heads, n_kv_heads, head_dim, v_head_dim;
  float scale;
};

/// y = silu(gate) * up
struct SwiGlu {
  ValueId gate, up, out;
};

/// y = a + b
struct Add {
  ValueId a, b, out;
};

/// y = x * sigmoid(gate)          gate as wide as x, or one value per row
struct SigmoidGate {
  ValueId in, gate, out;
};

/// A mixture of experts. From the router's logits (E per row), scores = gating(logits); the n_used
/// best experts by score + bias are chosen, ties to the lower id, where groups are set only out of
/// the n_groups_used best groups of E / n_groups neighbours; or, with `of_token`, the n_used that it
/// holds for the row's token, whatever the scores. Their weights are their scores, divided
/// by the scores' sum where `renormalise` says, times `scale`; then, in ascending order of e,
/// y[r] = sum_e weight[r, e] * down[e] (silu(gate[e] x[r]) * up[e] x[r])
/// x, y (R, d); gate, up: ne = {d, F, E}; down: ne = {F, d, E}; bias (E) or kNone; of_token: I32,
/// ne = {n_used, V}, or kNone. A limit above 0: gate[e] x[r] at most that, up[e] x[r] within +- that.
struct Moe {
  /// sqrt_softplus: sqrt(log(1 + e^x))
  enum class Gating : uint8_t { softmax, sigmoid, sqrt_softplus };
  enum class GroupScore : uint8_t { maximum, best_two };  ///< a group's: its best, or its two best summed
  ValueId in, router, out;
  WeightId gate, up, down;
  WeightId bias = kNone;
  int32_t n_experts = 0, n_used = 0;
  int32_t n_groups = 1, n_groups_used = 1;
  Gating gating = Gating::softmax;
  GroupScore group_score = GroupScore::maximum;
  bool renormalise = false;
  float scale = 1.0f;
  WeightId of_token = kNone;
  float limit = 0.0f;
};

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a state of C + P values a token:
/// c[r] = [rms_norm(kv[r, :C]) ; rotate(kv[r, C:])], with q[r, h] = [qn (N) ; qp (P)], qp rotated,
/// p = softmax_s(scale * (Kb[h] c[s, :C] . qn + c[s, C:] . qp)),  o[r, h] = Vb[h] sum_s p[s] c[s, :C]
/// q (R or O, H * (N + P)); kv (R, C + P); out (R or O, H * hd_v); norm (C). Kb (H, N, C) and Vb
/// (H, hd_v, C) come either as k_b with ne = {N, C, H}, transposed, and v_b with ne = {C, hd_v, H}, or
/// as one kv_b with ne = {C, H * (N + hd_v)}, a head's N rows before its hd_v.
struct LatentAttention {
  ValueId q, kv, out;
  WeightId norm;
  float eps;
  WeightId k_b = kNone, v_b = kNone, kv_b = kNone;
  RopeId rope;
  StateId state;
  int32_t n_heads, n_latent, nope_dim, rope_dim, v_head_dim;
  float scale;
  ValueId selection = kNone;  ///< of an Indexer, on the rows of q: s runs over these slots alone
};

/// y[r] = (x[r] - mean(x[r])) * rsqrt(var(x[r]) + eps) * w + b          w, b as wide as x
struct LayerNorm {
  ValueId in, out;
  WeightId weight, bias;
  float eps;
};

/// The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, eq. 1): which slots a row's attention reads.
/// Each row writes its key to its slot, then, with s over the row's ancestors and itself,
/// score[r, s] = sum_h weights[r, h] * relu(query[r, h] . K[s]),
/// out[r] = the slots of the top_k best scores, or of all where there are fewer: NaN is the worst, ties go
/// to the earlier slot; ascending, as the bits of int32, then -1. A positive factor on a row's weights or
/// query changes nothing. Without a key (kNone) the state is that of a Compressor's entries, of the same
/// ratio: s runs over the slots in which the row's entries lie.
/// query (R or O, H * D); weights (as query, H); key (R, D); out (as query, top_k)
struct Indexer {
  ValueId query, weights, key, out;
  StateId state;
  int32_t n_heads, head_dim, top_k;
  int32_t ratio = 1;  ///< above 1 without a key
};

// Of DeepSeek-V4 (transformers: models/deepseek_v4).

/// One entry for every `ratio` rows of a sequence. A row that is number t of its ancestors, from 0, keeps
/// [kv | gate + ape[t mod ratio]] in its slot of `raw`. Where t + 1 = ratio * (i + 1), it ends block i and
/// writes entry i to its slot of `entries`, from value `offset` on: norm(c), its last values rotated as at
/// position ratio * i, with c[d] = sum_j softmax_j(gate[j, d]) * kv[j, d], j over the rows of the block.
/// With `overlap`, kv and gate are twice as wide: the second halves count for the row's own block, the first
/// halves for the one after it, so that j runs over the rows of blocks i - 1 (where there is one) and i.
/// kv, gate (R, C), C = D, or 2 D with overlap; ape: ne = {C, ratio}; norm (D); raw: 2 C per token
struct Compressor {
  ValueId kv, gate;
  WeightId ape, norm;
  RopeId rope;
  StateId raw, entries;
  int32_t head_dim, ratio, offset;
  bool overlap;
  float eps;
};

/// Attention of many heads to one key that is the value too, over a window and a Compressor's entries.
/// Each row writes kv to its slot; then, with x over the kv of its last `window` ancestors, itself included,
/// and, with a ratio, over its entries (those of the selection, where there is one):
/// o[r, h] = sum_x p[x] x,  p = softmax of scale * q[r, h] . x and of one more logit, sinks[h]
/// q, out (R or O, H * D); kv (R, D); sinks (H); state: D per token, with a ratio 2 D: [kv | entry]
struct WindowAttention {
  ValueId q, kv, out;
  WeightId sinks;
  StateId state;
  int32_t n_heads, head_dim, window;
  float scale;
  int32_t ratio = 0;
  ValueId selection = kNone;  ///< of an Indexer of the same ratio, on the rows of q
};

/// y[r, g] = x[r, g] * rsqrt(mean(x[r, g]^2) + eps)    over groups of `group` values
struct UnitNorm {
  ValueId in, out;
  int32_t group;
  float eps;
};

/// y = x with the last n_rot values of each head rotated by the row's position, by its negative in `inverse`
struct TailRope {
  ValueId in, out;
  RopeId rope;
  int32_t n_heads;
  bool inverse;
};

/// y[r, g] = W[g] x[r, g] for n_groups equal parts of x and y; W: ne = {width of x / n_groups, width of y}
struct GroupedLinear {
  ValueId in, out;
  WeightId weight;
  int32_t n_groups;
};

/// y = silu(min(gate, limit)) * max(-limit, min(up, limit))
struct ClampedSwiGlu {
  ValueId gate, up, out;
  float limit;
};

/// The weights of hyper-connections over n streams (mHC, arXiv 2512.24880). x = [pre | post | comb], each
/// part times its scale, plus base: pre = sigmoid + eps; post = 2 sigmoid; comb (from, to) = softmax over
/// `to`, + eps, divided by its sums over `from`, + eps; then, n_iterations - 1 times, by those over `to` and
/// those over `from`. x, y (R or O, n + n + n * n), or pre alone (R or O, n); base as wide; scale (3), or (1)
struct HyperWeights {
  ValueId in, out;
  WeightId scale, base;
  int32_t n_streams, n_iterations;
  float eps;
};

/// y[r] = sum_s pre[r, s] * streams[r, s]              streams (R or O, n * d); weights of HyperWeights; y
/// (as streams, d)
struct HyperRead {
  ValueId streams, weights, out;
  int32_t n_streams;
};

/// y[r, to] = post[r, to] * x[r] + sum_from comb[r, from, to] * streams[r, from]
struct HyperWrite {
  ValueId streams, weights, in, out;
  int32_t n_streams;
};

/// y[r, h] = x[r, h, begin : begin + count]              x (R, n_heads * any); y (R, n_heads * count)
struct HeadSlice {
  ValueId in, out;
  int32_t n_heads, begin, count;
};

/// y[r] = [a[r] ; b[r]]
struct Concat {
  ValueId a, b, out;
};

/// Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): K key heads of N values, H value heads of M,
/// head h of which reads key head h mod K (tiled) or h / (H/K) (grouped). With row t - 1 the parent of t:
/// x[t] = silu(sum_j conv[:, j] * qkv[t - T + 1 + j]), qkv 0 before the sequence; [q | k | v] = x[t];
/// q = l2(q) / sqrt(N), k = l2(k), l2(x) = x * rsqrt(sum(x^2) + qk_eps); per value head, in f32:
/// g = exp(decay * softplus(alpha + dt_bias)), b = sigmoid(beta), S (N, M) the head's state, at first 0;
/// d = b * (v - g * S^T k), S = g * S + k d^T, o = S^T q;  out = o * rsqrt(mean(o^2) + norm_eps) * norm *
/// gate(z) qkv (R, C), C = 2 K N + H M; beta, alpha (R, H); z, out (R or O, H * M); conv: ne = {T, C}; decay,
/// dt_bias (H); norm (M). Fixed states, always f32: conv_state (T - 1, C), delta_state (H, N, M).
struct GatedDelta {
  enum class Order : uint8_t { tiled, grouped };
  enum class Gate : uint8_t { silu, sigmoid };  ///< of z
  ValueId qkv, z, beta, alpha, out;
  WeightId conv, decay, dt_bias, norm;
  StateId conv_state, delta_state;
  int32_t n_key_heads, n_value_heads, key_dim, value_dim, n_taps;
  Order order;
  float qk_eps, norm_eps;
  Gate gate = Gate::silu;
};

// The ops below serve Qwen4-Exp (transformers 5.24, models/qwen4_exp). A residual of S streams is one value
// of S * d, stream s its values s * d .. (s + 1) * d - 1.

/// y[r, s] = x[r] for each of n streams                   x (R, d); y (R, n * d)
struct Repeat {
  ValueId in, out;
  int32_t n;
};

/// y[r, s] = x[r, s] * rsqrt(mean(x[r, s]^2) + eps) * w[s]     x, y (R, S * d); w (S * d), d = group
struct StreamNorm {
  ValueId in, out;
  WeightId weight;
  int32_t group;
  float eps;
};

/// y = silu(scale * x)
struct Silu {
  ValueId in, out;
  float scale;
};

/// y[r] = mean over s of sigmoid(gate[r, s]) * x[r, s]         x, gate (R, S * d); y (R, d)
struct StreamMix {
  ValueId in, gate, out;
  int32_t n_streams;
};

/// y[r, s] = x[r, s] + 2 * sigmoid(logits[r, s] / S) * b[r]    x, y (R, S * d); logits (R, S); b (R, d)
struct StreamInject {
  ValueId in, logits, block, out;
  int32_t n_streams;
};

/// y[r, s] = sigmoid(sign(a) * sqrt(max(|a|, 1e-6))) * v[r], a = key[r, s] . query[r, s] / sqrt(d)
/// key, query, y (R, S * d); v (R, d)
struct StreamGate {
  ValueId key, query, value, out;
  int32_t n_streams;
};

/// y[r] = the rows of one table, a row a head, in head order; heads h go by their n-gram, 2 to N tokens, as
/// many heads for each. With t[j] the token j rows up the row's ancestors (in u64, modulo 2^64):
/// row = (xor over j < n of t[j] * multipliers[j]) mod sizes[h] + offsets[h]
/// No token before the sequence, nor at and beyond the first `eos` among the ancestors: they count as `eos`;
/// that the row itself is one cuts nothing. Of the table (w, any), any type, only those rows are ever read.
/// y (R, heads * w); multipliers (N); sizes, offsets (heads). Fixed state, always f32: tokens (N - 1): the
/// last tokens, the newest last, plus 1; 0 before the sequence.
struct NgramEmbed {
  ValueId out;
  WeightId table;
  StateId tokens;
  std::vector<uint64_t> multipliers, sizes, offsets;
  uint64_t eos;
};

/// y[r, c] = silu(sum_j w[c, j] * x[(T - 1 - j) * dilation rows up r's ancestors, c]), 0 before the sequence
/// x, y (R, C); w: ne = {T, C}. Fixed state, always f32: history ((T - 1) * dilation, C), the newest last.
struct CausalConv {
  ValueId in, out;
  WeightId weight;
  StateId history;
  int32_t n_taps, dilation;
};

/// Attention that sees of its row's past only the blocks that an indexer chooses. The row is number t along
/// its ancestors (from 0; positions go up by one along them). Their complete blocks of B = block_size, b =
/// tokens b * B .. b * B + B - 1, have keys i[b] = rotate(rms_norm(mean of index_k), position of the first);
/// block b scores sum over the index heads of relu(index_q[r, h] . i[b]). Seen are the n_blocks best, ties to
/// the older, and the (t + 1) mod B tokens behind the last complete block, the row itself among them. Then as
/// Attention.
/// index_q (R or O as q, index_heads * index_dim), normed and rotated; index_k (R, index_dim), as projected;
/// index_norm (index_dim). index_state: index_dim per token: index_k, or where the token ends a block its
/// i[b].
struct BlockAttention {
  ValueId q, k, v, index_q, index_k, out;
  StateId k_state, v_state, index_state;
  WeightId index_norm;
  RopeId index_rope;
  int32_t n_heads, n_kv_heads, head_dim, v_head_dim;
  int32_t index_heads, index_dim, block_size, n_blocks;
  float scale, index_eps;
};

/// y[o] = x[outputs[o]]: from here on only output rows are computed
struct SelectOutputs {
  ValueId in, out;
};

/// logits[o] = W x[o], all V of them or only the gathered ids, as Pass::head says.
/// Always the last op.                                  W (V, d); x (O, d)
struct Head {
  ValueId in;
  WeightId weight;
  WeightId bias = kNone;
};

using Op = std::variant<Embed, RmsNorm, Linear, Rope, Attention, SwiGlu, Add, SelectOutputs, Head,
                        SigmoidGate, Moe, LatentAttention, HeadSlice, GatedDelta, LayerNorm, Indexer, Repeat,
                        StreamNorm, Silu, StreamMix, StreamInject, StreamGate, NgramEmbed, CausalConv,
                        BlockAttention, Concat, Compressor, WindowAttention, UnitNorm, TailRope,
                        GroupedLinear, ClampedSwiGlu, HyperWeights, HyperRead, HyperWrite>;

/// "Linear": for errors.
const char* op_name(const Op& op);

/// A model as data: what a model file emits and a backend compiles.
struct Plan {
  std::vector<Weight> weights;
  std::vector<ValueSpec> values;
  std::vector<StateSpec> states;
  std::vector<RopeSpec> ropes;
  std::vector<Op> ops;
  int32_t n_layers = 0;
  int32_t n_vocab = 0;
  int32_t n_embd = 0;
  int32_t n_ctx_train = 0;
};

/// Checks every op against its weights' shapes, types and its values' widths. Throws Error(gguf or
/// unsupported) that names tensor or op with what was expected and found. Every backend's first step.
void check_plan(const Plan& plan);

// ---- passes --------------------------------------------------------------------------

enum class HeadMode : uint8_t {
  none,    ///< no logits (a prefill chunk that is not the last)
  full,    ///< all V logits of every output row
  gather,  ///< of output row o, the logits of gather_ids[gather_begin[o] .. gather_begin[o+1])
};

/// R rows. Row r becomes slot first_slot + r of the state; its parent is an earlier slot (or
/// -1: none), and it sees its chain of ancestors and itself. A plain prompt is a chain:
/// parent = slot - 1. Slots below first_slot must have been written by earlier passes.
struct Pass {
  std::span<const int32_t> tokens;     ///< (R)
  std::span<const int32_t> positions;  ///< (R)
  std::span<const int32_t> parents;    ///< (R), slots
  int32_t first_slot = 0;
  /// Rows [0, n_chain) go on with the sequence, each the child of the one before: fixed states move past
  /// them. Rows after them fork: a fork's parent is the sequence's last slot or a fork of this pass, its
  /// state ends with the pass. Means nothing to plans without fixed states.
  int32_t n_chain = INT32_MAX;
  std::span<const int32_t> outputs;  ///< (O) row indices, ascending
  HeadMode head = HeadMode::none;
  std::span<const int32_t> gather_ids;
  std::span<const int32_t> gather_begin;  ///< (O + 1)
};

/// What a row sees, worked out once per pass for every layer: slots [0, prefix) and the
/// listed extra slots (ascending, the row's own slot last). For a chain extra is empty and
/// prefix counts the row itself.
struct Visibility {
  std::vector<int32_t> prefix;       ///< (R)
  std::vector<int32_t> extra;        ///< concatenated
  std::vector<int32_t> extra_begin;  ///< (R + 1)
  bool chain = true;                 ///< every row: extra empty
};

/// The tree of slots behind a state: whose parent is whose. Shared by all backends.
class SlotTree {
 public:
  /// Enter a pass's rows and return what each of them sees. Throws Error(invalid_input) on a
  /// parent that is not an earlier slot.
  Visibility extend(const Pass& pass);
  /// Forget slots at and above n.
  void truncate(int32_t n);
  int32_t size() const { return static_cast<int32_t>(parent_.size()); }

 private:
  std::vector<int32_t> parent_;        // of slot s
  std::vector<int32_t> chain_prefix_;  // n such that slot s sees exactly [0, n) plus its tree ancestors
};

/// For plans with fixed states, which stand after `length` slots: throws Error(kv_cache) where a row would
/// need one that is not there. Returns the rows of the chain, Pass::n_chain within the pass's rows.
int32_t check_forks(const Pass& pass, int32_t length);

/// What truncating to n slots must satisfy where a state has fixed parts, those after slot `length` - 1: n is
/// 0 or the checkpoint (-1: none). Throws Error(kv_cache).
void check_truncate(int32_t n, int32_t length, int32_t checkpoint);

// ---- devices -------------------------------------------------------------------------

/// How a token is drawn from a row of logits. Greedy when temperature is 0.
/// Order: logit_bias, penalties, then temperature, top_k, top_p, min_p, draw.
struct SampleSpec {
  float temperature = 0.0f;
  int32_t top_k = 0;  ///< 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  float random = 0.0f;  ///< the draw, uniform in [0, 1)
  struct Count {
    int32_t id;
    int32_t in_output;  ///< occurrences in the output so far
    bool seen;          ///< in prompt or output (repetition_penalty)
  };
  std::span<const Count> counts{};
  struct Bias {
    int32_t id;
    float bias;
  };
  std::span<const Bias> bias{};
  std::span<const uint32_t> allowed{};  ///< bitmask over V (constraint); empty: all
};

struct TokenLogprob {
  int32_t id = -1;
  float logprob = 0.0f;
};

/// One sequence's memory on a device.
class State {
 public:
  virtual ~State() = default;
  SlotTree slots;
  /// Forget slots at and above n. Fixed states stand after the sequence's rows (Pass::n_chain) run so far;
  /// forks leave no trace in them. They go back to 0 or to the checkpoint, or stay where forks alone are
  /// forgotten; else Error(kv_cache). A pass must begin where they stand.
  virtual void truncate(int32_t n) { slots.truncate(n); }
  /// Keeps a copy of the fixed states as they stand now, for truncate() to come back to; one at a time.
  virtual void checkpoint() {}
  /// Bytes now held on the device.
  virtual size_t bytes() const = 0;
};

/// How far the weights have come to where they are computed with. A backend that uses them in
/// place has nothing to load and is always finished.
struct LoadStatus {
  size_t done = 0, total = 0;  ///< bytes
  bool finished = true;
  double finished_at = 0;      ///< now_ms() of base/clock.h, 0 before
  double first_kernel_at = 0;  ///< when the first kernel was issued, 0 before
  bool stood_by = false;       ///< its threads were ready before it began (stand_by_cuda)
  size_t kernels = 0;          ///< that the device has looked up, for this program or before
};

/// A compiled plan with its weights. Runs one pass at a time.
class Program {
 public:
  virtual ~Program() = default;
  virtual std::unique_ptr<State> new_state() = 0;
  /// Largest R that run() takes; callers split longer passes.
  virtual int32_t max_rows() const = 0;
  virtual void run(State& state, const Pass& pass) = 0;

  // Results of the last run(), valid until the next. o indexes its output rows.
  /// HeadMode::full: the V logits of row o, on the host (copied when they are elsewhere).
  virtual std::span<const float> logits(int32_t o) = 0;
  /// HeadMode::gather: the gathered logits of row o, in the order asked.
  virtual std::span<const float> gathered(int32_t o) = 0;
  /// HeadMode::full: log(sum_v exp(logit[v])) of row o, summed in f64 or better than f32.
  virtual double log_sum_exp(int32_t o) = 0;
  /// HeadMode::full: index of the largest logit, the first on a tie; NaN never wins;
  /// -1 where all are NaN.
  virtual int32_t argmax(int32_t o) = 0;
  /// A token drawn as `spec` says; -1 where none is left to choose from (all NaN or ruled out).
  virtual int32_t sample(int32_t o, const SampleSpec& spec) = 0;
  /// HeadMode::full: the n largest logits of row o as log-probabilities, best first, ties by id.
  virtual std::vector<TokenLogprob> top_logprobs(int32_t o, int32_t n) = 0;

  /// run() may be called while weights are still on their way: each step waits for its own. Wide
  /// heads come last, and only once a pass asked for full logits.
  virtual LoadStatus load_status() const { return {}; }
  /// Wait until every weight is there; throws what stopped the load.
  virtual void finish_load() {}
  /// Asked about once a millisecond by run() and finish_load() while they wait for weights: true ends them
  /// with Error(cancelled); of a pass the state is then fit for truncate(0) only. Empty: never asked.
  virtual void set_interrupt(std::function<bool()> interrupt) { (void)interrupt; }

  /// Bytes of weights resident and of activation memory, for reports.
  virtual size_t weight_bytes() const = 0;
  virtual size_t scratch_bytes() const = 0;
};

/// How a GPU does latent attention of many rows where it can do both; chosen: by which is less work.
enum class LatentForm : uint8_t { chosen, absorbed, decompressed };

struct ProgramOptions {
  int32_t n_ctx = 0;       ///< most slots a state may hold
  bool exact = false;      ///< f32 activations and f32 state everywhere
  int32_t max_rows = 512;  ///< wanted chunk size
  /// How a GPU's weights are read: "" chooses; "ring" copies the mapping through pinned memory, "read" reads
  /// the file into it, "map" pins the mapping itself in pieces, "direct" reads past the page cache.
  std::string load_mode;
  /// When a mixture's experts come to a GPU: "eager" before the first pass is through, "lazy" as routers
  /// choose them with the rest behind; "" or "auto" chooses by their size. The CPU's mapping is lazy anyway.
  std::string experts;
  /// Most bytes of a GPU that experts may take, 0: what is free. What does not fit stays with the host and
  /// is fetched as it is chosen.
  uint64_t expert_bytes = 0;
  /// The file's pages are in memory: reading them waits for no disk, and they may be mapped ahead.
  bool in_page_cache = false;
  int load_threads = 0;                    ///< that copy to a GPU, 0: what the mode is best with (benchmarks)
  LatentForm latent = LatentForm::chosen;  ///< tests and benchmarks say another
  uint64_t latent_bytes = 0;  ///< that decompressed heads may take at a time, 0: what suits the card
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;         ///< "cpu", "cuda"
  virtual std::string description() const = 0;  ///< e.g. "CPU avx512vnni, 2 threads"
  /// When the device's stages of starting were reached, now_ms() each, in order; empty on the CPU.
  virtual std::vector<std::pair<std::string, double>> start_stages() const { return {}; }
  /// Takes the plan; weights' mappings must outlive the program. Error(unsupported) names the
  /// op or the tensor and type that the backend cannot run; Error(out_of_memory) names need
  /// and have.
  virtual std::unique_ptr<Program> compile(Plan plan, const ProgramOptions& options) = 0;
};

/// threads 0: what the machine and the cgroup allow. isa "": the best the machine has; else
/// "portable", "avx2", "avx512vnni" (tests, doctor).
std::unique_ptr<Backend> make_cpu_backend(int threads, const std::string& isa = "");

/// device_index into the visible devices. Error(cuda) where there is no driver or card.
std::unique_ptr<Backend> make_cuda_backend(int device_index);
/// Whether the core was built with CUDA, and how many devices there are (0 without a driver).
bool cuda_built();
/// Architectures that this build's kernels have machine code for, e.g. "75 80 90a" (the last has PTX too),
/// and the version of the nvcc that made them; empty without CUDA.
struct CudaImages {
  std::string archs, nvcc;
};
CudaImages cuda_images();
int cuda_device_count();
/// For a process that waits for a model: makes ready on the device what does not depend on one, so that the
/// next program compiled with these options finds it. Returns when that is done, or once one is compiled
/// meanwhile. Takes 32 MiB of the GPU and the kernels' code. Error(cuda) and the like as compile() would
/// have.
void stand_by_cuda(int device_index, const ProgramOptions& options);

}  // namespace reflex
