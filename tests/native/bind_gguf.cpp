// native/gguf for pytest: a parsed file, its views as Python values, and its typed getters.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "gguf/gguf.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace reflex;

namespace {

/// A File and, where it was parsed from memory, the bytes it points into.
struct Opened {
  nb::bytes bytes;
  std::unique_ptr<gguf::File> file;
};

nb::bytes to_bytes(std::string_view s) { return nb::bytes(s.data(), s.size()); }

nb::object array_items(const gguf::ArrayView& a) {
  nb::list out;
  if (a.type == gguf::ValueType::array) return nb::none();  // opaque by contract
  if (a.type == gguf::ValueType::string) {
    a.each_string([&](uint64_t, std::string_view s) { out.append(to_bytes(s)); });
    return out;
  }
  const bool floats = a.type == gguf::ValueType::f32 || a.type == gguf::ValueType::f64;
  for (uint64_t i = 0; i < a.count; ++i) {
    if (floats)
      out.append(a.as_float(i));
    else if (a.type == gguf::ValueType::u64)
      out.append(a.as_uint(i));
    else
      out.append(a.as_int(i));
  }
  return out;
}

nb::dict value_dict(const gguf::File& file, const gguf::Value& v) {
  nb::dict d;
  d["key"] = v.key;
  d["type"] = gguf::value_type_name(v.type);
  d["offset"] = v.offset;
  d["element_type"] = nb::none();
  switch (v.type) {
    case gguf::ValueType::string:
      d["value"] = to_bytes(v.string);
      break;
    case gguf::ValueType::array:
      d["element_type"] = gguf::value_type_name(v.array.type);
      d["value"] = array_items(v.array);
      break;
    default: {
      // A scalar lies in the file as an array of one would.
      const gguf::ArrayView one{v.type, 1, v.data, nullptr, v.key, v.offset};
      d["value"] = nb::object(array_items(one)[0]);
    }
  }
  d["found"] = file.find(v.key) == &v;
  return d;
}

nb::dict tensor_dict(const gguf::File& file, const gguf::TensorInfo& t) {
  nb::dict d;
  nb::list ne;
  for (uint32_t i = 0; i < t.n_dims; ++i) ne.append(t.ne[i]);
  d["name"] = t.name;
  d["type"] = type_info(t.type).name;
  d["shape"] = ne;
  d["part"] = t.part;
  d["offset"] = t.offset;
  d["nbytes"] = t.nbytes;
  d["data"] = nb::bytes(reinterpret_cast<const char*>(t.data), t.nbytes);
  d["found"] = file.find_tensor(t.name) == &t;
  return d;
}

}  // namespace

void bind_gguf(nb::module_& m) {
  nb::class_<Opened>(m, "GgufFile")
      .def_prop_ro("version", [](const Opened& o) { return o.file->version(); })
      .def_prop_ro("total_bytes", [](const Opened& o) { return o.file->total_bytes(); })
      .def_prop_ro("paths",
                   [](const Opened& o) {
                     std::vector<std::string> paths;
                     for (const gguf::Part& p : o.file->parts()) paths.push_back(p.path);
                     return paths;
                   })
      .def_prop_ro("fds",
                   [](const Opened& o) {
                     std::vector<int> fds;
                     for (const gguf::Part& p : o.file->parts()) fds.push_back(p.fd);
                     return fds;
                   })
      .def("metadata",
           [](const Opened& o) {
             nb::list out;
             for (const gguf::Value& v : o.file->metadata()) out.append(value_dict(*o.file, v));
             return out;
           })
      .def("tensors",
           [](const Opened& o) {
             nb::list out;
             for (const gguf::TensorInfo& t : o.file->tensors()) out.append(tensor_dict(*o.file, t));
             return out;
           })
      .def("has_key", [](const Opened& o, std::string_view key) { return o.file->find(key) != nullptr; })
      .def("has_tensor",
           [](const Opened& o, std::string_view name) { return o.file->find_tensor(name) != nullptr; })
      .def("require_uint", [](const Opened& o, std::string_view key) { return o.file->require_uint(key); })
      .def("require_float", [](const Opened& o, std::string_view key) { return o.file->require_float(key); })
      .def("require_string",
           [](const Opened& o, std::string_view key) { return to_bytes(o.file->require_string(key)); })
      .def("require_array",
           [](const Opened& o, std::string_view key) { return array_items(o.file->require_array(key)); })
      .def("get_uint", [](const Opened& o, std::string_view key) { return o.file->get_uint(key); })
      .def("get_float", [](const Opened& o, std::string_view key) { return o.file->get_float(key); })
      .def("get_bool", [](const Opened& o, std::string_view key) { return o.file->get_bool(key); })
      .def("get_string",
           [](const Opened& o, std::string_view key) -> nb::object {
             const auto s = o.file->get_string(key);
             return s ? nb::object(to_bytes(*s)) : nb::none();
           })
      .def("get_array",
           [](const Opened& o, std::string_view key) -> nb::object {
             const gguf::ArrayView* a = o.file->get_array(key);
             return a ? array_items(*a) : nb::none();
           })
      .def("strings",
           [](const Opened& o, std::string_view key) {
             nb::list out;
             o.file->require_array(key).each_string(
                 [&](uint64_t, std::string_view s) { out.append(to_bytes(s)); });
             return out;
           })
      .def("as_int", [](const Opened& o, std::string_view key,
                        uint64_t i) { return o.file->require_array(key).as_int(i); })
      .def("as_uint", [](const Opened& o, std::string_view key,
                         uint64_t i) { return o.file->require_array(key).as_uint(i); })
      .def("as_float", [](const Opened& o, std::string_view key,
                          uint64_t i) { return o.file->require_array(key).as_float(i); })
      .def("check_size", [](const Opened& o) { o.file->check_size(); });

  m.def(
      "gguf_open",
      [](const std::string& path) {
        return std::make_unique<Opened>(nb::bytes("", 0), gguf::File::open(path));
      },
      "path"_a, "Opens a file; when it is one part of a split model, all of them.");
  m.def(
      "gguf_parse",
      [](nb::bytes data, const std::string& name) {
        return std::make_unique<Opened>(data, gguf::File::parse(data.data(), data.size(), name));
      },
      "data"_a, "name"_a = "memory.gguf", "Parses bytes; they are kept alive.");
}
