#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_tokenizer(nb::module_&) {}
