"""What `reflex info` says of a file's tokenizer is what generate, system1, check, the worker and the Python
API then do: an unknown pre-tokenizer falls back to the tokenizers package everywhere, a vocabulary that makes
no sense is refused everywhere with the same words, and ids go past all of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from reflex_worker import Engine, ReflexError
from reflex_worker.api import describe
from tests.conftest import reflex_command
from tests.oracle.references import fixture_path
from tests.oracle.rewrite import rewrite

PROMPT, CANDIDATES = "the one in there", [" and", " the"]
TOLD = "reflex: tokenizer.ggml.pre 'unheard-of' is not known"


@pytest.fixture(scope="module")
def unheard_of(tmp_path_factory) -> Path:
    """A file whose pre-tokenizer nobody knows."""
    target = tmp_path_factory.mktemp("pre") / "unheard-of.gguf"
    return rewrite(fixture_path("qwen3-tied"), target, keys={"tokenizer.ggml.pre": "unheard-of"})


def fewer_rows(table: np.ndarray) -> np.ndarray:
    return table[:100]


@pytest.fixture(
    scope="module",
    params=["no merges", "no tokens", "too few rows", "unknown model", "types of another number"],
)
def broken(request, tmp_path_factory) -> tuple[Path, str]:
    """A file whose vocabulary makes no sense, and what must be said of it."""
    target = tmp_path_factory.mktemp("vocabulary") / "broken.gguf"
    source = fixture_path("qwen3-tied")
    if request.param == "no merges":
        return rewrite(source, target, keys={"tokenizer.ggml.merges": None}), "tokenizer.ggml.merges"
    if request.param == "no tokens":
        return rewrite(source, target, keys={"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens"
    if request.param == "unknown model":
        keys = {"tokenizer.ggml.model": "unigram"}
        return rewrite(source, target, keys=keys), "expected 'gpt2' or 'llama', found 'unigram'"
    if request.param == "types of another number":
        keys = {"tokenizer.ggml.token_type": [1, 1, 3]}
        return rewrite(source, target, keys=keys), "expected one type for each of 269 tokens, found 3"
    changed = rewrite(source, target, change={"token_embd": fewer_rows})
    return changed, "expected at most the 100 rows of token_embd.weight, found 269 tokens"


def lines_of_a_worker(path: Path, *requests: dict[str, object]) -> tuple[list[dict], str]:
    """What `reflex stdio` answers to the requests in turn, and its stderr."""
    done = subprocess.run(
        [*reflex_command(), "stdio", str(path), "--device", "cpu"],
        input="".join(json.dumps(r) + "\n" for r in requests),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def row(stdout: str) -> dict:
    return json.loads(stdout.splitlines()[-1])


def test_an_unknown_pre_tokenizer_gives_the_same_ids_everywhere(reflex, unheard_of):
    with_package = Engine(str(unheard_of), device="cpu")
    ids = with_package.tokenize(PROMPT)
    api = with_package.generate(PROMPT, max_tokens=4, ignore_eos=True).run()

    info = reflex("info", str(unheard_of), "--json")
    assert info.returncode == 0 and row(info.stdout)["runs"] is True
    assert "words split by the tokenizers package" in reflex("info", str(unheard_of)).stdout

    options = ["--device", "cpu", "--json"]
    generated = reflex("generate", str(unheard_of), PROMPT, "--max-tokens", "4", "--ignore-eos", *options)
    assert generated.returncode == 0, generated.stderr
    assert row(generated.stdout)["token_ids"] == api.token_ids
    assert row(generated.stdout)["prompt_tokens"] == len(ids)

    choices = [a for c in CANDIDATES for a in ("--candidate", c)]
    decided = reflex("system1", str(unheard_of), PROMPT, *choices, *options)
    assert decided.returncode == 0, decided.stderr
    scored = [json.loads(line) for line in decided.stdout.splitlines()][:-1]
    assert [c["text"] for c in scored] == CANDIDATES
    assert [c["token_ids"] for c in scored] == [
        with_package.tokenize(PROMPT + c)[len(ids) :] for c in CANDIDATES
    ]

    checked = reflex("check", str(unheard_of), PROMPT, *options)
    assert checked.returncode == 0 and row(checked.stdout)["rows"] == len(ids)

    answers, stderr = lines_of_a_worker(
        unheard_of,
        {"type": "tokenize", "id": "t", "text": PROMPT},
        {"id": "r", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True},
    )
    assert answers[0]["token_ids"] == ids
    assert answers[1]["token_ids"] == api.token_ids
    for said in (info.stderr, generated.stderr, decided.stderr, checked.stderr):
        assert said.count(TOLD) == 1 and said.count("\n") == 1, said
    assert stderr.count(TOLD) == 1, stderr


def test_the_package_is_not_imported_for_files_that_the_core_knows():
    import reflex_worker

    site = str(Path(reflex_worker.__path__[0]).parent)
    code = (
        f"import sys; sys.path.insert(0, {site!r}); from reflex_worker.api import describe; "
        f"assert describe({str(fixture_path('qwen3-tied'))!r})['runs']; print('tokenizers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout.strip() == "False", done.stderr


def test_without_the_package_a_file_of_unknown_words_does_not_run(monkeypatch, unheard_of):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    report = describe(str(unheard_of))
    assert (report["runs"], report["error_kind"]) == (False, "tokenizer")
    assert "pip install" in report["error"]
    engine = Engine(str(unheard_of), device="cpu")
    with pytest.raises(ReflexError, match="pip install") as e:
        engine.generate(PROMPT)
    assert e.value.kind == "tokenizer"
    assert len(engine.generate(prompt_token_ids=[5, 6], max_tokens=2, ignore_eos=True).run().token_ids) == 2


def refusals(done: Sequence[subprocess.CompletedProcess[str]]) -> set[str]:
    assert all(d.returncode == 3 and d.stdout == "" and d.stderr.count("\n") == 1 for d in done)
    return {d.stderr for d in done}


def test_a_broken_vocabulary_is_refused_in_the_same_words_everywhere(reflex, broken):
    path, words = broken
    report = row(reflex("info", str(path), "--json").stdout)
    assert (report["runs"], report["error_kind"]) == (False, "tokenizer")
    assert words in report["error"]
    assert reflex("info", str(path)).returncode == 3
    error = report["error"]

    said = refusals(
        [
            reflex("generate", str(path), PROMPT, "--device", "cpu"),
            reflex("system1", str(path), PROMPT, "--candidate", " and", "--device", "cpu"),
            reflex("check", str(path), PROMPT, "--device", "cpu"),
        ]
    )
    assert said == {f"reflex: error [tokenizer]: {error}\n"}

    answers, _ = lines_of_a_worker(
        path,
        {"id": "text", "prompt": PROMPT},
        {"id": "score", "prompt": PROMPT, "candidates": CANDIDATES},
        {"type": "tokenize", "id": "t", "text": PROMPT},
    )
    assert [(a["error_kind"], a["error"]) for a in answers] == [("tokenizer", error)] * 3

    engine = Engine(str(path), device="cpu")
    assert not engine.info["tokenizer_known"] and engine.info["tokenizer_error"] == error
    with pytest.raises(ReflexError) as e:
        engine.generate(PROMPT)
    assert (e.value.kind, str(e.value)) == ("tokenizer", error)


def test_merges_into_no_token_are_found_before_a_text_meets_them(reflex, tmp_path):
    source = fixture_path("qwen3-tied")
    merges = ["t h", "Ġ t", "q q"]  # there is no token "qq"
    path = rewrite(source, tmp_path / "merges.gguf", keys={"tokenizer.ggml.merges": merges})
    report = describe(str(path))
    assert (report["runs"], report["error_kind"]) == (False, "tokenizer")
    assert "tokenizer.ggml.merges[2]: 'qq' is no token" in report["error"]
    done = reflex("generate", str(path), "qqq", "--device", "cpu")
    assert done.returncode == 3 and report["error"] in done.stderr
    harmless = [*merges[:2], "nowhere q"]  # no text comes to it: "nowhere" is no token either
    path = rewrite(source, tmp_path / "harmless.gguf", keys={"tokenizer.ggml.merges": harmless})
    assert describe(str(path))["runs"]


def test_a_type_that_an_op_cannot_read_is_found_by_info(tmp_path):
    """A plan is checked as a whole by info, as loading does."""
    source = fixture_path("qwen3-tied")
    path = rewrite(source, tmp_path / "f16.gguf", change={"blk.0.attn_norm": lambda w: w.astype(np.float16)})
    report = describe(str(path))
    with pytest.raises(ReflexError) as e:
        Engine(str(path), device="cpu")
    assert not report["runs"]
    assert (report["error_kind"], report["error"]) == (e.value.kind, str(e.value))
    assert "blk.0.attn_norm.weight" in report["error"] and "F16" in report["error"]
