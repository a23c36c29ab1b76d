// Every packed type decoded on the GPU and on the host from the same blocks: the bits must agree.
// Built and run by test_device.py. Prints a line per type; exit status 1 where any value differs.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "quant/int8_form.h"

namespace quant = reflex::quant;

namespace {

constexpr int kBlocks = 512;

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(2);
}

/// y (kBlocks, F::kValues); a thread per 32 values
template <class F>
__global__ void decode(const uint8_t* blocks, float* y) {
  constexpr int kGroups = F::kValues / 32;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= kBlocks * kGroups) return;
  const auto* b = reinterpret_cast<const typename F::Block*>(blocks);
  quant::decode32<F>(b[i / kGroups], i % kGroups, y + 32 * i);
}

bool same(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }

template <class F>
int differing(const char* name) {
  constexpr int n = kBlocks * F::kValues;
  std::vector<uint8_t> blocks(kBlocks * sizeof(typename F::Block));
  uint64_t seed = 1;
  for (uint8_t& byte : blocks) {  // Knuth's MMIX generator
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<uint8_t>(seed >> 56);
  }
  std::vector<float> host(n), device(n);
  quant::decode_row<F>(blocks.data(), host.data(), n);
  uint8_t* in = nullptr;
  float* out = nullptr;
  check(cudaMalloc(&in, blocks.size()), "cudaMalloc");
  check(cudaMalloc(&out, n * sizeof(float)), "cudaMalloc");
  check(cudaMemcpy(in, blocks.data(), blocks.size(), cudaMemcpyHostToDevice), "copy in");
  decode<F><<<n / 32 / 64, 64>>>(in, out);
  check(cudaMemcpy(device.data(), out, n * sizeof(float), cudaMemcpyDeviceToHost), name);
  check(cudaFree(in), "cudaFree");
  check(cudaFree(out), "cudaFree");
  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += !same(host[i], device[i]);
  std::printf("%s %d of %d differ\n", name, wrong, n);
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_IF_##kind(wrong += differing<quant::name>(#name);)
#include "quant/types.def"
#undef REFLEX_TYPE
  return wrong ? 1 : 0;
}
