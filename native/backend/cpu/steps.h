// A compiled plan as plain data: steps in order, each a fusion of one or more ops, and where each
// value lives. compile.cpp writes it, program.cpp runs it.
#pragma once
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "backend/backend.h"

namespace reflex::cpu {

/// An RmsNorm's constants; weight nullptr: no norm.
struct Norm {
  const float* weight = nullptr;  ///< (group)
  int32_t group = 0;
  float eps = 0;
};

/// out = W in + bias [+ residual]
struct LinearPart {
  WeightId weight = kNone;
  const float* bias = nullptr;  ///< (n_out)
  ValueId out = kNone;
  ValueId residual = kNone;
};

/// All the linear maps of one input, which is normed (where `norm` says) and prepared once. The
/// parts numbered gate and up, where set, are not stored: swiglu = silu(gate) * up is.
struct MatmulStep {
  ValueId in = kNone;
  Norm norm;
  std::vector<LinearPart> parts;
  int gate = -1, up = -1;
  ValueId swiglu = kNone;
};

/// The head: logits of the output rows, never kept as a value.
struct HeadStep {
  ValueId in = kNone;
  Norm norm;
  WeightId weight = kNone;
  const float* bias = nullptr;
};

struct EmbedStep {
  WeightId table = kNone;
  ValueId out = kNone;
};

/// out = rope(norm(in)), either absent; then into a state's slots where `state` is set.
struct HeadsStep {
  struct Item {
    ValueId in = kNone;
    Norm norm;
    RopeId rope = kNone;
    int32_t n_heads = 1;
    ValueId out = kNone;  ///< kNone: only the state is written
    StateId state = kNone;
  };
  std::vector<Item> items;
};

struct AttentionStep {
  Attention op{};
};
struct AddStep {
  ValueId a = kNone, b = kNone, out = kNone;
};
struct SwiGluStep {
  ValueId gate = kNone, up = kNone, out = kNone;
};
struct SigmoidGateStep {
  ValueId in = kNone, gate = kNone, out = kNone;
};
struct MoeStep {
  Moe op{};
  const float* bias = nullptr;  ///< (n_experts)
  /// (n_experts) passes that chose each so far, modulo 256; empty before the first pass
  std::shared_ptr<std::vector<uint8_t>> uses = std::make_shared<std::vector<uint8_t>>();
};
struct LatentStep {
  LatentAttention op{};
  Norm norm;                ///< of the latent
  bool with_output = true;  ///< else only the state is written
};
struct LayerNormStep {
  LayerNorm op{};
  const float *weight = nullptr, *bias = nullptr;
};
struct IndexerStep {
  Indexer op{};
  bool with_output = true;  ///< else only the state is written
};
struct CompressorStep {
  Compressor op{};
  const float* ape = nullptr;  ///< (ratio, C)
  Norm norm;
};
struct WindowStep {
  WindowAttention op{};
  const float* sinks = nullptr;  ///< (H)
  bool with_output = true;       ///< else only the state is written
};
struct TailRopeStep {
  TailRope op{};
};
struct GroupedStep {
  GroupedLinear op{};
};
struct ClampedSwiGluStep {
  ClampedSwiGlu op{};
};
struct HyperWeightsStep {
  HyperWeights op{};
  const float *scale = nullptr, *base = nullptr;
};
struct HyperReadStep {
  HyperRead op{};
};
struct HyperWriteStep {
  HyperWrite op{};
};
struct HeadSliceStep {
  HeadSlice op{};
};
struct ConcatStep {
  Concat op{};
};
struct DeltaStep {
  GatedDelta op{};
  const float* conv = nullptr;  ///< (C, T)
  const float *decay = nullptr, *dt_bias = nullptr, *norm = nullptr;
  bool with_output = true;  ///< else only the states are written
};
struct RepeatStep {
  Repeat op{};
};
struct SiluStep {
  Silu op{};
};
struct StreamNormStep {
  StreamNorm op{};
  const float* weight = nullptr;  ///< (S * d)
};
struct StreamMixStep {
  StreamMix op{};
};
struct StreamInjectStep {
  StreamInject op{};
};
struct StreamGateStep {
  StreamGate op{};
};
struct NgramStep {
  NgramEmbed op{};
  bool with_output = true;  ///< else only the state is written
};
struct ConvStep {
  CausalConv op{};
  const float* weight = nullptr;  ///< (C, T)
  bool with_output = true;
};
/// After a HeadsStep that normed and rotated, and wrote the states of k and v.
struct BlockAttentionStep {
  BlockAttention op{};
  const float* index_norm = nullptr;  ///< (index_dim)
  bool with_output = true;
};
struct SelectStep {
  ValueId in = kNone, out = kNone;
};

using Step = std::variant<EmbedStep, MatmulStep, HeadsStep, AttentionStep, AddStep, SwiGluStep,
                          SigmoidGateStep, MoeStep, LatentStep, HeadSliceStep, ConcatStep, DeltaStep,
                          LayerNormStep, IndexerStep, RepeatStep, SiluStep, StreamNormStep, StreamMixStep,
                          StreamInjectStep, StreamGateStep, NgramStep, ConvStep, BlockAttentionStep,
                          CompressorStep, WindowStep, TailRopeStep, GroupedStep, ClampedSwiGluStep,
                          HyperWeightsStep, HyperReadStep, HyperWriteStep, SelectStep, HeadStep>;

/// Steps and the place of each value: value v of row r lies at
/// (its kind's arena) + offset[v] * rows + r * width.
struct StepList {
  std::vector<Step> steps;
  std::vector<int64_t> offset;  ///< floats per row; -1: never stored
  int64_t all_floats = 0;       ///< arena floats per row, values on all rows
  int64_t output_floats = 0;    ///< the same, values on output rows
};

/// Constants that the steps point into.
struct Constants {
  std::vector<std::vector<float>> vectors;
};

/// with_head: everything up to the logits; else only what the states need.
StepList build_steps(const Plan& plan, bool with_head, Constants& constants);

}  // namespace reflex::cpu
