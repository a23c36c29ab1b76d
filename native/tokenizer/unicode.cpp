#include "tokenizer/unicode.h"

#include <array>
#include <cstring>
#include <string>

#include "tokenizer/tokenizer.h"

namespace reflex {
namespace {

#include "tokenizer/unicode_tables.inc"

constexpr int kBlockBits = 7;  // code points per block, as in make_unicode_tables.py
constexpr uint32_t kCodePoints = 0x110000;

constexpr auto expand_blocks() {
  std::array<uint8_t, (kCodePoints >> kBlockBits)> blocks{};
  size_t at = 0;
  for (const auto& run : kBlockRuns)
    for (int i = 0; i < run.count; ++i) blocks[at++] = run.block;
  return blocks;
}
constexpr auto kBlocks = expand_blocks();

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

CharClass char_class(uint32_t code_point) {
  if (code_point >= kCodePoints) return CharClass::other;
  const uint32_t at = code_point & ((1u << kBlockBits) - 1);
  const uint64_t word = kBlockWords[kBlocks[code_point >> kBlockBits] * 8u + (at >> 4)];
  return static_cast<CharClass>((word >> ((at & 15) * 4)) & 15);
}

int utf8_length(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;  // a continuation byte, or an overlong two-byte form
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

bool utf8_continues(uint8_t lead, int index, uint8_t byte) {
  uint8_t low = 0x80, high = 0xBF;
  if (index == 1) {
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  }
  return byte >= low && byte <= high;
}

size_t utf8_error(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080ull;
  size_t at = 0;
  while (at < text.size()) {
    uint64_t word;
    while (at + sizeof(word) <= text.size()) {  // ASCII, eight at a time
      std::memcpy(&word, text.data() + at, sizeof(word));
      if (word & kHighBits) break;
      at += sizeof(word);
    }
    if (at == text.size()) break;
    const uint8_t lead = static_cast<uint8_t>(text[at]);
    const int n = utf8_length(lead);
    if (n == 0 || text.size() - at < static_cast<size_t>(n)) return at;
    for (int i = 1; i < n; ++i)
      if (!utf8_continues(lead, i, static_cast<uint8_t>(text[at + i]))) return at;
    at += n;
  }
  return std::string_view::npos;
}

void Utf8Stream::push(std::string_view bytes, std::string& out) {
  for (const char c : bytes) {
    const uint8_t byte = static_cast<uint8_t>(c);
    if (n_pending_ > 0) {
      const uint8_t lead = static_cast<uint8_t>(pending_[0]);
      if (utf8_continues(lead, n_pending_, byte)) {
        pending_[n_pending_++] = c;
        if (n_pending_ < utf8_length(lead)) continue;
        out.append(pending_, n_pending_);
        n_pending_ = 0;
        continue;
      }
      // The longest beginning of a character becomes one U+FFFD; this byte starts afresh.
      out += kReplacement;
      n_pending_ = 0;
    }
    const int n = utf8_length(byte);
    if (n == 1) {
      out += c;
    } else if (n == 0) {
      out += kReplacement;
    } else {
      pending_[n_pending_++] = c;
    }
  }
}

void Utf8Stream::finish(std::string& out) {
  if (n_pending_ > 0) out += kReplacement;
  n_pending_ = 0;
}

}  // namespace reflex
