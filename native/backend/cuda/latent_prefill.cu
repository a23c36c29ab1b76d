// Multi-head latent attention of many rows, decompressed (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 11): keys
// and values of some heads are made from the latents of all slots as one product in f16, then a block of 64
// rows of a head walks over them (flash.cuh). The rotated part of a key is all heads' and is read where it
// is, in the state. Refuses: f32 states.
#include "backend/cuda/flash.cuh"
#include "backend/cuda/latent_params.h"
#include "backend/cuda/latent_rotation.cuh"
#include "backend/cuda/raw_group.cuh"

namespace reflex::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kTile = kDecompressTile, kStep = kDecompressStep, kStages = kDecompressStages,
              kStride = kDecompressStride;
constexpr float kMaxHalf = 65504.0f;

/// A half's value, finite where x is.
__device__ __forceinline__ float in_range(float x) {
  return x > kMaxHalf ? kMaxHalf : x < -kMaxHalf ? -kMaxHalf : x;
}
__device__ __forceinline__ uint32_t to_halves(float a, float b) { return h2_of(in_range(a), in_range(b)); }

}  // namespace

/// A thread per 32 values of a file's row. grid (ceil(heads (k items + v items) / 256))
REFLEX_KERNEL(latent_matrices, DecompressParams, kThreads) {
  wait_for_inputs();
  let_next_start();
  const int groups = p.latent_pad / 32, k_groups = (p.nope_dim + 31) / 32;
  const int64_t k_items = p.k_by_latent ? static_cast<int64_t>(k_groups) * p.latent_pad
                                        : static_cast<int64_t>(p.nope_dim) * groups;
  const int64_t each = k_items + static_cast<int64_t>(p.v_head_dim) * groups;
  int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int h = static_cast<int>(item / each);
  if (h >= p.n_heads) return;
  item -= h * each;
  const bool key = item < k_items, transposed = key && p.k_by_latent;
  if (!key) item -= k_items;
  const auto& m = key ? p.k : p.v;
  // Lanes next to each other have one output's next values, or the next latent value of the same outputs.
  const int j = static_cast<int>(transposed ? item % p.latent_pad : item / groups);
  const int group = static_cast<int>(transposed ? item / p.latent_pad : item % groups);
  const int n = transposed ? p.nope_dim : p.n_latent;
  float y[32] = {};
  if (32 * group < n && (!transposed || j < p.n_latent))
    read_group(m.type,
               m.at + (static_cast<size_t>(p.first_head + h) * m.head_rows + m.first + j) * m.row_bytes,
               group, n, y);
  auto* w = static_cast<__half*>(p.w) + static_cast<size_t>(h) * (p.nope_dim + p.v_head_dim) * p.latent_pad;
  if (transposed) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (32 * group + i < n)
        w[static_cast<size_t>(32 * group + i) * p.latent_pad + j] = __float2half_rn(in_range(y[i] * kWScale));
    return;
  }
  w += static_cast<size_t>(key ? j : p.nope_dim + j) * p.latent_pad + 32 * group;
#pragma unroll
  for (int i = 0; i < 32; i += 2)
    *reinterpret_cast<uint32_t*>(w + i) = to_halves(y[i] * kWScale, y[i + 1] * kWScale);
}

namespace {

struct DecompressShared {
  __half a[kStages][kTile][kStride], b[kStages][kTile][kStride];
};
static_assert(sizeof(DecompressShared) == decompress_bytes());

/// Latent values c0 .. of the block's slots and of its outputs' matrices.
__device__ __forceinline__ void fetch_step(const DecompressParams& p, DecompressShared& s, int stage,
                                           int slot0, int out0, int c0, bool quads) {
  const int width = p.n_latent + p.rope_dim, n_outs = p.n_heads * (p.nope_dim + p.v_head_dim);
  const auto* state = static_cast<const __half*>(p.state);
  const auto* w = static_cast<const __half*>(p.w);
  constexpr int kQuads = kStep / 8;
  for (int i = threadIdx.x; i < kTile * kQuads; i += kDecompressThreads) {
    const int r = i / kQuads, c = i % kQuads * 8;
    copy_quad(&s.b[stage][r][c], w + static_cast<size_t>(min(out0 + r, n_outs - 1)) * p.latent_pad + c0 + c);
    if (quads)
      copy_quad(&s.a[stage][r][c],
                state + static_cast<size_t>(min(slot0 + r, p.n_slots - 1)) * width + c0 + c);
  }
  if (!quads)
    for (int i = threadIdx.x; i < kTile * kStep; i += kDecompressThreads) {
      const int r = i / kStep, c = i % kStep;
      s.a[stage][r][c] = slot0 + r < p.n_slots && c0 + c < p.n_latent
                             ? state[static_cast<size_t>(slot0 + r) * width + c0 + c]
                             : __half(0.0f);
    }
}

__device__ __forceinline__ void store_sums(const DecompressParams& p, const float (&acc)[2][8][4], int slot0,
                                           int out0) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, each = p.nope_dim + p.v_head_dim;
  auto* keys = static_cast<__half*>(p.keys);
  auto* values = static_cast<__half*>(p.values);
  const bool pairs = p.nope_dim % 2 == 0 && p.v_head_dim % 2 == 0;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int out = out0 + 8 * n + 2 * t + i, h = out / each, j = out % each;
      if (h >= p.n_heads || (pairs && i)) continue;
      const bool key = j < p.nope_dim;
      const int stride = key ? p.key_stride : p.value_stride;
      __half* to =
          (key ? keys : values) + static_cast<size_t>(h) * p.n_slots * stride + (key ? j : j - p.nope_dim);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int slot = slot0 + 16 * m + g + 8 * r;
          if (slot >= p.n_slots) continue;
          __half* at = to + static_cast<size_t>(slot) * stride;
          const float x = acc[m][n][2 * r + i] * (1.0f / kWScale);
          if (pairs)
            *reinterpret_cast<uint32_t*>(at) = to_halves(x, acc[m][n][2 * r + 1] * (1.0f / kWScale));
          else
            *at = __float2half_rn(in_range(x));
        }
    }
}

}  // namespace

/// Y (slots, heads (N + V)) = c W^T: 128 by 128 a block, 32 by 64 a warp.
/// grid (ceil(heads (N + V) / 128), ceil(slots / 128)), shared memory decompress_bytes()
REFLEX_KERNEL(latent_decompress, DecompressParams, kDecompressThreads) {
  REFLEX_DYNAMIC_SHARED(uint8_t, raw);
  auto& s = *reinterpret_cast<DecompressShared*>(raw);
  wait_for_inputs();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row0 = warp % 4 * 32, column0 = warp / 4 * 64;
  const int out0 = blockIdx.x * kTile, slot0 = blockIdx.y * kTile, steps = p.latent_pad / kStep;
  // 16 bytes at a time: rows of the state that begin on them and have no part of a step.
  const bool quads = p.n_latent % kStep == 0 && p.rope_dim % 8 == 0;
  float acc[2][8][4] = {};
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) fetch_step(p, s, i, slot0, out0, i * kStep, quads);
    copy_commit();
  }
  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    const int next = step + kStages - 1;
    if (next < steps) fetch_step(p, s, next % kStages, slot0, out0, next * kStep, quads);
    copy_commit();
    const auto& a = s.a[step % kStages];
    const auto& b = s.b[step % kStages];
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t x[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) load_matrices(x[m], &a[row0 + 16 * m + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t y[4];
        load_matrices(y, &b[column0 + 8 * n + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma(acc[m][n], x[m][0], x[m][1], x[m][2], x[m][3], y[0], y[1]);
          mma(acc[m][n + 1], x[m][0], x[m][1], x[m][2], x[m][3], y[2], y[3]);
        }
      }
    }
  }
  let_next_start();
  copy_wait<0>();
  store_sums(p, acc, slot0 + row0, out0 + column0);
}

namespace {

using namespace flash;

template <int DK, int DV>
struct LatentFlash : Walk<DK, DV> {
  using Base = Walk<DK, DV>;
  using Base::kTileD, Base::kStepsD, Base::kTileN;
  using typename Base::Shared;

  /// Value d of a query, the rotated ones turned by the row's position; zero beyond N + P.
  static __device__ __forceinline__ float query(const LatentFlashParams& p, const float* x, int pass_row,
                                                int d) {
    const int n = p.from.nope_dim;
    if (d < n) return x[d];
    return d < n + p.from.rope_dim ? rotated(p.rotation, p.from.rope_dim, p.adjacent, x + n, pass_row, d - n)
                                   : 0.0f;
  }

  /// The block's queries to shared memory, where keys will be.
  static __device__ __forceinline__ void load_queries(const LatentFlashParams& p, Shared& s, int head,
                                                      int first, int n_rows) {
    const int dim = p.from.nope_dim + p.from.rope_dim;
    const float by = p.scale * kLog2E;
    for (int i = threadIdx.x; i < kRows * (DK / 2); i += flash::kThreads) {
      const int r = i / (DK / 2), d = i % (DK / 2) * 2, row = first + r;
      float a = 0, b = 0;
      if (r < n_rows) {
        const float* x = p.q + (static_cast<size_t>(row) * p.n_all_heads + head) * dim;
        const int pass_row = p.on_outputs ? p.pass.outputs[row] : row;
        a = query(p, x, pass_row, d) * by;
        b = query(p, x, pass_row, d + 1) * by;
      }
      *reinterpret_cast<uint32_t*>(&s.k[r][d]) = h2_of(a, b);
    }
  }

  /// Keys of slots base ..: N values, the state's P, zeros. Those from `end` on repeat the last.
  static __device__ __forceinline__ void fetch_keys(const DecompressParams& p, Shared& s, const __half* keys,
                                                    int base, int end, bool quads) {
    const int width = p.n_latent + p.rope_dim, dim = p.nope_dim + p.rope_dim;
    const auto* state = static_cast<const __half*>(p.state) + p.n_latent - p.nope_dim;
    if (quads) {
      for (int i = threadIdx.x; i < kSlots * (DK / 8); i += flash::kThreads) {
        const int slot = i / (DK / 8), d = i % (DK / 8) * 8;
        const auto at = static_cast<size_t>(min(base + slot, end - 1));
        if (d < dim)
          copy_quad(&s.k[slot][d], d < p.nope_dim ? keys + at * p.key_stride + d : state + at * width + d);
        else
          *reinterpret_cast<uint4*>(&s.k[slot][d]) = uint4{0, 0, 0, 0};
      }
    } else {
      for (int i = threadIdx.x; i < kSlots * DK; i += flash::kThreads) {
        const int slot = i / DK, d = i % DK;
        const auto at = static_cast<size_t>(min(base + slot, end - 1));
        s.k[slot][d] = d < p.nope_dim ? keys[at * p.key_stride + d]
                       : d < dim      ? state[at * width + d]
                                      : __half(0.0f);
      }
    }
    copy_commit();
  }

  /// Values of slots base ..: V of them, zeros. Those from `end` on repeat the last.
  static __device__ __forceinline__ void fetch_values(const DecompressParams& p, Shared& s,
                                                      const __half* values, int base, int end) {
    if (p.v_head_dim % 8 == 0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kSlots * (DV / 8); i += flash::kThreads) {
        const int slot = i / (DV / 8), d = i % (DV / 8) * 8;
        if (d < p.v_head_dim)
          copy_quad(&s.v[slot][d], values + static_cast<size_t>(min(base + slot, end - 1)) * DV + d);
        else
          *reinterpret_cast<uint4*>(&s.v[slot][d]) = uint4{0, 0, 0, 0};
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < kSlots * DV; i += flash::kThreads) {
        const int slot = i / DV, d = i % DV;
        s.v[slot][d] =
            d < p.v_head_dim ? values[static_cast<size_t>(min(base + slot, end - 1)) * DV + d] : __half(0.0f);
      }
    }
    copy_commit();
  }

  static __device__ __forceinline__ void run(const LatentFlashParams& p) {
    REFLEX_DYNAMIC_SHARED(uint8_t, raw);
    auto& s = *reinterpret_cast<Shared*>(raw);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    // The last rows see most: first.
    const int first_row = (gridDim.y - 1 - blockIdx.y) * kRows, n_rows = min(kRows, p.n_rows - first_row);
    const int head = p.from.first_head + blockIdx.x;
    const bool quads = p.from.n_latent % 8 == 0 && p.from.nope_dim % 8 == 0 && p.from.rope_dim % 8 == 0;
    wait_for_inputs();
    const PassHeader header = *p.pass.header;
    int row[2], pass_row[2], prefix[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 16 * warp + g + 8 * i;
      row[i] = j < n_rows ? first_row + j : -1;
      pass_row[i] = row[i] < 0 ? 0 : p.on_outputs ? p.pass.outputs[row[i]] : row[i];
      prefix[i] = row[i] < 0 ? 0 : p.pass.prefix[pass_row[i]];
    }
    const int last = first_row + n_rows - 1, last_pass_row = p.on_outputs ? p.pass.outputs[last] : last;
    const int end = header.first_slot + last_pass_row + 1;
    const auto* keys = static_cast<const __half*>(p.from.keys) +
                       static_cast<size_t>(blockIdx.x) * p.from.n_slots * p.from.key_stride;
    const auto* values =
        static_cast<const __half*>(p.from.values) + static_cast<size_t>(blockIdx.x) * p.from.n_slots * DV;

    load_queries(p, s, head, first_row, n_rows);
    __syncthreads();
    uint32_t q[kStepsD][4];
#pragma unroll
    for (int k = 0; k < kStepsD; ++k)
      load_matrices(q[k], &s.k[16 * warp + lane % 16][16 * k + lane / 16 * 8]);
    __syncthreads();
    fetch_keys(p.from, s, keys, 0, end, quads);

    float o[kTileD][4], top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kTileD; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;

    for (int base = 0; base < end; base += kSlots) {
      fetch_values(p.from, s, values, base, end);
      copy_wait<1>();
      __syncthreads();
      float score[kTileN][4];
      Base::scores(s, q, score, lane);
      __syncthreads();
      fetch_keys(p.from, s, keys, min(base + kSlots, end - 1), end, quads);
      Base::hide(p.pass, header, base, end, pass_row, prefix, score, t);
      Base::soften(score, top, total, o);
      copy_wait<1>();
      __syncthreads();
      Base::accumulate(s, score, o, lane);
      __syncthreads();
    }
    let_next_start();
    copy_wait<0>();
    store(p, row, head, total, o, t);
  }

  static __device__ __forceinline__ void store(const LatentFlashParams& p, const int (&row)[2], int head,
                                               float (&total)[2], const float (&o)[kTileD][4], int t) {
    const int width = p.from.v_head_dim;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(kFull, total[r], 1);
      total[r] += __shfl_xor_sync(kFull, total[r], 2);
      if (row[r] < 0) continue;
      const float inverse = 1.0f / total[r];
      float* out = p.out + (static_cast<size_t>(row[r]) * p.n_all_heads + head) * width;
#pragma unroll
      for (int n = 0; n < kTileD; ++n) {
        const int d = 8 * n + 2 * t;
        const float a = o[n][2 * r] * inverse, b = o[n][2 * r + 1] * inverse;
        if (width % 2 == 0 && d < width) {
          *reinterpret_cast<float2*>(out + d) = {a, b};
        } else {
          if (d < width) out[d] = a;
          if (d + 1 < width) out[d + 1] = b;
        }
      }
    }
  }
};

}  // namespace

// grid (heads, ceil(rows / 64)), shared memory flash_bytes(dk, dv)
#define REFLEX_LATENT_FLASH(dk, dv)                                          \
  static_assert(sizeof(LatentFlash<dk, dv>::Shared) == flash_bytes(dk, dv)); \
  REFLEX_KERNEL(latent_flash_##dk##x##dv, LatentFlashParams, flash::kThreads) { LatentFlash<dk, dv>::run(p); }
REFLEX_LATENT_FLASH(96, 64)
REFLEX_LATENT_FLASH(192, 128)

}  // namespace reflex::cuda
