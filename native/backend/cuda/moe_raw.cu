// Experts in f32 by place (moe_params.h), weights in the file's layout, any type: what exact mode runs, and
// fast mode for types without tiles. A warp makes one output of up to kRawPlaces places of one expert, each
// lane decoding 32 values at a time. Refuses: speed.
#include "backend/cuda/moe_params.h"
#include "backend/cuda/raw.cuh"

namespace reflex::cuda {

namespace {

template <class Raw>
__device__ __forceinline__ void run(const ExpertRawParams& p) {
  wait_for_inputs();
  let_next_start();
  const int lane = threadIdx.x % 32, out = blockIdx.x * kExpertWarps + threadIdx.x / 32;
  if (out >= p.n_out || static_cast<int>(blockIdx.y) >= *p.n_blocks) return;
  const RowBlock b = p.blocks[blockIdx.y];
  const int slot = p.slot_of ? p.slot_of[b.expert] : b.expert;
  if (slot < 0) return;
  const uint8_t* w =
      p.stack + static_cast<size_t>(slot) * p.slot_bytes + static_cast<size_t>(out) * p.row_bytes;
  const float* rows[kRawPlaces];
#pragma unroll
  for (int r = 0; r < kRawPlaces; ++r) {
    const int place = b.first + min(r, b.count - 1);
    rows[r] = p.x + static_cast<size_t>(p.row_of ? p.row_of[place] : place) * p.n_in;
  }
  float sum[kRawPlaces] = {};
#pragma unroll 1
  for (int group = lane; 32 * group < p.n_in; group += 32) {
    float y[32];
    Raw::read(w, group, p.n_in, y);
#pragma unroll
    for (int r = 0; r < kRawPlaces; ++r) {
      if (r >= b.count) break;
      const float* x = rows[r] + 32 * group;
      float part = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (32 * group + i < p.n_in) part += y[i] * x[i];
      sum[r] += part;
    }
  }
#pragma unroll
  for (int r = 0; r < kRawPlaces; ++r) {
    if (r >= b.count) break;
    const float all = warp_sum(sum[r]);
    if (lane == 0) p.out[static_cast<size_t>(b.first + r) * p.n_out + out] = all;
  }
}

}  // namespace

// grid (ceil(n_out / kExpertWarps), row blocks at most)
#define REFLEX_RAW(name) \
  REFLEX_KERNEL(moe_raw_##name, ExpertRawParams, kExpertThreads) { run<Raw_##name>(p); }
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_EACH_##kind(REFLEX_RAW, name)
#include "quant/types.def"
#undef REFLEX_TYPE

}  // namespace reflex::cuda
