// The tokenizer room on bytes in memory, so that a sanitizer sees every read: its parts against
// the obvious way of doing the same, and whole tokenizers over small and over bent files. Ids
// against `tokenizers` and SentencePiece are tests/tokenizer's.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "check.h"
#include "gguf_builder.h"
#include "tokenizer/marked_tokens.h"
#include "tokenizer/merge.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/string_list.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

using namespace reflex;
using check::GgufBuilder;
using check::ValueType;

namespace {

using Random = std::mt19937;

int below(Random& r, int n) { return static_cast<int>(r() % static_cast<unsigned>(n)); }

/// A copy in a buffer of exactly its size: a sanitizer then guards both ends.
struct Exact {
  explicit Exact(std::string_view s) : bytes(new char[s.size()]), size(s.size()) {
    std::copy(s.begin(), s.end(), bytes.get());
  }
  std::string_view view() const { return {bytes.get(), size}; }
  std::unique_ptr<char[]> bytes;
  size_t size;
};

std::string random_text(Random& r, int n_characters) {
  static const char* const kPieces[] = {
      "a",
      "B",
      " ",
      "  ",
      "\n",
      "\r\n",
      "\t",
      "'",
      "'s",
      "'LL",
      "'\xC5\xBF",
      "7",
      "123",
      "!",
      "#",
      "\xC3\xA9",
      "\xCC\x81",
      "\xE4\xB8\xAD",
      "\xE3\x82\xA2",
      "\xE3\x80\x80",
      "\xE2\x80\x98",
      "\xC2\xA0",
      "\xC2\x85",
      "\xE2\x85\xA7",
      "\xEF\xBC\x91",
      "\xF0\x9F\x98\x80",
      "\xF0\x90\x90\x80",
      "\xF4\x8F\xBF\xBF",
      "\x01",
      "<a>",
  };
  std::string text;
  for (int i = 0; i < n_characters; ++i) text += kPieces[below(r, std::size(kPieces))];
  return text;
}

constexpr const char* kPreNames[] = {"qwen2",       "qwen35", "llama-bpe", "deepseek-llm", "deepseek-coder",
                                     "deepseek-v3", "gpt-2",  "smollm",    "default"};

/// What a merge step may do, by pair of ids: a random but fixed table.
struct Table {
  uint32_t seed;
  PairMerge operator()(int32_t left, int32_t right) const {
    const uint32_t h = (static_cast<uint32_t>(left) * 31 + static_cast<uint32_t>(right)) * 2654435761u + seed;
    if (h % 3 == 0) return {};
    return {h % 17, static_cast<int32_t>(h % 7)};
  }
};

std::vector<int32_t> merged_by_hand(std::vector<int32_t> ids, const Table& table) {
  for (;;) {
    PairMerge best;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const PairMerge p = table(ids[i], ids[i + 1]);
      if (p.priority < best.priority) {
        best = p;
        at = i;
      }
    }
    if (best.priority == kNoMerge) return ids;
    ids[at] = best.id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

/// A byte-level vocabulary of the printable ASCII letters, a few merges and control tokens.
std::string small_bpe(const char* pre) {
  GgufBuilder b;
  b.string("tokenizer.ggml.model", "gpt2");
  b.string("tokenizer.ggml.pre", pre);
  std::vector<std::string> tokens;
  for (char c = '!'; c <= '~'; ++c) tokens.emplace_back(1, c);
  for (const char* t : {"\xC4\xA0", "\xC4\x8A", "th", "the", "\xC4\xA0the", "<|im_end|>", "<a>"})
    tokens.push_back(t);
  std::vector<int32_t> types(tokens.size(), 1);
  types[tokens.size() - 2] = 3;
  types[tokens.size() - 1] = 4;
  b.strings("tokenizer.ggml.tokens", tokens);
  b.array("tokenizer.ggml.token_type", ValueType::i32, types);
  b.strings("tokenizer.ggml.merges", {"t h", "th e", "\xC4\xA0 the"});
  b.scalar("tokenizer.ggml.eos_token_id", ValueType::u32, uint32_t{5});
  return b.file();
}

std::string small_spm() {
  GgufBuilder b;
  b.string("tokenizer.ggml.model", "llama");
  std::vector<std::string> tokens = {"<unk>",
                                     "<s>",
                                     "</s>",
                                     "\xE2\x96\x81",
                                     "a",
                                     "b",
                                     "ab",
                                     "\xE2\x96\x81"
                                     "ab"};
  std::vector<int32_t> types = {2, 3, 3, 1, 1, 1, 1, 1};
  std::vector<float> scores = {0, 0, 0, -3, -4, -5, -1, -2};
  for (int i = 0; i < 256; ++i) {
    tokens.push_back(format("<0x%02X>", static_cast<unsigned>(i)));
    types.push_back(6);
    scores.push_back(0);
  }
  b.strings("tokenizer.ggml.tokens", tokens);
  b.array("tokenizer.ggml.token_type", ValueType::i32, types);
  b.array("tokenizer.ggml.scores", ValueType::f32, scores);
  return b.file();
}

std::vector<int32_t> encode(const Tokenizer& t, std::string_view text, bool parse_special = true) {
  std::vector<int32_t> ids;
  EncodeOptions options;
  options.parse_special = parse_special;
  t.encode(text, options, ids);
  return ids;
}

std::string decode(const Tokenizer& t, const std::vector<int32_t>& ids) {
  std::string out;
  for (const int32_t id : ids) out += t.bytes(id);
  return out;
}

/// Encodes and decodes; any typed error of a tokenizer is a fine answer.
void use(std::string_view bytes, Random& r) {
  const Exact held(bytes);
  try {
    const auto file = gguf::File::parse(held.bytes.get(), held.size, "test.gguf");
    const auto t = Tokenizer::from_gguf(*file);
    for (int i = 0; i < 3; ++i) {
      const std::vector<int32_t> ids = encode(*t, random_text(r, 12), i != 0);
      for (const int32_t id : ids) CHECK(id >= 0 && id < t->size());
      decode(*t, ids);
    }
    for (int32_t id = 0; id < t->size(); ++id) t->find(t->bytes(id));
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::gguf || e.kind() == ErrorKind::tokenizer);
    CHECK(*e.what());
  }
}

}  // namespace

TEST(tokenizer_pre_tokenizers_stay_inside_the_text_and_cover_it) {
  Random r(1);
  for (int round = 0; round < 300; ++round) {
    const Exact text(random_text(r, below(r, 30)));
    for (const char* name : kPreNames) {
      const PreTokenizer* pre = PreTokenizer::find(name);
      CHECK(pre != nullptr);
      Scanner scanner(text.bytes.get());
      size_t at = 0;
      pre->split(
          scanner, 0, text.size,
          [](void* p, size_t begin, size_t end) {
            size_t& covered = *static_cast<size_t*>(p);
            CHECK_EQ(begin, covered);
            CHECK(end > begin);
            covered = end;
          },
          &at);
      CHECK_EQ(at, text.size);
    }
  }
}

TEST(tokenizer_merges_in_the_order_of_priority_then_place) {
  Random r(2);
  for (const size_t n : {1, 2, 3, 8, 31, 32, 33, 34, 64, 300}) {
    for (uint32_t seed = 0; seed < 40; ++seed) {
      Merger merger;
      std::vector<int32_t> ids;
      for (size_t i = 0; i < n; ++i) {
        ids.push_back(below(r, 7));
        merger.symbols.push_back({static_cast<uint32_t>(i * 2), ids.back()});
      }
      const Table table{seed};
      uint32_t last_end = 0;
      merger.merge(static_cast<uint32_t>(n * 2), [&](const Symbol& left, const Symbol& right, uint32_t end) {
        CHECK(left.begin < right.begin && right.begin < end && end <= n * 2);
        last_end = std::max(last_end, end);
        return table(left.id, right.id);
      });
      std::vector<int32_t> got;
      for (const Symbol& s : merger.symbols) got.push_back(s.id);
      CHECK(got == merged_by_hand(ids, table));
      CHECK_EQ(merger.symbols.front().begin, 0u);
      if (n > 1) CHECK_EQ(last_end, static_cast<uint32_t>(n * 2));
    }
  }
}

TEST(tokenizer_finds_marked_tokens_leftmost_and_longest) {
  Random r(3);
  for (int round = 0; round < 500; ++round) {
    MarkedTokenFinder finder;
    std::vector<std::string> spellings;
    for (int i = below(r, 6); i >= 0; --i) {
      std::string s;
      for (int k = below(r, 5); k >= 0; --k) s += static_cast<char>('a' + below(r, 2));
      spellings.push_back(s);
      finder.add(s, static_cast<int32_t>(spellings.size()) - 1);
    }
    finder.finish();
    std::string plain;
    for (int i = below(r, 40); i > 0; --i) plain += static_cast<char>('a' + below(r, 3));
    const Exact text(plain);
    const size_t begin = plain.empty() ? 0 : static_cast<size_t>(below(r, static_cast<int>(plain.size())));
    std::vector<MarkedToken> found;
    finder.find(text.view(), begin, text.size, found);
    size_t at = begin, n = 0;
    while (at < plain.size()) {
      int best = -1;
      for (size_t i = 0; i < spellings.size(); ++i)
        if (plain.compare(at, spellings[i].size(), spellings[i]) == 0 &&
            (best < 0 || spellings[i].size() >= spellings[static_cast<size_t>(best)].size()))
          best = static_cast<int>(i);
      if (best < 0) {
        ++at;
        continue;
      }
      CHECK(n < found.size());
      if (n == found.size()) break;
      CHECK_EQ(found[n].begin, at);
      CHECK_EQ(found[n].id, best);
      at = found[n++].end;
    }
    CHECK_EQ(n, found.size());
  }
}

TEST(tokenizer_string_index_finds_the_last_of_equal_strings) {
  Random r(4);
  std::vector<std::string> strings;
  for (int i = 0; i < 3000; ++i) {
    std::string s;
    for (int k = below(r, 40); k > 0; --k) s += static_cast<char>('a' + below(r, 26));
    strings.push_back(below(r, 10) == 0 && i > 0 ? strings[static_cast<size_t>(below(r, i))] : s);
  }
  GgufBuilder b;
  b.strings("strings", strings);
  const Exact bytes(b.file());
  const auto file = gguf::File::parse(bytes.bytes.get(), bytes.size, "test.gguf");
  const gguf::ArrayView& array = file->require_array("strings");
  StringIndex index(string_count(array));
  const StringList list(array, [&](int32_t i, std::string_view s) { index.add(i, s); });
  for (int32_t i = 0; i < list.size(); ++i) {
    CHECK(list[i] == strings[static_cast<size_t>(i)]);
    const auto last = std::find(strings.rbegin(), strings.rend(), strings[static_cast<size_t>(i)]);
    CHECK_EQ(index.find(list[i], list), static_cast<int32_t>(strings.rend() - last) - 1);
  }
  CHECK_EQ(index.find("NOT THERE", list), -1);
}

TEST(tokenizer_refuses_a_list_that_changed_under_it) {
  GgufBuilder b;
  b.strings("strings", {"one", "two", "three"});
  Exact bytes(b.file());
  const auto file = gguf::File::parse(bytes.bytes.get(), bytes.size, "test.gguf");
  const StringList list(file->require_array("strings"), [](int32_t, std::string_view) {});
  std::memset(bytes.bytes.get() + bytes.view().find("two") - 8, 0x7F, 8);  // the length of "two"
  CHECK(list[0] == "one");
  CHECK_THROWS(ErrorKind::tokenizer, list[1]);
  CHECK_THROWS(ErrorKind::tokenizer, list[2]);
}

TEST(tokenizer_utf8_stream_is_the_same_however_the_bytes_come) {
  const std::string bytes = "a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80\xFFz\xE4\xB8y\xED\xA0\x80\xF0\x9F";
  std::string whole;
  Utf8Stream all;
  all.push(bytes, whole);
  all.finish(whole);
  CHECK_EQ(utf8_error(whole), std::string_view::npos);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    std::string out;
    Utf8Stream stream;
    stream.push(std::string_view(bytes).substr(0, cut), out);
    CHECK_EQ(utf8_error(out), std::string_view::npos);
    stream.push(std::string_view(bytes).substr(cut), out);
    stream.finish(out);
    CHECK(out == whole);
  }
}

TEST(tokenizer_bpe_over_a_small_file) {
  const Exact bytes(small_bpe("gpt-2"));
  const auto file = gguf::File::parse(bytes.bytes.get(), bytes.size, "test.gguf");
  const auto t = Tokenizer::from_gguf(*file);
  CHECK_EQ(t->eos, 5);
  CHECK_EQ(t->end_ids.size(), size_t{2});
  const int32_t the = t->find("\xC4\xA0the"), end = t->find("<|im_end|>");
  CHECK((encode(*t, " the<|im_end|>") == std::vector<int32_t>{the, end}));
  CHECK(encode(*t, " the<|im_end|>", false).size() > 2);
  CHECK(t->bytes(the) == " the");
  const TextSpan literal[] = {{5, 6}};
  std::vector<int32_t> ids;
  t->encode("<a><a>", {.parse_special = true, .literal_spans = literal}, ids);
  CHECK_EQ(ids.front(), t->find("<a>"));
  CHECK_EQ(ids.size(), size_t{4});
  CHECK_THROWS(ErrorKind::invalid_input, encode(*t, "abc\xFF"));
  CHECK_THROWS(ErrorKind::tokenizer, encode(*t, "\xC3\xA9"));  // its bytes have no tokens here
}

TEST(tokenizer_spm_over_a_small_file) {
  const Exact bytes(small_spm());
  const auto file = gguf::File::parse(bytes.bytes.get(), bytes.size, "test.gguf");
  const auto t = Tokenizer::from_gguf(*file);
  CHECK_EQ(t->unk, 0);
  CHECK((encode(*t, "ab b</s>") == std::vector<int32_t>{7, 3, 5, 2}));
  CHECK(decode(*t, encode(*t,
                          "\xE4\xB8\xAD"
                          "b")) ==
        " \xE4\xB8\xAD"
        "b");
}

TEST(tokenizer_answers_several_threads_at_once) {
  const Exact bytes(small_bpe("qwen2"));
  const auto file = gguf::File::parse(bytes.bytes.get(), bytes.size, "test.gguf");
  const auto t = Tokenizer::from_gguf(*file);
  const std::string text = "the other<a> the then there";
  const std::vector<int32_t> expected = encode(*t, text);
  std::vector<std::string> answers(4);
  std::vector<std::thread> threads;
  for (std::string& answer : answers)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) answer = decode(*t, encode(*t, text));
      if (t->find("<a>") != t->size() - 1) answer += "?";  // its index is built by whoever is first
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& answer : answers) CHECK_EQ(answer, text);
}

TEST(tokenizer_survives_files_bent_at_every_byte) {
  Random r(5);
  const std::string files[] = {small_bpe("qwen2"), small_bpe("llama-bpe"), small_bpe(""), small_spm()};
  for (const std::string& good : files) {
    for (size_t at = 0; at < good.size(); at += 1 + static_cast<size_t>(below(r, 3))) {
      std::string bent = good;
      bent[at] = static_cast<char>(bent[at] ^ (1 << below(r, 8)));
      use(bent, r);
    }
    for (size_t n = 0; n < good.size(); n += 7) use(good.substr(0, n), r);
  }
}
