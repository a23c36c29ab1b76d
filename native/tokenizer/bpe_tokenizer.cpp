// Byte-level BPE (GPT-2's alphabet, Qwen, DeepSeek, Llama 3).
//
// The cold path decides the design. Resolving 151,387 merges to ids would look up three strings
// each before the first word is encoded; here the merges are only hashed as they stand in the
// file ("left right"), and a pair of ids is resolved when text first brings it, then kept in a
// cache. The index from spelling to id is not built at all where, as in Qwen's and DeepSeek's
// files, merge k makes token k + constant (checked string by string, never assumed).
#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>

#include "base/error.h"
#include "tokenizer/base_tokenizer.h"
#include "tokenizer/merge.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/unicode.h"

namespace reflex {
namespace {

// --- GPT-2's alphabet: every byte as a printable character -----------------------------------

constexpr uint32_t kAlphabetEnd = 0x144;  // one past the last character in use
constexpr int kBytes = 256;

/// Bytes that stand for themselves; the others are numbered up from U+0100 in order.
constexpr bool is_printable(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Alphabet {
  std::array<uint16_t, kBytes> of_byte{};
  std::array<int16_t, kAlphabetEnd> to_byte{};  // -1: not of the alphabet
};
constexpr Alphabet kAlphabet = [] {
  Alphabet a;
  a.to_byte.fill(-1);
  uint16_t next = 0x100;
  for (int b = 0; b < kBytes; ++b) {
    a.of_byte[b] = is_printable(b) ? static_cast<uint16_t>(b) : next++;
    a.to_byte[a.of_byte[b]] = static_cast<int16_t>(b);
  }
  return a;
}();
static_assert(kAlphabet.of_byte[0xAD] == kAlphabetEnd - 1);

/// The byte of a character of the alphabet, which takes one or two bytes of UTF-8; -1 when it is
/// none.
int byte_of(std::string_view character) {
  if (character.empty() || character.size() > 2) return -1;
  const uint8_t a = static_cast<uint8_t>(character[0]);
  uint32_t code_point = a;
  if (character.size() == 2) {
    const uint8_t b = static_cast<uint8_t>(character[1]);
    if (utf8_length(a) != 2 || !utf8_continues(a, 1, b)) return -1;
    code_point = (a & 0x1Fu) << 6 | (b & 0x3Fu);
  } else if (a >= 0x80) {
    return -1;
  }
  return code_point < kAlphabetEnd ? kAlphabet.to_byte[code_point] : -1;
}

void append_alphabet(uint8_t byte, std::string& out) {
  const uint32_t c = kAlphabet.of_byte[byte];
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

// --- Merges ---------------------------------------------------------------------------------

/// The merges of a file, by the pair of ids that they join.
class Merges {
 public:
  /// id_minus_rank: where to look first for the token that a merge makes. A wrong guess costs
  /// the index from spelling to id, no more.
  Merges(const gguf::ArrayView& array, const Vocabulary& vocabulary, int32_t id_minus_rank)
      : vocabulary_(vocabulary),
        id_minus_rank_(id_minus_rank),
        index_(string_count(array)),
        list_(array, [this](int32_t i, std::string_view s) { index_.add(i, s); }) {
    cache_.reset(
        static_cast<Entry*>(std::calloc(kCacheSize, sizeof(Entry))));  // zero pages, touched as needed
    if (!cache_) throw std::bad_alloc();
  }

  /// Error(tokenizer) where two tokens merge into what is none.
  void check() {
    list_.each([this](int32_t rank, std::string_view merge) {
      const size_t space = merge.find(' ');
      if (space == std::string_view::npos) return;
      const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
      if (vocabulary_.find(left) < 0 || vocabulary_.find(right) < 0) return;  // no text comes to it
      joined_.assign(left).append(right);
      token_of(rank);
    });
  }

  PairMerge find(int32_t left, int32_t right) {
    const uint64_t key = (static_cast<uint64_t>(left) + 1) << 32 | static_cast<uint32_t>(right);
    Entry& entry = cache_[(key * 0x9E3779B97F4A7C15ull) >> (64 - kCacheBits)];
    if (entry.key != key) entry = {key, resolve(left, right)};
    return entry.merge;
  }

 private:
  PairMerge resolve(int32_t left, int32_t right) {
    const std::string_view a = vocabulary_.spelling(left), b = vocabulary_.spelling(right);
    if (a.size() + 1 + b.size() > list_.longest()) return {};
    joined_.assign(a).append(1, ' ').append(b);
    const int32_t rank = index_.find(joined_, list_);
    if (rank < 0) return {};
    joined_.erase(a.size(), 1);
    const int32_t id = token_of(rank);
    if (!vocabulary_.is_plain(id)) return {};  // whether it is meant was decided by its mark
    return {static_cast<uint32_t>(rank), id};
  }

  /// The id spelled joined_, which merge number rank makes.
  int32_t token_of(int32_t rank) {
    const int64_t guess = static_cast<int64_t>(rank) + id_minus_rank_;
    if (guess >= 0 && guess < vocabulary_.size() &&
        vocabulary_.spelling(static_cast<int32_t>(guess)) == joined_)
      return static_cast<int32_t>(guess);
    const int32_t id = vocabulary_.find(joined_);
    if (id < 0)
      fail(ErrorKind::tokenizer, "tokenizer.ggml.merges[%d]: '%s' is no token of the vocabulary", rank,
           joined_.substr(0, 64).c_str());
    return id;
  }

  struct Entry {
    uint64_t key;  // left + 1, right; 0 is empty
    PairMerge merge;
  };
  struct Free {
    void operator()(Entry* p) const { std::free(p); }
  };
  static constexpr int kCacheBits = 16;  // 1 MiB, direct-mapped
  static constexpr size_t kCacheSize = size_t{1} << kCacheBits;

  const Vocabulary& vocabulary_;
  const int64_t id_minus_rank_;
  StringIndex index_;
  StringList list_;
  std::unique_ptr<Entry[], Free> cache_;
  std::string joined_;
};

const gguf::ArrayView& require_merges(const gguf::File& file) {
  const gguf::ArrayView* merges = file.get_array("tokenizer.ggml.merges");
  if (!merges)
    fail(ErrorKind::tokenizer, "tokenizer.ggml.merges: expected an array of strings, found no such key");
  return *merges;
}

class BpeTokenizer final : public BaseTokenizer {
 public:
  explicit BpeTokenizer(const gguf::File& file)
      : BaseTokenizer(file),
        pre_name_(file.get_string("tokenizer.ggml.pre").value_or("")),
        pre_(PreTokenizer::find(pre_name_)),
        leading_bytes_(find_byte_tokens()),
        merges_(require_merges(file), vocabulary(), leading_bytes_) {
    add_bos = file.get_bool("tokenizer.ggml.add_bos_token").value_or(pre_ && pre_->add_bos) && bos >= 0;
  }

  std::string_view model() const override { return "gpt2"; }
  std::string_view pre() const override { return pre_name_; }
  bool pre_known() const override { return pre_ != nullptr; }
  void check() const override { merges_.check(); }

 protected:
  void encode_plain(std::string_view text, size_t begin, size_t end,
                    std::vector<int32_t>& ids) const override {
    Scanner scanner(text.data());
    struct Context {
      const BpeTokenizer& self;
      std::string_view text;
      std::vector<int32_t>& ids;
    } context{*this, text, ids};
    pre_->split(
        scanner, begin, end,
        [](void* p, size_t word_begin, size_t word_end) {
          const Context& c = *static_cast<Context*>(p);
          c.self.encode_word(c.text.substr(word_begin, word_end - word_begin), c.ids);
        },
        &context);
    looked_at_ += scanner.looked_at();
  }

  bool decode(std::string_view spelling, std::string& bytes) const override {
    bool changed = false;
    for (size_t i = 0; i < spelling.size();) {
      const size_t n = static_cast<uint8_t>(spelling[i]) < 0x80 ? 1 : 2;
      const int byte = byte_of(spelling.substr(i, n));
      if (byte < 0) return false;  // not of the alphabet as a whole: the spelling is meant
      changed = changed || n != 1;
      bytes += static_cast<char>(byte);
      i += n;
    }
    return changed;
  }

  uint64_t plain_work() const override { return looked_at_ + merger_.steps(); }

 private:
  void encode_word(std::string_view word, std::vector<int32_t>& ids) const {
    if (pre_->ignore_merges && word.size() <= vocabulary().longest()) {
      spelled_.clear();
      for (const char c : word) append_alphabet(static_cast<uint8_t>(c), spelled_);
      const int32_t id = vocabulary().find(spelled_);
      if (id >= 0 && vocabulary().is_plain(id)) {
        ids.push_back(id);
        return;
      }
    }
    std::vector<Symbol>& symbols = merger_.symbols;
    symbols.clear();
    for (size_t i = 0; i < word.size(); ++i) {
      const uint8_t byte = static_cast<uint8_t>(word[i]);
      const int32_t id = byte_token_[byte];
      symbols.push_back({static_cast<uint32_t>(i), id >= 0 ? id : unknown_for(byte)});
    }
    merger_.merge(static_cast<uint32_t>(word.size()),
                  [this](const Symbol& left, const Symbol& right, uint32_t) {
                    return merges_.find(left.id, right.id);
                  });
    for (const Symbol& s : symbols) ids.push_back(s.id);
    if (symbols.capacity() > kKeptSymbols) std::vector<Symbol>().swap(symbols);
  }

  /// Fills byte_token_; returns how many tokens of single bytes begin the vocabulary.
  int32_t find_byte_tokens() {
    byte_token_.fill(-1);
    int32_t leading = 0;
    for (const int32_t id : vocabulary().shortest()) {
      const std::string_view spelling = vocabulary().spelling(id);
      const int byte = byte_of(spelling);
      if (byte < 0) continue;
      // A user-defined token is spelled as it is meant: it can be the byte only where they agree.
      const bool same = type(id) == TokenType::user_defined && spelling.size() == 1;
      if (!vocabulary().is_plain(id) && !same) continue;
      byte_token_[byte] = id;
      if (id == leading) ++leading;
    }
    return leading;
  }

  static constexpr size_t kKeptSymbols = size_t{1} << 16;  // more are given back after the word

  const std::string_view pre_name_;
  const PreTokenizer* const pre_;           // nullptr: not known
  std::array<int32_t, kBytes> byte_token_;  // -1: none
  const int32_t leading_bytes_;
  // Scratch of encode, which BaseTokenizer calls one at a time.
  mutable Merges merges_;
  mutable Merger merger_;
  mutable std::string spelled_;
  mutable uint64_t looked_at_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> make_bpe_tokenizer(const gguf::File& file) {
  return std::make_unique<BpeTokenizer>(file);
}

}  // namespace reflex
