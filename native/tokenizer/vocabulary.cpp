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

Vocabulary::Vocabulary(const gguf::File& file) : tokens_(require_tokens(file)) {
  if (const gguf::ArrayView* types = file.get_array(kTypes)) read_types(*types);
  for (int32_t id = 0; id < static_cast<int32_t>(types_.size()); ++id) {
    const TokenType t = types_[id];
    if ((t == TokenType::control || t == TokenType::user_defined) && !spelling(id).empty())
      marked_.push_back(id);
  }
}

void Vocabulary::read_types(const gguf::ArrayView& types) {
  if (types.count != static_cast<uint64_t>(size()))
    fail(ErrorKind::tokenizer, "%s: expected one type for each of %d tokens, found %llu", kTypes, size(),
         static_cast<unsigned long long>(types.count));
  types_.resize(types.count);
  const auto known = [](int64_t t) {
    return t >= 0 && t <= kLastType ? static_cast<TokenType>(t) : TokenType::undefined;
  };
  if (types.type == gguf::ValueType::i32 || types.type == gguf::ValueType::u32) {  // as every file has it
    for (size_t i = 0; i < types_.size(); ++i) {
      int32_t t;
      std::memcpy(&t, types.data + i * sizeof(t), sizeof(t));
      types_[i] = known(t);
    }
  } else {
    for (size_t i = 0; i < types_.size(); ++i) types_[i] = known(types.as_int(i));
  }
}

int32_t Vocabulary::find(std::string_view spelling) const {
  std::call_once(index_once_, [this] { index_ = std::make_unique<StringIndex>(tokens_); });
  return index_->find(spelling);
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
