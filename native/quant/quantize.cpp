#include "quant/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/half.h"
#include "quant/q4_0.h"
#include "quant/q8_0.h"

namespace reflex {
namespace {

quant::Half to_half(float f) {
  const uint16_t bits = f32_to_f16(f);
  quant::Half h;
  std::memcpy(&h, &bits, sizeof h);
  return h;
}

float inverse(float d) { return d == 0 ? 0.0f : 1.0f / d; }

/// d = max |x| / 127, q = x / d rounded half away from zero. x (32)
void encode(const float* x, quant::Q8_0::Block& b) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float d = largest / 127.0f, id = inverse(d);
  for (int i = 0; i < 32; ++i) b.qs[i] = static_cast<int8_t>(std::round(x[i] * id));
  b.d = to_half(d);
}

/// The value of largest magnitude (the first of them) becomes -8: d = it / -8. x (32)
void encode(const float* x, quant::Q4_0::Block& b) {
  float extreme = x[0];
  for (int i = 1; i < 32; ++i)
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  const float d = extreme / -8.0f, id = inverse(d);
  const auto level = [&](int i) { return std::min(static_cast<int>(x[i] * id + 8.5f), 15); };
  for (int i = 0; i < 16; ++i) b.qs[i] = static_cast<uint8_t>(level(i) | level(16 + i) << 4);
  b.d = to_half(d);
}

template <class F>
void encode_row(const float* x, void* y, size_t n) {
  auto* b = static_cast<typename F::Block*>(y);
  for (size_t i = 0; i < n; i += F::kValues, ++b) encode(x + i, *b);
}

/// y (n) = the floats of x, each narrowed by `narrow`.
template <class Narrow>
void narrow_row(const float* x, void* y, size_t n, Narrow narrow) {
  auto* bytes = static_cast<uint8_t*>(y);
  for (size_t i = 0; i < n; ++i) {
    const uint16_t h = narrow(x[i]);
    std::memcpy(bytes + 2 * i, &h, sizeof h);
  }
}

}  // namespace

void quantize_row(GgmlType type, const float* x, void* y, size_t n) {
  const TypeInfo& info = type_info(type);
  if (n % info.block_values != 0)
    fail(ErrorKind::invalid_input, "quantize %s: row of %zu values is no multiple of the block of %u",
         info.name, n, info.block_values);
  switch (type) {
    case GgmlType::F32:
      if (n != 0) std::memcpy(y, x, n * sizeof(float));
      return;
    case GgmlType::F16:
      return narrow_row(x, y, n, f32_to_f16);
    case GgmlType::BF16:
      return narrow_row(x, y, n, f32_to_bf16);
    case GgmlType::Q8_0:
      return encode_row<quant::Q8_0>(x, y, n);
    case GgmlType::Q4_0:
      return encode_row<quant::Q4_0>(x, y, n);
    default:
      fail(ErrorKind::unsupported, "type %s has no encoder here; gguf-py and llama.cpp have one", info.name);
  }
}

}  // namespace reflex
