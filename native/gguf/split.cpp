// Names and keys of split models; see split.h. The convention is ggml's gguf-split.
#include "gguf/split.h"

#include <cinttypes>

#include "gguf/reader.h"

namespace reflex::gguf {

namespace {

constexpr char kNoKey[] = "split.no", kCountKey[] = "split.count", kTensorsKey[] = "split.tensors.count";
constexpr size_t kDigits = 5;
constexpr std::string_view kOf = "-of-", kSuffix = ".gguf";

std::optional<uint64_t> split_key(const std::string& file, const Parsed& parsed, const char* key) {
  const Value* v = find_value(parsed, key);
  if (!v) return std::nullopt;
  const std::optional<uint64_t> n = uint_value(*v);
  if (!n)
    fail(ErrorKind::gguf, "%s: key '%s', offset %" PRIu64 ": expected a non-negative integer, found %s",
         file.c_str(), key, v->offset, describe(*v).c_str());
  return n;
}

/// kDigits decimal digits -> number; nullopt when they are none.
std::optional<uint32_t> digits(std::string_view text) {
  uint32_t n = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    n = n * 10 + static_cast<uint32_t>(c - '0');
  }
  return n;
}

struct PartName {
  std::string prefix;  // up to and without "-00001-of-00003.gguf"
  uint32_t number, total;
};

std::optional<PartName> parse_name(std::string_view path) {
  constexpr size_t tail = 1 + kDigits + kOf.size() + kDigits + kSuffix.size();
  if (path.size() < tail) return std::nullopt;
  const std::string_view t = path.substr(path.size() - tail);
  const auto number = digits(t.substr(1, kDigits));
  const auto total = digits(t.substr(1 + kDigits + kOf.size(), kDigits));
  if (t[0] != '-' || !t.ends_with(kSuffix) || t.substr(1 + kDigits, kOf.size()) != kOf || !number || !total)
    return std::nullopt;
  return PartName{std::string(path.substr(0, path.size() - tail)), *number, *total};
}

}  // namespace

SplitInfo split_info(const std::string& file, const Parsed& parsed) {
  SplitInfo info;
  const auto count = split_key(file, parsed, kCountKey);
  if (!count || *count <= 1) return info;
  if (*count > kMaxParts)
    fail(ErrorKind::gguf, "%s: key '%s': expected at most %" PRIu64 " parts, found %" PRIu64, file.c_str(),
         kCountKey, kMaxParts, *count);
  const auto no = split_key(file, parsed, kNoKey);
  if (!no) fail(ErrorKind::gguf, "%s: key '%s' is absent in a part of a split model", file.c_str(), kNoKey);
  if (*no >= *count)
    fail(ErrorKind::gguf, "%s: key '%s': expected a number below the %" PRIu64 " of '%s', found %" PRIu64,
         file.c_str(), kNoKey, *count, kCountKey, *no);
  info.no = static_cast<uint32_t>(*no);
  info.count = static_cast<uint32_t>(*count);
  info.n_tensors = split_key(file, parsed, kTensorsKey);
  return info;
}

std::vector<std::string> part_paths(const std::string& path, const SplitInfo& info) {
  const std::optional<PartName> name = parse_name(path);
  if (!name || name->number != info.no + 1 || name->total != info.count)
    fail(ErrorKind::gguf,
         "%s is part %" PRIu32 " of a model split into %" PRIu32 ": expected its name to end in '-%05" PRIu32
         "-of-%05" PRIu32 ".gguf', so that the other parts can be found",
         path.c_str(), info.no + 1, info.count, info.no + 1, info.count);
  std::vector<std::string> paths;
  paths.reserve(info.count);
  for (uint32_t i = 1; i <= info.count; ++i)
    paths.push_back(name->prefix + format("-%05" PRIu32 "-of-%05" PRIu32 ".gguf", i, info.count));
  return paths;
}

}  // namespace reflex::gguf
