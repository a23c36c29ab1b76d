// The tokens of a file: spellings, types, and the way from a spelling to its id. All views into
// the mapping. Owns no rule of how text becomes tokens.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "tokenizer/string_list.h"
#include "tokenizer/tokenizer.h"

namespace reflex {

class Vocabulary {
 public:
  /// Error(tokenizer) where tokens are missing or none, or types are of another number.
  explicit Vocabulary(const gguf::File& file);

  int32_t size() const { return tokens_.size(); }
  std::string_view spelling(int32_t id) const { return tokens_[id]; }
  TokenType type(int32_t id) const;
  /// Whether plain text may become this token. Control and user-defined ones come from their
  /// marks alone, the unknown one and SentencePiece's bytes from what nothing else covers.
  bool is_plain(int32_t id) const {
    const TokenType t = type(id);
    return t == TokenType::normal || t == TokenType::unused || t == TokenType::undefined;
  }
  size_t longest() const { return tokens_.longest(); }
  /// The last token spelled so; -1 when there is none. The first call builds the index; calls
  /// from several threads are fine.
  int32_t find(std::string_view spelling) const;
  /// Ids of the control and user-defined tokens that have a spelling, ascending.
  const std::vector<int32_t>& marked() const { return marked_; }
  /// Ids of the tokens spelled with one or two bytes, ascending.
  const std::vector<int32_t>& shortest() const { return shortest_; }

 private:
  std::vector<int32_t> marked_, shortest_;
  StringList tokens_;
  const gguf::ArrayView* types_;  // (size), or nullptr where the file has none: all normal
  mutable std::once_flag index_once_;
  mutable std::unique_ptr<StringIndex> index_;
};

/// The byte that a spelling of the form <0xXX> stands for; -1 when it is no such spelling.
int byte_of_spelling(std::string_view spelling);

}  // namespace reflex
