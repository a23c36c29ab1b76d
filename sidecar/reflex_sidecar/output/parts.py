"""The pieces that a model's text is taken apart into, and how text is held back at a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


Part = Thought | Text | Call | Arguments


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for n in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:n]):
                longest = n
                break
    return longest
