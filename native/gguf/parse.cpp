// The header of one GGUF file, checked field by field; see parse.h.
// Layout: ggml's docs/gguf.md. Magic, version, tensor count, entry count; entries; tensor
// directory; padding to the alignment; tensor data.
#include "gguf/parse.h"

#include <algorithm>
#include <bit>
#include <cinttypes>

#include "gguf/reader.h"

namespace reflex::gguf {

static_assert(std::endian::native == std::endian::little, "the file's numbers are read as they lie");

namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kFirstVersion = 2, kLastVersion = 3;
constexpr uint32_t kMaxDims = 4;  // ggml's GGML_MAX_DIMS
constexpr uint32_t kLastValueType = static_cast<uint32_t>(ValueType::f64);
// The least that one of them can take: an empty key or name is refused, so one byte of it.
constexpr uint64_t kMinEntryBytes = 8 + 1 + 4 + 1;           // key, type, a one-byte scalar
constexpr uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;  // name, n_dims, one dim, type, offset
constexpr uint64_t kMinArrayBytes = 4 + 8;                   // element type, count
constexpr uint64_t kFirstReserve = 1024;  // beyond this vectors grow as the file proves its claims

constexpr const char kAlignmentKey[] = "general.alignment";

void check_magic(Reader& in) {
  const uint64_t at = in.pos();
  const auto magic = in.read<uint32_t>("magic");
  if (magic == kMagic) return;
  const char found[5] = {static_cast<char>(magic), static_cast<char>(magic >> 8),
                         static_cast<char>(magic >> 16), static_cast<char>(magic >> 24), 0};
  in.fail_at(at, "not a GGUF file: expected it to begin with 'GGUF', found %s",
             quoted(std::string_view(found, 4)).c_str());
}

uint32_t read_version(Reader& in) {
  const uint64_t at = in.pos();
  const auto version = in.read<uint32_t>("version");
  if (version >= kFirstVersion && version <= kLastVersion) return version;
  if (version == 1)
    in.fail_at(at,
               "GGUF version 1 is not supported (expected 2 or 3): convert the model again with a current "
               "converter");
  if (version != 0 && (version & 0xFFFFu) == 0)
    in.fail_at(at, "a big-endian GGUF file (version %" PRIu32 "): only little-endian files are supported",
               __builtin_bswap32(version));
  in.fail_at(at, "unknown GGUF version: expected 2 or 3, found %" PRIu32, version);
}

ValueType read_value_type(Reader& in, const char* what) {
  const uint64_t at = in.pos();
  const auto id = in.read<uint32_t>(what);
  if (id > kLastValueType)
    in.fail_at(at, "%s: expected 0 to %" PRIu32 ", found %" PRIu32, what, kLastValueType, id);
  return static_cast<ValueType>(id);
}

void check_bools(const Reader& in, const std::byte* first, uint64_t count, uint64_t at) {
  const auto bad = [](std::byte b) { return std::to_integer<unsigned>(b) > 1; };
  const std::byte* p = std::find_if(first, first + count, bad);
  if (p == first + count) return;
  in.fail_at(at + static_cast<uint64_t>(p - first), "expected a bool of 0 or 1, found %u",
             std::to_integer<unsigned>(*p));
}

/// Reads an array's head and passes over its elements, checking each.
ArrayView read_array(Reader& in, int depth) {
  if (depth > kMaxArrayDepth)
    in.fail_at(in.pos(), "arrays nested deeper than %d are not supported", kMaxArrayDepth);
  ArrayView a;
  a.type = read_value_type(in, "array element type");
  a.count = in.read<uint64_t>("array length");
  a.offset = in.pos();
  a.data = in.here();
  if (a.type == ValueType::string) {
    in.skip_strings(a.count);
  } else if (a.type == ValueType::array) {
    in.expect_room(a.count, kMinArrayBytes, "arrays");
    for (uint64_t i = 0; i < a.count; ++i) read_array(in, depth + 1);
  } else {
    in.skip(a.count, value_bytes(a.type), "array elements");
    if (a.type == ValueType::boolean) check_bools(in, a.data, a.count, a.offset);
  }
  a.end = in.here();
  return a;
}

Value read_entry(Reader& in) {
  const uint64_t at = in.pos();
  Value v;
  v.key = in.string(kMaxKeyBytes, "key");
  if (v.key.empty()) in.fail_at(at, "an empty key");
  if (!is_utf8(v.key)) in.fail_at(at, "key %s is not UTF-8", quoted(v.key).c_str());
  in.subject("key", v.key);
  v.type = read_value_type(in, "value type");
  v.offset = in.pos();
  v.data = in.here();
  if (v.type == ValueType::string) {
    v.string = in.string(kMaxHeaderBytes, "string");
  } else if (v.type == ValueType::array) {
    v.array = read_array(in, 1);
    v.array.key = v.key;
  } else {
    in.skip(1, value_bytes(v.type), value_type_name(v.type));
    if (v.type == ValueType::boolean) check_bools(in, v.data, 1, v.offset);
  }
  in.subject(nullptr, {});
  return v;
}

std::vector<Value> read_metadata(Reader& in, uint64_t count) {
  std::vector<Value> entries;
  entries.reserve(std::min(count, kFirstReserve));
  for (uint64_t i = 0; i < count; ++i) entries.push_back(read_entry(in));
  return entries;
}

std::vector<uint32_t> index_keys(Reader& in, const std::vector<Value>& entries) {
  std::vector<uint32_t> order(entries.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const int c = entries[a].key.compare(entries[b].key);
    return c != 0 ? c < 0 : a < b;  // of two equal keys the later one is the culprit
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const Value &first = entries[order[i - 1]], &again = entries[order[i]];
    if (first.key != again.key) continue;
    in.subject("key", again.key);
    in.fail_at(again.offset, "a duplicate key: its first value is at offset %" PRIu64, first.offset);
  }
  return order;
}

uint64_t read_alignment(Reader& in, const Parsed& parsed) {
  const Value* v = find_value(parsed, kAlignmentKey);
  if (!v) return kDefaultAlignment;
  in.subject("key", v->key);
  const std::optional<uint64_t> n = uint_value(*v);
  if (!n) in.fail_at(v->offset, "expected a non-negative integer, found %s", describe(*v).c_str());
  if (!std::has_single_bit(*n) || *n < kMinAlignment || *n > kMaxAlignment)
    in.fail_at(v->offset, "expected a power of two from %" PRIu64 " to %" PRIu64 ", found %" PRIu64,
               kMinAlignment, kMaxAlignment, *n);
  in.subject(nullptr, {});
  return *n;
}

/// A tensor and where in the directory it stands, for messages about its data.
struct Entry {
  TensorInfo info;
  uint64_t at = 0;  // of the directory entry
};

/// ne[] and type -> bytes, no step of which may wrap.
uint64_t tensor_bytes(const Reader& in, const TensorInfo& t, const TypeInfo& type, uint64_t at) {
  if (t.ne[0] % type.block_values != 0)
    in.fail_at(at, "a row of %" PRIu64 " values is no multiple of the %" PRIu32 "-value blocks of type %s",
               t.ne[0], type.block_values, type.name);
  uint64_t bytes = t.ne[0] / type.block_values, values = t.ne[0];
  bool wraps = __builtin_mul_overflow(bytes, uint64_t{type.block_bytes}, &bytes);
  for (uint32_t d = 1; d < kMaxDims; ++d) {
    wraps |= __builtin_mul_overflow(bytes, t.ne[d], &bytes);
    wraps |= __builtin_mul_overflow(values, t.ne[d], &values);
  }
  // Signed 64-bit arithmetic on counts must stay safe for whoever uses them.
  if (wraps || values > INT64_MAX || bytes > INT64_MAX)
    in.fail_at(at,
               "the size of %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64
               " values of type %s exceeds 2^63",
               t.ne[0], t.ne[1], t.ne[2], t.ne[3], type.name);
  return bytes;
}

/// One directory entry; its offset is still relative to the data section.
Entry read_tensor(Reader& in, uint64_t alignment) {
  Entry e;
  TensorInfo& t = e.info;
  e.at = in.pos();
  t.name = in.string(kMaxTensorNameBytes, "tensor name");
  if (t.name.empty()) in.fail_at(e.at, "an empty tensor name");
  if (!is_utf8(t.name)) in.fail_at(e.at, "tensor name %s is not UTF-8", quoted(t.name).c_str());
  in.subject("tensor", t.name);

  uint64_t at = in.pos();
  t.n_dims = in.read<uint32_t>("number of dimensions");
  if (t.n_dims < 1 || t.n_dims > kMaxDims)
    in.fail_at(at, "expected 1 to %" PRIu32 " dimensions, found %" PRIu32, kMaxDims, t.n_dims);
  for (uint32_t d = 0; d < t.n_dims; ++d) {
    at = in.pos();
    t.ne[d] = in.read<uint64_t>("dimension");
    if (t.ne[d] == 0) in.fail_at(at, "dimension %" PRIu32 " is 0", d);
  }

  at = in.pos();
  const auto id = in.read<uint32_t>("tensor type");
  const TypeInfo* type = find_type(id);
  if (!type) in.fail_at(at, "unknown tensor type %" PRIu32, id);
  t.type = type->type;
  t.nbytes = tensor_bytes(in, t, *type, at);

  at = in.pos();
  t.offset = in.read<uint64_t>("tensor offset");
  if (t.offset % alignment != 0)
    in.fail_at(at, "data offset %" PRIu64 " is no multiple of the alignment, %" PRIu64, t.offset, alignment);
  in.subject(nullptr, {});
  return e;
}

/// Makes a tensor's offset absolute, within the file.
void place(const Reader& in, Entry& e, uint64_t base, const std::byte* data, uint64_t size) {
  TensorInfo& t = e.info;
  uint64_t begin = 0, end = 0;
  if (__builtin_add_overflow(base, t.offset, &begin) || __builtin_add_overflow(begin, t.nbytes, &end) ||
      end > size)
    in.fail_at(e.at,
               "its %" PRIu64 " bytes at data offset %" PRIu64 " (data begins at %" PRIu64
               ") do not lie within the file of %" PRIu64 " bytes",
               t.nbytes, t.offset, base, size);
  t.offset = begin;
  t.data = data + begin;
}

void check_overlap(Reader& in, const std::vector<Entry>& entries) {
  std::vector<uint32_t> order(entries.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto before = [&](uint32_t a, uint32_t b) { return entries[a].info.offset < entries[b].info.offset; };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  for (size_t i = 1; i < order.size(); ++i) {
    const TensorInfo &a = entries[order[i - 1]].info, &b = entries[order[i]].info;
    if (b.offset - a.offset >= a.nbytes) continue;
    in.subject("tensor", b.name);
    in.fail_at(entries[order[i]].at,
               "its data (bytes %" PRIu64 " to %" PRIu64 ") overlaps that of %s (%" PRIu64 " to %" PRIu64 ")",
               b.offset, b.offset + b.nbytes, quoted(a.name).c_str(), a.offset, a.offset + a.nbytes);
  }
}

std::vector<TensorInfo> read_tensors(Reader& in, uint64_t count, uint64_t alignment, const std::byte* data,
                                     uint64_t size) {
  in.expect_room(count, kMinTensorBytes, "tensors");
  std::vector<Entry> entries;
  entries.reserve(std::min(count, kFirstReserve));
  for (uint64_t i = 0; i < count; ++i) entries.push_back(read_tensor(in, alignment));

  // Cannot wrap: both terms are far below 2^63. A file without tensors may end before base.
  const uint64_t base = (in.pos() + alignment - 1) & ~(alignment - 1);
  std::vector<TensorInfo> tensors;
  tensors.reserve(entries.size());
  for (Entry& e : entries) {
    in.subject("tensor", e.info.name);
    place(in, e, base, data, size);
    tensors.push_back(e.info);
  }
  check_overlap(in, entries);
  return tensors;
}

}  // namespace

Parsed parse_part(const std::string& file, const std::byte* data, uint64_t size) {
  Reader in(file, data, size);
  Parsed parsed;
  check_magic(in);
  parsed.version = read_version(in);
  uint64_t at = in.pos();
  const auto n_tensors = in.read<uint64_t>("tensor count");
  if (n_tensors > kMaxTensors)
    in.fail_at(at, "expected at most %" PRIu64 " tensors, found %" PRIu64, kMaxTensors, n_tensors);
  at = in.pos();
  const auto n_entries = in.read<uint64_t>("metadata count");
  if (n_entries > kMaxMetadata)
    in.fail_at(at, "expected at most %" PRIu64 " metadata entries, found %" PRIu64, kMaxMetadata, n_entries);
  in.expect_room(n_entries, kMinEntryBytes, "metadata entries");
  parsed.metadata = read_metadata(in, n_entries);
  parsed.by_key = index_keys(in, parsed.metadata);
  const uint64_t alignment = read_alignment(in, parsed);
  parsed.tensors = read_tensors(in, n_tensors, alignment, data, size);
  return parsed;
}

const Value* find_value(const Parsed& parsed, std::string_view key) {
  const auto at =
      std::lower_bound(parsed.by_key.begin(), parsed.by_key.end(), key,
                       [&](uint32_t i, std::string_view k) { return parsed.metadata[i].key < k; });
  if (at == parsed.by_key.end() || parsed.metadata[*at].key != key) return nullptr;
  return &parsed.metadata[*at];
}

}  // namespace reflex::gguf
