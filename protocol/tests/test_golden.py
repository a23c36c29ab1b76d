"""Golden examples, both ways: what a line means, and how the meaning is written."""

import json
from pathlib import Path

import msgspec
import pytest
from reflex_protocol import LineError, check, codec, decode_answer, decode_line, encode, messages

GOLDEN = Path(__file__).parent.parent / "golden"


def examples(name):
    with open(GOLDEN / name, encoding="utf-8") as f:
        return [pytest.param(e, id=e["note"].replace(" ", "_")) for e in map(json.loads, f)]


def line_of(example):
    return bytes.fromhex(example["hex"]) if "hex" in example else example["line"].encode()


@pytest.mark.parametrize("example", examples("to_worker.jsonl"))
def test_lines_to_the_worker(example):
    meaning = with_tag(example)
    assert decode_line(line_of(example)) == meaning
    assert encode(meaning) == line_of(example) + b"\n"
    if example["struct"] != "Hello":
        assert check(meaning) is None


@pytest.mark.parametrize("example", examples("from_worker.jsonl"))
def test_lines_from_the_worker(example):
    meaning = with_tag(example)
    assert decode_answer(line_of(example)) == meaning
    assert encode(meaning) == line_of(example) + b"\n"


def with_tag(example):
    cls = getattr(messages, example["struct"])
    config = cls.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    return msgspec.convert({**tag, **example["fields"]}, cls, strict=False)


@pytest.mark.parametrize("example", examples("bad_lines.jsonl"))
def test_bad_lines(example):
    error = decode_line(line_of(example))
    assert isinstance(error, LineError)
    assert (error.kind, error.id) == (example["kind"], example["id"])
    said, cut, _ = example["message"].partition("...")  # where the JSON is broken is msgspec's to say
    assert error.message.startswith(said) and (cut or error.message == said)
    final = error.final()
    assert (final.ok, final.error_kind, final.error, final.id) == (False, error.kind, error.message, error.id)


@pytest.mark.parametrize("example", examples("refused.jsonl"))
def test_refused_messages(example):
    message = decode_line(line_of(example))
    assert not isinstance(message, LineError)
    assert check(message) == (example["kind"], example["message"])


def test_every_message_has_a_golden_example():
    shown = {e.values[0]["struct"] for n in ("to_worker.jsonl", "from_worker.jsonl") for e in examples(n)}
    sent = {codec.Request, *messages.CONTROL_TYPES.values()}
    heard = {codec.GenerateFinal, codec.ScoreFinal, codec.ErrorFinal, *messages.EVENT_TYPES.values()}
    assert {cls.__name__ for cls in sent | heard} == shown


def test_every_field_of_a_request_has_a_golden_example():
    shown = {name for e in examples("to_worker.jsonl") for name in e.values[0]["fields"]}
    assert set(messages.Request.__struct_fields__) <= shown | {"skip_special", "parse_special"}
