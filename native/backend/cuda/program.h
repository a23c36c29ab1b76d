// A compiled plan on the card. One stream computes; results stay on the device until asked for.
#pragma once
#include <map>

#include "backend/cuda/block_attention.h"
#include "backend/cuda/gated_delta.h"
#include "backend/cuda/hyper_params.h"
#include "backend/cuda/indexer.h"
#include "backend/cuda/latent.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/load.h"
#include "backend/cuda/moe_params.h"
#include "backend/cuda/ngram.h"
#include "backend/cuda/residence.h"
#include "backend/cuda/steps.h"
#include "backend/cuda/window.h"

namespace reflex::cuda {

/// One sequence's memory: keys and values in one buffer, state after state, each (capacity, width); fixed
/// states in another, and where a checkpoint was taken their copy. The last tokens that n-grams look back on
/// stay with the host, which alone reads them.
class CudaState final : public State {
 public:
  /// `stream`: the program's, on which fixed states are moved.
  CudaState(Device& device, const Plan& plan, bool exact, int32_t n_ctx, CUstream stream);
  size_t bytes() const override { return buffer_.bytes() + fixed_.bytes() + copy_.bytes(); }
  void truncate(int32_t n) override;
  void checkpoint() override;
  /// Room for n slots; moves what is there. Error(out_of_memory).
  void reserve(int32_t n, CUstream stream);
  CUdeviceptr at(StateId id) const {
    return buffer_.address() + offset_[static_cast<size_t>(id)] * capacity_;
  }
  float* fixed(StateId id) const { return fixed_.at<float>(fixed_at_[static_cast<size_t>(id)]); }
  /// Of an NgramEmbed: the newest last, plus 1; 0 before the sequence.
  std::span<int32_t> tokens(StateId id) { return tokens_[static_cast<size_t>(id)]; }
  /// Slots that the fixed states stand after.
  int32_t fixed_length() const { return fixed_length_; }
  /// Around a pass: should it end by an error, the fixed states are lost until truncate(0) or a checkpoint.
  void begin_fixed() { fixed_length_ = kLost; }
  void end_fixed(int32_t length) { fixed_length_ = length; }
  bool is_f32(StateId id) const { return f32_[static_cast<size_t>(id)]; }
  /// Changes whenever at() does: never the same for two buffers of one process.
  uint64_t generation() const { return generation_; }

 private:
  static constexpr int32_t kLost = INT32_MAX;
  Device& device_;
  CUstream stream_;
  std::vector<size_t> offset_;  // bytes per slot of the states before
  std::vector<size_t> fixed_at_;
  std::vector<std::vector<int32_t>> tokens_, tokens_copy_;  // by state, empty of those on the card
  bool has_fixed_ = false;
  int32_t fixed_length_ = 0, checkpoint_ = -1;  // in slots; -1: none
  std::vector<bool> f32_;
  size_t slot_bytes_ = 0, capacity_ = 0;
  int32_t n_ctx_;
  uint64_t generation_ = 0;
  DeviceBuffer buffer_, fixed_, copy_;
};

/// Where in the pinned results each kernel leaves its own.
inline constexpr size_t kResultsDone = 0, kResultsDrawn = 16, kResultsAdjusted = 32, kResultsSums = 64,
                        kResultsTop = kResultsSums + kScanBlocks * sizeof(double),
                        kResultsBest = kResultsTop + sizeof(Best) * kScanBlocks * kMaxTop;

class CudaProgram final : public Program {
 public:
  CudaProgram(std::shared_ptr<Device> device, Plan plan, const ProgramOptions& options);
  ~CudaProgram() override;

  std::unique_ptr<State> new_state() override;
  int32_t max_rows() const override { return options_.max_rows; }
  void run(State& state, const Pass& pass) override;
  std::span<const float> logits(int32_t o) override;
  std::span<const float> gathered(int32_t o) override;
  double log_sum_exp(int32_t o) override;
  int32_t argmax(int32_t o) override;
  int32_t sample(int32_t o, const SampleSpec& spec) override;
  std::vector<TokenLogprob> top_logprobs(int32_t o, int32_t n) override;
  LoadStatus load_status() const override;
  void finish_load() override;
  void set_interrupt(std::function<bool()> interrupt) override;
  size_t weight_bytes() const override { return residence_.bytes(); }
  size_t scratch_bytes() const override { return scratch_bytes_; }

 private:
  /// Host memory that a pass is read from: header, arrays, mask, then the embedded rows.
  struct Slot {
    PinnedBuffer memory;
    CUevent read = nullptr;  ///< the pass has been read
    bool busy = false;
  };
  /// What a captured pass depends on.
  struct GraphKey {
    int32_t n_rows, n_out, head;
    uint32_t block_quads;
    bool chain;
    int32_t n_chain, n_branches;  ///< of plans with fixed states
    int32_t reach;                ///< of plans with an indexer (IndexReach)
    int32_t n_choosing;           ///< BlockAttentions that choose
    uint64_t generation;
    auto operator<=>(const GraphKey&) const = default;
  };
  struct Graph {
    CUgraphExec exec = nullptr;
    uint32_t last_used = 0;
  };

  // pass.cpp: what a pass is
  void check_pass(const Pass& pass) const;
  uint32_t write_block(Slot& slot, const Pass& pass, const Visibility& vis, const DeltaPass& delta);
  DeltaPass plan_delta(const CudaState& state, const Pass& pass);
  void embed_rows(char* to, std::span<const int32_t> tokens) const;
  Slot& take_slot(bool replayed, size_t bytes);
  Graph* graph_for(const GraphKey& key);
  void capture(Graph& graph);
  void drop_graphs();
  void begin_gather(const Pass& pass);
  size_t gather_room() const;
  size_t decode_gathered(const Pass& pass, size_t first);
  void gather_rows(const Pass& pass);
  void ensure_gather_memory(size_t n, size_t width);
  void add_gather_bias();

  // program.cpp
  void allocate();
  void release() noexcept;
  void mark_fragments();
  void ensure_outputs(int32_t n_out, HeadMode head);

  // enqueue_moe.cpp: mixtures of experts, and the experts' way to the card
  void allocate_mixtures();
  void step(const MoeStep& s);
  void route(const MoeStep& s, int32_t rows);
  void choose_more(const MoeStep& s, int32_t rows, const ChooseParams& choose);
  void sort_rows(const MoeStep& s, int32_t rows, int32_t block_rows);
  void fetch_experts(const MoeStep& s, int32_t rows);
  std::vector<int32_t> chosen_experts(const MoeStep& s, int32_t rows);
  void place_wave(const MoeStep& s, std::span<const int32_t> experts);
  bool one_row_fits(const MoeStep& s) const;
  void experts_of_one(const MoeStep& s, const int32_t* slot_of);
  void expert_products(const MoeStep& s, int32_t rows, const int32_t* slot_of);
  void tiled_products(const MoeStep& s, int32_t rows, const int32_t* slot_of);
  void raw_products(const MoeStep& s, int32_t rows, const int32_t* slot_of);
  void combine(const MoeStep& s, int32_t rows);
  int32_t rows_per_block(const MoeStep& s, int32_t rows) const;
  const Weight& expert_weight(const MoeStep& s, int part) const;

  // enqueue.cpp: one launch or a few per step
  void enqueue();
  template <class T>
  void require_weights(const T& op);
  void step(const EmbedStep& s);
  void step(const MatmulStep& s);
  void step(const HeadsStep& s);
  void step(const AttentionStep& s);
  void step(const NormStep& s);
  void step(const AddStep& s);
  void step(const SwiGluStep& s);
  void step(const SigmoidGateStep& s);
  void step(const DeltaStep& s);
  void step(const LatentStep& s);
  void step(const HeadSliceStep& s);
  void step(const SelectStep& s);
  void step(const HeadStep& s);
  void step(const IndexStep& s);  // enqueue_sparse.cpp from here
  void step(const LayerNormStep& s);
  void step(const ConcatStep& s);
  void step(const SiluStep& s);
  void step(const BlockAttentionStep& s);  // enqueue_blocks.cpp
  void step(const RepeatStep& s);          // enqueue_streams.cpp from here
  void step(const StreamNormStep& s);
  void step(const StreamMixStep& s);
  void step(const StreamInjectStep& s);
  void step(const StreamGateStep& s);
  void step(const NgramStep& s);
  void step(const ConvStep& s);

  // enqueue_hyper.cpp: DeepSeek-V4's
  void allocate_mixes();
  void step(const HyperMixStep& s);
  void step(const TurnStep& s);
  void step(const WindowStep& s);
  void step(const CompressorStep& s);
  void step(const UnitNormStep& s);
  void step(const GroupedStep& s);
  void step(const ClampedSwiGluStep& s);
  void step(const HyperWeightsStep& s);
  void step(const HyperReadStep& s);
  void step(const HyperWriteStep& s);
  TurnItem turn_item(const TurnSpec& spec) const;
  void launch_turns(const TurnParams& p);
  HyperWeightsParams hyper_weights(const HyperWeights& op) const;
  HyperParams hyper_params(ValueId streams, ValueId weights, ValueId out, int32_t n_streams) const;
  void launch_hyper(const char* kernel, const HyperParams& p);
  void clamped_swiglu(const float* gate, const float* up, float* out, size_t n, float limit);

  int32_t rows_of(ValueId v) const;
  int32_t width_of(ValueId v) const { return steps_.values[static_cast<size_t>(v)].width; }
  /// How many the value holds in this pass.
  uint64_t values_of(ValueId v) const {
    return static_cast<uint64_t>(rows_of(v)) * static_cast<uint64_t>(width_of(v));
  }
  ValueId resolve(ValueId v) const;
  template <class T = float>
  T* value(ValueId v) const {
    const int64_t floats = steps_.offset[static_cast<size_t>(resolve(v))] * alloc_rows_;
    return values_.at<T>(static_cast<size_t>(floats) * sizeof(float));
  }
  bool in_fragments(ValueId v) const;
  PassArrays arrays() const;
  /// Of a HeadSpec or a TurnSpec, what an item of either kind is told alike.
  template <class Item, class Spec>
  Item heads_of(const Spec& spec, int32_t head_dim) const {
    Item item{};
    item.x = value(spec.in);
    item.norm_weight = residence_.vector(spec.norm.weight);
    item.eps = spec.norm.eps;
    item.n_heads = spec.n_heads;
    item.head_dim = head_dim;
    item.n_rows = rows_of(spec.in);
    item.on_outputs = steps_.values[static_cast<size_t>(spec.in)].rows == Rows::outputs;
    if (spec.rope == kNone) return item;
    const RopeSpec& rope = plan_.ropes[static_cast<size_t>(spec.rope)];
    item.rotation = rotations_[static_cast<size_t>(spec.rope)].template at<float>();
    item.n_rot = rope.n_rot;
    item.adjacent = rope.pairing == RopeSpec::Pairing::adjacent;
    return item;
  }
  /// Heads of all items, the most rows of one.
  template <class Params>
  static std::pair<uint32_t, uint32_t> extent_of(const Params& p) {
    uint32_t heads = 0, rows = 0;
    for (int i = 0; i < p.n_items; ++i) {
      heads += static_cast<uint32_t>(p.item[i].n_heads);
      rows = std::max(rows, static_cast<uint32_t>(p.item[i].n_rows));
    }
    return {heads, rows};
  }
  HeadItem head_item(const HeadSpec& spec, int32_t head_dim) const;
  void launch_heads(const HeadsParams& p);
  AttentionParams attention_params(const AttentionStep& s) const;
  void launch_qkv(const AttentionParams& p);
  Norming norming(const NormSpec& n) const { return {residence_.vector(n.weight), n.eps}; }
  Product product(WeightId weight, WeightId bias, float* out, const float* residual) const;
  void elementwise(const char* kernel, const float* a, const float* b, float* out, size_t n);

  // results.cpp
  void need_head(HeadMode mode, int32_t o, const char* what) const;
  void adjust(int32_t o, const SampleSpec& spec);
  void wait_for_best();
  void synchronize(const char* doing);
  const float* logits_row(int32_t o) const;

  std::shared_ptr<Device> device_;
  Plan plan_;
  ProgramOptions options_;
  StepList steps_;
  EmbedStep embed_;
  HeadStep head_;
  int32_t n_table_rows_ = 0;
  bool reads_tokens_ = false;    ///< a step does, so passes bring them
  std::vector<bool> fragments_;  ///< values that passes of several rows keep as f16 fragments
  Residence residence_;
  CUstream stream_ = nullptr;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<Launcher> launcher_;
  DeltaSteps delta_;
  LatentSteps latent_;
  IndexSteps index_;
  WindowSteps window_;
  BlockSteps blocks_;
  NgramTables ngrams_;
  bool forks_ = false;      ///< the plan has fixed states: passes tell which rows fork
  int32_t alloc_rows_ = 0;  ///< rows that values have room for
  DeviceBuffer values_, block_, partial_, tickets_;
  DeviceBuffer mix_partial_, mix_tickets_;          ///< of HyperMixSteps
  std::vector<DeviceBuffer> inv_freq_, rotations_;  ///< by rope: (n_rot / 2), (rows, n_rot / 2, 2)
  size_t scratch_bytes_ = 0;

  /// What mixtures of experts work with, by pair (row, k), by place or by expert (moe_params.h).
  struct Mixtures {
    DeviceBuffer ids, weights, place_of, row_of, blocks, n_blocks, ticket, slot_of;
    DeviceBuffer x, hidden, up, out, one;  ///< one: a single row's hidden values
    PinnedBuffer host_ids, host_slots;
    std::vector<ExpertSlots> slots;  ///< of each mixture, where experts share slots
  } mixtures_;

  // the pass under way or last run
  struct Current {
    CudaState* state = nullptr;
    const Slot* slot = nullptr;
    bool replayed = false;                       ///< captured now, or replayed
    int32_t n_rows = 0, n_out = 0, n_slots = 0;  ///< slots: those of the sequence after it
    HeadMode head = HeadMode::none;
    bool loaded = false;     ///< every weight was there when it began
    bool same_rows = false;  ///< the outputs are all rows, in order
    bool chain = false;
    int32_t most_seen = 0;                                    ///< slots that a row sees, at most
    uint32_t block_quads = 0, mask_at = 0, block_at[3] = {};  ///< quads; bytes of the arrays
    uint32_t delta_at[3] = {};                                ///< bytes of parents, forks and branches
    uint32_t tokens_at = 0;  ///< of the rows' tokens, where a step reads them
    int32_t n_chain = 0, n_branches = 0;
    IndexReach reach;
    size_t ngrams_at = 0;  ///< bytes of the slot's memory, where n-grams' rows begin
  } now_;
  Slot slots_[3];
  int turn_ = 1;
  uint32_t sequence_ = 0;
  double first_kernel_at_ = 0;
  std::map<GraphKey, Graph> graphs_;

  // results
  int32_t out_room_ = 0;
  DeviceBuffer logits_, best_partial_, normed_, adjusted_, adjust_items_;
  PinnedBuffer results_;
  std::vector<std::vector<float>> host_logits_;  // per output row, once asked for
  bool best_known_ = false;
  PinnedBuffer gather_memory_;
  size_t gather_out_at_ = 0, gather_weights_at_ = 0;
  std::vector<int32_t> gather_begin_, gather_row_;
  std::vector<float> gathered_, gather_bias_;
  bool gather_pending_ = false;
};

}  // namespace reflex::cuda
