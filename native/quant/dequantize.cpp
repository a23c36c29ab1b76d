#include "quant/dequantize.h"

#include <cstring>

#include "base/error.h"
#include "base/half.h"
#include "quant/int8_form.h"

namespace reflex {
namespace {

/// y (n) = the floats of x, each widened by `widen`.
template <class Widen>
void widen_row(const void* x, float* y, size_t n, Widen widen) {
  const auto* bytes = static_cast<const uint8_t*>(x);
  for (size_t i = 0; i < n; ++i) {
    uint16_t h;
    std::memcpy(&h, bytes + 2 * i, sizeof h);
    y[i] = widen(h);
  }
}

}  // namespace

void dequantize_row(GgmlType type, const void* x, float* y, size_t n) {
  const TypeInfo& info = type_info(type);
  if (n % info.block_values != 0)
    fail(ErrorKind::invalid_input, "dequantize %s: row of %zu values is no multiple of the block of %u",
         info.name, n, info.block_values);
  const auto id = static_cast<uint32_t>(type);
  if (quant::with_format(id, [&]<class F>() { quant::decode_row<F>(x, y, n); })) return;
  switch (type) {
    case GgmlType::F32:
      if (n != 0) std::memcpy(y, x, n * sizeof(float));
      return;
    case GgmlType::F16:
      return widen_row(x, y, n, f16_to_f32);
    case GgmlType::BF16:
      return widen_row(x, y, n, bf16_to_f32);
    default:
      fail(ErrorKind::unsupported, "type %s holds no weights that can be decoded", info.name);
  }
}

bool can_dequantize(GgmlType type) { return type_info(type).kind != TypeKind::other; }

}  // namespace reflex
