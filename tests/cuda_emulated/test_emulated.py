"""The CUDA backend on the emulated card (tests/native/emulator), a handful of fixtures end to end: what CI
has in place of a GPU. Exact mode gives the CPU's tokens and scores, fast mode stays within the card's bounds.

Nothing here ran on a GPU, and no time of it says anything of one. tests/gpu has the tests for a card; they
run on the emulated one too (REFLEX_EMULATOR=folder, and the folder on LD_LIBRARY_PATH), which takes long.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

import numpy as np
import pytest

from reflex_worker._native import Engine

from ..conftest import reflex_command
from ..gpu.bounds import assert_fast
from ..oracle.references import EXACT_MAX_DIFF, fixture_path, load
from ..oracle.test_system1 import mixed_candidates, run
from .conftest import run_python

# One of each kind of layer: plain attention (F32 and quantised), mixtures, Gated DeltaNet, latent attention,
# streams with n-grams and attention over chosen blocks.
FIXTURES = ("qwen3-tied", "llama-q4_0", "qwen2moe", "qwen35moe", "deepseek2-lite", "qwen4exp")
# Sparse attention's bounds in fast mode are of two kinds of rows: tests/gpu has them.
EXACT_FIXTURES = (*FIXTURES, "deepseek32", "deepseek4")
PROMPT, TOKENS, CANDIDATES = 20, 8, 6
ROWS = 33  # of the reference: a chunk of the delta rule and one more

# A driver is there for a whole process or not at all: so a process of its own.
CHILD = """
import json, sys
from reflex_worker._native import Engine
ask = json.load(sys.stdin)
engine = Engine(ask["path"], device="cuda", exact=ask["exact"], threads=2)
generation = engine.generate(prompt_token_ids=ask["ids"], max_tokens=ask["tokens"], ignore_eos=True)
while generation.step().kind != "done":
    pass
scoring = engine.score(prompt_token_ids=ask["ids"], candidate_token_ids=ask["candidates"])
while scoring.step().kind != "done":
    pass
answer = {
    "device": engine.info["device"],
    "tokens": list(generation.token_ids),
    "scores": [c[2] for c in scoring.candidates],
    "logits": [list(row) for row in engine.logits(ask["all"], ask["rows"])],
}
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Case:
    name: str
    ids: list[int]
    candidates: list[list[int]]


def case_of(name: str) -> Case:
    ref = load(name)
    return Case(name, ref.ids[:PROMPT], mixed_candidates(ref.logits.shape[1], CANDIDATES, seed=1))


def emulated(env: dict[str, str], case: Case, exact: bool, **settings: str) -> dict:
    ref = load(case.name)
    ask = {
        "path": str(fixture_path(case.name)),
        "exact": exact,
        "ids": case.ids,
        "candidates": case.candidates,
        "tokens": TOKENS,
        "all": ref.ids[:ROWS],
        "rows": ref.rows_below(ROWS),
    }
    answer = json.loads(run_python({**env, **settings}, CHILD, json.dumps(ask)))
    assert "emulated" in answer["device"], "this must not run on a card"
    return answer


BACKWARDS = {"REFLEX_EMULATOR_REVERSE": "1", "REFLEX_EMULATOR_EARLY": "1"}


@pytest.mark.parametrize("settings", [{}, BACKWARDS], ids=["forwards", "backwards"])
@pytest.mark.parametrize("name", EXACT_FIXTURES)
def test_emulated_cuda_in_exact_mode_is_the_cpu(
    name: str, settings: dict[str, str], emulated_environment: dict[str, str]
) -> None:
    case = case_of(name)
    cpu = Engine(str(fixture_path(name)), device="cpu", exact=True, threads=2)
    generation = cpu.generate(prompt_token_ids=case.ids, max_tokens=TOKENS, ignore_eos=True)
    while generation.step().kind != "done":
        pass
    scores = [c[2] for c in run(cpu, case.ids, case.candidates).candidates]
    found = emulated(emulated_environment, case, True, **settings)
    assert found["tokens"] == list(generation.token_ids)
    most = max(len(c) for c in case.candidates)
    assert np.abs(np.subtract(found["scores"], scores)).max() <= most * EXACT_MAX_DIFF
    ref = load(name)
    worst = float(np.abs(np.array(found["logits"]) - ref.at(ref.rows_below(ROWS))).max())
    print(f"{name}, emulated CUDA: max |difference| of logits {worst:.1e}")
    assert worst <= EXACT_MAX_DIFF


@pytest.mark.parametrize("name", FIXTURES)
def test_emulated_cuda_in_fast_mode_is_within_the_cards_bounds(
    name: str, emulated_environment: dict[str, str]
) -> None:
    found = emulated(emulated_environment, case_of(name), False)
    ref = load(name)
    wanted = ref.rows_below(ROWS)
    assert_fast(name, 0, wanted, np.array(found["logits"]), ref.at(wanted))


def test_emulated_cuda_serves_the_command(emulated_environment: dict[str, str]) -> None:
    said = []
    for device in ("cpu", "cuda"):
        ask = ["generate", "--demo", "Once", "--device", device, "--exact", "--max-tokens", "6", "--json"]
        done = subprocess.run(
            [*reflex_command(), *ask],
            capture_output=True,
            text=True,
            timeout=600,
            env=emulated_environment,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert said[1]["device"].startswith("CUDA") and "emulated" in said[1]["device"]
    assert said[0]["text"] == said[1]["text"]
