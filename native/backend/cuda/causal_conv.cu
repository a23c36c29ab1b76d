// Convolutions along a row's ancestors, and the way of n-grams' table rows to the card: the host has decoded
// them into pinned memory, as it does the token table's (embed.cu).
#include "backend/cuda/device.cuh"
#include "backend/cuda/stream_params.h"

namespace reflex::cuda {

namespace {

/// A channel at a row of the pass, or (below 0: -1 - i, the i-th) before it.
__device__ __forceinline__ float conv_input(const ConvParams& p, int source, int channel) {
  const int n_history = (p.n_taps - 1) * p.dilation;
  return source >= 0 ? p.x[static_cast<size_t>(source) * p.n_channels + channel]
                     : p.history[static_cast<size_t>(n_history + source) * p.n_channels + channel];
}

/// The channel's history after the chain: what its last row would look back on. Oldest first, so that none
/// is written before it is read.
__device__ __forceinline__ void move_history(const ConvParams& p, int channel) {
  const int n_history = (p.n_taps - 1) * p.dilation;
  if (p.n_chain == 0) return;
  for (int i = 0; i < n_history; ++i)
    p.history[static_cast<size_t>(i) * p.n_channels + channel] =
        conv_input(p, p.n_chain - n_history + i, channel);
}

}  // namespace

/// A thread per channel of a row; of a single row it moves the history too. grid (ceil(C / 256), R)
REFLEX_KERNEL(causal_conv, ConvParams, kStreamThreads) {
  wait_for_inputs();
  let_next_start();
  const int channel = blockIdx.x * kStreamThreads + threadIdx.x, row = blockIdx.y;
  if (channel >= p.n_channels) return;
  const float* taps = p.weight + static_cast<size_t>(channel) * p.n_taps;
  float sum = 0;
  for (int back = 0, source = row; back < p.n_taps; ++back) {
    sum += taps[p.n_taps - 1 - back] * conv_input(p, source, channel);
    if (back + 1 < p.n_taps)
      for (int i = 0; i < p.dilation; ++i) source = source >= 0 ? p.parents[source] : source - 1;
  }
  p.out[static_cast<size_t>(row) * p.n_channels + channel] = silu(sum);
  if (p.n_rows == 1) move_history(p, channel);
}

/// A thread per channel. grid (ceil(C / 256))
REFLEX_KERNEL(conv_history, ConvParams, kStreamThreads) {
  wait_for_inputs();
  let_next_start();
  const int channel = blockIdx.x * kStreamThreads + threadIdx.x;
  if (channel < p.n_channels) move_history(p, channel);
}

REFLEX_KERNEL(copy_pinned, CopyParams, kStreamThreads) {
  wait_for_inputs();
  let_next_start();
  const auto* from = static_cast<const uint4*>(p.from);
  auto* to = static_cast<uint4*>(p.to);
  const uint32_t stride = gridDim.x * kStreamThreads;
  for (uint32_t i = blockIdx.x * kStreamThreads + threadIdx.x; i < p.n_quads; i += stride) {
    to[i] = load_volatile(from + i);
  }
}

}  // namespace reflex::cuda
