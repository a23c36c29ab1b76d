// One new row at the end of a chain, f16 states: norm, rotation and store of the row's own heads,
// then attention over the whole sequence in splits, all in one launch. A block takes one key/value
// head and a run of slots; half warps (a quarter at head size 64) keep a running softmax each over
// every n-th slot, and merge at the end; the last block of a head merges the splits.
// Refuses: trees, other head sizes, f32 states (attention.cu).
#include "backend/cuda/rope.cuh"

namespace reflex::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  ///< slots a group loads before it uses the first
constexpr int kMinPerSplit = 64;
constexpr float kLog2E = 1.4426950408889634f;

struct Chunk {
  uint32_t v[4];  ///< 8 halves
};

__device__ __forceinline__ void unpack(const Chunk& c, float (&f)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = f16_value(c.v[i] & 0xFFFF);
    f[2 * i + 1] = f16_value(c.v[i] >> 16);
  }
}

/// Plain (coherent) load: this launch may have written the slot.
__device__ __forceinline__ Chunk load_chunk(const __half* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}

/// A softmax under way for QH query heads, 8 of the head's dims in this lane.
template <int QH>
struct Running {
  float top[QH], total[QH], o[QH][8];
};

template <int HD, int QH>
struct Kernel {
  static constexpr int kLanes = HD / 8;  ///< that share a slot
  static constexpr int kGroups = kThreads / kLanes;

  struct Shared {
    float heads[kThreads / 32][HD];  ///< scratch of prepare_head
    float q[QH][HD];                 ///< times scale and log2(e)
    float o[kGroups][HD];
    float top[kGroups], total[kGroups];
    bool last;
  };

  static __device__ __forceinline__ void attend(const AttentionParams& p, int g, int begin, int end,
                                                const Shared& s, Running<QH>& r) {
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, stride = p.n_kv_heads * HD;
    const auto* keys = static_cast<const __half*>(p.k) + g * HD + lane * 8;
    const auto* values = static_cast<const __half*>(p.v) + g * HD + lane * 8;
    float q[QH][8];
#pragma unroll
    for (int h = 0; h < QH; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) q[h][i] = s.q[h][lane * 8 + i];
    for (int base = begin; base < end; base += kGroups * kBatch) {
      Chunk k[kBatch], v[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int slot = min(base + j * kGroups + group, end - 1);
        k[j] = load_chunk(keys + static_cast<size_t>(slot) * stride);
        v[j] = load_chunk(values + static_cast<size_t>(slot) * stride);
      }
#pragma unroll
      for (int h = 0; h < QH; ++h) {
        float score[kBatch], top = r.top[h];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          float f[8], dot = 0;
          unpack(k[j], f);
#pragma unroll
          for (int i = 0; i < 8; ++i) dot += q[h][i] * f[i];
          dot = warp_sum<kLanes>(dot);
          score[j] = base + j * kGroups + group < end ? dot : -INFINITY;
          top = fmaxf(top, score[j]);
        }
        const float keep = top == -INFINITY ? 1.0f : exp2f(r.top[h] - top);
        r.top[h] = top;
        r.total[h] *= keep;
#pragma unroll
        for (int i = 0; i < 8; ++i) r.o[h][i] *= keep;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float w = score[j] == -INFINITY ? 0.0f : exp2f(score[j] - top);
          r.total[h] += w;
          float f[8];
          unpack(v[j], f);
#pragma unroll
          for (int i = 0; i < 8; ++i) r.o[h][i] += w * f[i];
        }
      }
    }
  }

  /// Merges the block's groups: thread d < HD gets (top, total, o[d]) of query head h.
  static __device__ __forceinline__ void merge(Shared& s, const Running<QH>& r, int h, float& top,
                                               float& total, float& o) {
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) s.o[group][lane * 8 + i] = r.o[h][i];
    if (lane == 0) {
      s.top[group] = r.top[h];
      s.total[group] = r.total[h];
    }
    __syncthreads();
    top = -INFINITY;
    total = o = 0;
    for (int i = 0; i < kGroups; ++i) top = fmaxf(top, s.top[i]);
    if (threadIdx.x >= HD || top == -INFINITY) return;
    for (int i = 0; i < kGroups; ++i) {
      const float w = s.top[i] == -INFINITY ? 0.0f : exp2f(s.top[i] - top);
      total += w * s.total[i];
      o += w * s.o[i][threadIdx.x];
    }
  }

  static __device__ __forceinline__ void prepare(const AttentionParams& p, int g, int position, int slot,
                                                 bool stores, Shared& s) {
    // The block that holds the new slot stores it; every block needs the queries.
    const int warp = threadIdx.x / 32, n_work = QH + (stores ? 2 : 0);
    for (int w = warp; w < n_work; w += kThreads / 32) {
      float* head = s.heads[warp];
      const HeadItem& item = w < QH ? p.q_item : w == QH ? p.k_item : p.v_item;
      const int h = w < QH ? g * QH + w : g;
      prepare_head(item, item.x + static_cast<size_t>(h) * HD, position, head);
      if (w < QH)
        for (int i = threadIdx.x % 32; i < HD; i += 32) s.q[w][i] = head[i] * (p.scale * kLog2E);
      else
        store_state(item, slot, h, head);
      __syncwarp();
    }
    __syncthreads();
  }

  static __device__ __forceinline__ void run(const AttentionParams& p) {
    extern __shared__ __align__(16) uint8_t raw[];
    auto& s = *reinterpret_cast<Shared*>(raw);
    let_next_start();
    wait_for_inputs();
    const int g = blockIdx.x, split = blockIdx.y, slot = p.pass.header->first_slot, n = slot + 1;
    const int even = (n + gridDim.y - 1) / gridDim.y;
    const int per_split = max(kMinPerSplit, (even + kGroups - 1) / kGroups * kGroups);
    const int n_splits = (n + per_split - 1) / per_split, begin = split * per_split;
    if (split >= n_splits) return;
    prepare(p, g, p.pass.positions[0], slot, split == n_splits - 1, s);

    Running<QH> r;
#pragma unroll
    for (int h = 0; h < QH; ++h) {
      r.top[h] = -INFINITY;
      r.total[h] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) r.o[h][i] = 0;
    }
    attend(p, g, begin, min(n, begin + per_split), s, r);

    const int d = threadIdx.x;
#pragma unroll
    for (int h = 0; h < QH; ++h) {
      float top, total, o;
      merge(s, r, h, top, total, o);
      const size_t head = static_cast<size_t>(g) * QH + h;
      if (n_splits == 1) {
        if (d < HD) p.out[head * HD + d] = o / total;
        continue;
      }
      float* partial = p.partial + (head * kMaxSplits + split) * (HD + 2);
      if (d < HD) partial[d] = o;
      if (d == 0) {
        partial[HD] = top;
        partial[HD + 1] = total;
      }
    }
    if (n_splits > 1) merge_splits(p, g, n_splits, s);
  }

  /// The last block of a head to come here reads what all have left.
  static __device__ __forceinline__ void merge_splits(const AttentionParams& p, int g, int n_splits,
                                                      Shared& s) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t before = atomicAdd(p.tickets + g, 1u);
      s.last = before == static_cast<uint32_t>(n_splits) - 1;
      if (s.last) p.tickets[g] = 0;
    }
    __syncthreads();
    if (!s.last) return;
    __threadfence();
    for (int i = threadIdx.x; i < QH * HD; i += kThreads) {
      const int h = i / HD, d = i % HD;
      const size_t head = static_cast<size_t>(g) * QH + h;
      const float* partial = p.partial + head * kMaxSplits * (HD + 2);
      float top = -INFINITY, total = 0, o = 0;
      for (int k = 0; k < n_splits; ++k) top = fmaxf(top, __ldcg(partial + k * (HD + 2) + HD));
      for (int k = 0; k < n_splits; ++k) {
        const float w = exp2f(__ldcg(partial + k * (HD + 2) + HD) - top);
        total += w * __ldcg(partial + k * (HD + 2) + HD + 1);
        o += w * __ldcg(partial + k * (HD + 2) + d);
      }
      p.out[head * HD + d] = o / total;
    }
  }
};

}  // namespace

// grid (G, splits <= kMaxSplits), shared memory as attention_one_bytes says.
#define REFLEX_ONE(hd, qh)                                                      \
  static_assert(sizeof(Kernel<hd, qh>::Shared) <= attention_one_bytes(hd, qh)); \
  extern "C" __global__ void __launch_bounds__(kThreads)                        \
      attention_one_##hd##x##qh(const __grid_constant__ AttentionParams p) {    \
    Kernel<hd, qh>::run(p);                                                     \
  }
#define REFLEX_HEADS(qh) REFLEX_ONE(64, qh) REFLEX_ONE(128, qh)
REFLEX_ATTENTION_ONE(REFLEX_HEADS)

}  // namespace reflex::cuda
