// File: the parts joined into one model, look-up by name and typed access. Reading bytes is
// parse.cpp's, finding parts split.cpp's.
#include "gguf/gguf.h"

#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "gguf/mapped_file.h"
#include "gguf/parse.h"
#include "gguf/reader.h"
#include "gguf/split.h"

namespace reflex::gguf {

struct File::Impl {
  std::vector<MappedFile> mappings;  // keeps what every view points into; empty for parse()
  std::vector<Part> parts;
  Parsed first;                     // of part 0; its tensors are moved into `tensors`
  std::vector<TensorInfo> tensors;  // of all parts
  std::vector<uint32_t> by_name;    // tensors' indices, sorted by name

  void add_part(Part part, Parsed&& parsed) {
    const auto index = static_cast<uint32_t>(parts.size());
    for (TensorInfo& t : parsed.tensors) {
      t.part = index;
      tensors.push_back(t);
    }
    if (index == 0) first = std::move(parsed);
    parts.push_back(std::move(part));
  }

  void index_tensors();
  [[noreturn]] void wrong(const Value& v, const char* expected) const;
  [[noreturn]] void absent(std::string_view key, const char* expected) const;
};

void File::Impl::index_tensors() {
  by_name.resize(tensors.size());
  for (uint32_t i = 0; i < by_name.size(); ++i) by_name[i] = i;
  std::sort(by_name.begin(), by_name.end(), [&](uint32_t a, uint32_t b) {
    const int c = tensors[a].name.compare(tensors[b].name);
    return c != 0 ? c < 0 : a < b;
  });
  for (size_t i = 1; i < by_name.size(); ++i) {
    const TensorInfo &a = tensors[by_name[i - 1]], &b = tensors[by_name[i]];
    if (a.name != b.name) continue;
    fail(ErrorKind::gguf,
         "%s: tensor %s, data at offset %" PRIu64
         ": a duplicate name: the first is in %s, data at offset %" PRIu64,
         parts[b.part].path.c_str(), quoted(b.name).c_str(), b.offset, parts[a.part].path.c_str(), a.offset);
  }
}

void File::Impl::wrong(const Value& v, const char* expected) const {
  fail(ErrorKind::gguf, "%s: key %s, offset %" PRIu64 ": expected %s, found %s", parts[0].path.c_str(),
       quoted(v.key).c_str(), v.offset, expected, describe(v).c_str());
}

void File::Impl::absent(std::string_view key, const char* expected) const {
  fail(ErrorKind::gguf, "%s: key %s: expected %s, but the file has no such key", parts[0].path.c_str(),
       quoted(key).c_str(), expected);
}

namespace {

/// Other parts repeat the split keys; they must agree, or parts of two models are mixed.
void check_same_split(const std::string& path, const SplitInfo& expected, uint32_t no,
                      const SplitInfo& found) {
  if (found.count != expected.count || found.no != no)
    fail(ErrorKind::gguf,
         "%s: expected part %" PRIu32 " of %" PRIu32 " by its name, found keys for part %" PRIu32
         " of %" PRIu32,
         path.c_str(), no + 1, expected.count, found.no + 1, found.count);
  if (found.n_tensors && expected.n_tensors && *found.n_tensors != *expected.n_tensors)
    fail(ErrorKind::gguf,
         "%s: key 'split.tensors.count': expected %" PRIu64 " as in the other parts, found %" PRIu64,
         path.c_str(), *expected.n_tensors, *found.n_tensors);
}

/// All missing parts in one message, so that they can be fetched in one go.
void check_all_exist(const std::vector<std::string>& paths) {
  constexpr size_t kMaxNamed = 8;
  size_t n_missing = 0;
  std::string names;
  for (const std::string& path : paths) {
    if (::access(path.c_str(), F_OK) == 0) continue;
    if (++n_missing <= kMaxNamed) names += (n_missing > 1 ? ", " : "") + path;
  }
  if (n_missing == 0) return;
  fail(ErrorKind::io, "%zu of the %zu parts of a split model are missing: %s%s", n_missing, paths.size(),
       names.c_str(), n_missing > kMaxNamed ? ", ..." : "");
}

}  // namespace

File::File() : impl_(std::make_unique<Impl>()) {}
File::~File() = default;

std::unique_ptr<File> File::open(const std::string& path) {
  std::unique_ptr<File> file(new File);
  Impl& impl = *file->impl_;
  const auto add = [&impl](MappedFile&& m, Parsed&& parsed) {
    impl.add_part(Part{m.path(), m.data(), m.size(), m.fd()}, std::move(parsed));
    impl.mappings.push_back(std::move(m));
  };
  MappedFile given = MappedFile::open(path);
  Parsed parsed = parse_part(path, given.data(), given.size());
  const SplitInfo split = split_info(path, parsed);
  if (split.count == 1) {
    add(std::move(given), std::move(parsed));
  } else {
    const std::vector<std::string> paths = part_paths(path, split);
    check_all_exist(paths);
    for (uint32_t no = 0; no < split.count; ++no) {
      if (no == split.no) {
        add(std::move(given), std::move(parsed));
        continue;
      }
      MappedFile m = MappedFile::open(paths[no]);
      Parsed p = parse_part(paths[no], m.data(), m.size());
      check_same_split(paths[no], split, no, split_info(paths[no], p));
      add(std::move(m), std::move(p));
    }
    if (split.n_tensors && *split.n_tensors != impl.tensors.size())
      fail(ErrorKind::gguf,
           "%s: key 'split.tensors.count': expected %" PRIu64 " tensors in all parts together, found %zu",
           path.c_str(), *split.n_tensors, impl.tensors.size());
  }
  impl.index_tensors();
  return file;
}

std::unique_ptr<File> File::parse(const void* data, size_t size, const std::string& name) {
  std::unique_ptr<File> file(new File);
  const auto* bytes = static_cast<const std::byte*>(data);
  file->impl_->add_part(Part{name, bytes, size, -1}, parse_part(name, bytes, size));
  file->impl_->index_tensors();
  return file;
}

uint32_t File::version() const { return impl_->first.version; }
const std::vector<Part>& File::parts() const { return impl_->parts; }
const std::vector<Value>& File::metadata() const { return impl_->first.metadata; }
const std::vector<TensorInfo>& File::tensors() const { return impl_->tensors; }

uint64_t File::total_bytes() const {
  uint64_t n = 0;
  for (const Part& p : impl_->parts) n += p.size;
  return n;
}

void File::check_size() const {
  for (const Part& p : impl_->parts) {
    if (p.fd < 0) continue;
    const size_t now = file_size(p.fd, p.path);
    if (now < p.size)
      fail(ErrorKind::io, "%s was truncated while it was open: expected %zu bytes, found %zu", p.path.c_str(),
           p.size, now);
  }
}

const Value* File::find(std::string_view key) const { return find_value(impl_->first, key); }

const TensorInfo* File::find_tensor(std::string_view name) const {
  const std::vector<TensorInfo>& all = impl_->tensors;
  const auto at = std::lower_bound(impl_->by_name.begin(), impl_->by_name.end(), name,
                                   [&](uint32_t i, std::string_view n) { return all[i].name < n; });
  return at != impl_->by_name.end() && all[*at].name == name ? &all[*at] : nullptr;
}

std::optional<uint64_t> File::get_uint(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return std::nullopt;
  const std::optional<uint64_t> n = uint_value(*v);
  if (!n) impl_->wrong(*v, "a non-negative integer");
  return n;
}

std::optional<double> File::get_float(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return std::nullopt;
  double x = 0;
  if (v->type == ValueType::f32) {
    float f;
    std::memcpy(&f, v->data, sizeof f);
    x = static_cast<double>(f);
  } else if (v->type == ValueType::f64) {
    std::memcpy(&x, v->data, sizeof x);
  } else {
    impl_->wrong(*v, "f32 or f64");
  }
  if (!std::isfinite(x)) impl_->wrong(*v, "a finite number");
  return x;
}

std::optional<bool> File::get_bool(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return std::nullopt;
  if (v->type != ValueType::boolean) impl_->wrong(*v, "bool");
  return *v->data != std::byte{0};
}

std::optional<std::string_view> File::get_string(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return std::nullopt;
  if (v->type != ValueType::string) impl_->wrong(*v, "string");
  return v->string;
}

const ArrayView* File::get_array(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return nullptr;
  if (v->type != ValueType::array) impl_->wrong(*v, "array");
  return &v->array;
}

uint64_t File::require_uint(std::string_view key) const {
  const std::optional<uint64_t> n = get_uint(key);
  if (!n) impl_->absent(key, "a non-negative integer");
  return *n;
}

double File::require_float(std::string_view key) const {
  const std::optional<double> x = get_float(key);
  if (!x) impl_->absent(key, "f32 or f64");
  return *x;
}

std::string_view File::require_string(std::string_view key) const {
  const std::optional<std::string_view> s = get_string(key);
  if (!s) impl_->absent(key, "string");
  return *s;
}

const ArrayView& File::require_array(std::string_view key) const {
  const ArrayView* a = get_array(key);
  if (!a) impl_->absent(key, "array");
  return *a;
}

}  // namespace reflex::gguf
