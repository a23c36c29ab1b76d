#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cpu(nb::module_&) {}
