"""Thoughts and calls taken out of a model's text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from reflex_sidecar.output.answer import AnswerSplitter
from reflex_sidecar.output.calls import format_of
from reflex_sidecar.output.parts import Arguments, Call, Part, Text, Thought, held_back

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "u": {"type": ["string", "null"]},
                },
            },
        },
    }
]


Whole = Thought | Text | tuple[str, str]


def merged(parts: list[Part]) -> list[Whole]:
    """Neighbours of a kind as one, a call as its name and arguments."""
    out: list[Whole] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Call):
            out.append((part.name, ""))
        elif isinstance(part, Arguments):
            assert isinstance(last, tuple), "arguments of nothing"
            out[-1] = (last[0], last[1] + part.text)
        elif type(last) is type(part):
            out[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            out.append(part)
    return out


def split(text: str, cuts: list[int], **options: Any) -> list[Whole]:
    splitter = AnswerSplitter(**options)
    parts: list[Part] = []
    for a, b in itertools.pairwise([0, *cuts, len(text)]):
        parts += splitter.feed(text[a:b])
    return merged(parts + splitter.finish())


def every_way(text: str, **options: Any) -> list[Whole]:
    """The parts of a text, which are the same whole, cut anywhere, and letter by letter."""
    whole = split(text, [], **options)
    for cut in range(len(text) + 1):
        assert split(text, [cut], **options) == whole, f"cut at {cut}"
    assert split(text, list(range(len(text))), **options) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", [Text("plain")]),
        ("", []),
        ("  indented", [Text("  indented")]),
        ("<think>\nhm\n</think>\n\nyes", [Thought("hm"), Text("yes")]),
        ("\n<think>hm</think>yes", [Thought("hm"), Text("yes")]),
        ("<think>\n\n</think>\n\nyes", [Text("yes")]),
        ("<think>a </thin b</think>c", [Thought("a </thin b"), Text("c")]),
        ("<think>never closed\n", [Thought("never closed")]),
        ("<thin air", [Text("<thin air")]),
        ("<think", [Text("<think")]),
        ("text <think>late</think>", [Text("text <think>late</think>")]),
        ("<think>one\n\ntwo</think>three\n", [Thought("one\n\ntwo"), Text("three\n")]),
    ],
)
def test_thoughts(text: str, parts: list[Part]):
    assert every_way(text) == parts


def test_a_thought_that_the_template_has_opened():
    assert every_way("hm\n</think>\n\nyes", inside_thought=True) == [Thought("hm"), Text("yes")]
    assert every_way("only thought", inside_thought=True) == [Thought("only thought")]


def test_without_splitting_thoughts_are_text():
    assert every_way("<think>a</think>b", split_thoughts=False) == [Text("<think>a</think>b")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}')]),
        ('Sure.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', [Text("Sure."), ("f", "{}")]),
        (
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
            [("f", "{}"), ("g", "{}")],
        ),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        ("<tool_call>not json</tool_call> end", [Text("<tool_call>not json</tool_call> end")]),
        ('<tool_call>{"arguments": {}}</tool_call>', [Text('<tool_call>{"arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "f", "argu', [Text('<tool_call>{"name": "f", "argu')]),
        ("a < b <tool", [Text("a < b <tool")]),
        # Cut off after it has become a call: its arguments as far as they came.
        ('<tool_call>{"name": "f", "arguments": {"a": "x\\', [("f", '{"a": "x')]),
        ("<function=f><parameter=s>\nab", [("f", '{"s":"ab')]),
        ("<function=f>\n<parameter=n>\n1\n</parameter>\n<par", [("f", '{"n":1')]),
        # JSON that ends too early, or names its parts in another order.
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> b', [("f", '{"a": 1'), Text("b")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a":1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        # A closing tag inside a string closes nothing.
        (
            '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>\\""}}</tool_call>',
            [("f", '{"s": "</tool_call>\\""}')],
        ),
        # Qwen3-Coder at times leaves out what opens.
        ("<function=f>\n</function>\n</tool_call>", [("f", "{}")]),
        (
            "<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n</function>",
            [("f", '{"s":"1"}')],
        ),
        (
            "<function=f><parameter=s>\n\n</parameter><parameter=n>2</parameter></function>",
            [("f", '{"s":"","n":2}')],
        ),
        ('<function=f><parameter=s>"q"\n\n</p\n</parameter></function>', [("f", '{"s":"\\"q\\"\\n\\n</p"}')]),
        (
            "<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            '<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{"x": [1]}\n</parameter>\n'
            "<parameter=u>\nnull\n</parameter>\n<parameter=unknown>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
            [("f", '{"s":"12","n":12,"b":true,"o":{"x":[1]},"u":null,"unknown":"two\\nlines"}')],
        ),
        ("<function=f>\n<parameter=n>\n3\n</parameter>\n</function>", [("f", '{"n":3}')]),
        ("<tool_call><function=f></function></tool_call>", [("f", "{}")]),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [Text("Looking."), ("f", '{"a": 1}')],
        ),
    ],
)
def test_calls(text: str, parts: list[Part]):
    assert every_way(text, tools=TOOLS) == parts


def test_calls_stay_text_where_no_tools_were_offered():
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert every_way(text) == [Text(text)]


def test_without_parallel_calls_only_the_first_comes_out():
    text = (
        '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>'
    )
    assert every_way(text, tools=TOOLS, parallel=False) == [("f", "{}")]


@pytest.mark.parametrize("text", ["<tool_ca", "<tool_call>\n", '<tool_call>\n{"name": "f", "argu'])
def test_a_forced_call_that_is_cut_off_early_is_no_text(text: str):
    """Cut by max_tokens inside the markup, `<tool_call` came out as the answer's content."""
    assert every_way(text, tools=TOOLS, forced=True) == []
    assert every_way(text, tools=TOOLS) == [Text(text)]


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "xyz"}}</tool_call>', 12),
        ("<function=f><parameter=s>\nxyz\n</parameter><parameter=n>12</parameter></function>", 6),
    ],
)
def test_arguments_come_in_pieces(text: str, fragments: int):
    """They came as one piece, when the call had ended."""
    splitter = AnswerSplitter(tools=TOOLS)
    parts = [p for c in text for p in splitter.feed(c)]
    assert parts[0] == Call("f") and len(parts) >= fragments
    assert all(isinstance(p, Arguments) and p.text for p in parts[1:])


def test_thought_then_call():
    text = '<think>\nuse f\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert every_way(text, tools=TOOLS) == [Thought("use f"), ("f", "{}")]


def test_arguments_are_json_again():
    (call,) = every_way('<tool_call>{"name":"f","arguments":{"s":"é\\n\\"q\\""}}</tool_call>', tools=TOOLS)
    assert isinstance(call, tuple) and json.loads(call[1]) == {"s": 'é\n"q"'}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("... <｜tool▁calls▁begin｜> ...", "deepseek"),
        ("... <｜tool▁calls▁begin｜> ... ```json ...", "deepseek_fenced"),
        ("<tool_call>\n<function=example>", "xml"),
        ("<tool_call>\n{", "json"),
        ("no tools", None),
    ],
)
def test_the_spelling_of_calls_follows_from_the_template(template: str, found: str | None):
    assert format_of(template) == found


def test_held_back_is_the_longest_beginning_of_a_marker():
    assert held_back("abc<th", ("</think>", "<think>")) == 3
    assert held_back("abc<", ("</think>",)) == 1
    assert held_back("abc", ("</think>",)) == 0
    assert held_back("</think>", ("</think>",)) == 0
