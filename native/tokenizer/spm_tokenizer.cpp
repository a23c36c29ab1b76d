// SentencePiece's BPE, as "llama" vocabularies have it: of neighbours whose join is a token, the
// best score merges first, the leftmost on a tie; characters without a token fall apart into
// byte tokens. Spaces are U+2581, and one is put before a text (add_space_prefix) and, as in
// llama.cpp, after every control token. No normalisation: the file carries none.
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "tokenizer/base_tokenizer.h"
#include "tokenizer/merge.h"
#include "tokenizer/unicode.h"

namespace reflex {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581
constexpr int kBytes = 256;

/// Merge priorities in the order of scores, the highest score first. score is not NaN.
uint32_t priority_of(float score) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 counts as 0
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return ~ascending;
}
// -inf, the lowest score, still stays below "no merge".
static_assert(0x80000000u + 0x7F800000u < kNoMerge);

class SpmTokenizer final : public BaseTokenizer {
 public:
  explicit SpmTokenizer(const gguf::File& file)
      : BaseTokenizer(file), pre_name_(file.get_string("tokenizer.ggml.pre").value_or("")) {
    read_scores(file);
    find_byte_tokens();
    add_space_prefix_ = file.get_bool("tokenizer.ggml.add_space_prefix").value_or(true);
    add_bos = file.get_bool("tokenizer.ggml.add_bos_token").value_or(true) && bos >= 0;
  }

  std::string_view model() const override { return "llama"; }
  std::string_view pre() const override { return pre_name_; }
  bool pre_known() const override { return true; }  // there is none to know

 protected:
  void encode_plain(std::string_view text, size_t begin, size_t end,
                    std::vector<int32_t>& ids) const override {
    std::string escaped;
    escaped.reserve(end - begin + kSpace.size());
    if (add_space_prefix_) escaped += kSpace;
    for (size_t i = begin; i < end; ++i) {
      if (text[i] == ' ')
        escaped += kSpace;
      else
        escaped += text[i];
    }
    // Where no token goes on past the beginning of a word, words are independent.
    size_t from = 0;
    while (from < escaped.size()) {
      size_t to = escaped.size();
      if (words_apart_) {
        size_t body = from;
        while (escaped.compare(body, kSpace.size(), kSpace) == 0) body += kSpace.size();
        to = std::min(to, escaped.find(kSpace, body));
      }
      encode_word(std::string_view(escaped).substr(from, to - from), ids);
      from = to;
    }
    looked_at_ += escaped.size();
  }

  bool decode(std::string_view spelling, std::string& bytes) const override {
    size_t at = 0;
    for (size_t next; (next = spelling.find(kSpace, at)) != std::string_view::npos; at = next + kSpace.size())
      bytes.append(spelling.substr(at, next - at)).append(1, ' ');
    if (at == 0) return false;
    bytes.append(spelling.substr(at));
    return true;
  }

  uint64_t plain_work() const override { return looked_at_ + merger_.steps(); }

 private:
  void read_scores(const gguf::File& file) {
    constexpr const char* kScores = "tokenizer.ggml.scores";
    const gguf::ArrayView* scores = file.get_array(kScores);
    if (!scores) fail(ErrorKind::tokenizer, "%s: expected an array of floats, found no such key", kScores);
    if (scores->count != static_cast<uint64_t>(size()))
      fail(ErrorKind::tokenizer, "%s: expected one score for each of %d tokens, found %llu", kScores, size(),
           static_cast<unsigned long long>(scores->count));
    priority_.resize(scores->count);
    for (int32_t id = 0; id < size(); ++id) {
      const double score = scores->as_float(static_cast<uint64_t>(id));
      if (std::isnan(score)) fail(ErrorKind::tokenizer, "%s[%d]: expected a number, found NaN", kScores, id);
      priority_[id] = priority_of(static_cast<float>(score));
    }
  }

  void find_byte_tokens() {
    byte_token_.fill(-1);
    words_apart_ = true;
    for (int32_t id = 0; id < size(); ++id) {
      const std::string_view spelling = vocabulary().spelling(id);
      if (type(id) == TokenType::byte) {
        if (const int byte = byte_of_spelling(spelling); byte >= 0) byte_token_[byte] = id;
      } else if (type(id) == TokenType::unknown && unk < 0) {
        unk = id;
      } else if (vocabulary().is_plain(id)) {
        const size_t body = spelling.find_first_not_of(kSpace);  // bytes of U+2581: enough to tell
        if (body != std::string_view::npos && spelling.find(kSpace, body) != std::string_view::npos)
          words_apart_ = false;
      }
    }
  }

  int32_t token_of(std::string_view piece) const {
    if (piece.size() > vocabulary().longest()) return -1;
    const int32_t id = vocabulary().find(piece);
    return id >= 0 && vocabulary().is_plain(id) ? id : -1;
  }

  void encode_word(std::string_view word, std::vector<int32_t>& ids) const {
    std::vector<Symbol>& symbols = merger_.symbols;
    symbols.clear();
    for (size_t i = 0; i < word.size();) {
      const size_t n = utf8_decode(word.data() + i).n_bytes;
      symbols.push_back({static_cast<uint32_t>(i), token_of(word.substr(i, n))});
      i += n;
    }
    const uint32_t size = static_cast<uint32_t>(word.size());
    merger_.merge(size, [&](const Symbol& left, const Symbol&, uint32_t end) -> PairMerge {
      const int32_t id = token_of(word.substr(left.begin, end - left.begin));
      return id < 0 ? PairMerge{} : PairMerge{priority_[id], id};
    });
    for (size_t i = 0; i < symbols.size(); ++i) {
      if (symbols[i].id >= 0) {
        ids.push_back(symbols[i].id);
        continue;
      }
      const uint32_t end = i + 1 < symbols.size() ? symbols[i + 1].begin : size;
      for (uint32_t at = symbols[i].begin; at < end; ++at) {
        const uint8_t byte = static_cast<uint8_t>(word[at]);
        const int32_t id = byte_token_[byte];
        if (id < 0) {  // no byte tokens: the character is unknown as a whole
          ids.push_back(unknown_for(byte));
          break;
        }
        ids.push_back(id);
      }
    }
    if (symbols.capacity() > kKeptSymbols) std::vector<Symbol>().swap(symbols);
  }

  static constexpr size_t kKeptSymbols = size_t{1} << 16;  // more are given back after the word

  const std::string_view pre_name_;
  std::vector<uint32_t> priority_;          // (size)
  std::array<int32_t, kBytes> byte_token_;  // -1: none
  bool add_space_prefix_ = true;
  bool words_apart_ = false;
  // Scratch of encode, which BaseTokenizer calls one at a time.
  mutable Merger merger_;
  mutable uint64_t looked_at_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> make_spm_tokenizer(const gguf::File& file) {
  return std::make_unique<SpmTokenizer>(file);
}

}  // namespace reflex
