"""Gated DeltaNet hybrids: what only layers with a state can get wrong. (Their logits: test_logits.py.)

Nothing may depend on how rows were cut into passes, on the request before, or on the candidates beside.
"""

from __future__ import annotations

import numpy as np
import pytest

from reflex_worker._native import Engine

from .conftest import rows
from .references import EXACT_MAX_DIFF, HYBRIDS, fixture_path, load
from .test_system1 import KINDS, check, mixed_candidates, run

LONG_CANDIDATES = (12, 40, 70)  # tokens: more than a small chunk holds, so a checkpoint is needed


@pytest.mark.parametrize("name", HYBRIDS)
def test_pieces_of_every_size_leave_the_same_state(engine, name):
    """Every row after every border: a state that a piece left wrong shows in the rows behind it."""
    ref, e = load(name), engine(name)
    ids, wanted = ref.ids[:70], list(range(70))
    single = rows(e, ids, wanted, 1)
    for chunk in range(2, 71):  # 36 and more: two pieces, cut at every point of the second half
        found = rows(e, ids, wanted, chunk)
        assert float(np.abs(found - single).max()) <= EXACT_MAX_DIFF, f"{name}: pieces of {chunk}"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_request_after_a_long_one_gives_the_bits_of_a_fresh_engine(engine, name, exact):
    ref = load(name)
    used = engine(name, exact=exact)
    used.logits(ref.ids, [256])
    run(used, ref.ids[:40], mixed_candidates(ref.logits.shape[1], 20, seed=1))
    fresh = Engine(str(fixture_path(name)), device="cpu", exact=exact, threads=2)
    assert used.logits(ref.ids[9:30], [0, 20]) == fresh.logits(ref.ids[9:30], [0, 20])


@pytest.mark.parametrize("chunk", [512, 33, 8])
@pytest.mark.parametrize("prompt_length", [1, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_forked_states_equal_one_pass_per_candidate(engine, name, kind, prompt_length, chunk):
    """Shared beginnings, beginnings of one another, and candidates too long for one pass."""
    ref, e = load(name), engine(name, chunk=chunk)
    vocab = ref.logits.shape[1]
    rng = np.random.default_rng(prompt_length)
    long_ones = [rng.integers(0, vocab, n).tolist() for n in LONG_CANDIDATES]
    candidates = mixed_candidates(vocab, 24, seed=prompt_length) + long_ones
    prompt = ref.ids[:prompt_length]
    check(run(e, prompt, candidates, score=kind), engine(name), prompt, candidates, kind, EXACT_MAX_DIFF)


def test_order_of_candidates_changes_no_bit_of_a_score(engine):
    ref, e = load("qwen35"), engine("qwen35")
    candidates = mixed_candidates(ref.logits.shape[1], 50, seed=8)
    first = {tuple(c[1]): c[2] for c in run(e, ref.ids[:30], candidates).candidates}
    again = {tuple(c[1]): c[2] for c in run(e, ref.ids[:30], candidates[::-1]).candidates}
    assert first == again
