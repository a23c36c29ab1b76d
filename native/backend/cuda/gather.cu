// Chosen rows of the head: an image of its own, small, since a first decision waits for it to load.
#include "backend/cuda/device.cuh"
#include "backend/cuda/params.h"

namespace reflex::cuda {

namespace {

constexpr int kWarps = 8;

}  // namespace

/// out[i] = w[i] . x[row[i]]: chosen rows of the head, decoded by the host. Warp per i.
REFLEX_KERNEL(gather_dots, GatherParams, kWarps * 32) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, i = blockIdx.x * kWarps + threadIdx.x / 32;
  if (i >= p.n) return;
  const float* x = p.x + static_cast<size_t>(p.row[i]) * p.width;
  const float* w = p.w + static_cast<size_t>(i) * p.width;
  float sum = 0;
  for (int k = lane; k < p.width; k += 32) sum += w[k] * x[k];
  sum = warp_sum(sum);
  if (lane == 0) p.out[i] = sum;
}

}  // namespace reflex::cuda
