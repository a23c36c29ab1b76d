"""Log-probabilities as the API shows them: tokens by their text and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET
from reflex_protocol.messages import TokenEvent, TokenLogprob, TopLogprob

Scored = TokenEvent | TokenLogprob | TopLogprob

# JSON has no minus infinity; OpenAI writes this for what cannot happen.
IMPOSSIBLE: Final = -9999.0


def piece(scored: Scored) -> tuple[str, bytes]:
    """A token's text and bytes. Of a worker too old to tell them, the id."""
    if scored.bytes is UNSET:
        named = f"token_id:{scored.token_id}"
        return named, named.encode()
    data = bytes(scored.bytes)
    try:
        return data.decode(), data
    except UnicodeDecodeError:  # part of a character, shown as OpenAI shows it
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data), data


def number(scored: Scored) -> float:
    """A log-probability that JSON can hold."""
    return IMPOSSIBLE if scored.logprob is UNSET else max(IMPOSSIBLE, scored.logprob)


def chat_entry(scored: TokenEvent | TokenLogprob) -> dict[str, Any]:
    """A token of `logprobs.content`."""
    return {**_entry(scored), "top_logprobs": [_entry(t) for t in _top(scored)]}


def _entry(scored: Scored) -> dict[str, Any]:
    text, data = piece(scored)
    return {"token": text, "logprob": number(scored), "bytes": list(data)}


def _top(scored: TokenEvent | TokenLogprob) -> list[TopLogprob]:
    return [] if scored.top_logprobs is UNSET else scored.top_logprobs


class LegacyLogprobs:
    """The `logprobs` of a plain completion: lists side by side, with offsets into the text."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def first(self, text: str) -> None:
        """A token that nothing predicted."""
        self._push(text, len(text), None, None)

    def add(self, scored: Sequence[TokenEvent | TokenLogprob]) -> None:
        """More tokens."""
        for token in scored:
            text, data = piece(token)
            top = {piece(t)[0]: number(t) for t in _top(token)}
            # Characters that begin in this token: continuation bytes count for the one before.
            self._push(text, sum(b & 0xC0 != 0x80 for b in data), number(token), top)

    def _push(self, text: str, length: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self._offset)
        self._offset += length

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
