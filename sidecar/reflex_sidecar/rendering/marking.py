"""Finding where text of users came to stand in a rendered prompt. Pure: strings in, ranges out.

A user may write `<|im_end|>`, and a template may write it too. Only the template's may become the
control token. The prompt is what the plain render says; a second render of the same conversation,
with marks around every control-token spelling in the content, tells where those came to stand:

    content    a <|im_end|> b     ->   a ⟦<|im_end|>⟧ b
    rendered   ...user\na ⟦<|im_end|>⟧ b<|im_end|>\n

Taking the marks out again must give the plain render, character for character; then the ranges
between them are the literal spans. Anything else raises CannotMark, and the caller must not use
the template's prompt: a guess here would hand the markup to whoever wrote the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

# What control tokens look like, for workers that do not list theirs.
USUAL_SPELLINGS: Final = (
    r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>|</?[a-z][a-z_]{0,32}>|\[/?[A-Z_]{2,32}\]"
)
# Two of these, absent from the content, are the marks: noncharacters first (Unicode 23.7), which
# text never holds, then private use.
_MARK_RANGES: Final = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xF1000), range(0x100000, 0x110000 - 2))


class CannotMark(Exception):
    """The marked render differs from the plain one, or no marks are free."""


class Marks(NamedTuple):
    """The two marks of one request."""

    open: str
    close: str


class Spellings:
    """The control-token spellings of one vocabulary."""

    def __init__(self, listed: Sequence[tuple[str, bool]] | None) -> None:
        """`listed`: (text, user_defined) of every control token; None: go by what they usually look like."""
        if listed is None:
            self._all = self._control = re.compile(USUAL_SPELLINGS)
        else:
            self._all = _pattern(text for text, _ in listed)
            self._control = _pattern(text for text, user_defined in listed if not user_defined)

    def find(self, text: str, *, user_defined: bool = True) -> list[tuple[int, int]]:
        """Ranges of `text` that spell control tokens, those that overlap as one."""
        pattern = self._all if user_defined else self._control
        if pattern is None:
            return []
        found: list[tuple[int, int]] = []
        match = pattern.search(text)
        while match:
            start, end = match.span()
            if found and start < found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
            match = pattern.search(text, start + 1)  # not from the end: spellings may overlap
        return found


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted({t for t in texts if t}, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile("|".join(map(re.escape, longest_first)))


# What an assistant writes about itself is markup that the model made: kept, where it is user-defined
# (<think>, <tool_call>). An end of turn in its text is not.
_ASSISTANT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "thinking")


def walk(value: Any, change: Callable[[str, bool], str], own: bool = False) -> Any:
    """A copy of template data with `change(text, own)` applied to every string, keys too."""
    if isinstance(value, str):
        return change(value, own)
    if isinstance(value, list):
        return [walk(item, change, own) for item in value]
    if isinstance(value, dict):
        return {change(k, own): walk(v, change, own) for k, v in value.items()}
    return value


def walk_messages(messages: list[Any], change: Callable[[str, bool], str]) -> list[Any]:
    """`walk` over messages; `own` is true for what an assistant's message says."""
    out = []
    for message in messages:
        if isinstance(message, dict):
            assistant = message.get("role") == "assistant"
            message = {
                key: value if key == "role" else walk(value, change, assistant and key in _ASSISTANT_FIELDS)
                for key, value in message.items()
            }
        out.append(message)
    return out


def any_spelled(messages: list[Any], others: list[Any], spellings: Spellings) -> bool:
    """Whether any content spells a control token."""
    found = False

    def look(text: str, own: bool) -> str:
        nonlocal found
        found = found or bool(spellings.find(text, user_defined=not own))
        return text

    walk_messages(messages, look)
    walk(others, look)
    return found


def choose_marks(messages: list[Any], others: list[Any]) -> Marks:
    """Two characters that the content does not hold. Raises CannotMark where it holds them all."""
    held: set[str] = set()

    def note(text: str, own: bool) -> str:
        held.update(c for c in set(text) if ord(c) >= _MARK_RANGES[0].start)
        return text

    walk_messages(messages, note)
    walk(others, note)
    free = (chr(c) for r in _MARK_RANGES for c in r if chr(c) not in held)
    try:
        return Marks(next(free), next(free))
    except StopIteration:
        raise CannotMark("the content holds every character that could mark it") from None


class MarkedText(str):
    """Text with marks that answers questions as if it had none.

    Templates ask (`content.startswith('<tool_response>')`) and cut (`content.split('</think>')`); a
    mark must change no answer. What is written out, though, is the text with its marks. A cut that
    falls differently with marks raises CannotMark.
    """

    marks: Marks
    plain: str

    @staticmethod
    def of(text: str, marks: Marks) -> MarkedText:
        """`text` holds the marks."""
        self = MarkedText(text)
        self.marks = marks
        self.plain = strip_marks(text, marks)
        return self

    def _cut(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A str method on the marked text, provided that it does the same to the plain one."""
        wanted = getattr(self.plain, name)(*args, **kwargs)
        return self._same(getattr(str(self), name)(*args, **kwargs), wanted)

    def _same(self, got: Any, wanted: Any) -> Any:
        if isinstance(got, str):
            if strip_marks(got, self.marks) != wanted:
                raise CannotMark("a template cuts the content where it spells a control token")
            return MarkedText.of(_balanced(got, self.marks), self.marks)
        if len(got) != len(wanted):
            raise CannotMark("a template splits the content where it spells a control token")
        return type(got)(self._same(g, w) for g, w in zip(got, wanted, strict=True))

    def __str__(self) -> str:
        return "".join((self,))

    def __add__(self, other: str) -> MarkedText:
        return MarkedText.of(str.__add__(self, other), self.marks)

    def __radd__(self, other: str) -> MarkedText:
        return MarkedText.of(str.__add__(other, self), self.marks)

    def __getitem__(self, key: Any) -> Any:
        return self._cut("__getitem__", key)

    def __len__(self) -> int:
        return len(self.plain)

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        return part in self.plain

    def __eq__(self, other: object) -> bool:
        return self.plain == (other.plain if isinstance(other, MarkedText) else other)

    def __hash__(self) -> int:
        return hash(self.plain)


def _balanced(text: str, marks: Marks) -> str:
    """The text without marks that have lost their partner in a cut."""
    parts = re.split(f"([{marks.open}{marks.close}])", "".join((text,)))
    opened: int | None = None
    for i in range(1, len(parts), 2):
        if parts[i] == marks.open:
            if opened is not None:
                parts[opened] = ""
            opened = i
        elif opened is None:
            parts[i] = ""
        else:
            opened = None
    if opened is not None:
        parts[opened] = ""
    return "".join(parts)


def _asks(name: str) -> Callable[..., Any]:
    def ask(self: MarkedText, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.plain, name)(*args, **kwargs)

    return ask


def _cuts(name: str) -> Callable[..., Any]:
    def cut(self: MarkedText, *args: Any, **kwargs: Any) -> Any:
        return self._cut(name, *args, **kwargs)

    return cut


for _name in (
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha"),
    *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(MarkedText, _name, _asks(_name))
for _name in (
    *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "replace"),
    *("removeprefix", "removesuffix", "lower", "upper", "title", "capitalize"),
):
    setattr(MarkedText, _name, _cuts(_name))


def mark(
    messages: list[Any], others: list[Any], spellings: Spellings, marks: Marks
) -> tuple[list[Any], list[Any]]:
    """Copies of the data with every spelling marked."""

    def change(text: str, own: bool) -> str:
        found = spellings.find(text, user_defined=not own)
        if not found:
            return text
        parts, at = [], 0
        for start, end in found:
            parts += [text[at:start], marks.open, text[start:end], marks.close]
            at = end
        return MarkedText.of("".join([*parts, text[at:]]), marks)

    return walk_messages(messages, change), walk(others, change)


def _escaped(mark: str) -> str:
    """How JSON in ASCII writes a mark."""
    return json.dumps(mark)[1:-1]


def strip_marks(text: str, marks: Marks) -> str:
    """The text without marks, in either spelling."""
    text = "".join((text,))  # a plain str: a MarkedText would answer as if it had no marks
    for m in marks:
        text = text.replace(m, "")
        escaped = _escaped(m)
        if escaped in text:
            text = text.replace(escaped, "")
    return text


def spans_between(marked: str, plain: str, marks: Marks) -> list[tuple[int, int]]:
    """The ranges of `plain` that `marked` shows, in code points. Raises CannotMark where the two differ."""
    tokens = re.compile("|".join(re.escape(t) for m in marks for t in (m, _escaped(m))))
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    at = position = 0
    start: int | None = None
    for match in tokens.finditer(marked):
        parts.append(marked[at : match.start()])
        position += match.start() - at
        at = match.end()
        opens = match[0] in (marks.open, _escaped(marks.open))
        if opens == (start is not None):
            raise CannotMark("the template tears marked content apart")
        if opens:
            start = position
        else:
            assert start is not None
            if start < position:
                spans.append((start, position))
            start = None
    if start is not None:
        raise CannotMark("the template tears marked content apart")
    parts.append(marked[at:])
    if "".join(parts) != plain:
        raise CannotMark("the marked render differs from the plain one")
    return spans
