// libFuzzer target: any bytes either parse, and then every view and getter is safe to use, or
// give Error(gguf). Run by run.sh, which reads these two lines:
// fuzz-sources: native/base/error.cpp native/quant/types.cpp native/gguf/*.cpp
// fuzz-seeds: python3 tests/gguf/hostile.py
#include <cstdlib>

#include "../native/gguf_builder.h"
#include "gguf/gguf.h"
#include "gguf/split.h"

using namespace reflex;

namespace {

/// Runs f; Error(gguf) is a fine answer, anything else is a finding.
template <class F>
void allow_refusal(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::gguf || !*e.what()) std::abort();
  }
}

void use_getters(const gguf::File& file) {
  for (const gguf::Value& v : file.metadata()) {
    allow_refusal([&] { file.require_uint(v.key); });
    allow_refusal([&] { file.require_float(v.key); });
    allow_refusal([&] { file.require_string(v.key); });
    allow_refusal([&] { file.get_bool(v.key); });
    allow_refusal([&] {
      const gguf::ArrayView& a = file.require_array(v.key);
      for (const uint64_t i : {uint64_t{0}, a.count - 1, a.count, ~uint64_t{0}}) {
        allow_refusal([&] { a.as_int(i); });
        allow_refusal([&] { a.as_uint(i); });
        allow_refusal([&] { a.as_float(i); });
      }
      a.each_string([](uint64_t, std::string_view) {});
    });
    gguf::describe(v);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  allow_refusal([&] {
    const auto file = gguf::File::parse(data, size, "fuzz.gguf");
    volatile uint64_t sum = check::touch_everything(*file);
    (void)sum;
    use_getters(*file);
    // File::parse never looks for other parts; what it would look for is worth reading too.
    const gguf::Parsed parsed = gguf::parse_part("m-00001-of-00002.gguf", file->parts()[0].data, size);
    gguf::part_paths("m-00001-of-00002.gguf", gguf::split_info("m-00001-of-00002.gguf", parsed));
  });
  return 0;
}
