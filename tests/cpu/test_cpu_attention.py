"""Attention over chains and trees against dense masks in float64."""

from __future__ import annotations

import numpy as np
import pytest

from reflex_worker import _testing

from .plans import F32, ISAS, Array, Floats, nmse

EXACT, FAST = 1e-10, 1e-4  # NMSE; fast keeps keys and values in f16


class AttentionPlan:
    """out (rows, H * hd_v) = attention of rows whose q | k | v are a table's rows, token = row."""

    def __init__(self, qkv: Floats, heads: int, kv_heads: int, hd: int, hd_v: int, **options) -> None:
        self.shape = heads, kv_heads, hd, hd_v
        self.scale = float(hd**-0.5)
        n, width = qkv.shape
        out = heads * hd_v
        vocab = max(n, out)
        plan = _testing.CpuPlan(vocab)
        table = np.zeros((vocab, width), np.float32)
        table[:n] = qkv
        x = plan.value(width)
        plan.embed(plan.weight("x", F32, width, vocab, table.tobytes()), x)
        at, parts = 0, []
        for size in (heads * hd, kv_heads * hd, kv_heads * hd_v):
            pick = np.zeros((size, width), np.float32)
            pick[np.arange(size), at + np.arange(size)] = 1
            parts.append(plan.value(size))
            plan.linear(x, parts[-1], plan.weight("pick", F32, width, size, pick.tobytes()))
            at += size
        states = plan.state("k", kv_heads * hd), plan.state("v", kv_heads * hd_v)
        o, chosen = plan.value(out), plan.value(out, True)
        plan.attention(*parts, o, *states, heads, kv_heads, hd, hd_v, self.scale)
        plan.select(o, chosen)
        same = np.zeros((vocab, out), np.float32)
        same[np.arange(out), np.arange(out)] = 1
        plan.head(chosen, plan.weight("same", F32, out, vocab, same.tobytes()))
        self.runner = _testing.CpuRunner(plan, max_rows=1024, **options)

    def run(self, first: int, count: int, parents: list[int]) -> Floats:
        rows = list(range(first, first + count))
        self.runner.run(
            rows,
            positions=rows,
            parents=parents[first : first + count],
            first_slot=first,
            outputs=list(range(count)),
        )
        width = self.shape[0] * self.shape[3]
        return np.stack([self.runner.logits(i)[:width] for i in range(count)])


def expected(qkv: Floats, parents: list[int], heads: int, kv_heads: int, hd: int, hd_v: int) -> Array:
    n, x = len(qkv), qkv.astype(np.float64)
    q = x[:, : heads * hd].reshape(n, heads, hd)
    k = x[:, heads * hd : (heads + kv_heads) * hd].reshape(n, kv_heads, hd)
    v = x[:, (heads + kv_heads) * hd :].reshape(n, kv_heads, hd_v)
    mask = np.zeros((n, n), bool)
    for r in range(n):
        s = r
        while s >= 0:
            mask[r, s] = True
            s = parents[s]
    out = np.zeros((n, heads, hd_v))
    for h in range(heads):
        g = h // (heads // kv_heads)
        score = np.where(mask, q[:, h] @ k[:, g].T * float(hd**-0.5), -np.inf)
        p = np.exp(score - score.max(1, keepdims=True))
        out[:, h] = p / p.sum(1, keepdims=True) @ v[:, g]
    return out.reshape(n, heads * hd_v)


def random_qkv(seed: int, n: int, heads: int, kv_heads: int, hd: int, hd_v: int) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, (heads + kv_heads) * hd + kv_heads * hd_v)).astype(np.float32) * 1.5


SHAPES = [(4, 2, 64, 64), (6, 1, 20, 12), (2, 2, 33, 33), (40, 1, 16, 16)]
PASSES = [[1], [7, 1, 1], [31, 2, 33], [64, 65], [130, 1, 3]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exact", [True, False])
def test_chains_in_passes_of_any_size(shape: tuple[int, int, int, int], exact: bool, isa: str) -> None:
    for passes in PASSES:
        n = sum(passes)
        qkv = random_qkv(n, n, *shape)
        parents = [r - 1 for r in range(n)]
        want = expected(qkv, parents, *shape)
        plan = AttentionPlan(qkv, *shape, isa=isa, exact=exact)
        first = 0
        for count in passes:
            got = plan.run(first, count, parents)
            assert nmse(got, want[first : first + count]) <= (EXACT if exact else FAST)
            first += count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False])
def test_random_trees_against_dense_masks(exact: bool, isa: str) -> None:
    rng = np.random.default_rng(1)
    for case in range(6):
        shape = SHAPES[case % len(SHAPES)]
        passes = [int(c) for c in rng.integers(1, 50, 4)]
        n = sum(passes)
        qkv = random_qkv(case, n, *shape)
        # Mostly chains, with branches off any earlier slot and the odd new root.
        parents = [r - 1 if rng.random() < 0.6 else int(rng.integers(-1, r)) if r else -1 for r in range(n)]
        want = expected(qkv, parents, *shape)
        plan = AttentionPlan(qkv, *shape, isa=isa, exact=exact, threads=2)
        first = 0
        for count in passes:
            got = plan.run(first, count, parents)
            assert nmse(got, want[first : first + count]) <= (EXACT if exact else FAST)
            first += count


@pytest.mark.parametrize("isa", ISAS)
def test_long_context_in_parts(isa: str) -> None:
    """Past 256 slots a few rows are cut into parts of slots that are merged."""
    shape, n = (4, 2, 32, 32), 700
    qkv = random_qkv(3, n, *shape)
    parents = [r - 1 for r in range(n)]
    parents[-1] = 300  # the last row hangs off the middle of the prompt
    want = expected(qkv, parents, *shape)
    results = []
    for threads in (1, 2, 3, 5):
        plan = AttentionPlan(qkv, *shape, isa=isa, exact=True, threads=threads)
        plan.run(0, n - 2, parents)
        got = np.concatenate([plan.run(n - 2, 1, parents), plan.run(n - 1, 1, parents)])
        assert nmse(got, want[n - 2 :]) <= EXACT
        results.append(got)
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@pytest.mark.parametrize("isa", ISAS)
def test_scores_far_apart_do_not_overflow(isa: str) -> None:
    shape, n = (2, 1, 32, 32), 40
    qkv = random_qkv(4, n, *shape) * np.float32(40)
    parents = [r - 1 for r in range(n)]
    want = expected(qkv, parents, *shape)
    plan = AttentionPlan(qkv, *shape, isa=isa, exact=True)
    assert nmse(plan.run(0, n - 1, parents), want[: n - 1]) <= 1e-9  # e^x of |x| in the thousands
    assert nmse(plan.run(n - 1, 1, parents), want[n - 1 :]) <= 1e-9
