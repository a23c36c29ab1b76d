"""Calls of tools in a model's text, for the spellings that Qwen and DeepSeek models are trained on.

Qwen2.5, Qwen3, Hermes:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

Qwen3-Coder, Qwen3.5:

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

DeepSeek V3 and R1, then V3.1 (both between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>):

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

A call comes out when it is complete. What looks like one and is none stays text, unchanged.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from .parts import Call, Part, Text, held_back

CallFormat = Literal["json", "xml", "deepseek"]

_BLOCKS: Final = {
    "<tool_call>": "</tool_call>",
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>",
    "<function=": "</function>",
}
# Around DeepSeek's calls; says nothing itself.
_WRAPPERS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MARKERS: Final = (*_BLOCKS, *_WRAPPERS)
_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_FENCED: Final = re.compile(
    r"(?:function)?\s*(?:<｜tool▁sep｜>)?([^\n`]+?)\s*```(?:json)?\s*(.*?)\s*```\s*\Z", re.DOTALL
)


def format_of(template: str) -> CallFormat | None:
    """The spelling that a chat template teaches; None for a template that knows no tools."""
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek"
    if "<function=" in template:
        return "xml"
    if "<tool_call>" in template:
        return "json"
    return None


class CallSplitter:
    """Feed it the answer's text; it gives Text and Call."""

    def __init__(self, tools: list[dict[str, Any]], *, parallel: bool = True) -> None:
        self._types = {t["function"]["name"]: _parameter_types(t["function"]) for t in tools}
        self._parallel = parallel
        self._held = ""
        self.n_calls = 0

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        out: list[Part] = []
        text, self._held = self._held + text, ""
        while text:
            at, marker = _first_marker(text)
            if marker is None:
                # White space goes with what follows: before a call it is dropped.
                sure = text[: len(text) - held_back(text, _MARKERS)].rstrip()
                self._say(sure, out)
                self._held = text[len(sure) :]
                break
            if marker in _WRAPPERS:
                self._say(text[:at].rstrip(), out)
                text = text[at + len(marker) :].lstrip()
                continue
            end = text.find(_BLOCKS[marker], at + len(marker))
            if end < 0:
                sure = text[:at].rstrip()
                self._say(sure, out)
                self._held = text[len(sure) :]
                break
            end += len(_BLOCKS[marker])
            self._block(text[:at], text[at:end], marker, out)
            text = text[end:]
            if self.n_calls:
                text = text.lstrip()
        return out

    def finish(self) -> list[Part]:
        """The end of the text: a call that was not finished is text."""
        held, self._held = self._held, ""
        out: list[Part] = []
        if self.n_calls:
            held = held.strip()
        self._say(held, out)
        return out

    def _say(self, text: str, out: list[Part]) -> None:
        if text:
            out.append(Text(text))

    def _block(self, before: str, block: str, marker: str, out: list[Part]) -> None:
        inner = block if marker == "<function=" else block[len(marker) : -len(_BLOCKS[marker])]
        call = self._parse(inner)
        if call is None:
            self._say(before + block, out)
            return
        self._say(before.rstrip(), out)
        self.n_calls += 1
        if self._parallel or self.n_calls == 1:
            out.append(call)

    def _parse(self, inner: str) -> Call | None:
        if function := _FUNCTION.match(inner):
            name = function[1].strip()
            types = self._types.get(name, {})
            arguments = {
                m[1].strip(): _typed(m[2], types.get(m[1].strip())) for m in _PARAMETER.finditer(function[2])
            }
            return Call(name, msgspec.json.encode(arguments).decode())
        if fenced := _FENCED.match(inner):
            return _call(fenced[1], fenced[2])
        name, separator, arguments_text = inner.partition("<｜tool▁sep｜>")
        if separator:
            return _call(name, arguments_text)
        return _json_call(inner)


def _first_marker(text: str) -> tuple[int, str | None]:
    found = [(at, m) for m in _MARKERS if (at := text.find(m)) >= 0]
    return min(found) if found else (-1, None)


def _call(name: str, arguments: str) -> Call | None:
    """A call whose arguments are JSON text."""
    name, arguments = name.strip(), arguments.strip() or "{}"
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(value, str):  # JSON text in JSON text
        arguments = value
    return Call(name, arguments) if name else None


def _json_call(inner: str) -> Call | None:
    """`{"name": ..., "arguments": ...}`."""
    try:
        value = msgspec.json.decode(inner.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return Call(value["name"], text)


def _parameter_types(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: p.get("type") for name, p in properties.items() if isinstance(p, dict)}


def _typed(text: str, declared: Any) -> Any:
    """A parameter's value: text where the schema says so or says nothing, else the JSON it spells."""
    value = text.removeprefix("\n").removesuffix("\n")
    kinds = declared if isinstance(declared, list) else [declared]
    if declared is None or kinds == ["string"]:
        return value
    if "boolean" in kinds and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    try:
        parsed = msgspec.json.decode(value.strip())
    except (msgspec.DecodeError, RecursionError):
        return value
    return value if "string" in kinds and not isinstance(parsed, (type(None), list, dict)) else parsed
