// One new row at the end of a chain, f16 states: norm, rotation and store of the row's own heads,
// then attention over the whole sequence in splits, all in one launch. A block takes one key/value
// head and a run of slots; half warps (a quarter at head size 64) keep a running softmax each over
// every n-th slot, and merge at the end; the last block of a head merges the splits.
// Refuses: trees, other head sizes, heads of which a part rotates, f32 states (attention.cu).
#include "backend/cuda/device.cuh"

namespace reflex::cuda {

namespace {

constexpr int kAttentionThreads = attention_one_threads(kArch / 10);
constexpr int kAttentionBatch =
    kAttentionThreads == 512 ? 1 : 4;  ///< slots a group loads before it uses the first
constexpr int kMinPerSplit = kAttentionThreads / 4;
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
struct AttentionOne {
  static constexpr int kLanes = HD / 8;  ///< that share a slot
  static constexpr int kGroups = kAttentionThreads / kLanes, kWarps = kAttentionThreads / 32;

  struct Shared {
    float q[QH][HD];     ///< times scale and log2(e)
    float fresh[2][HD];  ///< the new slot's key and value, as the state has them
    float o[kWarps][QH][HD];
    float top[kWarps][QH], total[kWarps][QH];
    bool last;
  };
  struct Batch {
    Chunk k[kAttentionBatch], v[kAttentionBatch];
  };

  static __device__ __forceinline__ void load(const AttentionParams& p, int g, int base, int end, Batch& b) {
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, stride = p.n_kv_heads * HD;
    const auto* keys = static_cast<const __half*>(p.k) + g * HD + lane * 8;
    const auto* values = static_cast<const __half*>(p.v) + g * HD + lane * 8;
#pragma unroll
    for (int j = 0; j < kAttentionBatch; ++j) {
      const size_t slot = static_cast<size_t>(min(base + j * kGroups + group, end - 1));
      b.k[j] = load_chunk(keys + slot * stride);
      b.v[j] = load_chunk(values + slot * stride);
    }
  }

  /// One more score, weight and value for each of kN slots; slots that are not there score -inf.
  template <int kN>
  static __device__ __forceinline__ void take(Running<QH>& r, int h, const float (&score)[kN],
                                              const float (&value)[kN][8]) {
    float top = r.top[h];
#pragma unroll
    for (int j = 0; j < kN; ++j) top = fmaxf(top, score[j]);
    const float keep = top == -INFINITY ? 1.0f : exp2f(r.top[h] - top);
    r.top[h] = top;
    r.total[h] *= keep;
#pragma unroll
    for (int i = 0; i < 8; ++i) r.o[h][i] *= keep;
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const float w = score[j] == -INFINITY ? 0.0f : exp2f(score[j] - top);
      r.total[h] += w;
#pragma unroll
      for (int i = 0; i < 8; ++i) r.o[h][i] += w * value[j][i];
    }
  }

  static __device__ __forceinline__ float dot(const float* q, const float (&k)[8]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += q[i] * k[i];
    return warp_sum<kLanes>(sum);
  }

  static __device__ __forceinline__ void attend(const Batch& b, int base, int end, const Shared& s,
                                                Running<QH>& r) {
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
    float k[kAttentionBatch][8], v[kAttentionBatch][8];
#pragma unroll
    for (int j = 0; j < kAttentionBatch; ++j) unpack(b.k[j], k[j]), unpack(b.v[j], v[j]);
#pragma unroll
    for (int h = 0; h < QH; ++h) {
      float score[kAttentionBatch];
#pragma unroll
      for (int j = 0; j < kAttentionBatch; ++j) {
        score[j] = dot(&s.q[h][lane * 8], k[j]);
        if (base + j * kGroups + group >= end) score[j] = -INFINITY;
      }
      take<kAttentionBatch>(r, h, score, v);
    }
  }

  /// The new slot, for the block that holds it: its first warp, the lanes of one group.
  static __device__ __forceinline__ void attend_fresh(const Shared& s, Running<QH>& r) {
    const int lane = threadIdx.x % kLanes;
    float k[8], v[1][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) k[i] = s.fresh[0][lane * 8 + i], v[0][i] = s.fresh[1][lane * 8 + i];
#pragma unroll
    for (int h = 0; h < QH; ++h) {
      const float all = dot(&s.q[h][lane * 8], k);
      const float score[1] = {threadIdx.x < kLanes ? all : -INFINITY};
      take<1>(r, h, score, v);
    }
  }

  // Of a head, a lane has the kOwn values from kOwn * lane.
  static constexpr int kOwn = HD / 32;
  /// What a head meets that is the same in every pass or known ahead of the wait.
  struct HeadConstants {
    float weight[kOwn], cosine[kOwn], sine[kOwn];
  };
  static __device__ __forceinline__ const HeadItem& item_of(const AttentionParams& p, int work) {
    return work < QH ? p.q_item : work == QH ? p.k_item : p.v_item;
  }
  static __device__ __forceinline__ HeadConstants constants_of(const HeadItem& item) {
    const int first = threadIdx.x % 32 * kOwn;
    HeadConstants c;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      c.weight[i] = item.norm_weight ? item.norm_weight[first + i] : 1.0f;
      c.cosine[i] = 1;
      c.sine[i] = 0;
      if (!item.rotation) continue;
      const int pair = item.adjacent ? (first + i) / 2 : (first + i) % (HD / 2);
      const float2 r = reinterpret_cast<const float2*>(item.rotation)[pair];
      c.cosine[i] = r.x;
      // The first of a pair takes the other's sine with a minus.
      const bool is_first = item.adjacent ? (first + i) % 2 == 0 : first + i < HD / 2;
      c.sine[i] = is_first ? -r.y : r.y;
    }
    return c;
  }

  /// norm(x), rotated: this lane's values. All dimensions rotate, or none.
  static __device__ __forceinline__ void prepare_head(const HeadItem& item, const float* x,
                                                      const HeadConstants& c, float (&v)[kOwn]) {
    const int first = threadIdx.x % 32 * kOwn;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      v[i] = __ldcg(x + first + i);
      squares += v[i] * v[i];
    }
    const float factor =
        item.norm_weight ? rsqrtf(warp_sum(squares) / static_cast<float>(HD) + item.eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v[i] *= factor * c.weight[i];
    if (!item.rotation) return;
    float other[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float far = __shfl_xor_sync(kFull, v[i], 16);  // half a head away
      other[i] = item.adjacent ? v[i ^ 1] : far;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v[i] = v[i] * c.cosine[i] + other[i] * c.sine[i];
  }

  /// The row's own heads: queries to shared memory in every block, key and value to the state in the
  /// block that `stores`.
  static __device__ __forceinline__ void prepare(const AttentionParams& p, int g, int slot, bool stores,
                                                 const HeadConstants& constants, Shared& s) {
    const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kOwn, n_work = QH + (stores ? 2 : 0);
#pragma unroll 1
    for (int w = warp; w < n_work; w += kWarps) {
      const HeadItem& item = item_of(p, w);
      const int h = w < QH ? g * QH + w : g;
      float v[kOwn];
      prepare_head(item, item.x + static_cast<size_t>(h) * HD, w == warp ? constants : constants_of(item), v);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (w < QH) {
          s.q[w][first + i] = v[i] * (p.scale * kLog2E);
        } else {
          const __half rounded = __float2half_rn(v[i]);
          s.fresh[w - QH][first + i] = __half2float(rounded);
          static_cast<__half*>(item.state)[(static_cast<size_t>(slot) * item.n_heads + h) * HD + first + i] =
              rounded;
        }
      }
    }
    __syncthreads();
  }

  /// Groups of a warp by shuffles, warps through shared memory.
  static __device__ __forceinline__ void merge_warps(Running<QH>& r, Shared& s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < QH; ++h) {
#pragma unroll
      for (int m = kLanes; m < 32; m *= 2) {
        const float other = __shfl_xor_sync(kFull, r.top[h], m), top = fmaxf(r.top[h], other);
        const float keep = r.top[h] == -INFINITY ? 0.0f : exp2f(r.top[h] - top);
        r.top[h] = top;
        r.total[h] *= keep;
        r.total[h] += __shfl_xor_sync(kFull, r.total[h], m);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          r.o[h][i] *= keep;
          r.o[h][i] += __shfl_xor_sync(kFull, r.o[h][i], m);
        }
      }
      if (lane < kLanes)
#pragma unroll
        for (int i = 0; i < 8; ++i) s.o[warp][h][lane * 8 + i] = r.o[h][i];
      if (lane == 0) {
        s.top[warp][h] = r.top[h];
        s.total[warp][h] = r.total[h];
      }
    }
    __syncthreads();
  }

  /// The splits of a sequence of n slots, the new one with them.
  static __device__ __forceinline__ int slots_per_split(int n) {
    const int even = (n + kMaxSplits - 1) / kMaxSplits;
    return max(kMinPerSplit, (even + kGroups - 1) / kGroups * kGroups);
  }

  static __device__ __forceinline__ void run(const AttentionParams& p) {
    REFLEX_DYNAMIC_SHARED(uint8_t, raw);
    auto& s = *reinterpret_cast<Shared*>(raw);
    let_next_start();
    // begin_pass has ended before any later kernel starts, and slots of earlier passes are at rest.
    const int g = blockIdx.x, split = blockIdx.y;
    const int slot = p.pass.header->first_slot, n = slot + 1, per_split = slots_per_split(n);
    const int n_splits = (n + per_split - 1) / per_split, begin = split * per_split;
    const bool stores = split == n_splits - 1;
    const int end = min(slot, begin + per_split);  // of the slots before the new one
    Batch batch;
    if (begin < end) load(p, g, begin, end, batch);
    const HeadConstants constants = constants_of(item_of(p, threadIdx.x / 32));
    wait_for_inputs();
    if (split >= n_splits) return;
    prepare(p, g, slot, stores, constants, s);

    Running<QH> r;
#pragma unroll
    for (int h = 0; h < QH; ++h) {
      r.top[h] = -INFINITY;
      r.total[h] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) r.o[h][i] = 0;
    }
#pragma unroll 1
    for (int base = begin; base < end; base += kGroups * kAttentionBatch) {
      const Batch now = batch;
      if (base + kGroups * kAttentionBatch < end) load(p, g, base + kGroups * kAttentionBatch, end, batch);
      attend(now, base, end, s, r);
    }
    if (stores && threadIdx.x < 32) attend_fresh(s, r);
    merge_warps(r, s);
#pragma unroll 1
    for (int i = threadIdx.x; i < QH * HD; i += kAttentionThreads) {
      const int h = i / HD, d = i % HD;
      float top = -INFINITY, total = 0, o = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s.top[w][h]);
#pragma unroll 2
      for (int w = 0; w < kWarps; ++w) {
        const float weight = s.top[w][h] == -INFINITY ? 0.0f : exp2f(s.top[w][h] - top);
        total += weight * s.total[w][h];
        o += weight * s.o[w][h][d];
      }
      const size_t head = static_cast<size_t>(g) * QH + h;
      if (n_splits == 1) {
        p.out[head * HD + d] = o / total;
        continue;
      }
      float* partial = p.partial + (head * kMaxSplits + split) * (HD + 2);
      partial[d] = o;
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
#pragma unroll 1
    for (int i = threadIdx.x; i < QH * HD; i += kAttentionThreads) {
      const int h = i / HD, d = i % HD;
      const size_t head = static_cast<size_t>(g) * QH + h;
      const float* partial = p.partial + head * kMaxSplits * (HD + 2);
      // Many loads at once: one after the other they would cost more than the attention.
      constexpr int kAtOnce = 8;
      float tops[kMaxSplits], top = -INFINITY, total = 0, o = 0;
#pragma unroll
      for (int k = 0; k < kMaxSplits; ++k) tops[k] = __ldcg(partial + min(k, n_splits - 1) * (HD + 2) + HD);
#pragma unroll
      for (int k = 0; k < kMaxSplits; ++k) top = fmaxf(top, tops[k]);
#pragma unroll
      for (int first = 0; first < kMaxSplits; first += kAtOnce) {
        if (first >= n_splits) break;
        float totals[kAtOnce], values[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float* from = partial + min(first + k, n_splits - 1) * (HD + 2);
          totals[k] = __ldcg(from + HD + 1);
          values[k] = __ldcg(from + d);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const float w = first + k < n_splits ? exp2f(tops[first + k] - top) : 0.0f;
          total += w * totals[k];
          o += w * values[k];
        }
      }
      p.out[head * HD + d] = o / total;
    }
  }
};

}  // namespace

// grid (G, kMaxSplits), threads and shared memory as attention_one_threads and _bytes say.
#define REFLEX_ONE(hd, qh)                                                                               \
  static_assert(sizeof(AttentionOne<hd, qh>::Shared) <= attention_one_bytes(hd, qh, kAttentionThreads)); \
  REFLEX_KERNEL(attention_one_##hd##x##qh, AttentionParams, kAttentionThreads) {                         \
    AttentionOne<hd, qh>::run(p);                                                                        \
  }
#define REFLEX_HEADS(qh) REFLEX_ONE(64, qh) REFLEX_ONE(128, qh)
REFLEX_ATTENTION_ONE(REFLEX_HEADS)

}  // namespace reflex::cuda
