"""Vocabularies to hold grammars against, with llguidance itself: a small one of our own, and real ones.

Text is cut greedily into the longest tokens, which is close enough to how models write it: what
matters is that tokens cross the borders of markup, names and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SHARED_VOCABULARIES = Path(__file__).resolve().parents[3] / "shared" / "vocab"
# Tokens that cross borders, as the merges of real vocabularies do.
MERGED = (*("<think>", "</think>", "<tool_call>", "</tool_call>"), '"}', '"}}', "}\n", ">\n", "\n</", "</")


class Vocabulary:
    """What llguidance's TokenizerWrapper asks for."""

    def __init__(self, tokens: Sequence[bytes], control: Sequence[str] = ()) -> None:
        self.tokens = [*tokens, *(c.encode() for c in control), b"<eos>"]
        self.special_token_ids = list(range(len(tokens), len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.control = {text: len(tokens) + i for i, text in enumerate(control)}
        self._by_bytes = {t: i for i, t in reversed(list(enumerate(self.tokens[:-1])))}
        self._longest = max(map(len, self.tokens))

    def __call__(self, data: bytes | str) -> list[int]:
        data = data.encode() if isinstance(data, str) else data
        ids, at = [], 0
        while at < len(data):
            for n in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._by_bytes.get(data[at : at + n])) is not None:
                    ids.append(token)
                    at += n
                    break
            else:
                raise ValueError(f"no token for {data[at : at + 1]!r}")
        return ids


def small(control: Sequence[str] = (), merged: Sequence[str] = MERGED) -> Vocabulary:
    """Every byte, and a few merges."""
    return Vocabulary([*(bytes([i]) for i in range(256)), *(m.encode() for m in merged)], control)


@cache
def real(name: str, control: Sequence[str] = ()) -> Vocabulary:
    """That of a file in ../shared/vocab (byte-level BPE); skips where there is none."""
    path = SHARED_VOCABULARIES / name
    native = pytest.importorskip("reflex_worker._native", reason="reads the file")
    if not path.exists():
        pytest.skip(f"no {path}")
    spelled = {c: b for b, c in _bytes_as_characters().items()}
    tokens: list[bytes] = []
    for word in native.gguf_array(str(path), "tokenizer.ggml.tokens"):
        text = word.decode()
        tokens.append(bytes(spelled[c] for c in text) if all(c in spelled for c in text) else text.encode())
    return Vocabulary(tokens, control)


def _bytes_as_characters() -> dict[int, str]:
    """GPT-2's table: printable bytes are themselves, others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


@cache
def _tokenizer(vocabulary: Vocabulary) -> Any:
    import llguidance

    wrapped = llguidance.TokenizerWrapper(vocabulary)
    return llguidance.LLTokenizer(wrapped, eos_token=[vocabulary.eos_token_id])


class Walk:
    """A text written token by token under a grammar."""

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        llguidance = pytest.importorskip("llguidance", reason="the worker's optional package")
        self._matcher = llguidance.LLMatcher(_tokenizer(vocabulary), grammar, log_level=0)
        assert not self._matcher.is_error(), f"{self._matcher.get_error()}\n{grammar}"
        self._vocabulary = vocabulary

    def _allowed(self, token: int) -> bool:
        return bool(self._matcher.compute_bitmask()[token // 8] >> (token % 8) & 1)

    def write(self, text: str) -> str | None:
        """What of the text is allowed, None for all of it."""
        done = b""
        for token in self._vocabulary(text):
            if self._matcher.is_stopped() or not self._allowed(token):
                return done.decode(errors="replace")
            assert self._matcher.consume_token(token), self._matcher.get_error()
            done += self._vocabulary.tokens[token]
        return None

    @property
    def may_end(self) -> bool:
        return self._matcher.is_stopped() or self._allowed(self._vocabulary.eos_token_id)


def fits(grammar: str, vocabulary: Vocabulary, text: str) -> bool:
    """Whether a text is an answer that the grammar allows, as a whole."""
    walk = Walk(grammar, vocabulary)
    return walk.write(text) is None and walk.may_end


def refused_after(grammar: str, vocabulary: Vocabulary, text: str) -> str | None:
    """The longest beginning that is allowed, where not all of the text is."""
    return Walk(grammar, vocabulary).write(text)
