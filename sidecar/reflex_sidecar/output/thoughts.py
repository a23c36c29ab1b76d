"""Reasoning apart from the answer: `<think>...</think>`, in pieces of any size.

Thoughts come first or not at all. Where a template has opened them already (DeepSeek-R1), the text
begins inside. Newlines next to the tags belong to the tags.
"""

from __future__ import annotations

import enum
from typing import Final

from .parts import Part, Text, Thought, held_back

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class _State(enum.Enum):
    START = enum.auto()  # nothing but white space so far
    BEGIN_THOUGHT = enum.auto()  # newlines after <think> are dropped
    THOUGHT = enum.auto()
    BEGIN_TEXT = enum.auto()  # newlines after </think> are dropped
    TEXT = enum.auto()


class ThoughtSplitter:
    """Feed it text; it gives Thought and Text."""

    def __init__(self, inside: bool = False) -> None:
        self._state = _State.BEGIN_THOUGHT if inside else _State.START
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        out: list[Part] = []
        text, self._held = self._held + text, ""
        while text:
            text = self._step(text, out)
        return out

    def finish(self) -> list[Part]:
        """The end of the text: what was held back is what it is."""
        held, self._held = self._held, ""
        if not held:
            return []
        if self._state in (_State.THOUGHT, _State.BEGIN_THOUGHT):
            return [Thought(t)] if (t := held.rstrip("\n")) else []
        return [Text(held)]

    def _step(self, text: str, out: list[Part]) -> str:
        """Handles the beginning of `text`; what is left of it (held text counts as handled)."""
        if self._state is _State.START:
            return self._start(text)
        if self._state in (_State.BEGIN_THOUGHT, _State.BEGIN_TEXT):
            text = text.lstrip("\n")
            if text:
                self._state = _State.THOUGHT if self._state is _State.BEGIN_THOUGHT else _State.TEXT
            return text
        if self._state is _State.THOUGHT:
            return self._thought(text, out)
        out.append(Text(text))
        return ""

    def _start(self, text: str) -> str:
        bare = text.lstrip()
        if bare.startswith(OPEN):
            self._state = _State.BEGIN_THOUGHT
            return bare[len(OPEN) :]
        if OPEN.startswith(bare):
            self._held = text
            return ""
        self._state = _State.TEXT
        return text

    def _thought(self, text: str, out: list[Part]) -> str:
        end = text.find(CLOSE)
        if end >= 0:
            if thought := text[:end].rstrip("\n"):
                out.append(Thought(thought))
            self._state = _State.BEGIN_TEXT
            return text[end + len(CLOSE) :]
        sure = text[: len(text) - held_back(text, (CLOSE,))].rstrip("\n")
        self._held = text[len(sure) :]
        if sure:
            out.append(Thought(sure))
        return ""
