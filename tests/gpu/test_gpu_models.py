"""Engines on the GPU: the fixtures' logits against transformers in float32, greedy tokens and system1
against the CPU's exact mode, to the gates of design.md."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError

from ..oracle.references import (
    EXACT_MAX_DIFF,
    EXACT_MEAN_KL,
    FIRST_CHOICE,
    HYBRIDS,
    MIXTURES,
    NAMES,
    SPARSE,
    SPARSE_FAST_RMS,
    fixture_path,
    load,
    mean_kl,
)
from ..oracle.test_requests import ONE_OF_EACH, requests_of, served
from ..oracle.test_system1 import mixed_candidates, run
from .bounds import assert_fast, rounded_bound

pytestmark = pytest.mark.gpu

RUN = [*NAMES, *SPARSE]
# Other than plain attention, all of them; of plain attention a file of each architecture.
MIXERS = [n for n in RUN if n in (*HYBRIDS, *SPARSE) or n.startswith("deepseek2")]
EVERY = [*MIXERS, *(n for n in ONE_OF_EACH if n not in MIXERS)]
# Pieces of 70 rows: two that meet at every place, and more of them; on an emulated card a choice of these.
SOME_PIECES = (*range(2, 12), 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 69, 70)
PIECES = SOME_PIECES if os.environ.get("REFLEX_EMULATOR") else range(2, 71)
LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 70, 130, 257)


@cache
def engine(name: str, device: str = "cuda", exact: bool = True) -> Engine:
    return Engine(str(fixture_path(name)), device=device, exact=exact, threads=2)


def rows(e: Engine, ids: list[int], wanted: list[int], chunk: int = 0) -> np.ndarray:
    return np.array(e.logits(ids, wanted, chunk=chunk), np.float64)


@pytest.mark.parametrize("name", RUN)
def test_exact_logits(name: str) -> None:
    ref = load(name)
    worst = kl = 0.0
    for length in LENGTHS:
        wanted = ref.rows_below(length)
        for chunk in (0, 7, 1):
            found = rows(engine(name), ref.ids[:length], wanted, chunk)
            worst = max(worst, float(np.abs(found - ref.at(wanted)).max()))
            kl = max(kl, mean_kl(ref.at(wanted), found))
    print(f"{name}: max |difference| {worst:.1e}, KL {kl:.1e}")
    assert worst <= EXACT_MAX_DIFF
    assert kl <= EXACT_MEAN_KL


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("name", [n for n in RUN if n not in SPARSE])
def test_fast_logits(name: str, chunk: int) -> None:
    ref = load(name)
    found = rows(engine(name, exact=False), ref.ids, ref.rows, chunk)
    assert_fast(name, chunk, ref.rows, found, ref.logits)


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("name", SPARSE)
def test_fast_logits_of_sparse_attention(name: str, chunk: int) -> None:
    """Rows that read every slot, and those that choose: f16 flips narrow choices, as 8 bits do on the CPU."""
    ref = load(name)
    found = rows(engine(name, exact=False), ref.ids, ref.rows, chunk)
    error, free = found - ref.logits, np.array(ref.rows) < FIRST_CHOICE[name]
    bounds = [max(bound, rounded_bound(name, chunk)) for bound in SPARSE_FAST_RMS[name]]
    for what, part, bound in zip(("all", "chosen"), (error[free], error[~free]), bounds, strict=True):
        rms = float(np.sqrt((part**2).mean()))
        print(f"{name} chunk {chunk or 'whole'}, rows that read {what}: rms {rms:.4f}, bound {bound:.4f}")
        assert rms <= bound


@pytest.mark.parametrize("name", RUN)
def test_greedy_tokens_of_exact_mode_are_the_cpus(name: str) -> None:
    ids = load(name).ids[:20]
    tokens = []
    for device in ("cpu", "cuda"):
        g = engine(name, device).generate(prompt_token_ids=ids, max_tokens=24, ignore_eos=True)
        while g.step().kind != "done":
            pass
        tokens.append(list(g.token_ids))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("score", ["logit_sum", "logprob_sum"])
def test_system1_is_the_cpus(score: str, exact: bool) -> None:
    results = []
    for device in ("cpu", "cuda"):
        cities = [" Paris", " London", " Rome"]
        s = engine("demo", device, exact).score("The capital of France is", cities, score=score)
        while s.step().kind != "done":
            pass
        results.append([c[2] for c in s.candidates])
        assert s.best_index == 0
    assert np.abs(np.subtract(*results)).max() <= (1e-3 if exact else 0.2)


@pytest.mark.parametrize("name", EVERY)
def test_pieces_of_every_size_leave_the_same_state(name: str) -> None:
    """Every row after every border: a state that a piece left wrong shows in the rows behind it."""
    ids, wanted = load(name).ids[:70], list(range(70))
    single = rows(engine(name), ids, wanted, 1)
    for chunk in PIECES:
        found = rows(engine(name), ids, wanted, chunk)
        assert float(np.abs(found - single).max()) <= EXACT_MAX_DIFF, f"{name}: pieces of {chunk}"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", EVERY)
def test_a_request_after_a_long_one_gives_the_bits_of_a_fresh_engine(name: str, exact: bool) -> None:
    ref = load(name)
    used = engine(name, exact=exact)
    used.logits(ref.ids, [256])
    run(used, ref.ids[:40], mixed_candidates(ref.logits.shape[1], 20, seed=1))
    fresh = Engine(str(fixture_path(name)), device="cuda", exact=exact)
    assert used.logits(ref.ids[9:30], [0, 20]) == fresh.logits(ref.ids[9:30], [0, 20])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_request_after_a_long_one_equals_that_of_a_fresh_process(name: str) -> None:
    """What a process gave first and what it gives after long requests."""
    short_ones, long_ones = requests_of(name)
    finals = served(str(fixture_path(name)), short_ones + long_ones + short_ones, "cuda")
    assert finals[-len(short_ones) :] == finals[: len(short_ones)]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", [*MIXTURES, *SPARSE])
def test_experts_give_the_same_bits_however_they_come(
    name: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all else, as routers choose them, and into fewer slots than there are experts."""
    ids = load(name).ids[:70]

    def bits(experts: str) -> tuple[list[int], list[list[float]]]:
        e = Engine(str(fixture_path(name)), device="cuda", exact=exact, experts=experts)
        g = e.generate(prompt_token_ids=ids[:9], max_tokens=4, ignore_eos=True)
        while g.step().kind != "done":
            pass
        return list(g.token_ids), e.logits(ids, [0, 33, 69], chunk=33)

    eager = bits("eager")
    assert bits("lazy") == eager
    room = 256
    monkeypatch.setenv("REFLEX_EXPERT_BYTES", str(room))
    with pytest.raises(ReflexError, match="that a row chooses") as error:
        bits("")
    assert error.value.kind == "out_of_memory"
    while True:  # until a row's 2 fit: twice as much is no room for all 8
        monkeypatch.setenv("REFLEX_EXPERT_BYTES", str(room))
        try:
            found = bits("")
            break
        except ReflexError as e:
            assert e.kind == "out_of_memory" and room < 1 << 26
            room *= 2
    assert found == eager


@pytest.mark.parametrize("chunk", [512, 33])
@pytest.mark.parametrize("prompt_length", [1, 7, 40])
@pytest.mark.parametrize("kind", ["logit_sum", "logprob_sum"])
@pytest.mark.parametrize("name", EVERY)
def test_system1_with_long_candidates_is_the_cpus(
    name: str, kind: str, prompt_length: int, chunk: int
) -> None:
    """Shared beginnings, beginnings of one another, and candidates too long for one pass."""
    ref = load(name)
    vocab = ref.logits.shape[1]
    rng = np.random.default_rng(prompt_length)
    candidates = mixed_candidates(vocab, 24, seed=prompt_length)
    candidates += [rng.integers(0, vocab, n).tolist() for n in (12, 40, 70)]
    scores = []
    for device in ("cpu", "cuda"):
        e = Engine(str(fixture_path(name)), device=device, exact=True, threads=2, chunk=chunk)
        scores.append([c[2] for c in run(e, ref.ids[:prompt_length], candidates, score=kind).candidates])
    most = max(len(c) for c in candidates)
    assert np.abs(np.subtract(*scores)).max() <= most * EXACT_MAX_DIFF


def test_the_first_qwen3next_files_run_too(tmp_path: Path) -> None:
    """One ssm_in for attn_qkv and attn_gate: their rows are put side by side again (Concat)."""
    pytest.importorskip("gguf")
    from ..oracle.rewrite import rewrite
    from ..oracle.test_conventions import join_ssm_in

    ref = load("qwen3next")
    path = rewrite(fixture_path("qwen3next"), tmp_path / "older.gguf", remake=join_ssm_in)
    e = Engine(str(path), device="cuda", exact=True)
    for chunk in (0, 7):
        assert float(np.abs(rows(e, ref.ids, ref.rows, chunk) - ref.logits).max()) <= EXACT_MAX_DIFF


def test_load_modes_give_the_same_logits() -> None:
    ref = load("qwen3-q8_0")
    found = [
        rows(Engine(str(fixture_path("qwen3-q8_0")), device="cuda", load_mode=mode), ref.ids[:9], [8])
        for mode in ("", "ring", "map", "read", "direct")
    ]
    assert all(np.array_equal(found[0], f) for f in found[1:])
