// Text <-> ids, from GGUF metadata alone: byte-level BPE (Qwen, DeepSeek, Llama 3, GPT-2
// pre-tokenizers) and SentencePiece (llama). Linear in the text. No normalisation: the file
// carries none.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"

namespace reflex {

/// tokenizer.ggml.token_type values.
enum class TokenType : uint8_t {
  undefined = 0,
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

/// A half-open range of the text in Unicode code points.
struct TextSpan {
  size_t begin, end;
};

struct EncodeOptions {
  bool parse_special = true;                  ///< control and user-defined spellings become their ids
  std::span<const TextSpan> literal_spans{};  ///< ranges in which they never do
};

class Tokenizer {
 public:
  /// Throws Error(tokenizer) where the metadata is absent or inconsistent. An unknown
  /// pre-tokenizer is no error: see pre_known().
  /// Tokens and merges are not copied: file must outlive the tokenizer. Its calls may come from
  /// any thread; encode runs one at a time.
  static std::unique_ptr<Tokenizer> from_gguf(const gguf::File& file);
  virtual ~Tokenizer() = default;

  /// Appends the ids of text; no BOS or EOS is added. text must be valid UTF-8
  /// (Error(invalid_input) with the byte offset otherwise).
  virtual void encode(std::string_view text, const EncodeOptions& options,
                      std::vector<int32_t>& ids) const = 0;

  /// What encode() looks at text by text, looked at now: Error(tokenizer) where the vocabulary contradicts
  /// itself. Walks all of it: for reports, never on the way to a token.
  virtual void check() const {}

  /// The raw bytes that a token stands for (bytes of an unfinished character included).
  /// A control token's bytes are its spelling. id must be in [0, size()).
  virtual std::string_view bytes(int32_t id) const = 0;

  virtual int32_t size() const = 0;
  virtual TokenType type(int32_t id) const = 0;
  /// Id of the token spelled exactly so in the vocabulary; -1 when there is none.
  virtual int32_t find(std::string_view spelling) const = 0;

  virtual std::string_view model() const = 0;  ///< tokenizer.ggml.model, e.g. "gpt2", "llama"
  virtual std::string_view pre() const = 0;    ///< tokenizer.ggml.pre; "" when absent
  virtual bool pre_known() const = 0;          ///< false: encode() must not be used

  // Special ids from the metadata, -1 when absent.
  int32_t bos = -1, eos = -1, eot = -1, eom = -1, unk = -1, pad = -1;
  bool add_bos = false;
  /// The end-of-generation set, sorted: eos, eot, eom and the control tokens with the
  /// well-known names of design.md.
  std::vector<int32_t> end_ids;
  bool is_end(int32_t id) const;
  /// Control tokens (type control, and unknown): left out of text under skip_special.
  bool is_control(int32_t id) const {
    return type(id) == TokenType::control || type(id) == TokenType::unknown;
  }
};

/// Turns token bytes into whole UTF-8: bytes of an unfinished character wait for the next
/// token; bytes that can never become one come out as U+FFFD, as Python's 'replace' does.
class Utf8Stream {
 public:
  /// Appends to out every whole character now complete.
  void push(std::string_view bytes, std::string& out);
  /// End of text: what is left comes out as U+FFFD.
  void finish(std::string& out);

 private:
  char pending_[4] = {};
  int n_pending_ = 0;
};

}  // namespace reflex
