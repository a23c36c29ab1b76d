"""Thoughts and calls taken out of a model's text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from reflex_sidecar.output.answer import AnswerSplitter
from reflex_sidecar.output.calls import format_of
from reflex_sidecar.output.parts import Call, Part, Text, Thought, held_back

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


def merged(parts: list[Part]) -> list[Part]:
    """Neighbours of a kind as one."""
    out: list[Part] = []
    for part in parts:
        if out and isinstance(part, (Text, Thought)) and type(out[-1]) is type(part):
            out[-1] = type(part)(out[-1].text + part.text)  # type: ignore[union-attr]
        else:
            out.append(part)
    return out


def split(text: str, cuts: list[int], **options: Any) -> list[Part]:
    splitter = AnswerSplitter(**options)
    parts: list[Part] = []
    for a, b in itertools.pairwise([0, *cuts, len(text)]):
        parts += splitter.feed(text[a:b])
    return merged(parts + splitter.finish())


def every_way(text: str, **options: Any) -> list[Part]:
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
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [Call("f", '{"a":1}')]),
        ('Sure.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', [Text("Sure."), Call("f", "{}")]),
        (
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>\n',
            [Call("f", "{}"), Call("g", "{}")],
        ),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [Call("f", '{"a": 1}')]),
        ("<tool_call>not json</tool_call> end", [Text("<tool_call>not json</tool_call> end")]),
        ('<tool_call>{"arguments": {}}</tool_call>', [Text('<tool_call>{"arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "f", "argu', [Text('<tool_call>{"name": "f", "argu')]),
        ("a < b <tool", [Text("a < b <tool")]),
        (
            "<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            '<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{"x": [1]}\n</parameter>\n'
            "<parameter=u>\nnull\n</parameter>\n<parameter=unknown>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
            [Call("f", '{"s":"12","n":12,"b":true,"o":{"x":[1]},"u":null,"unknown":"two\\nlines"}')],
        ),
        ("<function=f>\n<parameter=n>\n3\n</parameter>\n</function>", [Call("f", '{"n":3}')]),
        ("<tool_call><function=f></function></tool_call>", [Call("f", "{}")]),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [Call("f", '{"a": 1}'), Call("g", "{}")],
        ),
        (
            "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [Text("Looking."), Call("f", '{"a": 1}')],
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
    assert every_way(text, tools=TOOLS, parallel=False) == [Call("f", "{}")]


def test_thought_then_call():
    text = '<think>\nuse f\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert every_way(text, tools=TOOLS) == [Thought("use f"), Call("f", "{}")]


def test_arguments_are_json_again():
    (call,) = every_way('<tool_call>{"name":"f","arguments":{"s":"é\\n\\"q\\""}}</tool_call>', tools=TOOLS)
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"s": 'é\n"q"'}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("... <｜tool▁calls▁begin｜> ...", "deepseek"),
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
