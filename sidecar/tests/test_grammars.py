"""What answers with tools are bound to, held against the grammar engine itself, and what reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reflex_sidecar.grammars import CallRules, grammar
from reflex_sidecar.output.answer import AnswerSplitter
from reflex_sidecar.output.calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, CallFormat
from reflex_sidecar.output.parts import Arguments, Call, Text, Thought
from reflex_sidecar.parameters import parameters_of, value_of
from vocabulary import Vocabulary, fits, real, refused_after, small

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "unit": {"$ref": "#/$defs/Unit"},
            "more": {
                "anyOf": [
                    {"type": "object", "properties": {"u": {"$ref": "#/$defs/Unit"}}, "required": ["u"]},
                    {"type": "null"},
                ]
            },
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["c", "f"]}},
    },
}
NOW: dict[str, Any] = {"name": "now", "parameters": {"type": "object", "properties": {}}}
OPEN: dict[str, Any] = {"name": "open", "parameters": {"type": "object"}}
TOOLS = [WEATHER, NOW, OPEN]
DEEPSEEK = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


def dumps(value: Any) -> str:
    """As transformers' tojson writes it, and models with it."""
    return json.dumps(value, ensure_ascii=False)


def json_calls(*calls: tuple[str, Any]) -> str:
    bodies = [dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def xml_calls(*calls: tuple[str, dict[str, Any]]) -> str:
    """As Qwen3-Coder's template writes them."""
    out = []
    for name, arguments in calls:
        values = {k: v if isinstance(v, str) else dumps(v) for k, v in arguments.items()}
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        out.append(f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>")
    return "\n".join(out)


def deepseek_calls(*calls: tuple[str, Any]) -> str:
    bodies = [f"{CALL_BEGIN}{name}{SEPARATOR}{dumps(a)}{CALL_END}" for name, a in calls]
    return CALLS_BEGIN + "".join(bodies) + CALLS_END


def fenced_calls(*calls: tuple[str, Any]) -> str:
    bodies = [
        f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{dumps(a)}\n```{CALL_END}" for name, a in calls
    ]
    return CALLS_BEGIN + "\n".join(bodies) + CALLS_END


SPELLINGS: dict[CallFormat, Any] = {
    "json": json_calls,
    "xml": xml_calls,
    "deepseek": deepseek_calls,
    "deepseek_fenced": fenced_calls,
}
# Every way in which a model's file may hold the markup.
VOCABULARIES = {
    "bytes": small(merged=()),
    "merged": small(),
    "control": small(control=[*DEEPSEEK, "<tool_call>", "</tool_call>"], merged=['"}', '"}}', "}\n", ">\n"]),
}

everywhere = pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
every_spelling = pytest.mark.parametrize("spelling", SPELLINGS)


def rules(spelling: CallFormat, vocabulary: Vocabulary, **fields: Any) -> str:
    return grammar(CallRules(fields.pop("tools", TOOLS), spelling, control=vocabulary.control, **fields))


PARIS: tuple[str, dict[str, Any]] = (
    "get_weather",
    {"city": "Paris, \u00cele-de-France", "days": 3, "metric": True, "unit": "c", "more": {"u": "f"}},
)


@everywhere
@every_spelling
def test_a_call_may_follow_text(spelling: CallFormat, vocabulary: Vocabulary):
    """Once the grammar's text swallowed what opens a call: after a word of text no call was possible."""
    bound = rules(spelling, vocabulary)
    write = SPELLINGS[spelling]
    assert fits(bound, vocabulary, "Just text, a < b, <tool and no call.")
    for text in ("", "Let me look.\n"):
        assert fits(bound, vocabulary, text + write(PARIS))
        assert fits(bound, vocabulary, text + write(PARIS, ("now", {}), ("open", {})))


@everywhere
@every_spelling
def test_from_the_opener_on_every_token_is_bound(spelling: CallFormat, vocabulary: Vocabulary):
    bound = rules(spelling, vocabulary)
    write = SPELLINGS[spelling]
    for wrong in (
        ("unknown_tool", {}),
        ("get_weather", {"days": 3}),  # city is required
        ("get_weather", {"city": "x", "days": [3]}),
        ("get_weather", {"city": "x", "unit": "kelvin"}),
        ("get_weather", {"city": "x", "more": {"u": "kelvin"}}),
        ("get_weather", {"city": "x", "other": 1}),
    ):
        assert refused_after(bound, vocabulary, "Hm. " + write(wrong)) is not None, wrong
    half = write(PARIS)[: len(write(PARIS)) // 2]
    assert not fits(bound, vocabulary, half)


@everywhere
@every_spelling
def test_a_forced_answer_begins_with_the_call(spelling: CallFormat, vocabulary: Vocabulary):
    bound = rules(spelling, vocabulary, forced=True)
    write = SPELLINGS[spelling]
    assert refused_after(bound, vocabulary, "Let me look.") == ""
    assert not fits(bound, vocabulary, "")
    assert fits(bound, vocabulary, write(PARIS)) and fits(bound, vocabulary, write(("now", {}), PARIS))


@everywhere
@every_spelling
@pytest.mark.parametrize("forced", [False, True])
def test_without_parallel_calls_there_is_one_at_most(
    spelling: CallFormat, vocabulary: Vocabulary, forced: bool
):
    bound = rules(spelling, vocabulary, forced=forced, most=1)
    write = SPELLINGS[spelling]
    assert fits(bound, vocabulary, write(PARIS))
    assert refused_after(bound, vocabulary, write(PARIS, PARIS)) is not None


@everywhere
@every_spelling
def test_thoughts_may_speak_of_calls(spelling: CallFormat, vocabulary: Vocabulary):
    """Markup inside a thought opens nothing; after it everything is bound again."""
    write = SPELLINGS[spelling]
    thought = "I could write <function=x> or <tool" + ("_call> here." if not vocabulary.control else ".")
    for inside, opening in ((False, "<think>\n"), (False, "\n<think>"), (True, "")):
        bound = rules(spelling, vocabulary, inside_thought=inside)
        assert fits(bound, vocabulary, f"{opening}{thought}")  # cut off, or never closed
        assert fits(bound, vocabulary, f"{opening}{thought}</think>\n\nNo call.")
        assert fits(bound, vocabulary, f"{opening}{thought}</think>\n\n{write(PARIS)}")
        wrong = f"{opening}{thought}</think>\n\n{write(('unknown', {}))}"
        assert refused_after(bound, vocabulary, wrong) is not None


@everywhere
@every_spelling
def test_beside_tools_an_answer_follows_the_response_format(spelling: CallFormat, vocabulary: Vocabulary):
    schema = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
    bound = rules(spelling, vocabulary, answer=schema)
    assert fits(bound, vocabulary, '{"z": 1}') and fits(bound, vocabulary, SPELLINGS[spelling](PARIS))
    assert refused_after(bound, vocabulary, "text") == ""


def test_a_function_without_the_tool_call_around_it_is_bound_too():
    vocabulary = small()
    bound = rules("xml", vocabulary)
    assert fits(bound, vocabulary, "Hm.\n<function=now>\n</function>")
    assert refused_after(bound, vocabulary, "<function=later>") == "<function="


def test_references_in_a_tools_schema_lead_from_its_own_root():
    """A pydantic model with an enum or a nested model was a 400: its $defs were looked for in the
    schema of the whole call."""
    for spelling in SPELLINGS:
        vocabulary = small()
        assert fits(rules(spelling, vocabulary), vocabulary, SPELLINGS[spelling](PARIS))
    itself = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}}}
    vocabulary = small()
    assert fits(rules("xml", vocabulary, tools=[itself]), vocabulary, xml_calls(("f", {"a": {}})))


def test_strings_of_the_xml_spelling_are_bound_by_their_schema():
    tool = {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "short": {"type": "string", "maxLength": 3},
                "long": {"type": "string", "minLength": 2},
                "word": {"type": "string", "enum": ["on e", "two\nlines"]},
            },
        },
    }
    vocabulary = small()
    bound = rules("xml", vocabulary, tools=[tool])
    for fine in (
        {"short": "abc"},
        {"short": ""},
        {"long": "ab\ncd"},
        {"word": "two\nlines"},
        {"long": "</p> </parameter"},
    ):
        assert fits(bound, vocabulary, xml_calls(("f", fine))), fine
    for wrong in ({"short": "abcd"}, {"long": "a"}, {"word": "on"}):
        assert refused_after(bound, vocabulary, xml_calls(("f", wrong))) is not None, wrong


def test_more_than_the_listed_parameters_where_the_schema_says_so():
    listed = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    vocabulary = small()
    bound = rules("xml", vocabulary, tools=[{"name": "f", "parameters": listed}])
    assert fits(bound, vocabulary, xml_calls(("f", {"a": 1, "b": "two"})))


@every_spelling
def test_what_the_grammar_allows_is_what_is_read(spelling: CallFormat):
    tools = [{"type": "function", "function": f} for f in TOOLS]
    splitter = AnswerSplitter(tools=tools)
    text = "<think>\nhm\n</think>\n\nWell.\n" + SPELLINGS[spelling](PARIS, ("now", {}))
    parts = [p for c in text for p in splitter.feed(c)] + splitter.finish()
    assert "".join(p.text for p in parts if isinstance(p, Thought)) == "hm"
    assert "".join(p.text for p in parts if isinstance(p, Text)) == "Well."
    assert [p.name for p in parts if isinstance(p, Call)] == ["get_weather", "now"]
    at = [i for i, p in enumerate(parts) if isinstance(p, Call)]
    first, second = (
        "".join(p.text for p in some if isinstance(p, Arguments))
        for some in (parts[at[0] : at[1]], parts[at[1] :])
    )
    assert json.loads(first) == PARIS[1] and json.loads(second) == {}


@pytest.mark.parametrize(
    ("name", "spelling", "control"),
    [
        ("ggml-vocab-qwen2.gguf", "json", ()),
        ("ggml-vocab-qwen2.gguf", "xml", ()),
        ("ggml-vocab-deepseek-llm.gguf", "deepseek", ()),
        ("ggml-vocab-deepseek-llm.gguf", "deepseek", DEEPSEEK),
        ("ggml-vocab-deepseek-llm.gguf", "deepseek_fenced", DEEPSEEK),
    ],
)
def test_with_real_vocabularies(name: str, spelling: CallFormat, control: tuple[str, ...]):
    vocabulary = real(name, control)
    write = SPELLINGS[spelling]
    bound = rules(spelling, vocabulary)
    assert fits(bound, vocabulary, "Let me look.\n" + write(PARIS, ("now", {})))
    assert fits(bound, vocabulary, "<think>\nhm\n</think>\n\nNo.")
    assert refused_after(bound, vocabulary, "Hm. " + write(("get_weather", {"days": 1}))) is not None
    assert refused_after(rules(spelling, vocabulary, most=1), vocabulary, write(PARIS, PARIS)) is not None


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "x"}, "x", "x"),
        ({"$ref": "#/$defs/N"}, "2.5", 2.5),
        ({"allOf": [{"$ref": "#/$defs/N"}]}, "2", 2),
        ({"type": "array"}, "[1, [2]]", [1, [2]]),
        ({"$ref": "#/nowhere"}, "12", "12"),
    ],
)
def test_a_parameters_text_by_its_schema(schema: dict[str, Any], text: str, value: Any):
    root = {"type": "object", "properties": {"p": schema}, "$defs": {"N": {"type": "number"}}}
    (parameter,) = parameters_of({"name": "f", "parameters": root}).listed
    assert value_of(text, parameter.types) == value


def test_a_schema_that_refers_to_itself_has_an_end():
    loop = {"$ref": "#/$defs/L"}
    root = {"properties": {"p": loop}, "$defs": {"L": {"$ref": "#/$defs/L"}}}
    assert parameters_of({"name": "f", "parameters": root}).listed[0].types == frozenset()
