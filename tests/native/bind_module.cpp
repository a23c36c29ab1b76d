// `_testing`: the rooms, as pytest sees them. Each bind_<room>.cpp adds its part; here only what
// all of them share: reflex::Error arrives as `_testing.Error` with the kind's name in `kind`.
#include <nanobind/nanobind.h>

#include <cstring>

#include "base/error.h"

namespace nb = nanobind;

void bind_gguf(nb::module_& m);
void bind_quant(nb::module_& m);
void bind_tokenizer(nb::module_& m);
void bind_cpu(nb::module_& m);

namespace {

void bind_errors(nb::module_& m) {
  // Lives as long as the process: the translator below may outlive the module's dict.
  static PyObject* error = PyErr_NewException("reflex_worker._testing.Error", PyExc_Exception, nullptr);
  if (!error) throw nb::python_error();
  m.attr("Error") = nb::borrow(error);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const reflex::Error& e) {
      // A message names the file as the caller spelled it, which need not be UTF-8.
      PyObject* what =
          PyUnicode_DecodeUTF8(e.what(), static_cast<Py_ssize_t>(std::strlen(e.what())), "replace");
      PyObject* value = what ? PyObject_CallFunctionObjArgs(error, what, nullptr) : nullptr;
      PyObject* kind = value ? PyUnicode_FromString(reflex::error_kind_name(e.kind())) : nullptr;
      if (kind && PyObject_SetAttrString(value, "kind", kind) == 0) PyErr_SetObject(error, value);
      Py_XDECREF(kind);
      Py_XDECREF(value);
      Py_XDECREF(what);
    }
  });
}

}  // namespace

NB_MODULE(_testing, m) {
  bind_errors(m);
  bind_gguf(m);
  bind_quant(m);
  bind_tokenizer(m);
  bind_cpu(m);
}
