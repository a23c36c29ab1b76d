"""Requests one after another on one engine, every architecture: nothing of a request is left for the next, a
request whose state is gone says so and harms nobody, candidates may be longer than a pass.
"""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

from reflex_worker import Engine as ApiEngine
from reflex_worker._native import Engine, ReflexError
from reflex_worker.energy import Meters
from reflex_worker.worker import Worker
from tests.conftest import reflex_command

from .references import EXACT_MAX_DIFF, fixture_path, load
from .test_system1 import KINDS, check, mixed_candidates, run

# One file of each architecture, and of each kind of latent attention.
ONE_OF_EACH = (
    "qwen2-tied",
    "qwen3-q8_0",
    "llama3",
    "qwen2moe-q4_0",
    "qwen3moe-q4_k",
    "deepseek-q8_0",
    "deepseek2-lite",
    "deepseek2-v3",
    "deepseek2-unsplit-q4_0",
    "qwen35-q8_0",
    "qwen35moe-q8_0",
    "qwen3next-q4_0",
    "qwen4exp",
    "qwen4exp-q8_0",
    "deepseek32-q8_0",
    "deepseek4-q8_0",
)
SMALL_CHUNK = 8
LONG_CANDIDATES = (7, 8, 9, 17, 30)  # tokens: around a chunk and past several


def served(path: str, requests: list[dict[str, object]], device: str = "cpu") -> list[dict[str, object]]:
    """The finals of a fresh worker process, without times and the drawn seed."""
    done = subprocess.run(
        [*reflex_command(), "stdio", path, "--device", device, "--threads", "2"],
        input="".join(json.dumps(r) + "\n" for r in requests),
        capture_output=True,
        text=True,
        timeout=300,
    )
    finals = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(finals) == len(requests), done.stderr
    for f in finals:
        assert f["event"] == "final" and "error_kind" not in f, f
        f.pop("timings"), f.pop("seed", None)
    return finals


Requests = list[dict[str, object]]


def requests_of(name: str) -> tuple[Requests, Requests]:
    """Short ones and long ones."""
    ref = load(name)
    candidates = [[5], [5, 9, 11], [5, 9, 12, 13], [7] * 40]
    short_ones: Requests = [
        {"id": "a", "prompt_token_ids": ref.ids[9:30], "max_tokens": 8, "ignore_eos": True, "logprobs": 3},
        {"id": "b", "prompt_token_ids": ref.ids[9:30], "candidate_token_ids": candidates},
        {"id": "c", "prompt_token_ids": ref.ids[3:4], "max_tokens": 3, "ignore_eos": True, "logprobs": 3},
    ]
    long_ones: Requests = [
        {"id": "0", "prompt_token_ids": ref.ids, "max_tokens": 8, "ignore_eos": True},
        {"id": "1", "prompt_token_ids": ref.ids[:200], "candidate_token_ids": candidates},
    ]
    return short_ones, long_ones


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_request_after_a_long_one_equals_that_of_a_fresh_process(name):
    short_ones, long_ones = requests_of(name)
    path = str(fixture_path(name))
    assert served(path, long_ones + short_ones)[2:] == served(path, short_ones)


@pytest.mark.parametrize("prompt_length", [1, SMALL_CHUNK, 20])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_candidates_longer_than_a_pass(engine, name, kind, prompt_length):
    ref, e = load(name), engine(name, chunk=SMALL_CHUNK)
    vocab = ref.logits.shape[1]
    rng = np.random.default_rng(prompt_length)
    candidates = mixed_candidates(vocab, 12, seed=prompt_length)
    candidates += [rng.integers(0, vocab, n).tolist() for n in LONG_CANDIDATES]
    candidates.append(candidates[-1][:-1])  # the beginning of the longest
    prompt = ref.ids[:prompt_length]
    check(run(e, prompt, candidates, score=kind), engine(name), prompt, candidates, kind, EXACT_MAX_DIFF)


# ---- requests whose state is gone ----------------------------------------------------------


def finish(task):
    while task.step().kind != "done":
        pass
    return task


def assert_gone(task) -> None:
    for _ in range(2):  # and stays so
        with pytest.raises(ReflexError, match="another one has begun") as e:
            task.step()
        assert e.value.kind == "kv_cache"


@pytest.fixture
def own_engine(request) -> Engine:
    return Engine(str(fixture_path(request.param)), device="cpu", threads=1, chunk=SMALL_CHUNK)


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("own_engine", ["qwen3-tied", "qwen35", "deepseek2-v3"], indirect=True)
def test_a_generation_that_another_request_overtook_says_so(own_engine, steps):
    """It used to go on in the other's rows, and took them with it."""
    prompt = list(range(5, 35))
    want = finish(own_engine.generate(prompt_token_ids=[7, 8, 9], max_tokens=4, ignore_eos=True)).token_ids
    old = own_engine.generate(prompt_token_ids=prompt, max_tokens=8, ignore_eos=True)
    for _ in range(steps):
        old.step()
    so_far = old.token_ids
    new = own_engine.generate(prompt_token_ids=[7, 8, 9], max_tokens=4, ignore_eos=True)
    old.step()  # the new one has not begun: nothing has happened yet
    new.step()
    assert_gone(old)
    new.step()
    assert_gone(old)
    assert finish(new).token_ids == want
    assert old.token_ids[: len(so_far)] == so_far


@pytest.mark.parametrize("own_engine", ["qwen3-tied", "qwen35", "deepseek2-v3"], indirect=True)
def test_a_scoring_that_another_request_overtook_says_so(own_engine):
    prompt, candidates = list(range(5, 35)), [[1, 2], [3] * 20, [4]]
    want = run(own_engine, prompt, candidates).candidates
    old = own_engine.score(prompt_token_ids=prompt, candidate_token_ids=candidates)
    old.step()
    new = own_engine.score(prompt_token_ids=prompt, candidate_token_ids=candidates)
    new.step()
    assert_gone(old)
    assert finish(new).candidates == want
    assert_gone(old)
    again = own_engine.score(prompt_token_ids=prompt, candidate_token_ids=candidates)
    again.step()
    own_engine.logits(prompt[:3], [2])  # the tests' own door begins a request too
    assert_gone(again)


@pytest.mark.parametrize("own_engine", ["qwen35"], indirect=True)
def test_what_has_ended_stays_ended(own_engine):
    done = finish(own_engine.generate(prompt_token_ids=[7, 8, 9], max_tokens=1, ignore_eos=True))
    finish(own_engine.generate(prompt_token_ids=[7, 8], max_tokens=1, ignore_eos=True))
    assert done.step().kind == "done"


@pytest.mark.parametrize("name", ["qwen35", "qwen3-tied"])
def test_a_worker_survives_a_request_whose_state_is_gone(name):
    engine = ApiEngine(str(fixture_path(name)), device="cpu", threads=1)
    worker = Worker(max_line_bytes=1 << 16, start_load=lambda _: None, meters=Meters())
    worker.load_at_start()
    worker.load_finished(engine)

    def say(**line: object) -> None:
        worker.receive(json.dumps(line).encode() + b"\n")

    def hear() -> list[dict]:
        while worker.has_work:
            worker.work()
        return [json.loads(line) for line in worker.take_output().splitlines()]

    request = {"prompt_token_ids": [7, 8, 9], "max_tokens": 4, "ignore_eos": True}
    say(id="first", **request)
    [first] = hear()
    say(id="a", **request)
    for _ in range(3):
        worker.work()
    engine._native.logits([1, 2, 3], [2])  # somebody else takes the engine
    say(id="b", **request)
    a, b = hear()
    assert (a["id"], a["error_kind"]) == ("a", "kv_cache")
    assert b["id"] == "b" and b["token_ids"] == first["token_ids"]
