// native/quant for pytest: the table of types, and rows as bytes in and out. The arguments are
// trusted no further than Error goes: a row's bytes must match its values.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <vector>

#include "base/error.h"
#include "quant/dequantize.h"
#include "quant/int8_form.h"
#include "quant/quantize.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace reflex;

namespace {

const TypeInfo& known(uint32_t id) {
  const TypeInfo* info = find_type(id);
  if (!info) fail(ErrorKind::unsupported, "type id %u is not in the table", id);
  return *info;
}

/// Values in `size` bytes of a row.
size_t values_of(const TypeInfo& info, size_t size) {
  if (size % info.block_bytes != 0)
    fail(ErrorKind::invalid_input, "%s: %zu bytes are no whole blocks of %u", info.name, size,
         info.block_bytes);
  return size / info.block_bytes * info.block_values;
}

template <class T>
nb::bytes to_bytes(const std::vector<T>& v) {
  return nb::bytes(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
}

nb::list types() {
  nb::list out;
#define REFLEX_TYPE(name, id, values, bytes, kind) \
  out.append(nb::make_tuple(#name, id, values, bytes, #kind));
#include "quant/types.def"
#undef REFLEX_TYPE
  return out;
}

nb::bytes dequantize(uint32_t id, nb::bytes row) {
  const TypeInfo& info = known(id);
  std::vector<float> y(values_of(info, row.size()));
  dequantize_row(info.type, row.data(), y.data(), y.size());
  return to_bytes(y);
}

nb::bytes quantize(uint32_t id, nb::bytes floats) {
  const TypeInfo& info = known(id);
  std::vector<float> x(floats.size() / sizeof(float));
  std::memcpy(x.data(), floats.data(), x.size() * sizeof(float));
  std::vector<uint8_t> y(row_bytes(info.type, x.size()));
  quantize_row(info.type, x.data(), y.data(), x.size());
  return to_bytes(y);
}

nb::object unpack(uint32_t id, nb::bytes row) {
  const TypeInfo& info = known(id);
  const size_t n = values_of(info, row.size());
  std::vector<int8_t> q(n);
  std::vector<float> scale(n / 16), min(quant::has_min(id) ? n / 16 : 0);
  if (!quant::unpack_int8(id, row.data(), q.data(), scale.data(), min.data(), n)) return nb::none();
  return nb::make_tuple(to_bytes(q), to_bytes(scale),
                        quant::has_min(id) ? to_bytes(min) : nb::object(nb::none()));
}

}  // namespace

void bind_quant(nb::module_& m) {
  m.def("quant_types", types, "The lines of types.def: (name, id, values, bytes, kind).");
  m.def(
      "quant_find",
      [](uint32_t id) -> nb::object {
        const TypeInfo* t = find_type(id);
        if (!t) return nb::none();
        return nb::make_tuple(t->name, static_cast<uint32_t>(t->type), t->block_values, t->block_bytes,
                              can_dequantize(t->type));
      },
      "id"_a, "find_type: (name, id, values, bytes, can_dequantize), or None.");
  m.def("quant_dequantize", dequantize, "id"_a, "row"_a, "A row's bytes -> its f32 values as bytes.");
  m.def("quant_quantize", quantize, "id"_a, "floats"_a, "f32 values as bytes -> a row's bytes.");
  m.def("quant_unpack_int8", unpack, "id"_a, "row"_a,
        "A row's bytes -> (q, scale, min or None) as bytes; None without an int8 form.");
}
