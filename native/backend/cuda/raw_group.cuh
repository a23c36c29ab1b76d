// 32 values of a weight's row in the file's own layout, of a type known at run time.
#pragma once
#include "backend/cuda/raw.cuh"

namespace reflex::cuda {

/// y (32) = values 32 group .. of a row of n values.
__device__ __forceinline__ void read_group(int32_t type, const uint8_t* row, int group, int n, float* y) {
  switch (static_cast<GgmlType>(type)) {
#define REFLEX_CASE(name)               \
  case GgmlType::name:                  \
    Raw_##name::read(row, group, n, y); \
    break;
#define REFLEX_TYPE(name, id, values, bytes, kind) REFLEX_EACH_##kind(REFLEX_CASE, name)
#include "quant/types.def"
#undef REFLEX_TYPE
#undef REFLEX_CASE
    default:
      break;
  }
}

}  // namespace reflex::cuda
