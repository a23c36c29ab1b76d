// Gated DeltaNet over a long chain, kDeltaChunk rows at a time (Yang, Kautz, Hatamizadeh 2024, arXiv
// 2412.06464, section 3.3; Yang et al. 2024, arXiv 2406.06484, for the UT transform).
//
// Within a chunk, with c_t = g_1 .. g_t, D_ts = c_t / c_s for s <= t (else 0), S the state before it:
//   (I + L) d = diag(b) (V - diag(c) K S),   L_ts = b_t D_ts (k_t . k_s) for s < t, else 0
//   O = diag(c) Q S + (D * Q K^T) d,         S' = c_C S + (diag(c_C / c) K)^T d
// delta_chunks makes what does not know S, for all chunks at once: W = (I + L)^-1 diag(b c) K, U = (I +
// L)^-1 diag(b) V, D * Q K^T. delta_scan goes through the chunks in order: d = U - W S and the second line;
// columns of S know nothing of each other, so a block has kDeltaSlice of them. The c_t are kept as
// logarithms, summed in f64, and only quotients of at most 1 are formed.
#include "backend/cuda/gated_delta.cuh"
#include "backend/cuda/split_mma.cuh"

namespace reflex::cuda {

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRowBlocks = kDeltaChunk / 16;  // of an mma's 16 rows
static_assert(kRowBlocks == 4 && kWarps == 8);

__device__ __forceinline__ float* shared_memory() {
  REFLEX_DYNAMIC_SHARED(float, raw);
  return raw;
}

// ---- all chunks at once --------------------------------------------------------------------

struct ChunkShared {
  float* keys;      // (kDeltaChunk, key_pad + 4)
  float* lower;     // (kDeltaChunk, kDeltaPairStride): L
  float* x;         // (kWarps, kDeltaChunk, 8): a warp's solution
  float* inverse;   // (kRowBlocks, 16, kDeltaInverseStride): of I + L's diagonal blocks
  float* strength;  // (kDeltaChunk): b
  float* carry;     // (kDeltaChunk): c
  double* log_c;    // (kDeltaChunk)
};

__device__ __forceinline__ ChunkShared lay_out(int key_pad) {
  ChunkShared m;
  m.keys = shared_memory();
  m.lower = m.keys + kDeltaChunk * (key_pad + 4);
  m.x = m.lower + kDeltaChunk * kDeltaPairStride;
  m.inverse = m.x + kWarps * kDeltaChunk * 8;
  m.strength = m.inverse + kRowBlocks * 16 * kDeltaInverseStride;
  m.carry = m.strength + kDeltaChunk;
  m.log_c = reinterpret_cast<double*>(m.carry + kDeltaChunk);
  return m;
}

/// L to shared memory and D * Q K^T to `pairs`: a warp has 16 rows and 32 columns of both.
template <int kTerms>
__device__ __forceinline__ void make_pairs(const DeltaParams& p, const ChunkShared& m, const float* q,
                                           float* pairs) {
  const int warp = threadIdx.x / 32, row0 = warp % kRowBlocks * 16, column0 = warp / kRowBlocks * 32;
  const int stride = p.key_pad + 4;
  float kk[4][4] = {}, qk[4][4] = {};
  if (column0 <= row0 + 15)
    for (int i = 0; i < p.key_pad; i += 8) {
      float a[4], aq[4];
      load_a(a, m.keys + row0 * stride + i, stride);
      load_a(aq, q + row0 * p.key_pad + i, p.key_pad);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column0 + 8 * j > row0 + 15) continue;  // above the diagonal
        float b[2];
        load_b_transposed(b, m.keys + (column0 + 8 * j) * stride + i, stride);
        mma_f32<kTerms>(kk[j], a, b);
        mma_f32<kTerms>(qk[j], aq, b);
      }
    }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int t = row0 + acc_row(c), s = column0 + 8 * j + acc_column(c);
      const float ratio = s <= t ? expf(static_cast<float>(m.log_c[t] - m.log_c[s])) : 0.0f;
      m.lower[t * kDeltaPairStride + s] = s < t ? m.strength[t] * ratio * kk[j][c] : 0.0f;
      pairs[t * kDeltaChunk + s] = s <= t ? ratio * qk[j][c] : 0.0f;
    }
}

/// One column of the inverse of one diagonal block, by substitution.
__device__ __forceinline__ void invert_blocks(const ChunkShared& m) {
  if (threadIdx.x >= kDeltaChunk) return;
  const int block = threadIdx.x / 16, column = threadIdx.x % 16;
  const float* l = m.lower + 16 * block * (kDeltaPairStride + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int s = 0; s < i; ++s) sum -= l[i * kDeltaPairStride + s] * x[s];
    x[i] = sum;
    m.inverse[(16 * block + i) * kDeltaInverseStride + column] = sum;
  }
}

/// Eight columns of (I + L)^-1 times a right side, 16 rows after 16 rows; the right side of a row and
/// column is right(t, j), the solution goes to out(t, j).
template <int kTerms, class Right, class Out>
__device__ __forceinline__ void solve(const ChunkShared& m, Right right, Out out) {
  float* x = m.x + threadIdx.x / 32 * kDeltaChunk * 8;
  for (int block = 0; block < kRowBlocks; ++block) {
    const int row0 = 16 * block;
    float sum[4], y[4] = {}, a[4], b[2];
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = right(row0 + acc_row(c), acc_column(c));
    for (int i = 0; i < row0; i += 8) {
      load_a(a, m.lower + row0 * kDeltaPairStride + i, kDeltaPairStride);
#pragma unroll
      for (int c = 0; c < 4; ++c) a[c] = -a[c];
      load_b(b, x + i * 8, 8);
      mma_f32<kTerms>(sum, a, b);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x[(row0 + acc_row(c)) * 8 + acc_column(c)] = sum[c];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
      load_a(a, m.inverse + row0 * kDeltaInverseStride + i, kDeltaInverseStride);
      load_b(b, x + (row0 + i) * 8, 8);
      mma_f32<kTerms>(y, a, b);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[(row0 + acc_row(c)) * 8 + acc_column(c)] = y[c];
      out(row0 + acc_row(c), acc_column(c), y[c]);
    }
    __syncwarp();
  }
}

/// grid (chunks, H)
template <int kTerms>
__device__ __forceinline__ void chunks(const DeltaParams& p) {
  wait_for_inputs();
  let_next_start();
  const int h = blockIdx.y, first = blockIdx.x * kDeltaChunk, pad = p.key_pad, stride = pad + 4;
  const size_t at = static_cast<size_t>(h) * p.capacity + first;
  const size_t key_at = (static_cast<size_t>(key_head_of(p, h)) * p.capacity + first) * pad;
  const ChunkShared m = lay_out(pad);
  for (int i = threadIdx.x; i < kDeltaChunk * pad / 4; i += kThreads) {
    const int row = i / (pad / 4), column = i % (pad / 4) * 4;
    *reinterpret_cast<float4*>(m.keys + row * stride + column) =
        *reinterpret_cast<const float4*>(p.k + key_at + static_cast<size_t>(row) * pad + column);
  }
  if (threadIdx.x < kDeltaChunk) {
    double sum = 0;
    for (int s = 0; s <= threadIdx.x; ++s) sum += static_cast<double>(p.gate[at + s]);
    m.log_c[threadIdx.x] = sum;
    m.strength[threadIdx.x] = p.strength[at + threadIdx.x];
    m.carry[threadIdx.x] = expf(static_cast<float>(sum));
  }
  __syncthreads();
  if (threadIdx.x < kDeltaChunk) {
    p.carry[at + threadIdx.x] = m.carry[threadIdx.x];
    p.ratio[at + threadIdx.x] = expf(static_cast<float>(m.log_c[kDeltaChunk - 1] - m.log_c[threadIdx.x]));
  }
  make_pairs<kTerms>(p, m, p.q + key_at, p.pairs + at * kDeltaChunk);
  __syncthreads();
  invert_blocks(m);
  __syncthreads();
  const int key_tiles = pad / 8, tiles = key_tiles + p.value_pad / 8;
  for (int tile = threadIdx.x / 32; tile < tiles; tile += kWarps) {
    if (tile < key_tiles) {
      float* w = p.w + at * pad + 8 * tile;
      const float* keys = m.keys + 8 * tile;
      solve<kTerms>(
          m, [&](int t, int j) { return m.strength[t] * m.carry[t] * keys[t * stride + j]; },
          [&](int t, int j, float y) { w[static_cast<size_t>(t) * pad + j] = y; });
    } else {  // each place of v is read before it is written, by the one thread that has it
      float* v = p.v + at * p.value_pad + 8 * (tile - key_tiles);
      solve<kTerms>(
          m, [&](int t, int j) { return m.strength[t] * v[static_cast<size_t>(t) * p.value_pad + j]; },
          [&](int t, int j, float y) { v[static_cast<size_t>(t) * p.value_pad + j] = y; });
    }
  }
}

// ---- one chunk after the other -------------------------------------------------------------

struct ScanShared {
  float* state;    // (key_pad, kDeltaSliceStride)
  float* d;        // (kDeltaChunk, kDeltaSliceStride)
  float* decayed;  // the same, each row times c_C / c_t
  float* pairs;    // (kDeltaChunk, kDeltaPairStride)
  float* factors;  // (2, 2, kDeltaChunk): carry and ratio of even and odd chunks
  float* tiles;    // W, Q, K (kDeltaChunk, key_pad + 4); one and the same where they do not fit
  int next_tile;   // floats from one to the next
};

__device__ __forceinline__ ScanShared lay_out_scan(const DeltaParams& p) {
  ScanShared m;
  m.state = shared_memory();
  m.d = m.state + p.key_pad * kDeltaSliceStride;
  m.decayed = m.d + kDeltaChunk * kDeltaSliceStride;
  m.pairs = m.decayed + kDeltaChunk * kDeltaSliceStride;
  m.factors = m.pairs + kDeltaChunk * kDeltaPairStride;
  m.tiles = m.factors + 4 * kDeltaChunk;
  m.next_tile = p.buffers == 3 ? kDeltaChunk * (p.key_pad + 4) : 0;
  return m;
}

__device__ __forceinline__ void copy_rows(float* to, int to_stride, const float* from, int columns) {
  for (int i = threadIdx.x; i < kDeltaChunk * columns / 4; i += kThreads) {
    const int row = i / (columns / 4), column = i % (columns / 4) * 4;
    copy_quad(to + row * to_stride + column, from + static_cast<size_t>(row) * columns + column);
  }
}

/// Begins to bring item `item`: W, Q or K of a chunk, and what is read with it.
__device__ __forceinline__ void fetch(const DeltaParams& p, const ScanShared& m, int item, int n_items) {
  if (item < n_items) {
    const int chunk = item / 3, which = item % 3, h = blockIdx.y, pad = p.key_pad;
    const size_t at = static_cast<size_t>(h) * p.capacity + static_cast<size_t>(chunk) * kDeltaChunk;
    const size_t key_at =
        static_cast<size_t>(key_head_of(p, h)) * p.capacity + static_cast<size_t>(chunk) * kDeltaChunk;
    const float* from = which == 0 ? p.w + at * pad : (which == 1 ? p.q : p.k) + key_at * pad;
    copy_rows(m.tiles + which * m.next_tile, pad + 4, from, pad);
    if (which == 1) copy_rows(m.pairs, kDeltaPairStride, p.pairs + at * kDeltaChunk, kDeltaChunk);
    if (which == 0 && threadIdx.x < 2 * kDeltaChunk / 4) {
      const int half = threadIdx.x / (kDeltaChunk / 4), i = threadIdx.x % (kDeltaChunk / 4) * 4;
      copy_quad(m.factors + (chunk % 2 * 2 + half) * kDeltaChunk + i, (half ? p.ratio : p.carry) + at + i);
    }
  }
  copy_commit();
}

/// d = U - W S, and d times c_C / c_t. A warp has 16 rows and 16 columns; u: its U.
template <int kTerms>
__device__ __forceinline__ void correct(const DeltaParams& p, const ScanShared& m, float (&u)[2][4],
                                        const float* ratio) {
  const int warp = threadIdx.x / 32, row0 = warp % kRowBlocks * 16, column0 = warp / kRowBlocks * 16;
  const int stride = p.key_pad + 4;
  for (int i = 0; i < p.key_pad; i += 8) {
    float a[4], b[2];
    load_a(a, m.tiles + row0 * stride + i, stride);
#pragma unroll
    for (int c = 0; c < 4; ++c) a[c] = -a[c];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_b(b, m.state + i * kDeltaSliceStride + column0 + 8 * j, kDeltaSliceStride);
      mma_f32<kTerms>(u[j], a, b);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int t = row0 + acc_row(c), to = t * kDeltaSliceStride + column0 + 8 * j + acc_column(c);
      m.d[to] = u[j][c];
      m.decayed[to] = u[j][c] * ratio[t];
    }
}

/// O = diag(c) Q S + (D * Q K^T) d, to where U was.
template <int kTerms>
__device__ __forceinline__ void emit(const DeltaParams& p, const ScanShared& m, const float* carry,
                                     float* out) {
  const int warp = threadIdx.x / 32, row0 = warp % kRowBlocks * 16, column0 = warp / kRowBlocks * 16;
  const int stride = p.key_pad + 4;
  float o[2][4] = {}, a[4], b[2];
  for (int i = 0; i < p.key_pad; i += 8) {
    load_a(a, m.tiles + m.next_tile + row0 * stride + i, stride);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_b(b, m.state + i * kDeltaSliceStride + column0 + 8 * j, kDeltaSliceStride);
      mma_f32<kTerms>(o[j], a, b);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) o[j][c] *= carry[row0 + acc_row(c)];
  for (int i = 0; i < row0 + 16; i += 8) {
    load_a(a, m.pairs + row0 * kDeltaPairStride + i, kDeltaPairStride);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_b(b, m.d + i * kDeltaSliceStride + column0 + 8 * j, kDeltaSliceStride);
      mma_f32<kTerms>(o[j], a, b);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      out[static_cast<size_t>(row0 + acc_row(c)) * p.value_pad + column0 + 8 * j + acc_column(c)] = o[j][c];
}

/// S = c_C S + K^T (d times c_C / c_t): a warp has 16 rows at a time, of all the slice's columns.
template <int kTerms>
__device__ __forceinline__ void update(const DeltaParams& p, const ScanShared& m, float carry) {
  const int stride = p.key_pad + 4;
  for (int row0 = threadIdx.x / 32 * 16; row0 < p.key_pad; row0 += 16 * kWarps) {
    float s[4][4], a[4], b[2];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[j][c] = carry * m.state[(row0 + acc_row(c)) * kDeltaSliceStride + 8 * j + acc_column(c)];
    for (int i = 0; i < kDeltaChunk; i += 8) {
      load_a_transposed(a, m.tiles + 2 * m.next_tile + i * stride + row0, stride);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        load_b(b, m.decayed + i * kDeltaSliceStride + 8 * j, kDeltaSliceStride);
        mma_f32<kTerms>(s[j], a, b);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        m.state[(row0 + acc_row(c)) * kDeltaSliceStride + 8 * j + acc_column(c)] = s[j][c];
  }
}

/// grid (value_pad / kDeltaSlice, H)
template <int kTerms>
__device__ __forceinline__ void scan(const DeltaParams& p) {
  wait_for_inputs();
  let_next_start();
  const int h = blockIdx.y, column0 = blockIdx.x * kDeltaSlice, n = p.key_dim, m_dim = p.value_dim;
  const ScanShared m = lay_out_scan(p);
  float* state = p.state + static_cast<size_t>(h) * n * m_dim + column0;
  const int n_items = 3 * ((p.n_chain + kDeltaChunk - 1) / kDeltaChunk);
  for (int i = 0; i < p.buffers; ++i) fetch(p, m, i, n_items);
  for (int i = threadIdx.x; i < p.key_pad * kDeltaSlice; i += kThreads) {
    const int row = i / kDeltaSlice, column = i % kDeltaSlice;
    m.state[row * kDeltaSliceStride + column] =
        row < n && column0 + column < m_dim ? state[static_cast<size_t>(row) * m_dim + column] : 0.0f;
  }
  const int warp = threadIdx.x / 32, row0 = warp % kRowBlocks * 16, warp_column = warp / kRowBlocks * 16;
  for (int item = 0; item < n_items; ++item) {
    const int chunk = item / 3, which = item % 3;
    const float* carry = m.factors + chunk % 2 * 2 * kDeltaChunk;
    float* v =
        p.v + (static_cast<size_t>(h) * p.capacity + static_cast<size_t>(chunk) * kDeltaChunk) * p.value_pad +
        column0;
    float u[2][4];
    if (which == 0)  // on its way while the copies end
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          u[j][c] =
              v[static_cast<size_t>(row0 + acc_row(c)) * p.value_pad + warp_column + 8 * j + acc_column(c)];
    if (p.buffers == 3)
      copy_wait<2>();
    else
      copy_wait<0>();
    __syncthreads();
    if (which == 0)
      correct<kTerms>(p, m, u, carry + kDeltaChunk);
    else if (which == 1)
      emit<kTerms>(p, m, carry, v);
    else
      update<kTerms>(p, m, carry[kDeltaChunk - 1]);
    __syncthreads();
    fetch(p, m, item + p.buffers, n_items);
  }
  for (int i = threadIdx.x; i < n * kDeltaSlice; i += kThreads) {
    const int row = i / kDeltaSlice, column = i % kDeltaSlice;
    if (column0 + column < m_dim)
      state[static_cast<size_t>(row) * m_dim + column] = m.state[row * kDeltaSliceStride + column];
  }
}

}  // namespace

#define REFLEX_CHUNKS(terms)                                                       \
  REFLEX_KERNEL(delta_chunks_##terms, DeltaParams, kThreads) { chunks<terms>(p); } \
  REFLEX_KERNEL(delta_scan_##terms, DeltaParams, kThreads) { scan<terms>(p); }
REFLEX_CHUNKS(1)
REFLEX_CHUNKS(3)
#undef REFLEX_CHUNKS

}  // namespace reflex::cuda
