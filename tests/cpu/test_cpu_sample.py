"""What is read off the logits: log-sum-exp, the best, a draw, against numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reflex_worker import _testing

from .plans import F32, ISAS, Array, Floats

Count = tuple[int, int, bool]


def head(logits: Floats, isa: str = "") -> _testing.CpuRunner:
    """A runner whose last pass left these logits (O, V): unit vectors through their transpose."""
    rows, vocab = logits.shape
    plan = _testing.CpuPlan(vocab)
    table = np.zeros((vocab, rows), np.float32)
    table[:rows] = np.eye(rows, dtype=np.float32)
    a, b = plan.value(rows), plan.value(rows, True)
    plan.embed(plan.weight("x", F32, rows, vocab, table.tobytes()), a)
    plan.select(a, b)
    zero = np.zeros((vocab, rows), np.float32)
    bias = plan.weight("bias", F32, vocab, 1, logits[0].tobytes()) if rows == 1 else -1
    weight = zero if rows == 1 else np.ascontiguousarray(logits.T)
    plan.head(b, plan.weight("w", F32, rows, vocab, weight.tobytes()), bias)
    runner = _testing.CpuRunner(plan, isa=isa)
    runner.run(list(range(rows)), outputs=list(range(rows)))
    return runner


def weights(
    logits: Floats,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    counts: Sequence[Count] = (),
    bias: Sequence[tuple[int, float]] = (),
    allowed: Sequence[int] = (),
) -> Array:
    """Unnormalised weights (V) of the draw, 0 for what is cut, in the order of backend.h."""
    x = logits.astype(np.float64)
    for i, value in bias:
        x[i] += value
    for i, n, seen in counts:
        if seen:
            x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
        x[i] -= frequency * n + (presence if n > 0 else 0.0)
    if len(allowed):
        mask = np.array([allowed[i // 32] >> (i % 32) & 1 for i in range(len(x))], bool)
        x[~mask] = -np.inf
    p = np.exp((x - x.max()) / temperature)
    order = np.lexsort((np.arange(len(x)), -p))
    kept = order[:top_k] if top_k else order
    if top_p < 1.0:
        total = np.cumsum(p[kept])
        kept = kept[: int(np.searchsorted(total, top_p * total[-1])) + 1]
    w = np.zeros(len(x))
    w[kept] = np.where(p[kept] >= min_p, p[kept], 0.0)
    return w


SPECS: list[dict] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 100, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
    {"top_k": 1},
    {"top_p": 0.0},
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS)
def test_draws_follow_the_reference(spec: dict, isa: str) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(5003) * 3).astype(np.float32)
    counts = [(int(i), int(n), True) for i, n in zip(rng.integers(0, 5003, 20), range(20), strict=True)]
    counts = list({c[0]: c for c in counts}.values())
    extra = {"counts": counts, "repetition": 1.2, "frequency": 0.1, "presence": 0.3, "bias": [(7, 4.0)]}
    runner = head(logits[None], isa)
    for more in ({}, extra):
        cumulative = np.cumsum(weights(logits, **spec, **more))
        for u in rng.random(40):
            got = runner.sample(0, **spec, **more, random=float(np.float32(u)))
            at = float(np.float32(u)) * cumulative[-1]
            low = cumulative[got - 1] if got else 0.0
            slack = 1e-5 * cumulative[-1]  # weights are f32
            assert low - slack <= at < cumulative[got] + slack
            assert weights(logits, **spec, **more)[got] > 0


def test_mask_bias_and_penalties_bind_greedy_too() -> None:
    logits = np.array([[1.0, 5.0, 3.0, 5.0, -2.0]], np.float32)
    runner = head(logits)
    assert runner.sample(0, temperature=0.0) == 1  # the first on a tie
    assert runner.sample(0, temperature=0.0, bias=[(4, 100.0)]) == 4
    assert runner.sample(0, temperature=0.0, allowed=[0b10101]) == 2
    assert runner.sample(0, temperature=0.0, counts=[(1, 0, True), (3, 0, True)], repetition=2.0) == 2
    assert runner.sample(0, temperature=0.0, counts=[(1, 3, True)], frequency=0.1) == 3
    assert runner.sample(0, temperature=1.0, allowed=[0]) == -1  # no token is left
    with pytest.raises(_testing.Error, match="token id 5 is outside the vocabulary of 5"):
        runner.sample(0, bias=[(5, 1.0)])


@pytest.mark.parametrize("isa", ISAS)
def test_log_sum_exp_and_top_logprobs(isa: str) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((3, 20011)) * 4).astype(np.float32)
    logits[1, [5, 9, 20010]] = 30.0  # a three-way tie
    runner = head(logits, isa)
    for o in range(3):
        x = logits[o].astype(np.float64)
        lse = x.max() + np.log(np.exp(x - x.max()).sum())
        assert abs(runner.log_sum_exp(o) - lse) <= 1e-6 * abs(lse)
        assert runner.argmax(o) == int(np.argmax(x))
        order = np.lexsort((np.arange(len(x)), -x))[:50]
        got = runner.top_logprobs(o, 50)
        assert [i for i, _ in got] == order.tolist()
        assert np.abs(np.array([p for _, p in got]) - (x[order] - lse)).max() <= 1e-5
    assert [i for i, _ in runner.top_logprobs(1, 3)] == [5, 9, 20010]
    assert runner.top_logprobs(0, 0) == []


@pytest.mark.parametrize("isa", ISAS)
def test_nan_never_wins(isa: str) -> None:
    logits = np.full((1, 100), np.nan, np.float32)
    logits[0, 40], logits[0, 70] = -3.0, -2.0
    runner = head(logits, isa)
    assert runner.argmax(0) == 70
    assert runner.sample(0, temperature=0.0) == 70
    assert {runner.sample(0, random=u) for u in (0.0, 0.2, 0.5, 0.99)} == {40, 70}
    assert [i for i, _ in runner.top_logprobs(0, 10)] == [70, 40]
