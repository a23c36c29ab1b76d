"""schema.json is what the messages say, and what golden examples obey."""

import json
from pathlib import Path

from reflex_protocol import ERROR_KINDS, messages, schema

GOLDEN = Path(__file__).parent.parent / "golden"
STORED = Path(schema.__file__).with_name("schema.json")


def test_schema_is_not_stale():
    """After a change of messages: python protocol/make_schema.py"""
    assert STORED.read_text(encoding="utf-8") == schema.text()


def test_schema_names_every_message_and_error_kind():
    defs = json.loads(STORED.read_text(encoding="utf-8"))["$defs"]
    assert {c.__name__ for c in messages.CONTROL_TYPES.values()} <= set(defs)
    assert {c.__name__ for c in messages.EVENT_TYPES.values()} <= set(defs)
    assert defs["ErrorFinal"]["properties"]["error_kind"]["examples"] == list(ERROR_KINDS)


def test_golden_examples_obey_the_schema():
    defs = json.loads(STORED.read_text(encoding="utf-8"))["$defs"]
    for name, closed in (("to_worker.jsonl", True), ("from_worker.jsonl", False)):
        for example in map(json.loads, (GOLDEN / name).read_text(encoding="utf-8").splitlines()):
            shape = defs[example["struct"]]
            line = json.loads(example["line"])
            assert set(shape["required"]) <= set(line), line
            assert set(line) <= set(shape["properties"]), line
            assert shape.get("additionalProperties", True) is not closed


def test_error_kinds_are_append_only():
    """A program switches on these; a new kind goes to the end."""
    assert ERROR_KINDS[:17] == (
        "gguf", "unsupported_architecture", "cuda", "out_of_memory", "tokenizer", "context_overflow",
        "kv_cache", "lora", "io", "invalid_input", "cancelled", "busy", "shutting_down", "line_too_long",
        "unsupported", "fatal", "other",
    )  # fmt: skip
