// What both kinds of tokenizer share: the text is checked, cut at control tokens, and the plain
// pieces between them given to the kind; special ids and defaults read from the metadata.
#pragma once
#include <mutex>
#include <string>
#include <unordered_map>

#include "tokenizer/marked_tokens.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocabulary.h"

namespace reflex {

class BaseTokenizer : public Tokenizer {
 public:
  void encode(std::string_view text, const EncodeOptions& options, std::vector<int32_t>& ids) const override;
  std::string_view bytes(int32_t id) const override;
  int32_t size() const override { return vocabulary_.size(); }
  TokenType type(int32_t id) const override { return vocabulary_.type(id); }
  int32_t find(std::string_view spelling) const override { return vocabulary_.find(spelling); }

  /// Operations of all encode calls so far (characters looked at, merge steps): what tests hold
  /// linear in the text, since a clock can't be trusted.
  uint64_t work() const;

 protected:
  explicit BaseTokenizer(const gguf::File& file);
  const Vocabulary& vocabulary() const { return vocabulary_; }

  /// Appends the ids of [begin, end) of text, which holds no control token to be recognised and
  /// is not empty; before it is nothing or a control token. One call at a time.
  virtual void encode_plain(std::string_view text, size_t begin, size_t end,
                            std::vector<int32_t>& ids) const = 0;
  /// The bytes of a token of type normal, unused or undefined whose spelling is not them;
  /// false: the spelling is.
  virtual bool decode(std::string_view spelling, std::string& bytes) const = 0;
  virtual uint64_t plain_work() const = 0;

  /// What a byte without a token becomes: the unknown token, or Error(tokenizer).
  int32_t unknown_for(uint8_t byte) const;

 private:
  void read_special_ids(const gguf::File& file);
  void collect_end_ids();
  std::vector<MarkedToken> find_marked(std::string_view text, std::span<const TextSpan> literal) const;

  Vocabulary vocabulary_;
  MarkedTokenFinder marked_;
  mutable std::mutex encoding_;
  mutable uint64_t searched_ = 0;  // steps of marked_.find
  mutable std::mutex decoding_;
  mutable std::unordered_map<int32_t, std::string> decoded_;  // made when first asked for; stable addresses
};

std::unique_ptr<Tokenizer> make_bpe_tokenizer(const gguf::File& file);
std::unique_ptr<Tokenizer> make_spm_tokenizer(const gguf::File& file);

}  // namespace reflex
