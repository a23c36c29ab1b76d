// A plan as the card runs it: steps in order, each a fusion of one or more ops, and where each value
// lives. build_steps.cpp writes it, pass.cpp runs it. Plain data, no CUDA.
#pragma once
#include <cstdint>
#include <type_traits>
#include <variant>
#include <vector>

#include "backend/backend.h"

namespace reflex::cuda {

/// Passes of more rows are launched each time: launches hide behind the work they launch. Those of as many or
/// fewer are replayed, with the sequence's length as all that may differ.
inline constexpr int32_t kMaxGraphRows = 64;

struct NormSpec {
  WeightId weight = kNone;  ///< kNone: no norm
  int32_t group = 0;
  float eps = 0;
};

/// out = W in + bias [+ residual]
struct MatmulPart {
  WeightId weight = kNone, bias = kNone;
  ValueId out = kNone, residual = kNone;
};

/// Linear maps of one input, normed on the way where `norm` says. With swiglu there are two parts,
/// gate and up, and only silu(gate) * up is kept.
struct MatmulStep {
  ValueId in = kNone;
  NormSpec norm;
  std::vector<MatmulPart> parts;
  ValueId swiglu = kNone;
};

struct HeadStep {
  ValueId in = kNone;
  NormSpec norm;
  WeightId weight = kNone, bias = kNone;
};

struct EmbedStep {
  WeightId table = kNone;
  ValueId out = kNone;
};

/// out = rope(norm(in)) per head, either absent
struct HeadSpec {
  ValueId in = kNone, out = kNone;
  NormSpec norm;
  RopeId rope = kNone;
  int32_t n_heads = 1;
};
struct HeadsStep {
  HeadSpec item;
};

/// k and v, as `k` and `v` prepare them, to the states; then attention with q as `q` prepares it.
struct AttentionStep {
  Attention op{};
  HeadSpec q, k, v;  ///< q.out is op.q; it is the same as q.in where there is nothing to do
};

/// The same over chosen blocks: `plain` is what it is while there is nothing to choose.
struct BlockAttentionStep {
  BlockAttention op{};
  AttentionStep plain;
  HeadSpec index_q;  ///< index_q.out is op.index_q
};

/// A mixture of experts: op.in = norm(in) where `norm` says, op.router = router op.in where that is a
/// weight (and the plan's Linear is not a step), out = the experts' sum [+ residual].
struct MoeStep {
  Moe op{};
  NormSpec norm;
  WeightId router = kNone;
  ValueId in = kNone, residual = kNone, out = kNone;
  int32_t index = 0;  ///< among the plan's mixtures
};

struct NormStep {
  ValueId in = kNone, out = kNone;
  NormSpec norm;
};
struct AddStep {
  ValueId a = kNone, b = kNone, out = kNone;
};
struct SwiGluStep {
  ValueId gate = kNone, up = kNone, out = kNone;
};
/// out = in * sigmoid(gate), gate as wide as in or one value per row
struct SigmoidGateStep {
  ValueId in = kNone, gate = kNone, out = kNone;
};
/// Both write states of rows beside a value, whose rows may be none.
struct DeltaStep {
  GatedDelta op{};
};
struct LatentStep {
  LatentAttention op{};
};
/// read_where_chosen: only by latent attention, which reads all slots by itself where all are chosen.
struct IndexStep {
  Indexer op{};
  bool read_where_chosen = false;
};
/// Heads normed where `normed` says (without a weight: by ones), the last values of each rotated, or rotated
/// back.
struct TurnSpec {
  ValueId in = kNone, out = kNone;
  bool normed = false;
  NormSpec norm;
  RopeId rope = kNone;
  int32_t n_heads = 1;
  bool inverse = false;
};
struct TurnStep {
  TurnSpec item;
};
/// op.in = fn norm(streams), then op and the read of the same streams: one step where fn is F32.
struct HyperMixStep {
  UnitNorm norm{};
  Linear fn{kNone, kNone, kNone};
  HyperWeights op{};
  HyperRead read{};
};
/// kv, as `kv` prepares it, to the state; then attention with q as `q` prepares it. Either may be the value
/// as it is (rope kNone).
struct WindowStep {
  WindowAttention op{};
  TurnSpec q, kv;
};
struct HeadSliceStep {
  HeadSlice op{};
};
/// Then, where `norm` has an output, that norm of the result too.
struct StreamInjectStep {
  StreamInject op{};
  StreamNorm norm{kNone, kNone, kNone, 0, 0};
};
struct SelectStep {
  ValueId in = kNone, out = kNone;
};

/// An op that is a step of its own, as the plan has it: what it reads is in operands.h.
template <class T>
struct OpStep {
  T op{};
};
template <class T>
inline constexpr bool kIsOpStep = false;
template <class T>
inline constexpr bool kIsOpStep<OpStep<T>> = true;
using LayerNormStep = OpStep<LayerNorm>;
using ConcatStep = OpStep<Concat>;
using SiluStep = OpStep<Silu>;
using RepeatStep = OpStep<Repeat>;
using StreamNormStep = OpStep<StreamNorm>;
using StreamMixStep = OpStep<StreamMix>;
using StreamGateStep = OpStep<StreamGate>;
using NgramStep = OpStep<NgramEmbed>;
using ConvStep = OpStep<CausalConv>;
using CompressorStep = OpStep<Compressor>;
using UnitNormStep = OpStep<UnitNorm>;
using GroupedStep = OpStep<GroupedLinear>;
using ClampedSwiGluStep = OpStep<ClampedSwiGlu>;
using HyperWeightsStep = OpStep<HyperWeights>;
using HyperReadStep = OpStep<HyperRead>;
using HyperWriteStep = OpStep<HyperWrite>;

using Step =
    std::variant<EmbedStep, MatmulStep, HeadsStep, AttentionStep, NormStep, AddStep, SwiGluStep,
                 SigmoidGateStep, MoeStep, DeltaStep, LatentStep, HeadSliceStep, SelectStep, HeadStep,
                 LayerNormStep, ConcatStep, SiluStep, IndexStep, TurnStep, WindowStep, HyperMixStep,
                 CompressorStep, UnitNormStep, GroupedStep, ClampedSwiGluStep, HyperWeightsStep,
                 HyperReadStep, HyperWriteStep, StreamInjectStep, BlockAttentionStep, RepeatStep,
                 StreamNormStep, StreamMixStep, StreamGateStep, NgramStep, ConvStep>;

/// Whether T is one of a variant's types.
template <class T, class V>
inline constexpr bool kHolds = false;
template <class T, class... Types>
inline constexpr bool kHolds<T, std::variant<Types...>> = (std::is_same_v<T, Types> || ...);
/// Ops that run as they are.
template <class T>
concept StepOfItsOwn = kHolds<OpStep<T>, Step>;

struct StepList {
  std::vector<Step> steps;
  std::vector<ValueSpec> values;   ///< the plan's, and those that fusion added
  std::vector<ValueId> select_of;  ///< of a value that a SelectStep makes: its input; else kNone
  std::vector<bool> fragments;     ///< read only as the plain input of products: may be f16 fragments
  std::vector<int64_t> offset;     ///< value v of alloc_rows rows lies at floats offset[v] * alloc_rows
  int64_t floats = 0;              ///< per row, of all values
};

StepList build_steps(const Plan& plan);

}  // namespace reflex::cuda
