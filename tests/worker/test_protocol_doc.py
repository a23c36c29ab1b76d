"""The examples of docs/protocol.md and of the protocol's README, executed: sessions line by line against a
real worker, shell and Python blocks as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reflex_protocol import ERROR_KINDS
from reflex_protocol.client import Client
from reflex_protocol.messages import CONTROL_TYPES, Request, Sampling

from tests.conftest import ROOT, reflex_command

from .process import LIMIT, Lines

DOC = ROOT / "docs/protocol.md"
README = ROOT / "protocol/README.md"

# Values that the page promises exactly; of all others it shows an example.
EXACT = {
    "event",
    "id",
    "ok",
    "error",
    "error_kind",
    "finish_reason",
    "stop_match",
    "score",
    "state",
    "protocol",
}


def blocks(path: Path, language: str) -> list:
    text = path.read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"no {language} block in {path}"
    return [pytest.param(block, id=f"{path.stem}-{language}-{i}") for i, block in enumerate(found)]


@pytest.fixture(scope="module")
def path_with_reflex(tmp_path_factory) -> dict[str, str]:
    """An environment in which `reflex` is the command under test."""
    folder = tmp_path_factory.mktemp("bin")
    command = " ".join(f"'{word}'" for word in reflex_command())
    (folder / "reflex").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "reflex").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def check(shown: object, found: object, where: str) -> None:
    """Same keys in the same order, same kinds of value, and what is promised exactly, exactly."""
    if isinstance(shown, dict):
        assert isinstance(found, dict), where
        if shown:  # {} stands for "whatever"
            assert list(found) == list(shown), where
        for key, value in shown.items():
            check(value, found[key], f"{where}.{key}")
            if key in EXACT and not isinstance(value, (dict, list)) and not where.endswith("[]"):
                assert found[key] == value, f"{where}.{key}"
    elif isinstance(shown, list):
        assert isinstance(found, list), where
        if shown and found:
            check(shown[0], found[0], f"{where}[]")
    elif isinstance(shown, (int, float)) and not isinstance(shown, bool):
        assert isinstance(found, (int, float)), where
    else:
        assert type(found) is type(shown), where


@pytest.mark.parametrize("block", blocks(DOC, "session"))
def test_sessions_of_the_page(block):
    pipe = subprocess.PIPE
    command = [*reflex_command(), "stdio", "--demo"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        while b"READY" not in process.stderr.readline():
            pass
        lines = Lines(process.stdout.fileno(), process.stdin.fileno())
        for line in block.splitlines():
            if line.startswith("> "):
                lines.write(line[2:].encode() + b"\n")
            else:
                assert line.startswith("< "), line
                check(json.loads(line[2:]), lines.hear(), line)
        process.stdin.close()
        assert lines.at_end()


def spelled(shown: object) -> Iterator[tuple[list[int], str]]:
    """Every place of an example that shows ids and what they spell."""
    if isinstance(shown, list):
        for value in shown:
            yield from spelled(value)
    if not isinstance(shown, dict):
        return
    ids = [shown["token_id"]] if "token_id" in shown else shown.get("token_ids")
    if ids and isinstance(shown.get("text"), str):
        yield ids, shown["text"]
    if "token_id" in shown and "bytes" in shown:
        yield ids, bytes(shown["bytes"]).decode()
    for value in shown.values():
        yield from spelled(value)


def test_the_ids_and_sizes_of_the_page_are_those_of_the_bundled_model():
    """They were those of a model before the last: 2649 tokens, and " Paris" another one."""
    sessions = "".join(b.values[0] for b in blocks(DOC, "session"))
    lines = [json.loads(line[2:]) for line in sessions.splitlines()]
    asked = {line["id"]: line for line in lines if line.get("type") in ("tokenize", "detokenize")}
    with Client.spawn([*reflex_command(), "stdio", "--demo"]) as worker:
        hello = worker.hello(timeout=LIMIT)
        assert hello.model is not None
        pairs = list(spelled(lines))
        for line in lines:
            if line.get("event") == "hello":
                assert line["model"]["n_vocab"] == hello.model.n_vocab
                assert line["limits"]["n_ctx"] == line["model"]["n_ctx"] == hello.model.n_ctx
            elif line.get("event") in ("tokenize", "detokenize"):
                both = {**asked[line["id"]], **line}
                pairs.append((both["token_ids"], both["text"]))
        assert len(pairs) > 8
        for ids, text in pairs:
            assert worker.detokenize(ids, timeout=LIMIT) == text
            assert worker.tokenize(text, add_bos=False, timeout=LIMIT) == ids


@pytest.mark.parametrize("block", blocks(DOC, "sh"))
def test_shell_blocks_of_the_page(block, path_with_reflex):
    done = subprocess.run(["sh", "-ec", block], env=path_with_reflex, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [True, True]


@pytest.mark.parametrize("block", blocks(DOC, "python") + blocks(README, "python"))
def test_python_blocks_of_the_page(block, path_with_reflex):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], env=path_with_reflex, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
    assert done.stdout


def test_the_page_names_every_field_and_word():
    text = DOC.read_text(encoding="utf-8")
    words = [
        *Request.__struct_fields__,
        *Sampling.__struct_fields__,
        *CONTROL_TYPES,
        *ERROR_KINDS,
    ]
    missing = [word for word in words if f"`{word}`" not in text and f'"{word}"' not in text]
    assert missing == []
