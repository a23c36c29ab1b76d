// `_boot`: the command's first import. Starts the driver's thread and hands out its state; plain
// C API and nothing else, because every millisecond of its own import delays the driver.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include "boot/boot.h"
#include "boot/floor.h"

namespace {

PyObject* start(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"device", "set_environment", nullptr};
  int device = 0, set_environment = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ip:start", const_cast<char**>(names), &device,
                                   &set_environment))
    return nullptr;
#if REFLEX_WITH_CUDA
  reflex::BootOptions options;
  options.device = device;
  options.set_environment = set_environment != 0;
  return PyCapsule_New(reflex::boot_start(options), reflex::kBootCapsule, nullptr);
#else
  Py_RETURN_NONE;  // a build without kernels has no use for a driver
#endif
}

PyObject* init_only(PyObject*, PyObject*) {
  char message[256] = "";
  int n;
  Py_BEGIN_ALLOW_THREADS;
  n = reflex::boot_init_only(message, sizeof message);
  Py_END_ALLOW_THREADS;
  if (n < 0) {
    PyErr_SetString(PyExc_RuntimeError, message);
    return nullptr;
  }
  return PyLong_FromLong(n);
}

PyObject* floor_of(PyObject*, PyObject* args) {
  PyObject* path = nullptr;
  int threads = 0;
  if (!PyArg_ParseTuple(args, "O&i:floor", PyUnicode_FSConverter, &path, &threads)) return nullptr;
  char message[512] = "";
  reflex::BootFloor floor;
  bool ok;
  const char* name = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS;
  reflex::BootOptions options;
  options.set_environment = true;
  ok = reflex::boot_floor(reflex::boot_start(options), name, threads, floor, message, sizeof message);
  Py_END_ALLOW_THREADS;
  Py_DECREF(path);
  if (!ok) {
    PyErr_SetString(PyExc_RuntimeError, message);
    return nullptr;
  }
  return Py_BuildValue("{s:d,s:d,s:d,s:n}", "init_ms", floor.init, "context_ms", floor.context, "bytes_ms",
                       floor.bytes, "file_bytes", static_cast<Py_ssize_t>(floor.file_bytes));
}

PyCFunction as_function(PyObject* (*f)(PyObject*, PyObject*, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef methods[] = {
    {"start", as_function(start), METH_VARARGS | METH_KEYWORDS,
     "start(device=0, set_environment=True): begin starting the driver in a thread; a capsule for\n"
     "_native.adopt_boot(), or None in a build without CUDA. Never waits, never raises for want of a GPU."},
    {"init_only", init_only, METH_NOARGS,
     "init_only(): load the driver and cuInit, no context; the number of devices. RuntimeError says why "
     "not."},
    {"floor", floor_of, METH_VARARGS,
     "floor(path, threads): the driver started, and every byte of the file copied to the card; when each was "
     "done,\nin milliseconds since the driver's start. RuntimeError says why not."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module{PyModuleDef_HEAD_INIT,
                   "_boot",
                   "Starts the CUDA driver before anything else.",
                   0,
                   methods,
                   nullptr,
                   nullptr,
                   nullptr,
                   nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__boot() { return PyModule_Create(&module); }
