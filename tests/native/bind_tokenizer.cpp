// native/tokenizer for pytest: a tokenizer over a file or bytes, the UTF-8 stream, the parts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "tokenizer/base_tokenizer.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace reflex;

namespace {

/// A tokenizer with the file (and, where it was parsed from memory, the bytes) it points into.
struct OpenTokenizer {
  nb::bytes bytes;
  std::unique_ptr<gguf::File> file;
  std::unique_ptr<Tokenizer> tokenizer;
};

std::string_view view(const nb::bytes& b) { return {b.c_str(), b.size()}; }

std::vector<int32_t> encode(const OpenTokenizer& self, const nb::bytes& text, bool parse_special,
                            const std::vector<std::pair<size_t, size_t>>& literal_spans) {
  std::vector<TextSpan> spans;
  for (const auto& [begin, end] : literal_spans) spans.push_back({begin, end});
  EncodeOptions options;
  options.parse_special = parse_special;
  options.literal_spans = spans;
  std::vector<int32_t> ids;
  self.tokenizer->encode(view(text), options, ids);
  return ids;
}

/// The words of text, as byte ranges.
std::vector<std::pair<size_t, size_t>> split(std::string_view pre, const nb::bytes& text) {
  const PreTokenizer* p = PreTokenizer::find(pre);
  if (!p) throw nb::value_error("no such pre-tokenizer");
  Scanner scanner(text.c_str());
  std::vector<std::pair<size_t, size_t>> words;
  p->split(
      scanner, 0, text.size(),
      [](void* out, size_t begin, size_t end) {
        static_cast<std::vector<std::pair<size_t, size_t>>*>(out)->emplace_back(begin, end);
      },
      &words);
  return words;
}

}  // namespace

void bind_tokenizer(nb::module_& m) {
  nb::class_<OpenTokenizer>(m, "Tokenizer")
      .def("__init__",
           [](OpenTokenizer* self, nb::bytes bytes) {
             auto file = gguf::File::parse(bytes.c_str(), bytes.size(), "bytes");
             auto tokenizer = Tokenizer::from_gguf(*file);
             new (self) OpenTokenizer{bytes, std::move(file), std::move(tokenizer)};
           })
      .def_static("open",
                  [](const std::string& path) {
                    OpenTokenizer o{nb::bytes(""), gguf::File::open(path), nullptr};
                    o.tokenizer = Tokenizer::from_gguf(*o.file);
                    return o;
                  })
      .def("encode", &encode, "text"_a, "parse_special"_a = true,
           "literal_spans"_a = std::vector<std::pair<size_t, size_t>>{})
      .def("bytes",
           [](const OpenTokenizer& self, int32_t id) {
             if (id < 0 || id >= self.tokenizer->size()) throw nb::index_error("no such token");
             const std::string_view b = self.tokenizer->bytes(id);
             return nb::bytes(b.data(), b.size());
           })
      .def("type",
           [](const OpenTokenizer& self, int32_t id) { return static_cast<int>(self.tokenizer->type(id)); })
      .def("is_control", [](const OpenTokenizer& self, int32_t id) { return self.tokenizer->is_control(id); })
      .def("is_end", [](const OpenTokenizer& self, int32_t id) { return self.tokenizer->is_end(id); })
      .def("find",
           [](const OpenTokenizer& self, const nb::bytes& s) { return self.tokenizer->find(view(s)); })
      .def(
          "work",
          [](const OpenTokenizer& self) { return static_cast<const BaseTokenizer&>(*self.tokenizer).work(); })
      .def_prop_ro("size", [](const OpenTokenizer& self) { return self.tokenizer->size(); })
      .def_prop_ro("model", [](const OpenTokenizer& self) { return self.tokenizer->model(); })
      .def_prop_ro("pre", [](const OpenTokenizer& self) { return self.tokenizer->pre(); })
      .def_prop_ro("pre_known", [](const OpenTokenizer& self) { return self.tokenizer->pre_known(); })
      .def_prop_ro("bos", [](const OpenTokenizer& self) { return self.tokenizer->bos; })
      .def_prop_ro("eos", [](const OpenTokenizer& self) { return self.tokenizer->eos; })
      .def_prop_ro("eot", [](const OpenTokenizer& self) { return self.tokenizer->eot; })
      .def_prop_ro("eom", [](const OpenTokenizer& self) { return self.tokenizer->eom; })
      .def_prop_ro("unk", [](const OpenTokenizer& self) { return self.tokenizer->unk; })
      .def_prop_ro("pad", [](const OpenTokenizer& self) { return self.tokenizer->pad; })
      .def_prop_ro("add_bos", [](const OpenTokenizer& self) { return self.tokenizer->add_bos; })
      .def_prop_ro("end_ids", [](const OpenTokenizer& self) { return self.tokenizer->end_ids; });

  nb::class_<Utf8Stream>(m, "Utf8Stream")
      .def(nb::init<>())
      .def("push",
           [](Utf8Stream& self, const nb::bytes& b) {
             std::string out;
             self.push(view(b), out);
             return out;
           })
      .def("finish", [](Utf8Stream& self) {
        std::string out;
        self.finish(out);
        return out;
      });

  m.def("pre_tokenize", &split, "pre"_a, "text"_a);
  m.def("pre_known", [](std::string_view pre) { return PreTokenizer::find(pre) != nullptr; });
  m.def("char_class", [](uint32_t code_point) { return static_cast<int>(char_class(code_point)); });
  m.def("utf8_error", [](const nb::bytes& b) {
    const size_t at = utf8_error(view(b));
    return at == std::string_view::npos ? int64_t{-1} : static_cast<int64_t>(at);
  });
}
