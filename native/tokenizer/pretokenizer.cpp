#include "tokenizer/pretokenizer.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "tokenizer/unicode.h"

namespace reflex {
namespace {

// ASCII is most of most text: its classes in one small table.
constexpr unsigned ascii_class(uint8_t c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return kLetter;
  if (c >= '0' && c <= '9') return kNumber;
  if (c == ' ' || (c >= '\t' && c <= '\r')) return kSpace;
  if (c == '$' || c == '+' || c == '<' || c == '=' || c == '>' || c == '^' || c == '`' || c == '|' ||
      c == '~')
    return kSymbol;
  if (c > ' ' && c < 0x7F) return kPunctuation;
  return class_bit(CharClass::other);
}
constexpr auto kAsciiClass = [] {
  std::array<uint8_t, 128> table{};
  for (int c = 0; c < 128; ++c) table[c] = static_cast<uint8_t>(ascii_class(static_cast<uint8_t>(c)));
  return table;
}();

bool is_newline(uint32_t c) { return c == '\r' || c == '\n'; }

// --- Parts that the regexes share ---------------------------------------------------------------

/// X* for a test of one character.
template <class Test>
size_t run_of(Scanner& s, size_t pos, size_t end, Test test) {
  while (pos < end) {
    const auto c = s.at(pos);
    if (!test(c)) break;
    pos += c.n_bytes;
  }
  return pos;
}
size_t run_of_class(Scanner& s, size_t pos, size_t end, unsigned set) {
  return run_of(s, pos, end, [set](const Scanner::At& c) { return (c.cls & set) != 0; });
}
size_t run_of_newlines(Scanner& s, size_t pos, size_t end) {
  return run_of(s, pos, end, [](const Scanner::At& c) { return is_newline(c.code_point); });
}

/// The characters that c matches under (?i): U+017F folds to s, nothing else here is special.
bool equals_folded(uint32_t c, char lower) {
  return c == static_cast<uint32_t>(lower) || c == static_cast<uint32_t>(lower - 'a' + 'A') ||
         (lower == 's' && c == 0x17F);
}

/// 's|'t|'re|'ve|'m|'ll|'d, or the same under (?i).
template <bool ignore_case>
size_t contraction(Scanner& s, size_t pos, size_t end) {
  if (s.at(pos).code_point != '\'' || pos + 1 >= end) return pos;
  const auto same = [](uint32_t c, char lower) {
    return ignore_case ? equals_folded(c, lower) : c == static_cast<uint32_t>(lower);
  };
  const auto first = s.at(pos + 1);
  for (const char c : {'s', 't', 'm', 'd'})
    if (same(first.code_point, c)) return pos + 1 + first.n_bytes;
  if (pos + 2 >= end || first.n_bytes != 1) return pos;
  const auto second = s.at(pos + 2);
  for (const char* pair : {"re", "ve", "ll"})
    if (same(first.code_point, pair[0]) && same(second.code_point, pair[1])) return pos + 3;
  return pos;
}

/// \s*[\r\n]+|\s+(?!\S)|\s+ (with_newlines) or \s+(?!\S)|\s+. One look at the run decides all
/// three: the match ends after its last newline, else before its last character where
/// something follows, and at that character alone when the run has no other.
size_t spaces(Scanner& s, size_t pos, size_t end, bool with_newlines) {
  size_t at = pos, last = pos, after_newline = pos;
  while (at < end) {
    const auto c = s.at(at);
    if (c.cls != kSpace) break;
    last = at;
    at += c.n_bytes;
    if (is_newline(c.code_point)) after_newline = at;
  }
  if (with_newlines && after_newline > pos) return after_newline;
  return at == end || last == pos ? at : last;
}

/// " ?[set]+", or " ?[^...]+" with the complement as set.
size_t optional_blank_then(Scanner& s, size_t pos, size_t end, unsigned set) {
  const size_t from = s.at(pos).code_point == ' ' ? pos + 1 : pos;
  const size_t to = run_of_class(s, from, end, set);
  return to > from ? to : pos;
}

/// \s?[...]+ by a test; a space that is itself of the set (U+3000) may begin the run.
template <class Test>
size_t optional_space_then(Scanner& s, size_t pos, size_t end, Test test) {
  const auto c = s.at(pos);
  if (c.cls == kSpace) {
    const size_t from = pos + c.n_bytes;
    const size_t to = run_of(s, from, end, test);
    if (to > from) return to;
  }
  return run_of(s, pos, end, test);
}

/// [^\r\n...]?[body]+ where bits of `never` may not be the first character.
size_t prefixed_word(Scanner& s, size_t pos, size_t end, unsigned body, unsigned never) {
  const auto c = s.at(pos);
  if (c.cls & body) return run_of_class(s, pos, end, body);
  if ((c.cls & never) || is_newline(c.code_point)) return pos;
  const size_t from = pos + c.n_bytes;
  const size_t to = run_of_class(s, from, end, body);
  return to > from ? to : pos;
}

constexpr unsigned kAllClasses = 0xFF;

// --- Whole regexes ------------------------------------------------------------------------------

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[L]+|\p{N}{1,D}| ?[^\s L \p{N}]+[\r\n]*
//   |\s*[\r\n]+|\s+(?!\S)|\s+
// L is \p{L} (Qwen2, Llama 3) or \p{L}\p{M} (Qwen3.5); D is 1 (Qwen) or 3 (Llama 3).
template <unsigned word, int max_digits>
size_t modern(Scanner& s, size_t pos, size_t end) {
  if (const size_t e = contraction<true>(s, pos, end); e > pos) return e;
  if (const size_t e = prefixed_word(s, pos, end, word, kLetter | kNumber); e > pos) return e;
  const auto c = s.at(pos);
  if (c.cls == kNumber) {
    size_t e = pos;
    for (int i = 0; i < max_digits && e < end; ++i) {
      const auto d = s.at(e);
      if (d.cls != kNumber) break;
      e += d.n_bytes;
    }
    return e;
  }
  if (const size_t e = optional_blank_then(s, pos, end, kAllClasses & ~(kSpace | word | kNumber)); e > pos)
    return run_of_newlines(s, e, end);
  return spaces(s, pos, end, true);
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t gpt2(Scanner& s, size_t pos, size_t end) {
  if (const size_t e = contraction<false>(s, pos, end); e > pos) return e;
  for (const unsigned set : {kLetter, kNumber, kAllClasses & ~(kSpace | kLetter | kNumber)})
    if (const size_t e = optional_blank_then(s, pos, end, set); e > pos) return e;
  return spaces(s, pos, end, false);
}

// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
//   | ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
size_t deepseek_v3(Scanner& s, size_t pos, size_t end) {
  const auto c = s.at(pos);
  if (c.code_point < 0x80 && (c.cls & (kPunctuation | kSymbol))) {
    const size_t e =
        run_of(s, pos + 1, end, [](const Scanner::At& d) { return d.code_point < 0x80 && d.cls == kLetter; });
    if (e > pos + 1) return e;
  }
  if (const size_t e = prefixed_word(s, pos, end, kLetter | kMark, kLetter | kPunctuation | kSymbol); e > pos)
    return e;
  if (const size_t e = optional_blank_then(s, pos, end, kPunctuation | kSymbol); e > pos)
    return run_of_newlines(s, e, end);
  return spaces(s, pos, end, true);
}

// \p{N}{1,3}
size_t up_to_three_numbers(Scanner& s, size_t pos, size_t end) {
  size_t e = pos;
  for (int i = 0; i < 3 && e < end; ++i) {
    const auto c = s.at(e);
    if (c.cls != kNumber) break;
    e += c.n_bytes;
  }
  return e;
}
// \p{N}+
size_t numbers(Scanner& s, size_t pos, size_t end) { return run_of_class(s, pos, end, kNumber); }
// Digits with individual_digits
size_t digit(Scanner& s, size_t pos, size_t) {
  const auto c = s.at(pos);
  return c.cls & (kNumber | kNumberDigits) ? pos + c.n_bytes : pos;
}
// [0-9][0-9][0-9]
size_t three_ascii_digits(Scanner& s, size_t pos, size_t end) {
  if (end - pos < 3) return pos;
  for (size_t i = pos; i < pos + 3; ++i) {
    const auto c = s.at(i);
    if (c.code_point < '0' || c.code_point > '9') return pos;
  }
  return pos + 3;
}
// [一-龥぀-ゟ゠-ヿ]+
size_t cjk_and_kana(Scanner& s, size_t pos, size_t end) {
  return run_of(s, pos, end, [](const Scanner::At& c) {
    return (c.code_point >= 0x4E00 && c.code_point <= 0x9FA5) ||
           (c.code_point >= 0x3040 && c.code_point <= 0x30FF);
  });
}
// [一-龥ࠀ-一가-퟿]+
size_t deepseek_cjk(Scanner& s, size_t pos, size_t end) {
  return run_of(s, pos, end, [](const Scanner::At& c) {
    return (c.code_point >= 0x0800 && c.code_point <= 0x9FA5) ||
           (c.code_point >= 0xAC00 && c.code_point <= 0xD7FF);
  });
}
// [\r\n]
size_t newline(Scanner& s, size_t pos, size_t) { return is_newline(s.at(pos).code_point) ? pos + 1 : pos; }
// [\p{P}\$\+<=>\^~\|]+
size_t default_punctuation(Scanner& s, size_t pos, size_t end) {
  return run_of(s, pos, end, [](const Scanner::At& c) {
    return c.cls == kPunctuation || (c.cls == kSymbol && c.code_point < 0x80 && c.code_point != '`');
  });
}
// \s?\p{L}+
size_t space_letters(Scanner& s, size_t pos, size_t end) {
  return optional_space_then(s, pos, end, [](const Scanner::At& c) { return c.cls == kLetter; });
}
// \s?\p{P}+
size_t space_punctuation(Scanner& s, size_t pos, size_t end) {
  return optional_space_then(s, pos, end, [](const Scanner::At& c) { return c.cls == kPunctuation; });
}

// The letters of DeepSeek-LLM's tokenizer.json, its second Split: cased letters of some older
// Unicode version, written out.
struct Range {
  uint32_t first, last;
};
constexpr Range kDeepseekLetters[] = {
    {0x41, 0x5A},       {0x61, 0x7A},       {0xB5, 0xB5},       {0xC0, 0xD6},       {0xD8, 0xF6},
    {0xF8, 0x1BA},      {0x1BC, 0x1BF},     {0x1C4, 0x293},     {0x295, 0x2AF},     {0x370, 0x373},
    {0x376, 0x377},     {0x37B, 0x37D},     {0x37F, 0x37F},     {0x386, 0x386},     {0x388, 0x38A},
    {0x38C, 0x38C},     {0x38E, 0x3A1},     {0x3A3, 0x3F5},     {0x3F7, 0x481},     {0x48A, 0x52F},
    {0x531, 0x556},     {0x10A0, 0x10C5},   {0x13A0, 0x13F5},   {0x13F8, 0x13FD},   {0x1C90, 0x1CBA},
    {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},   {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},   {0x1E00, 0x1F15},
    {0x1F18, 0x1F1D},   {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},   {0x1F50, 0x1F57},   {0x1F59, 0x1F59},
    {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},   {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},   {0x1FB6, 0x1FBC},
    {0x1FBE, 0x1FBE},   {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},   {0x1FD0, 0x1FD3},   {0x1FD6, 0x1FDB},
    {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},   {0x1FF6, 0x1FFC},   {0x2102, 0x2102},   {0x2107, 0x2107},
    {0x210A, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211D},   {0x2124, 0x2124},   {0x2126, 0x2126},
    {0x2128, 0x2128},   {0x212A, 0x212D},   {0x212F, 0x2134},   {0x2139, 0x2139},   {0x213C, 0x213F},
    {0x2145, 0x2149},   {0x214E, 0x214E},   {0x2183, 0x2184},   {0x2C00, 0x2C7B},   {0x2C7E, 0x2CE4},
    {0x2CEB, 0x2CEE},   {0x2CF2, 0x2CF3},   {0xA640, 0xA66D},   {0xA680, 0xA69B},   {0xA722, 0xA76F},
    {0xA771, 0xA787},   {0xA78B, 0xA78E},   {0xAB70, 0xABBF},   {0xFB00, 0xFB06},   {0xFB13, 0xFB17},
    {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},   {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB},
    {0x10C80, 0x10CB2}, {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF}, {0x1E900, 0x1E943},
};
bool is_deepseek_letter(const Scanner::At& c) {
  if (c.code_point < 0x80) return c.cls == kLetter;
  const auto* after = std::upper_bound(std::begin(kDeepseekLetters), std::end(kDeepseekLetters), c.code_point,
                                       [](uint32_t cp, const Range& r) { return cp < r.first; });
  return after != std::begin(kDeepseekLetters) && c.code_point <= after[-1].last;
}
// \s?[A-Za-zµÀ-ÖØ-ö...]+
size_t deepseek_letters(Scanner& s, size_t pos, size_t end) {
  return optional_space_then(s, pos, end, is_deepseek_letter);
}
// \s?[!-/:-~！-／：-～‘-‟　-。]+
size_t deepseek_punctuation(Scanner& s, size_t pos, size_t end) {
  return optional_space_then(s, pos, end, [](const Scanner::At& at) {
    const uint32_t c = at.code_point;
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '~') || (c >= 0xFF01 && c <= 0xFF0F) ||
           (c >= 0xFF1A && c <= 0xFF5E) || (c >= 0x2018 && c <= 0x201F) || (c >= 0x3000 && c <= 0x3002);
  });
}

// --- Stages: the first match at or after pos ----------------------------------------------------

/// A regex that matches at one position, tried at each.
template <size_t (*match)(Scanner&, size_t pos, size_t end)>
Match each(Scanner& s, size_t pos, size_t end) {
  while (pos < end) {
    const size_t e = match(s, pos, end);
    if (e > pos) return {pos, e};
    pos += s.at(pos).n_bytes;
  }
  return {end, end};
}

// \s+$, found from the end: from the front, every run that does not reach it would be looked at
// once for each of its positions.
Match trailing_spaces(Scanner& s, size_t pos, size_t end) {
  size_t begin = end;
  while (begin > pos) {
    const size_t before = s.before(begin);
    if (s.at(before).cls != kSpace) break;
    begin = before;
  }
  return {begin, end};
}

constexpr Stage kQwen2 = each<modern<kLetter, 1>>;
constexpr Stage kQwen35 = each<modern<kLetter | kMark, 1>>;
constexpr Stage kLlama3 = each<modern<kLetter, 3>>;
constexpr Stage kGpt2 = each<gpt2>;
constexpr Stage kDigits = each<digit>;

// What each name stands for. The regexes are those of the models' tokenizer.json; "default" is
// llama.cpp's for files that name none. Names whose regex we have not seen are left out: they
// go to the fallback, which says so.
constexpr PreTokenizer kKnown[] = {
    {"qwen2", {kQwen2}, false, false},
    {"deepseek-r1-qwen", {kQwen2}, false, false},
    {"stablelm2", {kQwen2}, false, false},
    {"qwen35", {kQwen35}, false, false},
    {"llama-bpe", {kLlama3}, true, true},
    {"llama3", {kLlama3}, true, true},
    {"llama-v3", {kLlama3}, true, true},
    {"smaug-bpe", {kLlama3}, false, false},
    {"dbrx", {kLlama3}, false, false},
    {"deepseek-v3", {each<up_to_three_numbers>, each<cjk_and_kana>, each<deepseek_v3>}, false, false},
    {"joyai-llm", {each<up_to_three_numbers>, each<cjk_and_kana>, each<deepseek_v3>}, false, false},
    {"hunyuan-dense", {each<up_to_three_numbers>, each<cjk_and_kana>, each<deepseek_v3>}, false, false},
    {"deepseek-llm",
     {each<newline>, each<deepseek_letters>, each<deepseek_punctuation>, trailing_spaces, each<deepseek_cjk>,
      kDigits},
     false,
     false},
    {"deepseek-coder",
     {each<newline>, each<space_letters>, each<space_punctuation>, each<deepseek_cjk>, kDigits},
     false,
     false},
    {"gpt-2", {kGpt2}, false, false},
    {"phi-2", {kGpt2}, false, false},
    {"olmo", {kGpt2}, false, false},
    {"smollm", {kDigits, kGpt2}, false, false},
    {"starcoder", {kDigits, kGpt2}, false, false},
    {"refact", {kDigits, kGpt2}, false, false},
    {"command-r", {kDigits, kGpt2}, false, false},
    {"default", {each<default_punctuation>, kGpt2, each<numbers>, each<three_ascii_digits>}, false, false},
};

struct Splitter {
  const PreTokenizer& pre;
  Scanner& text;
  PreTokenizer::Emit emit;
  void* context;

  /// Splits [begin, end) by this stage; matches and what lies between them go on to the next.
  void run(int stage, size_t begin, size_t end) {
    if (stage == PreTokenizer::kMaxStages || pre.stages[stage] == nullptr) {
      emit(context, begin, end);
      return;
    }
    while (begin < end) {
      const Match match = pre.stages[stage](text, begin, end);
      if (match.begin > begin) run(stage + 1, begin, match.begin);
      if (match.end > match.begin) run(stage + 1, match.begin, match.end);
      begin = match.end;
    }
  }
};

}  // namespace

Scanner::At Scanner::at(size_t pos) {
  ++looked_at_;
  const uint8_t lead = static_cast<uint8_t>(text_[pos]);
  if (lead < 0x80) return {lead, 1, kAsciiClass[lead]};
  const Character c = utf8_decode(text_ + pos);
  return {c.code_point, c.n_bytes, class_bit(char_class(c.code_point))};
}

size_t Scanner::before(size_t pos) const {
  do --pos;
  while ((static_cast<uint8_t>(text_[pos]) & 0xC0) == 0x80);
  return pos;
}

const PreTokenizer* PreTokenizer::find(std::string_view name) {
  if (name.empty()) name = "default";
  for (const PreTokenizer& pre : kKnown)
    if (name == pre.name) return &pre;
  return nullptr;
}

void PreTokenizer::split(Scanner& text, size_t begin, size_t end, Emit emit, void* context) const {
  if (begin < end) Splitter{*this, text, emit, context}.run(0, begin, end);
}

}  // namespace reflex
