// `_testing`: the rooms, as pytest sees them. Each bind_<room>.cpp adds its part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_gguf(nb::module_& m);
void bind_quant(nb::module_& m);
void bind_tokenizer(nb::module_& m);
void bind_cpu(nb::module_& m);

NB_MODULE(_testing, m) {
  bind_gguf(m);
  bind_quant(m);
  bind_tokenizer(m);
  bind_cpu(m);
}
