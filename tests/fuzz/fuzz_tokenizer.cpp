// libFuzzer target: a file's bytes, whose last ones are also the text. Either the file gives a
// tokenizer, and then every text is encoded and comes back, or a typed error says why not. Run by
// run.sh, which reads these two lines:
// fuzz-sources: native/base/error.cpp native/quant/types.cpp native/gguf/*.cpp native/tokenizer/*.cpp
// fuzz-seeds: python3 tests/fuzz/tokenizer_seeds.py
#include <algorithm>
#include <cstdlib>

#include "gguf/gguf.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

using namespace reflex;

namespace {

constexpr size_t kTextBytes = 96;  // taken from the end

/// Whether the tokenizer's bytes are the text itself: byte-level, and nothing was unknown.
bool comes_back(const Tokenizer& t, const std::vector<int32_t>& ids) {
  return t.model() == "gpt2" && std::find(ids.begin(), ids.end(), t.unk) == ids.end();
}

void encode(const Tokenizer& t, std::string_view text, const EncodeOptions& options) {
  std::vector<int32_t> ids;
  t.encode(text, options, ids);
  std::string bytes;
  for (const int32_t id : ids) {
    if (id < 0 || id >= t.size()) std::abort();
    bytes += t.bytes(id);
  }
  if (comes_back(t, ids) && bytes != text) std::abort();
}

/// Runs f; an error of one of these kinds is a fine answer, anything else is a finding.
template <class F>
void allow(std::initializer_list<ErrorKind> kinds, F&& f) {
  try {
    f();
  } catch (const Error& e) {
    if (std::find(kinds.begin(), kinds.end(), e.kind()) == kinds.end() || !*e.what()) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  allow({ErrorKind::gguf, ErrorKind::tokenizer}, [&] {
    const auto file = gguf::File::parse(data, size, "fuzz.gguf");
    const auto t = Tokenizer::from_gguf(*file);
    const size_t n = std::min(size, kTextBytes);
    const std::string_view raw(reinterpret_cast<const char*>(data) + size - n, n);
    if (utf8_error(raw) != std::string_view::npos)
      allow({ErrorKind::invalid_input, ErrorKind::tokenizer}, [&] { encode(*t, raw, {}); });
    std::string text;
    Utf8Stream stream;
    stream.push(raw, text);
    stream.finish(text);
    if (utf8_error(text) != std::string_view::npos) std::abort();
    allow({ErrorKind::tokenizer}, [&] { encode(*t, text, {}); });
    allow({ErrorKind::tokenizer}, [&] { encode(*t, text, {.parse_special = false, .literal_spans = {}}); });
    const TextSpan spans[] = {{raw.empty() ? 0u : data[size - 1] % 8u, 9}, {3, 5}};
    allow({ErrorKind::tokenizer, ErrorKind::invalid_input},
          [&] { encode(*t, text, {.parse_special = true, .literal_spans = spans}); });
    for (int32_t id = 0; id < t->size(); ++id) allow({ErrorKind::tokenizer}, [&] { t->find(t->bytes(id)); });
  });
  return 0;
}
