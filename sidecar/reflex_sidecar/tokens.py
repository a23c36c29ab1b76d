"""Log-probabilities as the API shows them: tokens by their text and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType


class Scored(Protocol):
    """A token with its log-probability, as the worker tells it."""

    token_id: int
    logprob: float | UnsetType


def piece(scored: Any) -> tuple[str, bytes]:
    """A token's text and bytes. A worker that does not tell them leaves the id to show."""
    text = getattr(scored, "piece", None)
    raw = getattr(scored, "bytes", None)
    if isinstance(raw, list):
        data = bytes(raw)
        return data.decode("utf-8", "replace"), data
    if isinstance(text, str):
        return text, text.encode()
    named = f"token_id:{scored.token_id}"
    return named, named.encode()


# The API has no minus infinity; OpenAI writes this for what cannot happen.
IMPOSSIBLE = -9999.0


def number(logprob: float | UnsetType | None) -> float:
    """A log-probability that JSON can hold."""
    if logprob is None or isinstance(logprob, UnsetType) or logprob < IMPOSSIBLE:
        return IMPOSSIBLE
    return logprob


def chat_entry(scored: Any) -> dict[str, Any]:
    """A token of `logprobs.content`."""
    top = [] if scored.top_logprobs is UNSET else scored.top_logprobs
    return {**_entry(scored), "top_logprobs": [_entry(t) for t in top]}


def _entry(scored: Any) -> dict[str, Any]:
    text, data = piece(scored)
    return {"token": text, "logprob": number(scored.logprob), "bytes": list(data)}


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
        self._push(text, None, None)

    def add(self, scored: Sequence[Any]) -> None:
        """More tokens."""
        for token in scored:
            text, _ = piece(token)
            top = (
                {}
                if token.top_logprobs is UNSET
                else {piece(t)[0]: number(t.logprob) for t in token.top_logprobs}
            )
            self._push(text, number(token.logprob), top)

    def _push(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self._offset)
        self._offset += len(text)

    def body(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
