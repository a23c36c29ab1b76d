#include "tokenizer/vocabulary.h"

#include <cstring>

#include "base/error.h"

namespace reflex {
namespace {

constexpr const char* kTokens = "tokenizer.ggml.tokens";
constexpr const char* kTypes = "tokenizer.ggml.token_type";
constexpr int64_t kLastType = static_cast<int64_t>(TokenType::byte);

const gguf::ArrayView& require_tokens(const gguf::File& file) {
  const gguf::ArrayView* tokens = file.get_array(kTokens);
  if (!tokens) fail(ErrorKind::tokenizer, "%s: expected an array of strings, found no such key", kTokens);
  if (tokens->count == 0) fail(ErrorKind::tokenizer, "%s: expected at least one token, found none", kTokens);
  return *tokens;
}

}  // namespace

Vocabulary::Vocabulary(const gguf::File& file)
    : tokens_(require_tokens(file),
              [this](int32_t id, std::string_view s) {
                if (s.size() - 1 < 2) shortest_.push_back(id);
              }),
      types_(file.get_array(kTypes)) {
  if (!types_) return;
  if (types_->count != static_cast<uint64_t>(size()))
    fail(ErrorKind::tokenizer, "%s: expected one type for each of %d tokens, found %llu", kTypes, size(),
         static_cast<unsigned long long>(types_->count));
  for (int32_t id = 0; id < size(); ++id) {
    const TokenType t = type(id);
    if ((t == TokenType::control || t == TokenType::user_defined) && !spelling(id).empty())
      marked_.push_back(id);
  }
}

TokenType Vocabulary::type(int32_t id) const {
  if (!types_) return TokenType::normal;
  int64_t t;
  if (types_->type == gguf::ValueType::i32) {  // as every file has it
    int32_t value;
    std::memcpy(&value, types_->data + static_cast<size_t>(id) * sizeof(value), sizeof(value));
    t = value;
  } else {
    t = types_->as_int(static_cast<uint64_t>(id));
  }
  return t >= 0 && t <= kLastType ? static_cast<TokenType>(t) : TokenType::undefined;
}

int32_t Vocabulary::find(std::string_view spelling) const {
  std::call_once(index_once_, [this] {
    auto index = std::make_unique<StringIndex>(size());
    tokens_.each([&](int32_t id, std::string_view s) { index->add(id, s); });
    index_ = std::move(index);
  });
  return index_->find(spelling, tokens_);
}

int byte_of_spelling(std::string_view spelling) {
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
  };
  if (spelling.size() != 6 || spelling.substr(0, 3) != "<0x" || spelling[5] != '>') return -1;
  const int high = digit(spelling[3]), low = digit(spelling[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace reflex
