// The GGUF room on bytes in memory, so that a sanitizer sees every read: a whole good file, that
// file cut and bent at every byte, and the typed getters. Named hostile files and files on disk
// are tests/gguf's.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "check.h"
#include "gguf/gguf.h"
#include "gguf/parse.h"
#include "gguf/reader.h"
#include "gguf/string_walk.h"
#include "gguf_builder.h"

using namespace reflex;
using check::GgufBuilder;
using check::touch_everything;
using check::ValueType;

namespace {

constexpr uint32_t kF32 = 0, kQ8_0 = 8;

/// A file in a buffer of exactly its size (a sanitizer then guards its end), and its parse.
struct Held {
  std::unique_ptr<char[]> bytes;
  std::unique_ptr<gguf::File> file;
};

Held parse(std::string_view bytes) {
  Held h;
  h.bytes.reset(new char[bytes.size()]);
  std::memcpy(h.bytes.get(), bytes.data(), bytes.size());
  h.file = gguf::File::parse(h.bytes.get(), bytes.size(), "test.gguf");
  return h;
}

/// The message of the Error(gguf) that run() throws; "" when it throws none.
std::string message_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::gguf);
    return e.what();
  }
  return "";
}

bool holds(const std::string& text, std::string_view part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found)
    std::fprintf(stderr, "expected \"%.*s\" in: %s\n", static_cast<int>(part.size()), part.data(),
                 text.c_str());
  return found;
}

/// Every value type, scalar and array, and three tensors.
GgufBuilder sample() {
  GgufBuilder b;
  b.string("general.architecture", "qwen3");
  b.scalar<uint32_t>("general.alignment", ValueType::u32, 32);
  b.scalar<uint8_t>("s.u8", ValueType::u8, 200);
  b.scalar<int8_t>("s.i8", ValueType::i8, -100);
  b.scalar<uint16_t>("s.u16", ValueType::u16, 60000);
  b.scalar<int16_t>("s.i16", ValueType::i16, -30000);
  b.scalar<uint32_t>("s.u32", ValueType::u32, 4000000000u);
  b.scalar<int32_t>("s.i32", ValueType::i32, 7);
  b.scalar<float>("s.f32", ValueType::f32, 0.5f);
  b.scalar<uint8_t>("s.bool", ValueType::boolean, 1);
  b.scalar<uint64_t>("s.u64", ValueType::u64, uint64_t{1} << 63);
  b.scalar<int64_t>("s.i64", ValueType::i64, -5);
  b.scalar<double>("s.f64", ValueType::f64, 1e-6);
  b.strings("a.strings", {"a", "", "Ġthe", std::string("\0x", 2)});
  b.array<int32_t>("a.i32", ValueType::i32, {1, -2, 3});
  b.array<uint64_t>("a.u64", ValueType::u64, {1, std::numeric_limits<uint64_t>::max()});
  b.array<float>("a.f32", ValueType::f32, {1.5f, -2.5f});
  b.array<uint8_t>("a.bool", ValueType::boolean, {1, 0, 1});
  b.array<int8_t>("a.empty", ValueType::i8, {});
  // Two arrays in an array: [[9, 8], ["x"]].
  b.entry("a.nested", ValueType::array).put<uint32_t>(9).put<uint64_t>(2);
  b.more().put<uint32_t>(0).put<uint64_t>(2).put<uint8_t>(9).put<uint8_t>(8);
  b.more().put<uint32_t>(8).put<uint64_t>(1).text("x");
  b.tensor("token_embd.weight", kF32, {4, 2}, std::string(32, 'a'));
  b.tensor("blk.0.attn_q.weight", kQ8_0, {64, 2, 1, 1}, std::string(136, 'b'));
  b.tensor("output_norm.weight", kF32, {3}, std::string(12, 'c'));
  return b;
}

}  // namespace

TEST(gguf_views_what_the_file_holds) {
  const std::string bytes = sample().file();
  const Held h = parse(bytes);
  const gguf::File& f = *h.file;
  CHECK_EQ(f.version(), 3u);
  CHECK_EQ(f.metadata().size(), 20u);
  CHECK_EQ(f.total_bytes(), bytes.size());
  CHECK_EQ(f.require_string("general.architecture"), "qwen3");
  // Views, not copies.
  const char* view = f.require_string("general.architecture").data();
  CHECK(view > h.bytes.get() && view < h.bytes.get() + bytes.size());

  const gguf::TensorInfo* q = f.find_tensor("blk.0.attn_q.weight");
  CHECK(q != nullptr);
  CHECK(q->type == GgmlType::Q8_0);
  CHECK_EQ(q->n_dims, 4u);
  CHECK_EQ(q->ne[0] * 1000 + q->ne[1], 64002u);
  CHECK_EQ(q->nbytes, 136u);
  CHECK_EQ(q->offset % 32, 0u);
  CHECK_EQ(reinterpret_cast<const char*>(q->data) - h.bytes.get(), static_cast<ptrdiff_t>(q->offset));
  CHECK_EQ(std::string_view(reinterpret_cast<const char*>(q->data), q->nbytes), std::string(136, 'b'));
  CHECK_EQ(f.tensors()[2].ne[1], 1u);
  CHECK(f.find_tensor("blk.1.attn_q.weight") == nullptr);
  CHECK(f.find("") == nullptr);
  f.check_size();  // bytes in memory have no file that could shrink
}

TEST(gguf_version_2_reads_as_version_3) {
  GgufBuilder b = sample();
  const Held three = parse(b.file());
  b.version = 2;
  const Held two = parse(b.file());
  CHECK_EQ(two.file->version(), 2u);
  CHECK_EQ(touch_everything(*two.file), touch_everything(*three.file));
}

TEST(gguf_typed_getters_convert) {
  const Held h = parse(sample().file());
  const gguf::File& f = *h.file;
  CHECK_EQ(f.require_uint("s.u8"), 200u);
  CHECK_EQ(f.require_uint("s.u16"), 60000u);
  CHECK_EQ(f.require_uint("s.u32"), 4000000000u);
  CHECK_EQ(f.require_uint("s.i32"), 7u);
  CHECK_EQ(f.require_uint("s.u64"), uint64_t{1} << 63);
  CHECK_EQ(f.require_float("s.f32"), 0.5);
  CHECK_EQ(f.require_float("s.f64"), 1e-6);
  CHECK(f.get_bool("s.bool") == true);
  CHECK(!f.get_uint("absent") && !f.get_float("absent") && !f.get_bool("absent") && !f.get_string("absent"));
  CHECK(f.get_array("absent") == nullptr);

  std::vector<std::string> strings;
  f.require_array("a.strings").each_string([&](uint64_t i, std::string_view s) {
    CHECK_EQ(i, strings.size());
    strings.emplace_back(s);
  });
  CHECK((strings == std::vector<std::string>{"a", "", "Ġthe", std::string("\0x", 2)}));
  const gguf::ArrayView& ints = f.require_array("a.i32");
  CHECK_EQ(ints.as_int(1), -2);
  CHECK_EQ(ints.as_float(1), -2.0);
  CHECK_EQ(ints.as_uint(2), 3u);
  CHECK_EQ(f.require_array("a.u64").as_uint(1), std::numeric_limits<uint64_t>::max());
  CHECK_EQ(f.require_array("a.f32").as_float(1), -2.5);
  CHECK_EQ(f.require_array("a.bool").as_int(1), 0);
  f.require_array("a.empty").each_string([](uint64_t, std::string_view) { CHECK(false); });
}

TEST(gguf_typed_getters_name_what_they_found) {
  const Held h = parse(sample().file());
  const gguf::File& f = *h.file;
  const auto says = [](const std::function<void()>& run, std::string_view key, std::string_view found) {
    const std::string m = message_of(run);
    return holds(m, key) && holds(m, found);
  };
  CHECK(says([&] { f.require_uint("s.i64"); }, "'s.i64', offset ",
             "expected a non-negative integer, found i64 -5"));
  CHECK(says([&] { f.get_uint("s.f32"); }, "'s.f32'", "found f32 0.5"));
  CHECK(says([&] { f.get_uint("s.bool"); }, "'s.bool'", "found bool true"));
  CHECK(says([&] { f.get_float("s.i32"); }, "'s.i32'", "expected f32 or f64, found i32 7"));
  CHECK(says([&] { f.get_bool("s.u8"); }, "'s.u8'", "expected bool, found u8 200"));
  CHECK(says([&] { f.get_string("s.u64"); }, "'s.u64'", "expected string, found u64 9223372036854775808"));
  CHECK(says([&] { f.get_array("general.architecture"); }, "'general.architecture'", "found string 'qwen3'"));
  CHECK(says([&] { f.get_string("a.i32"); }, "'a.i32'", "found array of 3 x i32"));
  CHECK(says([&] { f.require_uint("no.such"); }, "'no.such'", "the file has no such key"));
  CHECK(says([&] { f.require_float("no.such"); }, "'no.such'", "the file has no such key"));
  CHECK(says([&] { f.require_string("no.such"); }, "'no.such'", "the file has no such key"));
  CHECK(says([&] { f.require_array("no.such"); }, "'no.such'", "the file has no such key"));

  const auto array = [&](const char* key) { return f.require_array(key); };
  const auto none = [](uint64_t, std::string_view) {};
  CHECK(says([&] { array("a.i32").each_string(none); }, "'a.i32'", "expected string, found i32"));
  CHECK(says([&] { array("a.strings").as_int(0); }, "'a.strings'", "expected an integer, found string"));
  CHECK(says([&] { array("a.strings").as_float(0); }, "'a.strings'", "expected a number, found string"));
  CHECK(says([&] { array("a.nested").as_uint(0); }, "'a.nested'", "expected an integer, found array"));
  CHECK(says([&] { array("a.f32").as_int(0); }, "'a.f32'", "expected an integer, found f32"));
  CHECK(
      says([&] { array("a.i32").as_uint(1); }, "'a.i32', element 1 of 3", "expected a non-negative integer"));
  CHECK(says([&] { array("a.u64").as_int(1); }, "'a.u64'", "expected an integer below 2^63"));
  CHECK(says([&] { array("a.i32").as_int(3); }, "'a.i32', element 3 of 3",
             "expected an index below the count"));
  CHECK(says([&] { array("a.empty").as_int(0); }, "'a.empty'", "expected an index below the count"));
}

TEST(gguf_floats_that_are_not_finite_are_refused) {
  GgufBuilder b;
  b.scalar<float>("nan", ValueType::f32, std::nanf(""));
  b.scalar<float>("inf", ValueType::f32, -INFINITY);
  b.scalar<double>("nan64", ValueType::f64, std::nan(""));
  const Held h = parse(b.file());
  for (const char* key : {"nan", "inf", "nan64"}) {
    CHECK(holds(message_of([&] { h.file->require_float(key); }), "expected a finite number, found f"));
    CHECK(holds(message_of([&] { h.file->get_float(key); }), key));
  }
}

TEST(gguf_truncation_at_every_byte_is_an_error_with_an_offset) {
  const GgufBuilder b = sample();
  const std::string bytes = b.file();
  for (size_t n = 0; n < bytes.size(); ++n) {
    const std::string m = message_of([&] { parse(std::string_view(bytes).substr(0, n)); });
    if (!holds(m, "test.gguf: ") || !holds(m, "offset ")) {
      CHECK_EQ(n, bytes.size());  // names the length that was let through
      return;
    }
  }
}

TEST(gguf_any_single_byte_changed_is_safe) {
  const std::string bytes = sample().file();
  const size_t header = sample().header().size();
  size_t refused = 0, read = 0;
  for (size_t at = 0; at < header; ++at) {
    for (const int change : {0x01, 0x80, 0xFF}) {
      std::string bent = bytes;
      bent[at] = static_cast<char>(bent[at] ^ change);
      try {
        touch_everything(*parse(bent).file);
        ++read;
      } catch (const Error& e) {
        CHECK(e.kind() == ErrorKind::gguf);
        ++refused;
      }
    }
  }
  // Both must be common, or the sweep tests nothing: a changed name still reads, a changed
  // length mostly does not.
  CHECK(read > header / 4);
  CHECK(refused > header / 4);
}

TEST(gguf_a_length_rewritten_after_parsing_cannot_lead_a_walk_astray) {
  Held h = parse(sample().file());
  const gguf::ArrayView& a = h.file->require_array("a.strings");
  char* second = h.bytes.get() + (reinterpret_cast<const char*>(a.data) - h.bytes.get()) + 9;
  for (const uint64_t length : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{40}}) {
    std::memcpy(second, &length, sizeof length);
    const std::string m = message_of([&] { a.each_string([](uint64_t, std::string_view) {}); });
    CHECK(holds(m, "'a.strings', element 1 of 4"));
    CHECK(holds(m, "changed while it was open"));
  }
}

// A long array is walked in several places at once, and a place may begin where only seems to begin a string:
// here some strings hold what looks like lengths, and some are longer than the distance of two places.
TEST(gguf_strings_walked_in_several_places_are_those_walked_one_by_one) {
  constexpr uint64_t kStrings = 3000;
  check::Bytes array;
  uint64_t state = 1;
  for (uint64_t i = 0; i < kStrings; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    check::Bytes lengths;
    for (uint64_t k = 0; k < state >> 60; ++k) lengths.put<uint64_t>(3).raw("abc");
    array.text(i % 97 == 0    ? std::string(700, 'x')
               : i % 5 == 0   ? lengths.str()
               : i % 131 == 7 ? std::string(90, '\0')
                              : std::string(state >> 59, 'y'));
  }
  const size_t real = array.size();
  array.raw(std::string(5000, '\1'));                                     // whatever follows in a file
  const std::unique_ptr<std::byte[]> bytes(new std::byte[array.size()]);  // a sanitizer guards its end
  std::memcpy(bytes.get(), array.str().data(), array.size());
  const std::byte *begin = bytes.get(), *end = begin + array.size();
  for (const uint64_t apart : {64, 256, 1000, 4096}) {
    const gguf::StringWalk all = gguf::walk_strings(begin, end, kStrings, apart);
    CHECK_EQ(all.passed, kStrings);
    CHECK_EQ(static_cast<size_t>(all.at - begin), real);
    CHECK(gguf::walk_strings(begin, end, kStrings + 1, apart).passed == kStrings);
    // Cut anywhere, it tells which string does not end.
    for (size_t bytes_left = 0; bytes_left < real; bytes_left += 377) {
      const gguf::StringWalk want = gguf::walk_strings(begin, begin + bytes_left, kStrings, real);
      const gguf::StringWalk found = gguf::walk_strings(begin, begin + bytes_left, kStrings, apart);
      CHECK(found.at == want.at && found.passed == want.passed && found.passed < kStrings);
    }
  }
}

TEST(gguf_nesting_is_bounded_before_the_stack_is) {
  GgufBuilder b;
  check::Bytes& bytes = b.entry("deep", ValueType::array);
  for (int i = 0; i < 10000; ++i) bytes.put<uint32_t>(9).put<uint64_t>(1);
  bytes.put<uint32_t>(0).put<uint64_t>(0);
  CHECK(holds(message_of([&] { parse(b.file()); }), "'deep'"));
  CHECK(holds(message_of([&] { parse(b.file()); }), "nested deeper than"));

  GgufBuilder allowed;
  check::Bytes& shallow = allowed.entry("deep", ValueType::array);
  for (int i = 1; i < gguf::kMaxArrayDepth; ++i) shallow.put<uint32_t>(9).put<uint64_t>(1);
  shallow.put<uint32_t>(0).put<uint64_t>(1).put<uint8_t>(7);
  CHECK_EQ(parse(allowed.file()).file->metadata().size(), 1u);
}

TEST(gguf_many_tensors_in_any_order_are_found_and_placed) {
  GgufBuilder b;
  constexpr uint64_t n = 3000;
  for (uint64_t i = 0; i < n; ++i) {
    // Data in an order of its own: 7 and 3000 have no common factor.
    b.tensor_at("blk." + std::to_string(i) + ".w", kF32, {8}, i * 7 % n * 32);
  }
  const std::string bytes = b.file() + std::string(n * 32, '\0');
  const Held h = parse(bytes);
  for (uint64_t i = 0; i < n; ++i) {
    const gguf::TensorInfo* t = h.file->find_tensor("blk." + std::to_string(i) + ".w");
    CHECK(t == &h.file->tensors()[i]);
  }
}

TEST(gguf_utf8_is_judged_as_the_standard_does) {
  for (const char* good : {"", "a", "é", "€", "😀", "\xEF\xBF\xBF", "\xF4\x8F\xBF\xBF", "\xED\x9F\xBF"})
    CHECK(gguf::is_utf8(good));
  for (const char* bad : {"\x80", "\xC0\x80", "\xC1\xBF", "\xC3", "\xE0\x80\x80", "\xE2\x82", "\xED\xA0\x80",
                          "\xF0\x80\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "a\xFF"})
    CHECK(!gguf::is_utf8(bad));
  CHECK_EQ(gguf::quoted("a\n\xFFé"), "'a\\x0a\\xffé'");
  CHECK_EQ(gguf::quoted("\xC2\x9B\xC2\xA0"), "'\\xc2\\x9b\xC2\xA0'");  // CSI, then a mere space
  CHECK(gguf::quoted(std::string(5000, 'x')).size() < 128);
}
