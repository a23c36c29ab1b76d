// Single values and array elements out of their bytes, as the wider type.
#include <cinttypes>
#include <cstring>

#include "gguf/gguf.h"
#include "gguf/parse.h"
#include "gguf/reader.h"

namespace reflex::gguf {

namespace {

struct TypeRow {
  const char* name;
  uint32_t bytes;  // 0: varies
};

// By file id.
constexpr TypeRow kTypes[] = {{"u8", 1},  {"i8", 1},  {"u16", 2},  {"i16", 2},    {"u32", 4},
                              {"i32", 4}, {"f32", 4}, {"bool", 1}, {"string", 0}, {"array", 0},
                              {"u64", 8}, {"i64", 8}, {"f64", 8}};
static_assert(sizeof kTypes / sizeof kTypes[0] == static_cast<size_t>(ValueType::f64) + 1);

template <class T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

/// An integer of either sign: `negative` says which of the two readings of `bits` holds.
struct Integer {
  uint64_t bits;
  bool negative;
};

template <class T>
Integer load_integer(const std::byte* p) {
  const T value = load<T>(p);
  return {static_cast<uint64_t>(value), value < T{0}};
}

/// The integer or bool at p; nullopt when the type is neither.
std::optional<Integer> integer(ValueType type, const std::byte* p) {
  switch (type) {
    case ValueType::u8:
      return load_integer<uint8_t>(p);
    case ValueType::i8:
      return load_integer<int8_t>(p);
    case ValueType::u16:
      return load_integer<uint16_t>(p);
    case ValueType::i16:
      return load_integer<int16_t>(p);
    case ValueType::u32:
      return load_integer<uint32_t>(p);
    case ValueType::i32:
      return load_integer<int32_t>(p);
    case ValueType::boolean:
      return load_integer<uint8_t>(p);
    case ValueType::u64:
      return load_integer<uint64_t>(p);
    case ValueType::i64:
      return load_integer<int64_t>(p);
    case ValueType::f32:
    case ValueType::f64:
    case ValueType::string:
    case ValueType::array:
      return std::nullopt;
  }
  return std::nullopt;
}

[[noreturn]] void fail_element(const ArrayView& a, uint64_t i, const char* expected) {
  fail(ErrorKind::gguf,
       "key %s, element %" PRIu64 " of %" PRIu64 " (the array begins at offset %" PRIu64
       "): expected %s, found %s",
       quoted(a.key).c_str(), i, a.count, a.offset, expected, value_type_name(a.type));
}

/// The bytes of element i of a fixed-size type.
const std::byte* element(const ArrayView& a, uint64_t i) {
  if (i >= a.count) [[unlikely]]
    fail_element(a, i, "an index below the count");
  return a.data + i * kTypes[static_cast<uint32_t>(a.type)].bytes;
}

}  // namespace

const char* value_type_name(ValueType type) { return kTypes[static_cast<uint32_t>(type)].name; }

uint32_t value_bytes(ValueType type) { return kTypes[static_cast<uint32_t>(type)].bytes; }

std::optional<uint64_t> uint_value(const Value& value) {
  if (value.type == ValueType::boolean) return std::nullopt;
  const std::optional<Integer> n = integer(value.type, value.data);
  if (!n || n->negative) return std::nullopt;
  return n->bits;
}

std::string describe(const Value& value) {
  const char* name = value_type_name(value.type);
  if (value.type == ValueType::string) return std::string(name) + " " + quoted(value.string);
  if (value.type == ValueType::array)
    return format("array of %" PRIu64 " x %s", value.array.count, value_type_name(value.array.type));
  if (value.type == ValueType::f32)
    return format("%s %g", name, static_cast<double>(load<float>(value.data)));
  if (value.type == ValueType::f64) return format("%s %g", name, load<double>(value.data));
  if (value.type == ValueType::boolean)
    return format("%s %s", name, load<uint8_t>(value.data) ? "true" : "false");
  const std::optional<Integer> n = integer(value.type, value.data);
  if (n->negative) return format("%s %" PRId64, name, static_cast<int64_t>(n->bits));
  return format("%s %" PRIu64, name, n->bits);
}

int64_t ArrayView::as_int(uint64_t i) const {
  const std::optional<Integer> n = integer(type, element(*this, i));
  if (!n) fail_element(*this, i, "an integer");
  if (!n->negative && n->bits > INT64_MAX) fail_element(*this, i, "an integer below 2^63");
  return static_cast<int64_t>(n->bits);
}

uint64_t ArrayView::as_uint(uint64_t i) const {
  const std::optional<Integer> n = integer(type, element(*this, i));
  if (!n) fail_element(*this, i, "an integer");
  if (n->negative) fail_element(*this, i, "a non-negative integer");
  return n->bits;
}

double ArrayView::as_float(uint64_t i) const {
  const std::byte* p = element(*this, i);
  if (type == ValueType::f32) return static_cast<double>(load<float>(p));
  if (type == ValueType::f64) return load<double>(p);
  const std::optional<Integer> n = integer(type, p);
  if (!n) fail_element(*this, i, "a number");
  return n->negative ? static_cast<double>(static_cast<int64_t>(n->bits)) : static_cast<double>(n->bits);
}

void ArrayView::expect_strings() const {
  if (type != ValueType::string && count != 0) fail_element(*this, 0, "string");
}

void ArrayView::changed(uint64_t i) const {
  fail(ErrorKind::gguf,
       "key %s, element %" PRIu64 " of %" PRIu64
       ": its length no longer fits the array: the file was changed while it was open",
       quoted(key).c_str(), i, count);
}

}  // namespace reflex::gguf
