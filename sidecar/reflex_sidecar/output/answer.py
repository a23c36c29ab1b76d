"""The splitters in a row: thoughts first, then calls in what is left."""

from __future__ import annotations

from typing import Any

from .calls import CallSplitter
from .parts import Part, Text
from .thoughts import ThoughtSplitter


class AnswerSplitter:
    """Feed it a model's text; it gives parts in order."""

    def __init__(
        self,
        *,
        split_thoughts: bool = True,
        inside_thought: bool = False,
        tools: list[dict[str, Any]] | None = None,
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        """`tools`: None leaves calls as text. `forced`: the answer is nothing but calls."""
        self._thoughts = ThoughtSplitter(inside_thought) if split_thoughts else None
        self._calls = CallSplitter(tools, parallel=parallel, forced=forced) if tools is not None else None

    @property
    def n_calls(self) -> int:
        """Calls so far."""
        return self._calls.n_calls if self._calls else 0

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        if not text:
            return []
        return self._second(self._thoughts.feed(text) if self._thoughts else [Text(text)])

    def finish(self) -> list[Part]:
        """The end of the text."""
        out = self._second(self._thoughts.finish()) if self._thoughts else []
        return out + self._calls.finish() if self._calls else out

    def _second(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                out += self._calls.feed(part.text)
            else:
                out.append(part)
        return out
