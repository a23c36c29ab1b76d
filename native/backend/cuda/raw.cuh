// Weights in the file's own layout, 32 values of a row at a time, for every type that holds any.
#pragma once
#include "backend/cuda/device.cuh"
#include "quant/int8_form.h"

namespace reflex::cuda {

struct PlainF32 {
  static __device__ __forceinline__ float at(const uint8_t* row, int i) {
    return quant::float_of_bits(quant::load_u32(row + 4 * static_cast<size_t>(i)));
  }
};
struct PlainF16 {
  static __device__ __forceinline__ float at(const uint8_t* row, int i) {
    return f16_value(quant::load_u16(row + 2 * static_cast<size_t>(i)));
  }
};
struct PlainBF16 {
  static __device__ __forceinline__ float at(const uint8_t* row, int i) {
    return quant::float_of_bits(quant::load_u16(row + 2 * static_cast<size_t>(i)) << 16);
  }
};

/// Raw<type>::read: y (32) = values 32 group .. of the row; beyond n_in zero (plain types alone have
/// rows that are no multiple of 32).
template <class Plain>
struct RawPlain {
  static __device__ __forceinline__ void read(const uint8_t* row, int group, int n_in, float* y) {
#pragma unroll
    for (int i = 0; i < 32; ++i) y[i] = 32 * group + i < n_in ? Plain::at(row, 32 * group + i) : 0.0f;
  }
};
template <class F>
struct RawPacked {
  static __device__ __forceinline__ void read(const uint8_t* row, int group, int, float* y) {
    constexpr int kGroups = F::kValues / 32;
    const auto* block = reinterpret_cast<const typename F::Block*>(row) + group / kGroups;
    quant::decode32<F>(*block, group % kGroups, y);
  }
};

#define REFLEX_RAW_plain(name) using Raw_##name = RawPlain<Plain##name>;
#define REFLEX_RAW_packed(name) using Raw_##name = RawPacked<quant::name>;
#define REFLEX_RAW_other(name)
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_RAW_##kind(name)
#include "quant/types.def"
#undef REFLEX_TYPE
#undef REFLEX_RAW_plain
#undef REFLEX_RAW_packed
#undef REFLEX_RAW_other

#define REFLEX_EACH_plain(M, name) M(name)
#define REFLEX_EACH_packed(M, name) M(name)
#define REFLEX_EACH_other(M, name)

}  // namespace reflex::cuda
