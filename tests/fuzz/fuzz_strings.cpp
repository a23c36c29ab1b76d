// libFuzzer target: a string array walked in several places at once ends where the plain walk ends, whatever
// the bytes. Places lie far closer than in a file, whose 64 KiB of an input would never have a second one.
// Run by run.sh, which reads this line:
// fuzz-sources: native/gguf/string_walk.cpp
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gguf/string_walk.h"

using namespace reflex;

namespace {

constexpr size_t kSetting = 3;  // bytes: the distance of two places, and how many strings are asked for

gguf::StringWalk plain(const std::byte* at, const std::byte* end, uint64_t count) {
  uint64_t passed = 0;
  for (; passed < count; ++passed) {
    uint64_t n = 0;
    if (static_cast<uint64_t>(end - at) < gguf::kStringLengthBytes) break;
    std::memcpy(&n, at, gguf::kStringLengthBytes);
    if (n > static_cast<uint64_t>(end - at) - gguf::kStringLengthBytes) break;
    at += gguf::kStringLengthBytes + n;
  }
  return {at, passed};
}

/// One byte of input a string, so that most inputs are arrays of strings.
std::vector<std::byte> strings_of(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < size; ++i) {
    const uint64_t n = data[i] == 255 ? 300 : data[i] % 24;
    const size_t at = bytes.size();
    bytes.resize(at + gguf::kStringLengthBytes + n, std::byte{data[i]});
    std::memcpy(bytes.data() + at, &n, sizeof n);
  }
  return bytes;
}

void compare(const std::vector<std::byte>& bytes, uint64_t count, uint64_t apart) {
  const std::byte* end = bytes.data() + bytes.size();
  const gguf::StringWalk want = plain(bytes.data(), end, count);
  const gguf::StringWalk got = gguf::walk_strings(bytes.data(), end, count, apart);
  if (got.at != want.at || got.passed != want.passed) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kSetting) return 0;
  const uint64_t apart = 1 + data[0], count = data[1] | data[2] << 8;
  data += kSetting, size -= kSetting;
  const auto* raw = reinterpret_cast<const std::byte*>(data);
  compare({raw, raw + size}, count, apart);
  std::vector<std::byte> bytes = strings_of(data, size);
  compare(bytes, count, apart);
  compare(bytes, size, apart);
  if (bytes.empty()) return 0;
  bytes[(count * 31) % bytes.size()] ^= std::byte{data[0]};
  compare(bytes, size, apart);
  compare(bytes, ~uint64_t{0} / gguf::kStringLengthBytes, apart);
  return 0;
}
