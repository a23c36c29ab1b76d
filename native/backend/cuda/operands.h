// What an op reads, and from where: the one place that lists the operands of every op, for fusion, for the
// values' places and for the weights' residence. Refuses: what becomes of them.
#pragma once
#include <type_traits>

#include "backend/backend.h"

namespace reflex::cuda {

/// f(v) for every value that the op reads.
template <class T, class F>
void for_inputs(const T& o, F f) {
  const auto some = [&f](auto... v) { ((v != kNone ? f(v) : void()), ...); };
  if constexpr (requires { o.in; }) some(o.in);
  if constexpr (requires { o.a; }) some(o.a, o.b);
  if constexpr (requires { o.q; }) some(o.q);
  if constexpr (requires { o.v; }) some(o.k, o.v);
  if constexpr (requires { o.kv; }) some(o.kv);
  if constexpr (requires { o.selection; }) some(o.selection);
  if constexpr (requires { o.streams; }) some(o.streams);
  if constexpr (requires { o.router; }) some(o.router);  // its gate and up are weights
  if constexpr (std::is_same_v<T, SwiGlu> || std::is_same_v<T, ClampedSwiGlu>) some(o.gate, o.up);
  if constexpr (std::is_same_v<T, SigmoidGate> || std::is_same_v<T, StreamMix>) some(o.gate);
  if constexpr (std::is_same_v<T, Compressor>) some(o.gate);
  if constexpr (std::is_same_v<T, GatedDelta>) some(o.qkv, o.z, o.beta, o.alpha);
  if constexpr (std::is_same_v<T, Indexer>) some(o.query, o.weights, o.key);
  if constexpr (std::is_same_v<T, HyperRead> || std::is_same_v<T, HyperWrite>) some(o.weights);
  if constexpr (std::is_same_v<T, StreamInject>) some(o.logits, o.block);
  if constexpr (std::is_same_v<T, StreamGate>) some(o.key, o.query, o.value);
  if constexpr (std::is_same_v<T, BlockAttention>) some(o.index_q, o.index_k);
}

/// f(w) for every weight that an op of its own step (OpStep) reads as f32, all of it: they lie together.
template <class T, class F>
void for_vectors(const T& o, F f) {
  if constexpr (std::is_same_v<T, LayerNorm>) f(o.weight), f(o.bias);
  if constexpr (std::is_same_v<T, StreamNorm> || std::is_same_v<T, CausalConv>) f(o.weight);
  if constexpr (std::is_same_v<T, Compressor>) f(o.ape), f(o.norm);
  if constexpr (std::is_same_v<T, HyperWeights>) f(o.scale), f(o.base);
}

/// f(w) for every matrix that such an op reads in the file's layout.
template <class T, class F>
void for_matrices(const T& o, F f) {
  if constexpr (std::is_same_v<T, GroupedLinear>) f(o.weight);
}

}  // namespace reflex::cuda
