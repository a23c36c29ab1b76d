// Pre-tokenizers: how text falls into the words inside which BPE merges. Each is a sequence of
// stages as in a tokenizer.json (Split with behaviour Isolated, Digits, ByteLevel), every stage
// a regex matched by hand in linear time. Knows no vocabulary; normalises nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace reflex {

/// Valid UTF-8 under the matchers' eyes. Counts the characters they look at, so that tests can
/// hold the work linear.
class Scanner {
 public:
  struct At {
    uint32_t code_point;
    uint32_t n_bytes;
    unsigned cls;  ///< class_bit of its class
  };
  explicit Scanner(const char* text) : text_(text) {}
  At at(size_t pos);
  /// Where the character that ends at pos begins; pos > 0.
  size_t before(size_t pos) const;
  uint64_t looked_at() const { return looked_at_; }

 private:
  const char* text_;
  uint64_t looked_at_ = 0;
};

struct Match {
  size_t begin, end;
};
/// The first match of one regex in [pos, end); {end, end} when there is none. Nothing outside
/// is seen, as a tokenizer.json's stages see their piece alone.
using Stage = Match (*)(Scanner&, size_t pos, size_t end);

struct PreTokenizer {
  static constexpr int kMaxStages = 6;
  const char* name;
  Stage stages[kMaxStages];  ///< the first nullptr ends them
  bool ignore_merges;        ///< a word that is a token is taken whole, merges or not
  bool add_bos;              ///< what an absent add_bos_token means

  /// By tokenizer.ggml.pre; nullptr when it is not known. "" is "default", as in llama.cpp.
  static const PreTokenizer* find(std::string_view name);

  /// Calls emit(context, begin, end) for each word of [begin, end), in order.
  using Emit = void (*)(void* context, size_t begin, size_t end);
  void split(Scanner& text, size_t begin, size_t end, Emit emit, void* context) const;
};

}  // namespace reflex
