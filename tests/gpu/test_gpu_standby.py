"""A worker that waits for a model with its device made ready: what it loads, what fails, how it leaves."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..conftest import reflex_command

pytestmark = pytest.mark.gpu

LIMIT = 120
LOAD_MODES = ("direct", "map", "read", "ring")
REQUEST: dict[str, Any] = {"id": "r", "prompt": "Once upon a time", "max_tokens": 6, "ignore_eos": True}


def worker(*options: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    argv = [*reflex_command(), "stdio", "--device", "cuda", *options]
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stderr is not None and "_READY" in process.stderr.readline()
    return process


def answers(lines: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    """All answers to lines that are sent at once, of a worker that then leaves well."""
    process = worker(*options)
    said, _ = process.communicate("".join(json.dumps(line) + "\n" for line in lines), timeout=LIMIT)
    assert process.returncode == 0
    return [json.loads(line) for line in said.splitlines()]


def load(path: Path | str, id: str = "l") -> dict[str, Any]:
    return {"type": "load", "id": id, "model": str(path)}


@pytest.mark.parametrize("options", [[], ["--exact"], *(["--load-mode", m] for m in LOAD_MODES)])
def test_tokens_are_those_of_a_worker_that_starts_with_its_model(demo_gguf: Path, options: list[str]) -> None:
    waited = answers([load(demo_gguf), REQUEST], *options)
    started = answers([REQUEST], "--model", str(demo_gguf), *options)
    assert waited[0]["event"] == "loaded"
    assert waited[1]["token_ids"] == started[0]["token_ids"]


def test_a_load_that_fails_leaves_the_next_one_everything(demo_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(demo_gguf.read_bytes()[:4096])
    heard = answers(
        [load(tmp_path / "none.gguf", "a"), load(tmp_path / "broken.gguf", "b"), load(demo_gguf), REQUEST]
    )
    assert [(h["id"], h.get("error_kind")) for h in heard[:2]] == [("a", "io"), ("b", "gguf")]
    assert heard[2]["event"] == "loaded" and heard[3]["ok"]


def test_one_model_per_process(demo_gguf: Path) -> None:
    heard = answers([load(demo_gguf, "a"), load(demo_gguf, "b"), REQUEST])
    assert heard[0]["event"] == "loaded"
    assert (heard[1]["id"], heard[1]["error_kind"]) == ("b", "invalid_input")
    assert heard[2]["ok"]


def test_a_request_that_is_cancelled_while_its_model_loads(demo_gguf: Path) -> None:
    heard = answers([load(demo_gguf), REQUEST, {**REQUEST, "id": "s"}, {"type": "cancel", "target": "r"}])
    finals = {h["id"]: h for h in heard if h["event"] == "final"}
    assert sorted(h["id"] for h in heard) == ["l", "r", "s"]
    assert finals["r"]["ok"] or finals["r"]["error_kind"] == "cancelled"  # it may have been answered by then
    assert finals["s"]["ok"]


def test_sigterm_while_a_model_loads_answers_everything(demo_gguf: Path) -> None:
    with worker() as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(load(demo_gguf)) + "\n" + json.dumps(REQUEST) + "\n")
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        said = [json.loads(line) for line in process.stdout]
        assert process.wait(LIMIT) == 0
    for line in said:  # whatever it had come to, each has its one answer
        assert line["event"] == "loaded" or line.get("ok") or line["error_kind"] == "shutting_down"
    assert [line["id"] for line in said] in (["l", "r"], [])
