// One pass in progress: the steps, run by every thread of the team in the same order, with
// barriers where one step reads what another thread wrote.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>

#include "backend/cpu/program.h"

namespace reflex::cpu {

inline constexpr int kCountersPerStep = 6;      ///< phases of the longest step, BlockAttention
inline constexpr int32_t kAttentionRows = 32;   ///< query rows of one attention task
inline constexpr int32_t kPartSlots = 128;      ///< slots of one part of a long context
inline constexpr int32_t kLongContext = 512;    ///< slots from which heads alone don't divide it well
inline constexpr int32_t kMatmulRows = 48;      ///< most weight rows of one piece
inline constexpr int32_t kFewRows = 4;          ///< up to which a product is a stream over its weights
inline constexpr int32_t kMatvecRows = 16;      ///< weight rows of a piece of such a product
inline constexpr int kStreamsPerStep = 2;       ///< Moe: gate and up, then down
inline constexpr int32_t kMatmulUnit = 12;      ///< a piece is a multiple: the kernels' groups divide it
inline constexpr int32_t kPiecesPerThread = 8;  ///< aimed at, so that uneven threads even out
inline constexpr int32_t kConvChannels = 256;   ///< channels of one task of a CausalConv
inline constexpr size_t kLine = 64;

inline size_t round_line(size_t n) { return (n + kLine - 1) / kLine * kLine; }

/// Weight rows of one piece of a product with n_out rows.
inline int32_t grain(int32_t n_out, int threads) {
  const int32_t even = n_out / (kPiecesPerThread * threads);
  return std::clamp(even / kMatmulUnit * kMatmulUnit, kMatmulUnit, kMatmulRows);
}

inline int32_t pieces(int32_t n, int32_t grain) { return (n + grain - 1) / grain; }

/// Bytes of a product's scratch, of kernels that do or do not ask for the rows.
template <class F>
size_t kernel_scratch(F f, int32_t n_in, int32_t n_rows) {
  if constexpr (std::is_invocable_v<F, int32_t, int32_t>)
    return f(n_in, n_rows);
  else
    return f(n_in);
}

class PassRun {
 public:
  PassRun(CpuProgram& program, CpuState& state, const Pass& pass, const Visibility& visibility,
          const StepList& list);
  void run();

 private:
  /// Work of one phase, handed out piece by piece.
  struct alignas(64) Counter {
    std::atomic<int32_t> next{0};
  };
  /// What is left of a thread's own part of a phase: pieces taken from its front, by itself, and from its
  /// back, by others who have done theirs.
  struct alignas(64) Part {
    std::atomic<uint64_t> taken{0};  ///< front, and back in the high half
  };
  /// Which experts each row of a Moe step goes to, then the same by expert. Reused by each.
  struct Routing {
    std::vector<int32_t> expert;  ///< (R, n_used), ascending per row
    std::vector<float> weight;    ///< (R, n_used)
    struct Chosen {
      int32_t expert = 0;
      int32_t begin = 0, end = 0;  ///< its part of rows and of_row
      size_t act_at[kForms] = {};  ///< where its prepared rows begin, bytes
      int32_t n_rows() const { return end - begin; }
    };
    std::vector<Chosen> chosen;  ///< experts that have rows, ascending
    std::vector<int32_t> rows;   ///< (R * n_used) rows of the first chosen, then of the next
    std::vector<float> of_row;   ///< their weights
  };

  void reserve();
  void reserve_matmul(ValueId in, std::span<const WeightId> weights, bool pair, size_t& scratch);
  void thread_main(int t);

  void step(const EmbedStep& s, Counter* counters, int t);
  void step(const MatmulStep& s, Counter* counters, int t);
  void step(const HeadsStep& s, Counter* counters, int t);
  void step(const AttentionStep& s, Counter* counters, int t);
  void step(const AddStep& s, Counter* counters, int t);
  void step(const SwiGluStep& s, Counter* counters, int t);
  void step(const SigmoidGateStep& s, Counter* counters, int t);
  void step(const MoeStep& s, Counter* counters, int t);
  void step(const LatentStep& s, Counter* counters, int t);
  void step(const HeadSliceStep& s, Counter* counters, int t);
  void step(const ConcatStep& s, Counter* counters, int t);
  void step(const DeltaStep& s, Counter* counters, int t);
  void step(const LayerNormStep& s, Counter* counters, int t);
  void step(const IndexerStep& s, Counter* counters, int t);
  void step(const RepeatStep& s, Counter* counters, int t);
  void step(const SiluStep& s, Counter* counters, int t);
  void step(const StreamNormStep& s, Counter* counters, int t);
  void step(const StreamMixStep& s, Counter* counters, int t);
  void step(const StreamInjectStep& s, Counter* counters, int t);
  void step(const StreamGateStep& s, Counter* counters, int t);
  void step(const NgramStep& s, Counter* counters, int t);
  void step(const ConvStep& s, Counter* counters, int t);
  void step(const BlockAttentionStep& s, Counter* counters, int t);
  void step(const CompressorStep& s, Counter* counters, int t);
  void step(const WindowStep& s, Counter* counters, int t);
  void step(const TailRopeStep& s, Counter* counters, int t);
  void step(const GroupedStep& s, Counter* counters, int t);
  void step(const ClampedSwiGluStep& s, Counter* counters, int t);
  void step(const HyperWeightsStep& s, Counter* counters, int t);
  void step(const HyperReadStep& s, Counter* counters, int t);
  void step(const HyperWriteStep& s, Counter* counters, int t);
  void step(const SelectStep& s, Counter* counters, int t);
  void step(const HeadStep& s, Counter* counters, int t);

  void prepare(ValueId in, const Norm& norm, const bool (&forms)[kForms], Counter& counter, int t);
  /// A part of a step's weight rows: pieces of its own numbers follow one another over all parts.
  struct PieceRange {
    int part;
    int32_t n_out, first, end;  ///< pieces [first, end)
  };
  void begin_stream(WeightId id, int32_t row, int32_t end, int32_t member = 0) const;
  void matmul_chunk(const MatmulStep& s, int part, int32_t begin, int32_t end, int t);
  void pair_chunk(const MatmulStep& s, int32_t begin, int32_t end, int t);
  void head_gather(const HeadStep& s, Counter& counter, int t);
  void reserve_moe(const MoeStep& s, size_t& scratch);
  void fetch_chosen(const MoeStep& s);
  void route_row(const MoeStep& s, int32_t r, float* scores);
  void sort_by_expert(int32_t n_rows, const Moe& op);
  void place_activations(int32_t n_in, std::span<const WeightId> weights, bool shared);
  void prepare_expert(const Routing::Chosen& c, std::span<const WeightId> weights, const float* x,
                      const int32_t* rows, int t);
  void begin_expert(const Moe& op, const Routing::Chosen& c, int32_t row) const;
  void expert_gate_up(const Moe& op, const Routing::Chosen& c, int32_t begin, int32_t end, int t);
  void experts_down(const Moe& op, int32_t begin, int32_t end, int t);
  MatmulArgs expert_args(WeightId w, const Routing::Chosen& c, int t) const;
  void reserve_latent(const LatentAttention& op, size_t& scratch);
  AttentionArgs latent_task(AttentionArgs a, const LatentAttention& op, int32_t group, int32_t first) const;
  void latent_rows(const LatentAttention& op, Counter& counter, int t);
  void latent_selected(const LatentAttention& op, Counter& counter, int t);
  void reserve_indexer(const Indexer& op, size_t& scratch);
  void index_row(const Indexer& op, int32_t i, int t);
  void index_scores(const Indexer& op, int32_t i, uint8_t* scratch, float* scores);
  void write_state(StateId state, int32_t r, const float* x, int32_t n, int32_t width, int32_t offset);
  void write_state(StateId state, int32_t r, const float* x, int32_t n) { write_state(state, r, x, n, n, 0); }
  int32_t seen(int32_t r) const;
  int32_t most_seen() const;
  int32_t slot_seen(int32_t r, int32_t i) const;
  void reserve_compressor(const Compressor& op, size_t& scratch);
  void raw_row(const CompressorStep& s, int32_t r, int t);
  void entry_of(const CompressorStep& s, int32_t r, int t);
  void reserve_window(const WindowAttention& op, size_t& scratch);
  int32_t window_rows(const WindowAttention& op, int32_t i, int32_t* at) const;
  void reserve_grouped(const GroupedLinear& op, size_t& scratch);
  void reserve_delta(const GatedDelta& op, size_t& scratch);
  void latent_state(const LatentStep& s, int32_t r, int t);
  bool decompressed(const LatentAttention& op) const;
  int32_t n_slots() const;
  Form latent_key_form(const LatentAttention& op) const;
  void reserve_decompressed(const LatentAttention& op, size_t& scratch);
  void rotate_queries(const LatentAttention& op, int32_t i);
  void prepare_latents(const LatentAttention& op, int32_t begin, int32_t end);
  void read_state(StateId state, size_t at, float* y, size_t n) const;
  void decompress(const LatentAttention& op, int32_t head, float* keys, float* values, float* weight, int t);
  void latent_head(const LatentAttention& op, int32_t head, int t);
  void latent_decompressed(const LatentAttention& op, Counter* counters, int t);
  void latent_query(const LatentAttention& op, int32_t head, int t);
  void latent_value(const LatentAttention& op, int32_t head, int t);
  void head_product(WeightId w, int32_t member, int32_t begin, int32_t end, const float* x, size_t ldx,
                    int32_t n_rows, float* y, size_t ldy, int t);
  void ngram_rows(const NgramEmbed& op, int32_t r, uint64_t* rows) const;
  void conv_channels(const ConvStep& s, int32_t begin, int32_t end, int t);
  void reserve_blocks(const BlockAttention& op, size_t& scratch);
  int32_t sight_of(const BlockAttention& op) const;
  int32_t slot_at(int32_t r, int32_t depth) const;
  void block_key(const BlockAttentionStep& s, int32_t r, int t);
  float* block_scores(const BlockAttention& op, int32_t i) const;
  void score_chain(const BlockAttention& op, int32_t begin, int32_t end, int32_t first, int t);
  void score_branch(const BlockAttention& op, int32_t i) const;
  void choose_blocks(const BlockAttention& op, int32_t i);
  int32_t list_parts(const BlockAttention& op, const AttentionArgs& a) const;
  void attend_list(const BlockAttention& op, const AttentionArgs& all, int32_t parts, Counter* counters,
                   int t);
  void attend(const AttentionArgs& a, int32_t n, Counter* counters, int t);
  const float* rope_row(RopeId rope, int32_t r) const;
  int32_t attention_parts(const AttentionArgs& a, int32_t n_rows) const;
  /// Of an Attention, or of a BlockAttention, whose rows see what `sees` says.
  template <class T>
  AttentionArgs attention_args(const T& op, const Visibility& sees) const {
    AttentionArgs a;
    a.q = value(op.q);
    a.ldq = static_cast<size_t>(width(op.q));
    a.out = value(op.out);
    a.ldo = static_cast<size_t>(width(op.out));
    a.k = state_.buffer(op.k_state);
    a.v = state_.buffer(op.v_state);
    a.ldk = static_cast<size_t>(op.n_kv_heads) * static_cast<size_t>(op.head_dim);
    a.ldv = static_cast<size_t>(op.n_kv_heads) * static_cast<size_t>(op.v_head_dim);
    a.f16 = state_.is_f16(op.k_state);
    a.n_heads = op.n_heads;
    a.n_kv_heads = op.n_kv_heads;
    a.head_dim = op.head_dim;
    a.v_head_dim = op.v_head_dim;
    a.scale = op.scale;
    a.row_of = rows_kind(op.q) == Rows::all ? nullptr : pass_.outputs.data();
    a.prefix = sees.prefix.data();
    a.extra = sees.extra.data();
    a.extra_begin = sees.extra_begin.data();
    return a;
  }
  void heads_row(const HeadsStep::Item& item, int32_t r, int t);
  void compute_ropes(Counter& counter);
  MatmulArgs matmul_args(WeightId w, int32_t n_rows, Form form, int t, int32_t member = 0) const;
  Form form_of(WeightId w, int32_t n_rows) const;

  /// Calls f(begin, end) on pieces of [0, n) until none is left, in the order handed out.
  template <class F>
  void share(Counter& counter, int32_t n, int32_t grain, F f) {
    for (;;) {
      const int32_t begin = counter.next.fetch_add(1, std::memory_order_relaxed) * grain;
      if (begin >= n) return;
      f(begin, begin + grain < n ? begin + grain : n);
    }
  }

  /// f(row, first, count) for every piece of at most kColumns columns of every row
  static constexpr int32_t kColumns = 1024;
  template <class F>
  void share_columns(Counter& counter, int32_t n_rows, int32_t n_columns, F f) {
    const int32_t per_row = pieces(n_columns, kColumns);
    share(counter, n_rows * per_row, 1, [&](int32_t task, int32_t) {
      const int32_t first = task % per_row * kColumns;
      f(static_cast<size_t>(task / per_row), static_cast<size_t>(first),
        static_cast<size_t>(std::min(n_columns - first, kColumns)));
    });
  }

  /// The same for pieces [0, n) that lie one after another in memory: each thread has a part of its own and
  /// walks it in order, f(begin, end) taking `most` pieces at once while many are left. A stream that jumps
  /// back and forth with another thread's is a third slower. A step has kStreamsPerStep of them, by number.
  template <class F>
  void stream(const Counter* counters, int32_t n, int32_t most, int t, F f, int which = 0) {
    const int threads = program_.pool_->size();
    Part* parts = parts_of(counters, which);
    for (int k = 0; k < threads; ++k) {
      const int owner = (t + k) % threads;
      const int32_t first = part_begin(n, owner), size = part_begin(n, owner + 1) - first;
      std::atomic<uint64_t>& taken = parts[owner].taken;
      for (uint64_t old = taken.load(std::memory_order_relaxed);;) {
        const auto front = static_cast<int32_t>(old), back = static_cast<int32_t>(old >> 32);
        const int32_t left = size - front - back;
        if (left <= 0) break;
        const int32_t some = k == 0 ? std::clamp(left / 4, 1, most) : 1;
        const uint64_t step = k == 0 ? static_cast<uint64_t>(some) : uint64_t{1} << 32;
        if (!taken.compare_exchange_weak(old, old + step, std::memory_order_relaxed)) continue;
        const int32_t begin = first + (k == 0 ? front : size - back - 1);
        f(begin, begin + some);
        old = taken.load(std::memory_order_relaxed);
      }
    }
  }
  /// The first of thread t's own pieces of n.
  int32_t part_begin(int32_t n, int t) const {
    return static_cast<int32_t>(int64_t{n} * t / program_.pool_->size());
  }
  /// The parts of the step whose counters these are. Only two steps' are ever in use: a thread that has
  /// come to a step makes its part ready for the next.
  Part* parts_of(const Counter* counters, int which) const {
    const auto step = static_cast<size_t>(counters - counters_.get()) / kCountersPerStep;
    const size_t set = step % 2 * kStreamsPerStep + static_cast<size_t>(which);
    return parts_.get() + set * static_cast<size_t>(program_.pool_->size());
  }

  float* value(ValueId v) const;
  int32_t width(ValueId v) const { return program_.plan_.values[static_cast<size_t>(v)].width; }
  Rows rows_kind(ValueId v) const { return program_.plan_.values[static_cast<size_t>(v)].rows; }
  int32_t rows(ValueId v) const { return rows_kind(v) == Rows::all ? n_rows_ : n_outputs_; }
  /// The pass row that row i of a value stands for.
  int32_t pass_row(ValueId v, int32_t i) const {
    return rows_kind(v) == Rows::all ? i : pass_.outputs[static_cast<size_t>(i)];
  }
  uint8_t* scratch(int t) const {
    return program_.scratch_.data() + static_cast<size_t>(t) * scratch_stride_;
  }

  CpuProgram& program_;
  const Kernels& kernels_;
  CpuState& state_;
  const Pass& pass_;
  const Visibility& visibility_;
  const StepList& list_;
  const int32_t n_rows_, n_outputs_;
  size_t scratch_stride_ = 0;
  std::vector<size_t> rope_at_;  // floats into rope_, per RopeSpec
  std::unique_ptr<Counter[]> counters_;
  std::unique_ptr<Part[]> parts_;  ///< (2, kStreamsPerStep, threads)
  Routing routing_;
  /// What the rows of the BlockAttention steps see, for each size and number of blocks among them: all, while
  /// they see no more blocks than may be chosen, else a list, which each step writes anew.
  struct Sight {
    int32_t block_size = 0, n_blocks = 0;
    int32_t most = 0;  ///< blocks that any row sees complete
    Visibility sees;
  };
  std::vector<Sight> sights_;
};

/// cs (n_rot): cosines, then sines, of position * inv_freq, the product rounded to f32 as the models were
/// trained with.
void rope_angles(const RopeSpec& spec, int32_t position, float* cs);

}  // namespace reflex::cpu
