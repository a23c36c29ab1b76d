"""The `tokenizers` package in the native tokenizer's place, for files whose pre-tokenizer the core
does not know: their vocabulary and merges under GPT-2's byte-level regex, which is near what most of
them mean and exactly what none of them promises. Says so once, on stderr.

Only text to ids: the core turns ids into text whatever the pre-tokenizer is called. The package is
imported when the first such file is opened, never before.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._native import ReflexError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

_told: set[str] = set()  # the names that stderr has heard of


def _refuse(kind: str, message: str) -> ReflexError:
    from ._native import ReflexError

    error = ReflexError(message)
    error.kind = kind
    return error


def _read_native(path: str) -> tuple[Callable[[str], Any], dict[str, str]]:
    """Reads arrays of a file by key; and its scalars, as text."""
    from ._native import gguf_array, gguf_info

    return lambda key: gguf_array(path, key), gguf_info(path)["metadata"]


class FallbackTokenizer:
    """Text to ids for one GGUF whose tokenizer.ggml.model is "gpt2".

    read_array and scalars stand in for the core in tests: a metadata array by its key (strings as
    bytes, None when absent), and the scalars by theirs as text.
    Raises ReflexError: `tokenizer` where the package is missing or the vocabulary makes no sense.
    """

    def __init__(
        self,
        path: str,
        read_array: Callable[[str], Any] | None = None,
        scalars: dict[str, str] | None = None,
    ) -> None:
        if read_array is None or scalars is None:
            read_array, scalars = _read_native(path)
        self.pre = scalars.get("tokenizer.ggml.pre", "")
        model = scalars.get("tokenizer.ggml.model", "")
        if model != "gpt2":
            raise _refuse("tokenizer", f"tokenizer.ggml.model: expected 'gpt2', found {model!r}")
        tokens = _strings(read_array, "tokenizer.ggml.tokens")
        merges = _strings(read_array, "tokenizer.ggml.merges")
        types = read_array("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise _refuse(
                "tokenizer", f"tokenizer.ggml.token_type: expected {len(tokens)} types, found {len(types)}"
            )
        self._marked = {
            t: i
            for i, (t, k) in enumerate(zip(tokens, types, strict=True))
            if t and k in (_CONTROL, _USER_DEFINED)
        }
        # Longest first: of alternatives that begin at one place, re takes the first.
        spellings = sorted(self._marked, key=lambda t: len(t.encode()), reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._bos = _token_id(scalars.get("tokenizer.ggml.bos_token_id"), len(tokens))
        self._add_bos = scalars.get("tokenizer.ggml.add_bos_token") == "true"
        self._tokenizer = _build(self.pre, tokens, merges, self._marked)
        alphabet = _alphabet()
        vocabulary = self._tokenizer.get_vocab()
        self._missing = {byte for byte, character in alphabet.items() if character not in vocabulary}
        if self.pre not in _told:
            _told.add(self.pre)
            print(
                f"reflex: tokenizer.ggml.pre {self.pre!r} is not known; splitting words as GPT-2 does, "
                "through the tokenizers package (ids may differ from the model's own)",
                file=sys.stderr,
                flush=True,
            )

    def tokenize(
        self,
        text: str,
        *,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
        add_bos: bool | None = None,
    ) -> list[int]:
        """The ids of a text, under the rules of Engine.tokenize.

        Raises ReflexError: `invalid_input` for a span outside the text or a lone surrogate,
        `tokenizer` for a byte that no token stands for.
        """
        ids: list[int] = []
        at = 0
        for begin, end in self._find_marked(text, literal_spans) if parse_special else ():
            self._encode(text[at:begin], ids)
            ids.append(self._marked[text[begin:end]])
            at = end
        self._encode(text[at:], ids)
        wanted = self._add_bos if add_bos is None else add_bos
        if wanted and self._bos >= 0 and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def _find_marked(self, text: str, literal_spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Control and user-defined tokens from left to right, none of which overlaps a span."""
        if self._pattern is None:
            return
        free_from = 0
        for begin, end in sorted(span for span in literal_spans if span[0] != span[1]):
            if begin < 0 or begin > end or end > len(text):
                raise _refuse(
                    "invalid_input",
                    f"literal_spans: [{begin}, {end}) is no range of a text of {len(text)} code points",
                )
            for match in self._pattern.finditer(text, free_from, max(free_from, begin)):
                yield match.span()
            free_from = max(free_from, end)
        for match in self._pattern.finditer(text, free_from):
            yield match.span()

    def _encode(self, text: str, ids: list[int]) -> None:
        """Appends the ids of text in which nothing is marked."""
        if not text:
            return
        try:
            data = text.encode()
        except UnicodeEncodeError as e:
            raise _refuse("invalid_input", f"the text is not valid Unicode at code point {e.start}") from e
        # The package leaves out what it has no token for, without a word.
        if self._missing and (lost := self._missing.intersection(data)):
            raise _refuse("tokenizer", f"the vocabulary has no token for byte 0x{min(lost):02X}")
        ids += self._tokenizer.encode(text, add_special_tokens=False).ids


def _strings(read_array: Callable[[str], Any], key: str) -> list[str]:
    items = read_array(key)
    if not items and key.endswith("tokens"):
        raise _refuse("tokenizer", f"{key}: expected at least one token, found none")
    if items is None:
        raise _refuse("tokenizer", f"{key}: expected an array of strings, found no such key")
    out = []
    for i, item in enumerate(items):
        try:
            out.append(item.decode())
        except (UnicodeDecodeError, AttributeError) as e:
            raise _refuse("tokenizer", f"{key}[{i}]: expected a string of UTF-8, found {item!r}") from e
    return out


def _token_id(text: str | None, n_tokens: int) -> int:
    """-1 where there is none, or no token has it, as in the core."""
    value = int(text) if text is not None else -1
    return value if 0 <= value < n_tokens else -1


def _alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in GPT-2's vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    out = {byte: chr(byte) for byte in printable}
    for byte in range(0x100):
        if byte not in out:
            out[byte] = chr(0x100 + len(out) - len(printable))
    return out


def _build(pre: str, tokens: list[str], merges: list[str], marked: dict[str, int]) -> Any:
    """The package's tokenizer over everything but the marked tokens, which text reaches by their
    marks alone."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError as e:
        raise _refuse(
            "tokenizer",
            f"tokenizer.ggml.pre {pre!r} is not known to the native tokenizer, and the fallback needs "
            "the tokenizers package: pip install 'reflex-worker[tokenizers]'",
        ) from e
    alphabet = set(_alphabet().values())
    marked_only = {t for t in marked if t not in alphabet or not t.isascii()}
    vocabulary = {t: i for i, t in enumerate(tokens) if t not in marked_only}
    pairs = []
    for i, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if {left, right, left + right} & marked_only:
            continue
        if not {left, right, left + right} <= vocabulary.keys():
            raise _refuse(
                "tokenizer", f"tokenizer.ggml.merges[{i}]: {merge!r} names no tokens of the vocabulary"
            )
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    return tokenizer
