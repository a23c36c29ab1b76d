#include "tokenizer/base_tokenizer.h"

#include <algorithm>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace reflex {
namespace {

// Positions inside words are 32 bits wide, and SentencePiece makes three bytes of a space.
constexpr size_t kMaxTextBytes = size_t{1} << 30;
// Bound of the automaton that finds control tokens (about 32 bytes a character): real files have
// less than 64 KiB of spellings.
constexpr size_t kMaxMarkedBytes = size_t{16} << 20;

// Control tokens that end a generation whatever ids the metadata names.
constexpr std::string_view kEndNames[] = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<\xEF\xBD\x9C"  // U+FF5C, then U+2581 between the words
    "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>",
    "</s>",
};

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::from_gguf(const gguf::File& file) {
  const auto model = file.get_string("tokenizer.ggml.model");
  if (!model) fail(ErrorKind::tokenizer, "tokenizer.ggml.model: expected a string, found no such key");
  if (*model == "gpt2") return make_bpe_tokenizer(file);
  if (*model == "llama") return make_spm_tokenizer(file);
  fail(ErrorKind::tokenizer, "tokenizer.ggml.model: expected 'gpt2' or 'llama', found '%.*s'",
       static_cast<int>(std::min<size_t>(model->size(), 64)), model->data());
}

bool Tokenizer::is_end(int32_t id) const { return std::binary_search(end_ids.begin(), end_ids.end(), id); }

BaseTokenizer::BaseTokenizer(const gguf::File& file) : vocabulary_(file) {
  size_t spelled = 0;
  for (const int32_t id : vocabulary_.marked()) {
    spelled += vocabulary_.spelling(id).size();
    if (spelled > kMaxMarkedBytes)
      fail(ErrorKind::tokenizer,
           "tokenizer.ggml.tokens: expected at most %zu bytes of control tokens, found more",
           kMaxMarkedBytes);
    marked_.add(vocabulary_.spelling(id), id);
  }
  marked_.finish();
  read_special_ids(file);
  collect_end_ids();
}

void BaseTokenizer::read_special_ids(const gguf::File& file) {
  // An id that no token has counts as absent, as in llama.cpp: such files exist.
  const auto read = [&](const char* key) {
    const auto id = file.get_uint(key);
    return id && *id < static_cast<uint64_t>(size()) ? static_cast<int32_t>(*id) : -1;
  };
  bos = read("tokenizer.ggml.bos_token_id");
  eos = read("tokenizer.ggml.eos_token_id");
  eot = read("tokenizer.ggml.eot_token_id");
  eom = read("tokenizer.ggml.eom_token_id");
  unk = read("tokenizer.ggml.unknown_token_id");
  pad = read("tokenizer.ggml.padding_token_id");
}

void BaseTokenizer::collect_end_ids() {
  for (const int32_t id : {eos, eot, eom})
    if (id >= 0) end_ids.push_back(id);
  for (const int32_t id : vocabulary_.marked())
    if (type(id) == TokenType::control && std::find(std::begin(kEndNames), std::end(kEndNames),
                                                    vocabulary_.spelling(id)) != std::end(kEndNames))
      end_ids.push_back(id);
  std::sort(end_ids.begin(), end_ids.end());
  end_ids.erase(std::unique(end_ids.begin(), end_ids.end()), end_ids.end());
}

void BaseTokenizer::encode(std::string_view text, const EncodeOptions& options,
                           std::vector<int32_t>& ids) const {
  if (!pre_known())
    fail(ErrorKind::tokenizer, "tokenizer.ggml.pre '%.*s' is not known", static_cast<int>(pre().size()),
         pre().data());
  if (text.size() > kMaxTextBytes)
    fail(ErrorKind::invalid_input, "the text has %zu bytes, expected at most %zu", text.size(),
         kMaxTextBytes);
  if (const size_t at = utf8_error(text); at != std::string_view::npos)
    fail(ErrorKind::invalid_input, "the text is not valid UTF-8 at byte %zu (0x%02X)", at,
         static_cast<unsigned>(static_cast<uint8_t>(text[at])));
  const std::lock_guard lock(encoding_);
  std::vector<MarkedToken> marked;
  if (options.parse_special && !marked_.empty()) marked = find_marked(text, options.literal_spans);

  size_t at = 0;
  for (const MarkedToken& token : marked) {
    if (token.begin > at) encode_plain(text, at, token.begin, ids);
    ids.push_back(token.id);
    at = token.end;
  }
  if (at < text.size()) encode_plain(text, at, text.size(), ids);
}

std::vector<MarkedToken> BaseTokenizer::find_marked(std::string_view text,
                                                    std::span<const TextSpan> literal) const {
  std::vector<MarkedToken> found;
  if (literal.empty()) {
    searched_ += marked_.find(text, 0, text.size(), found);
    return found;
  }
  std::vector<TextSpan> spans(literal.begin(), literal.end());
  std::sort(spans.begin(), spans.end(),
            [](const TextSpan& a, const TextSpan& b) { return a.begin < b.begin; });
  // Walks the text once; n is the code point at byte `at`.
  size_t at = 0, n = 0;
  const auto byte_of = [&](size_t code_point) {
    while (n < code_point && at < text.size()) {
      at += utf8_decode(text.data() + at).n_bytes;
      ++n;
    }
    return at;
  };
  size_t free_from = 0;  // bytes; up to here everything is searched or literal
  for (const TextSpan& span : spans) {
    if (span.begin > span.end)
      fail(ErrorKind::invalid_input, "literal_spans: [%zu, %zu) ends before it begins", span.begin, span.end);
    if (span.begin == span.end) continue;
    if (span.begin > n) searched_ += marked_.find(text, free_from, byte_of(span.begin), found);
    free_from = byte_of(span.end);  // where it is, when the span lies inside an earlier one
    if (n < span.end)
      fail(ErrorKind::invalid_input,
           "literal_spans: [%zu, %zu) ends after the text, which has %zu code points", span.begin, span.end,
           n);
  }
  searched_ += marked_.find(text, free_from, text.size(), found);
  return found;
}

std::string_view BaseTokenizer::bytes(int32_t id) const {
  const std::string_view spelling = vocabulary_.spelling(id);
  std::string raw;
  switch (type(id)) {
    case TokenType::control:
    case TokenType::user_defined:
    case TokenType::unknown:
      return spelling;
    case TokenType::byte:
      if (const int byte = byte_of_spelling(spelling); byte >= 0) {
        raw.assign(1, static_cast<char>(byte));
        break;
      }
      return spelling;
    default:
      if (!decode(spelling, raw)) return spelling;
  }
  const std::lock_guard lock(decoding_);
  return decoded_.try_emplace(id, std::move(raw)).first->second;
}

int32_t BaseTokenizer::unknown_for(uint8_t byte) const {
  if (unk < 0)
    fail(ErrorKind::tokenizer, "the vocabulary has no token for byte 0x%02X and none for unknown", byte);
  return unk;
}

uint64_t BaseTokenizer::work() const {
  const std::lock_guard lock(encoding_);
  return searched_ + plain_work();
}

}  // namespace reflex
