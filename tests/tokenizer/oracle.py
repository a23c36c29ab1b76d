"""`tokenizers`, told to do what a GGUF's metadata says: the oracle of the native tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

CONTROL, USER_DEFINED = 3, 4

# DeepSeek-LLM's second Split lists its letters; written here as ranges of code points, since
# several of them are what text tools like to normalise away.
DEEPSEEK_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
    "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
    "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


DEEPSEEK_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
DEEPSEEK_CJK = "4E00-9FA5 800-4E00 AC00-D7FF"
CJK_AND_KANA = "4E00-9FA5 3040-309F 30A0-30FF"
RANGES = (DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, DEEPSEEK_CJK, CJK_AND_KANA)


def char_class(ranges: str) -> str:
    return "[" + "".join("-".join(chr(int(c, 16)) for c in r.split("-")) for r in ranges.split()) + "]"


def split(regex: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


DIGITS: dict[str, object] = {"type": "Digits", "individual_digits": True}
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

# tokenizer.ggml.pre -> the stages of the models' tokenizer.json; "default" is llama.cpp's.
STAGES: dict[str, list[dict[str, object]]] = {
    "qwen2": [split(QWEN2)],
    "qwen35": [split(QWEN35)],
    "llama-bpe": [split(LLAMA3)],
    "gpt-2": [split(GPT2)],
    "smollm": [DIGITS, split(GPT2)],
    "deepseek-llm": [
        split("[\r\n]"),
        split(r"\s?" + char_class(DEEPSEEK_LETTERS) + "+"),
        split(r"\s?" + char_class(DEEPSEEK_PUNCTUATION) + "+"),
        split(r"\s+$"),
        split(char_class(DEEPSEEK_CJK) + "+"),
        DIGITS,
    ],
    "deepseek-coder": [
        split("[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        split(char_class(DEEPSEEK_CJK) + "+"),
        DIGITS,
    ],
    "deepseek-v3": [
        split(r"\p{N}{1,3}"),
        split(char_class(CJK_AND_KANA) + "+"),
        split(DEEPSEEK3),
    ],
    "default": [
        split(r"[\p{P}\$\+<=>\^~\|]+"),
        split(GPT2.removesuffix(r"|\s+")),
        split(r"\p{N}+"),
        split("[0-9][0-9][0-9]"),
    ],
}
ALIASES = {
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
    "joyai-llm": "deepseek-v3",
    "hunyuan-dense": "deepseek-v3",
    "phi-2": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "": "default",
}
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def pre_tokenizer(stages: Sequence[dict[str, object]]) -> PreTokenizer:
    """The Python package builds a pre-tokenizer from JSON only as part of a whole tokenizer."""
    tokenizer = json.loads(Tokenizer(BPE()).to_str())
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(stages)}
    return Tokenizer.from_str(json.dumps(tokenizer)).pre_tokenizer  # type: ignore[return-value]


def stages_of(pre: str) -> list[dict[str, object]]:
    return STAGES[ALIASES.get(pre, pre)]


def words(pre: str) -> PreTokenizer:
    """Splits text into words, as text."""
    return pre_tokenizer(stages_of(pre))


def build(pre: str, tokens: Sequence[str], merges: Sequence[str], types: Sequence[int] = ()) -> Tokenizer:
    """A tokenizer of the whole: control and user-defined tokens are recognised in text."""
    pairs = [(a, b) for a, b in (m.split(" ") for m in merges)]
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=pre in IGNORE_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizer([*stages_of(pre), BYTE_LEVEL])  # type: ignore[assignment]
    tokenizer.decoder = ByteLevel()  # type: ignore[assignment]
    marked = [t for t, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=True) for t in marked])
    return tokenizer
