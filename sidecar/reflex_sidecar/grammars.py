"""Lark grammars (of llguidance) for answers that may, or must, call tools, in the spelling that the
model was trained on. output/calls.py reads what they allow. Pure.

An answer of the model's own choice is free text up to what opens a call; from there on every token is
bound: the markup, the names of tools, arguments by their schemas. Inside a thought nothing is bound.
A forced answer begins with the call. Markers that are control tokens of the model are matched as
tokens, others as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from .output.calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, CallFormat
from .output.thoughts import CLOSE, OPEN
from .parameters import Parameter, parameters_of

# Calls in one answer, and parameters that a schema does not name: bounds that keep a small model from
# writing them for ever.
MAX_CALLS: Final = 16
MAX_UNLISTED: Final = 16
# A length in a schema that is followed; longer ones cost the engine more than they bind.
_LONGEST_BOUND: Final = 2000
# As the models are trained to write it.
_JSON_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANYTHING: Final = "/(?s:.*)/"
_TOOL_CALL: Final = ("<tool_call>", "</tool_call>")
_FUNCTION: Final = "<function="
_PARAMETER_END: Final = "</parameter>"


@dataclass(frozen=True)
class CallRules:
    """What an answer is bound to. `tools`: `function` objects, their schemas closed (constraints.py).

    forced: it begins with a call. most: calls in it. inside_thought: the prompt ends in an open
    thought. control: ids of the model's control tokens by their spelling. answer: where it calls no
    tool, the schema that it follows instead of being free text.
    """

    tools: list[dict[str, Any]]
    spelling: CallFormat = "json"
    forced: bool = False
    most: int = MAX_CALLS
    inside_thought: bool = False
    control: Mapping[str, int] = field(default_factory=dict)
    answer: Any = None


def grammar(rules: CallRules) -> str:
    """The whole grammar as text."""
    g = _Grammar(rules)
    if rules.spelling == "json":
        openers = {_TOOL_CALL[0]: g.json_calls()}
    elif rules.spelling == "xml":
        # Qwen3-Coder at times leaves out the <tool_call>.
        openers = {_TOOL_CALL[0]: g.xml_calls(), _FUNCTION: "function_rest"}
    else:
        openers = {CALLS_BEGIN: g.deepseek_calls(fenced=rules.spelling == "deepseek_fenced")}
    opener, calls = next(iter(openers.items()))
    if rules.forced:
        start = f"{g.mark(opener)} {calls}"
    elif rules.answer is not None:
        start = f"{g.mark(opener)} {calls} | {g.json(rules.answer, lenient=False)}"
    else:
        start = g.free(openers)
    return "\n".join([f"start: {start}", *g.lines, ""])


class _Grammar:
    """Rules as they are needed; methods add to `lines` and give what stands for them in a rule."""

    def __init__(self, rules: CallRules) -> None:
        self.lines: list[str] = []
        self._rules = rules
        self._n = 0

    # ---- small things ----------------------------------------------------------------------

    def mark(self, text: str) -> str:
        """A marker: the control token of that spelling, or the text."""
        token = self._rules.control.get(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    def json(self, schema: Any, *, lenient: bool = True) -> str:
        """A value by a schema, as a rule's name. lenient: keywords that the engine lacks are let go."""
        body: dict[str, Any] = {"not": {}} if schema is False else {}
        if isinstance(schema, dict):
            body = dict(schema)
        body["x-guidance"] = {**_JSON_SPELLING, "lenient": lenient}
        return self._rule("json", f"%json {msgspec.json.encode(body).decode()}")

    def _rule(self, name: str, body: str, options: str = "") -> str:
        self._n += 1
        name = f"{name}_{self._n}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, name: str, body: str) -> str:
        self._n += 1
        name = f"{name}_{self._n}"
        self.lines.append(f"{name}: {body}")
        return name

    def _until(self, marker: str, without: list[str]) -> str:
        """Any text up to and with a marker, the first of its kind."""
        body = " & ".join([_ANYTHING, *(f"~/{w}/" for w in without)])
        if marker in self._rules.control:
            return f"{self._terminal('TEXT', body)} {self.mark(marker)}"
        name = self._terminal("TEXT", body)
        return self._rule("until", name, f"[suffix={_quoted(marker)}]")

    def _never(self, markers: list[str], without: list[str]) -> str:
        """Any text in which no marker stands (markers that are tokens cannot stand in text)."""
        inside = [f"(?s:.*){_escaped(m)}(?s:.*)" for m in markers if m not in self._rules.control]
        return self._terminal("END", " & ".join([_ANYTHING, *(f"~/{w}/" for w in [*without, *inside])]))

    # ---- free text -------------------------------------------------------------------------

    def free(self, openers: Mapping[str, str]) -> str:
        """An answer of the model's own choice: a thought, text, calls."""
        after = self._answer(openers, [])
        # Where a thought is open, or comes, only its end matters.
        thought = f"{self._never([CLOSE], [])} | {self._until(CLOSE, [])} {after}"
        if self._rules.inside_thought:
            return thought
        if OPEN in self._rules.control:
            return f"/\\s*/ {self.mark(OPEN)} ({thought}) | {after}"
        opening = rf"\s*{_escaped(OPEN)}"
        return f"/{opening}/ ({thought}) | {self._answer(openers, [f'{opening}(?s:.*)'])}"

    def _answer(self, openers: Mapping[str, str], without: list[str]) -> str:
        ways = [self._never(list(openers), without)]
        for opener, calls in openers.items():
            others = [f"(?s:.*){_escaped(o)}(?s:.*)" for o in openers if o != opener]
            ways.append(f"{self._until(opener, [*without, *others])} {calls}")
        return self._rule("answer", " | ".join(ways))

    def _repeated(self, call: str, between: str) -> str:
        """One call or more; the first one's opening has been read."""
        more = self._rules.most - 1
        return self._rule("calls", f"{call} ({between} {call}){{0,{more}}}" if more else call)

    # ---- the spellings ---------------------------------------------------------------------

    def json_calls(self) -> str:
        """What follows `<tool_call>`."""
        ways = []
        for function in self._rules.tools:
            head = f'{{"name": {_quoted(function["name"])}, "arguments": '
            # Each tool's schema by itself: references in it lead from its own root.
            ways.append(f"{_quoted(head)} {self.json(_arguments(function))}")
        opening, closing = map(self.mark, _TOOL_CALL)
        bodies = " | ".join(ways)
        call = self._rule("call", f'"\\n" ({bodies}) "}}\\n" {closing}')
        return self._repeated(call, f"/\\n?/ {opening}")

    def xml_calls(self) -> str:
        """What follows `<tool_call>`; adds the rule `function_rest`, what follows `<function=`."""
        functions = " | ".join(self._function(f) for f in self._rules.tools)
        self.lines.append(f"function_rest: {functions}")
        opening, closing = map(self.mark, _TOOL_CALL)
        call = self._rule("call", f'"\\n<function=" function_rest "\\n" {closing}')
        return self._repeated(call, f"/\\n?/ {opening}")

    def _function(self, function: dict[str, Any]) -> str:
        parameters = parameters_of(function)
        parts = [_quoted(f"{function['name']}>\n")]
        for parameter in parameters.listed:
            part = self._parameter(parameter)
            parts.append(part if parameter.required else f"{part}?")
        if parameters.more:
            value = self._rule("value", self._value_text(""), f"[suffix={_quoted(_PARAMETER_END)}]")
            unlisted = self._rule("parameter", f'"<parameter=" /[^<>\\n]+/ ">\\n" {value} "\\n"')
            parts.append(f"{unlisted}{{0,{MAX_UNLISTED}}}")
        return self._rule("function", " ".join([*parts, '"</function>"']))

    def _parameter(self, p: Parameter) -> str:
        opening, closing = _quoted(f"<parameter={p.name}>\n"), _quoted(f"\n{_PARAMETER_END}\n")
        if p.kind == "json":
            ways = '("true" | "false" | "True" | "False")'
            value = ways if p.types == {"boolean"} else self.json(p.schema)
            return self._rule("parameter", f"{opening} {value} {closing}")
        if p.words is not None:
            words = " | ".join(_quoted(w) for w in p.words)
            return self._rule("parameter", f"{opening} ({words}) {closing}")
        least, most = p.lengths if p.kind == "text" else (0, None)
        bounded = (least > 0 or most is not None) and max(least, most or 0) <= _LONGEST_BOUND
        bound = f"{{{least},{'' if most is None else most}}}" if bounded else ""
        value = self._rule("value", self._value_text(bound), f"[suffix={_quoted(_PARAMETER_END)}]")
        return self._rule("parameter", f'{opening} {value} "\\n"')

    def _value_text(self, bound: str) -> str:
        """A string's terminal: its characters and the newline before the closing tag."""
        inside = f"~/(?s:.*){_escaped(_PARAMETER_END)}(?s:.*)/"
        return self._terminal("VALUE", f"/(?s:.{bound or '*'})\\n/ & {inside}")

    def deepseek_calls(self, *, fenced: bool) -> str:
        """What follows `<｜tool▁calls▁begin｜>`."""
        begin, end, separator = map(self.mark, (CALL_BEGIN, CALL_END, SEPARATOR))
        ways = []
        for function in self._rules.tools:
            arguments = self.json(_arguments(function))
            if fenced:
                name = _quoted(f"{function['name']}\n```json\n")
                ways.append(f'"function" {separator} {name} {arguments} "\\n```"')
            else:
                ways.append(f"{_quoted(function['name'])} {separator} {arguments}")
        call = self._rule("call", f"{begin} ({' | '.join(ways)}) {end}")
        calls = self._repeated(call, '"\\n"' if fenced else "")
        return f"{calls} {self.mark(CALLS_END)}"


def _arguments(function: dict[str, Any]) -> Any:
    return function.get("parameters") or {"type": "object"}


def _quoted(text: str) -> str:
    """A literal of a rule."""
    return msgspec.json.encode(text).decode()


def _escaped(text: str) -> str:
    """Text inside a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")
