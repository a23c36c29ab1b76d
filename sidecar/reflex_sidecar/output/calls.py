"""Calls of tools in a model's text, for the spellings that Qwen and DeepSeek models are trained on.

Qwen2.5, Qwen3, Hermes:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

Qwen3-Coder, Qwen3.5:

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

DeepSeek V3 and R1, then V3.1 (both between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>):

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

A call comes out as soon as its name is known and its arguments have begun, and its arguments as they
come. What looks like a call and turns out to be none before that stays text, unchanged.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from ..parameters import parameters_of, value_of
from .parts import Arguments, Call, Part, Text, held_back

CallFormat = Literal["json", "xml", "deepseek", "deepseek_fenced"]

CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"

_BLOCKS: Final = {"<tool_call>": "</tool_call>", CALL_BEGIN: CALL_END, "<function=": "</function>"}
# Around DeepSeek's calls; they say nothing themselves.
_WRAPPERS: Final = (CALLS_BEGIN, CALLS_END)
_MARKERS: Final = (*_BLOCKS, *_WRAPPERS)
_PARAMETER_END: Final = "</parameter>"

# From these on it is a call: a name, and the brace that opens its arguments.
_JSON_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_SEPARATED_HEAD: Final = re.compile(r"\s*([^\n`<｜]+?)\s*<｜tool▁sep｜>\s*(?=\{)")
_FENCED_HEAD: Final = re.compile(r"\s*(?:function)?\s*(?:<｜tool▁sep｜>)?([^\n`]+?)\s*```(?:json)?\s*(?=\{)")
_FUNCTION_HEAD: Final = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER_HEAD: Final = re.compile(r"<parameter=([^>\n]+)>")

# What is of interest in JSON text outside of strings, and inside. A `<` there is no JSON.
_OUTSIDE: Final = re.compile(r'["{}\[\]<]')
_INSIDE: Final = re.compile(r'["\\]')


def format_of(template: str) -> CallFormat | None:
    """The spelling that a chat template teaches; None for a template that knows no tools."""
    if CALLS_BEGIN in template:
        return "deepseek_fenced" if "```json" in template else "deepseek"
    if "<function=" in template:
        return "xml"
    if "<tool_call>" in template:
        return "json"
    return None


class CallSplitter:
    """Feed it the answer's text; it gives Text, and for each call a Call and its Arguments."""

    def __init__(self, tools: list[dict[str, Any]], *, parallel: bool = True, forced: bool = False) -> None:
        """forced: the text is calls and nothing else, so that what is cut off is markup and no text."""
        self._tools = tools
        self._parallel = parallel
        self._forced = forced
        self._held = ""  # not yet decided what it is
        self._block: _Block | None = None  # the call, or what looks like one, that is being read
        self._behind_a_call = False
        self.n_calls = 0

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        out: list[Part] = []
        if self._block is None:
            text, self._held = self._held + text, ""
        while text:
            text = self._text(text, out) if self._block is None else self._call(self._block, text, out)
        return out

    def finish(self) -> list[Part]:
        """The end of the text: what has not become a call is text."""
        held, self._held = self._held, ""
        block, self._block = self._block, None
        if block is not None:
            held = "" if block.began else held + block.text
        out: list[Part] = []
        if not self._forced:
            self._say(held.strip() if self.n_calls else held, out)
        return out

    def _say(self, text: str, out: list[Part]) -> None:
        if text:
            out.append(Text(text))

    def _text(self, text: str, out: list[Part]) -> str:
        """Text up to what may be a call; what is left to look at."""
        if self._behind_a_call:  # white space there belongs to the markup
            text = text.lstrip()
            self._behind_a_call = not text
        # A closing tag that nothing opened: Qwen3-Coder leaves out the one before <function=.
        markers = (*_MARKERS, "</tool_call>") if self.n_calls else _MARKERS
        at, marker = _first_marker(text, markers)
        if marker is None:
            # White space goes with what follows: before a call it is dropped.
            sure = text[: len(text) - held_back(text, markers)].rstrip()
            self._say(sure, out)
            self._held = text[len(sure) :]
            return ""
        before = text[:at].rstrip()
        self._say(before, out)
        rest = text[at + len(marker) :]
        if marker not in _BLOCKS:
            self._behind_a_call = True
            return rest
        self._held = text[len(before) : at]
        self._block = _Block(marker, self._tools)
        return rest

    def _call(self, block: _Block, text: str, out: list[Part]) -> str:
        """More of a block; what is left behind its end."""
        began = block.began
        parts, rest = block.feed(text)
        if parts and not began and block.began:
            self.n_calls += 1
            self._held = ""
        if self._parallel or self.n_calls <= 1:
            out += parts
        if rest is None:
            return ""
        self._block = None
        if not block.began:
            self._say(self._held + block.text, out)
            self._held = ""
        self._behind_a_call = self.n_calls > 0
        return rest


class _Block:
    """From a marker that opens a call to the one that closes it."""

    def __init__(self, marker: str, tools: list[dict[str, Any]]) -> None:
        self.text = marker  # all of it, until it is a call
        self.began = False
        self._end = _BLOCKS[marker]
        self._bare = marker == "<function="
        self._seen = marker if self._bare else ""  # what is to be read
        self._tools = tools
        self._reader: _Json | _Xml | None = None

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """What is certain now, and what stands behind the block's end (None: it has not ended)."""
        if not self.began:
            self.text += text
        self._seen += text
        out: list[Part] = []
        if self._reader is None:
            self._begin(out)
        if self._reader is not None:
            fragment, left = self._reader.feed(self._seen)
            self._seen = left
            if fragment:
                out.append(Arguments(fragment))
            if not self._reader.done:
                return out, None
        end = self._seen.find(self._end)
        if end < 0:
            if self._reader is not None:  # behind a call's arguments nothing matters but the end
                self._seen = self._seen[len(self._seen) - held_back(self._seen, (self._end,)) :]
            return out, None
        rest = self._seen[end + len(self._end) :]
        if not self.began:
            self.text = self.text[: len(self.text) - len(rest)]
            out += self._whole(self._seen[:end])
        return out, rest

    def _begin(self, out: list[Part]) -> None:
        """Where the text has become a call: its name, and who reads its arguments."""
        if found := _FUNCTION_HEAD.match(self._seen):
            name = found[1].strip()
            self._reader = _Xml(next((t for t in self._tools if t["function"]["name"] == name), None))
        elif found := _JSON_HEAD.match(self._seen):
            name = _string(found[1])
            self._reader = _Json() if name else None
        elif found := _SEPARATED_HEAD.match(self._seen) or _FENCED_HEAD.match(self._seen):
            name = found[1].strip()
            self._reader = _Json() if self._end == CALL_END else None
        else:
            return
        if self._reader is not None:
            self.began = True
            self._seen = self._seen[found.end() :]
            out.append(Call(name))

    def _whole(self, inner: str) -> list[Part]:
        """A call in an order or with arguments that cannot be told before its end."""
        name, separator, arguments = inner.partition(SEPARATOR)
        call = _separated_call(name, arguments) if separator else _json_call(inner)
        if call is None:
            return []
        self.began = True
        return [Call(call[0]), Arguments(call[1])]


class _Json:
    """Reads one JSON object, and gives its text as it comes."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._inside = False  # a string

    def feed(self, text: str) -> tuple[str, str]:
        """Text of the object, and what is not read yet."""
        at = 0
        while at < len(text) and not self.done:
            found = (_INSIDE if self._inside else _OUTSIDE).search(text, at)
            if found is None:
                return text, ""
            mark, at = found[0], found.end()
            if mark == "\\":
                if at == len(text):  # the character that it escapes is not there yet
                    return text[: at - 1], text[at - 1 :]
                at += 1
            elif mark == '"':
                self._inside = not self._inside
            elif mark == "<":  # what follows is the end of a call whose JSON was cut off
                self.done, at = True, at - 1
            else:
                self._depth += 1 if mark in "{[" else -1
                self.done = self._depth == 0
        return text[:at], text[at:]


class _Xml:
    """Reads parameters up to the function's end, and gives them as a JSON object, piece by piece."""

    def __init__(self, tool: dict[str, Any] | None) -> None:
        self.done = False
        listed = parameters_of(tool["function"]).listed if tool else ()
        self._types = {p.name: p.types for p in listed}
        self._given: set[str] = set()
        self._name: str | None = None  # the parameter whose value is being read
        self._as_text = False  # it is a string, shown as it comes
        self._began = False  # of its text, the newline after the tag has been dropped

    def feed(self, text: str) -> tuple[str, str]:
        """JSON text, and what is not read yet."""
        out: list[str] = []
        while not self.done:
            step = self._between(text, out) if self._name is None else self._value(self._name, text, out)
            if step is None:
                break
            text = step
        if self._name is not None and self._as_text:
            text = self._grow(text, out)
        return "".join(out), text

    def _between(self, text: str, out: list[str]) -> str | None:
        """The next parameter's tag or the function's end. None where it has not come yet."""
        head = _PARAMETER_HEAD.search(text)
        ends = [at for end in ("</function>", "</tool_call>") if (at := text.find(end)) >= 0]
        if ends and (head is None or min(ends) < head.start()):
            out.append("}" if self._given else "{}")
            self.done = True
            return text[min(ends) :]
        if head is None:
            return None
        self._name = name = head[1].strip()
        self._as_text = not self._types.get(name, frozenset()) - {"string"}
        self._began = False
        if name not in self._given:
            name = msgspec.json.encode(name).decode()
            out.append(f"{',' if self._given else '{'}{name}:" + ('"' if self._as_text else ""))
        return text[head.end() :]

    def _value(self, name: str, text: str, out: list[str]) -> str | None:
        end = text.find(_PARAMETER_END)
        if end < 0:
            return None
        value = text[:end].removesuffix("\n")
        if not self._began:
            value = value.removeprefix("\n")
        if name not in self._given:  # the first of two counts: what is out cannot be taken back
            if self._as_text:
                out.append(_escaped(value) + '"')
            else:
                out.append(msgspec.json.encode(value_of(value, self._types[name])).decode())
        self._given.add(name)
        self._name = None
        return text[end + len(_PARAMETER_END) :]

    def _grow(self, text: str, out: list[str]) -> str:
        """What is certain of a string whose end has not come; the rest."""
        if not self._began and text:
            text, self._began = text.removeprefix("\n"), True
        sure = text[: len(text) - held_back(text, ("\n" + _PARAMETER_END, _PARAMETER_END))]
        if self._name not in self._given:
            out.append(_escaped(sure))
        return text[len(sure) :]


def _first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    found = [(at, m) for m in markers if (at := text.find(m)) >= 0]
    return min(found) if found else (-1, None)


def _escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


def _string(text: str) -> str:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return ""


def _separated_call(name: str, arguments: str) -> tuple[str, str] | None:
    """`NAME<｜tool▁sep｜>JSON`, where the JSON is no object: text of JSON in JSON, or nothing."""
    name, arguments = name.strip(), arguments.strip() or "{}"
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return (name, value if isinstance(value, str) else arguments) if name else None


def _json_call(inner: str) -> tuple[str, str] | None:
    """`{"name": ..., "arguments": ...}`, in any order."""
    try:
        value = msgspec.json.decode(inner.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return value["name"], text
