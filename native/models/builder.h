// Writes a Plan while a model file spells out its steps. Binds tensors by their GGUF names and
// checks each one's shape and type as it does, and in the end that none was left over; knows nothing of any
// device.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "gguf/gguf.h"
#include "models/config.h"

namespace reflex {

class Builder {
 public:
  Builder(const gguf::File& file, Config config);
  const Config& config() const { return config_; }
  const gguf::File& file() const { return file_; }

  // -- tensors: Error(gguf) names the tensor, what was expected and what was found ----------
  /// W (n_out, n_in), any type that holds weights
  WeightId matrix(const std::string& name, int64_t n_in, int64_t n_out);
  /// n_members matrices (n_out, n_in) in one tensor: an expert stack, or a matrix per head
  WeightId stack(const std::string& name, int64_t n_in, int64_t n_out, int64_t n_members);
  /// n_out rows of n_in indices, in I32
  WeightId indices(const std::string& name, int64_t n_in, int64_t n_out);
  /// (n) in F32, as the converter keeps every 1-D tensor
  WeightId vector(const std::string& name, int64_t n);
  /// the same, or kNone where the file has none
  WeightId optional_vector(const std::string& name, int64_t n);
  /// an F32 vector's values, for tables that the model works out on the host
  std::vector<float> host_vector(const std::string& name, int64_t n);
  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }
  /// Tensors that a key has turned off, which the file may have all the same: those whose name begins so.
  void unread(std::string beginning) { unread_.push_back(std::move(beginning)); }

  // -- steps ------------------------------------------------------------------------------
  ValueId embed(WeightId table);
  /// eps 0: the model's
  ValueId rms_norm(ValueId x, WeightId w, int32_t group, float eps = 0);
  ValueId linear(ValueId x, WeightId w, WeightId bias = kNone);
  RopeId rope_table(RopeSpec::Pairing pairing, const std::vector<float>& divisors = {});
  RopeId rope_table(RopeSpec spec);
  ValueId rope(ValueId x, RopeId table, int32_t n_heads);
  /// adds the layer's two states "blk.N.k" and "blk.N.v"
  ValueId attention(int32_t layer, ValueId q, ValueId k, ValueId v);
  ValueId swiglu(ValueId gate, ValueId up);
  ValueId add(ValueId a, ValueId b);
  ValueId sigmoid_gate(ValueId x, ValueId gate);
  /// of op: all but out
  ValueId moe(Moe op);
  /// of op: all but out and state; adds the layer's state "blk.N.latent"
  ValueId latent_attention(int32_t layer, LatentAttention op);
  /// `count` values of each head from its `begin`-th
  ValueId head_slice(ValueId x, int32_t n_heads, int32_t begin, int32_t count);
  ValueId layer_norm(ValueId x, WeightId w, WeightId bias, float eps);
  /// of op: all but out and, with a key, the state: then adds "blk.N.index"
  ValueId indexer(int32_t layer, Indexer op);
  /// a's values, then b's
  ValueId concat(ValueId a, ValueId b);
  StateId state_per_token(int32_t layer, const char* name, int32_t width);
  void compressor(Compressor op);
  /// of op: all but out
  ValueId window_attention(WindowAttention op);
  ValueId unit_norm(ValueId x, int32_t group, float eps);
  ValueId tail_rope(ValueId x, RopeId table, int32_t n_heads, bool inverse);
  ValueId grouped_linear(ValueId x, WeightId w, int32_t n_groups);
  /// limit 0: none
  ValueId clamped_swiglu(ValueId gate, ValueId up, float limit);
  /// of op: all but out
  ValueId hyper_weights(HyperWeights op);
  ValueId hyper_read(ValueId streams, ValueId weights, int32_t n_streams);
  ValueId hyper_write(ValueId streams, ValueId weights, ValueId x, int32_t n_streams);
  /// of op: all but out and the states; adds the layer's states "blk.N.conv" and "blk.N.delta"
  ValueId gated_delta(int32_t layer, GatedDelta op);
  ValueId repeat(ValueId x, int32_t n);
  /// of streams as wide as the model
  ValueId stream_norm(ValueId x, WeightId w);
  ValueId silu(ValueId x, float scale);
  ValueId stream_mix(ValueId x, ValueId gate);
  ValueId stream_inject(ValueId x, ValueId logits, ValueId block);
  ValueId stream_gate(ValueId key, ValueId query, ValueId value);
  /// of op: all but out and state; adds the layer's state "blk.N.tokens"
  ValueId ngram_embed(int32_t layer, NgramEmbed op);
  /// adds the layer's state "blk.N.history"
  ValueId causal_conv(int32_t layer, ValueId x, WeightId w, int32_t n_taps, int32_t dilation);
  /// of op: all but out and the states; adds the layer's states "blk.N.k", "blk.N.v" and "blk.N.index"
  ValueId block_attention(int32_t layer, BlockAttention op);
  ValueId select_outputs(ValueId x);
  void head(ValueId x, WeightId w);

  /// Error(unsupported_architecture) where the file has a tensor that no step reads: it would mean something.
  Plan finish() &&;

 private:
  void check_nothing_is_left() const;
  WeightId bind(const gguf::TensorInfo& t);
  ValueId value(int32_t width, Rows rows);
  const ValueSpec& spec(ValueId v) const { return plan_.values[static_cast<size_t>(v)]; }
  StateId state(int32_t layer, const char* name, StateSpec::Kind kind, int32_t width, bool always_f32);
  template <class T>
  ValueId push(int32_t width, Rows rows, T op);

  const gguf::File& file_;
  Config config_;
  Plan plan_;
  std::vector<bool> read_;  ///< of the file's tensors, in its order
  std::vector<std::string> unread_;
};

/// "blk.3." + name
std::string block_name(int32_t layer, std::string_view name);

}  // namespace reflex
