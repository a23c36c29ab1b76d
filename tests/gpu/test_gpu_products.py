"""Products of every type on the GPU against numpy in float64, at every number of rows that another kernel
or another shape of one takes."""

from __future__ import annotations

import numpy as np
import pytest

from reflex_worker import _testing

from ..cpu.plans import F32, TYPES, decode, nmse, random_weight

pytestmark = pytest.mark.gpu

EXACT, FAST = 1e-10, 1e-5  # NMSE; design.md allows 1e-4 in fast mode
ROWS = [1, 2, 4, 5, 16, 17, 32, 33, 64, 65, 128, 130]
N_OUT = 301  # ragged: no kernel's tiles divide it
COMPUTABLE = [name for name, (_, _, _, kind) in TYPES.items() if kind != "other"]


def widths(name: str) -> list[int]:
    """Of rows: several cells, and for small blocks one that ends within a unit of 128."""
    values = TYPES[name][1]
    return [768] if values == 256 else [75, 352] if values == 1 else [values * 11]


def product(name: str, weight: bytes, n_in: int, x: np.ndarray, exact: bool) -> _testing.CpuRunner:
    """logits = x W^T: a table that holds x, and W as the head."""
    table = np.zeros((N_OUT, n_in), np.float32)
    table[: len(x)] = x
    plan = _testing.CpuPlan(N_OUT)
    e = plan.weight("x", F32, n_in, N_OUT, table.tobytes())
    w = plan.weight("w", TYPES[name][0], n_in, N_OUT, weight)
    a, b = plan.value(n_in), plan.value(n_in, True)
    plan.embed(e, a)
    plan.select(a, b)
    plan.head(b, w)
    return _testing.CpuRunner(plan, max_rows=len(x), exact=exact, device="cuda")


@pytest.mark.parametrize("name", COMPUTABLE)
def test_product_of_every_type(name: str) -> None:
    rng = np.random.default_rng(TYPES[name][0])
    for n_in in widths(name):
        weight = random_weight(rng, name, N_OUT, n_in)
        x = rng.standard_normal((max(ROWS), n_in)).astype(np.float32)
        want = x.astype(np.float64) @ decode(name, weight, N_OUT, n_in).T
        for exact in (True, False):
            runner = product(name, weight, n_in, x, exact)
            worst = 0.0
            for rows in ROWS:
                runner.truncate(0)
                runner.run(list(range(rows)), outputs=list(range(rows)))
                got = np.stack([runner.logits(r) for r in range(rows)])
                worst = max(worst, nmse(got, want[:rows]))
            print(f"{name} n_in {n_in} {'exact' if exact else 'fast'}: NMSE {worst:.2e}")
            assert worst <= (EXACT if exact else FAST)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_nan_reaches_the_output(name: str, rows: int) -> None:
    """A broken activation must not come out as a plausible number."""
    rng = np.random.default_rng(3)
    n_in = 256
    weight = random_weight(rng, name, N_OUT, n_in)
    x = rng.standard_normal((rows, n_in)).astype(np.float32)
    x[rows - 1, 17] = np.nan
    runner = product(name, weight, n_in, x, False)
    runner.run(list(range(rows)), outputs=list(range(rows)))
    assert np.isnan(runner.logits(rows - 1)).all()
    assert rows == 1 or np.isfinite(runner.logits(0)).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_1", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_activations_of_any_size(name: str, size: float) -> None:
    rng = np.random.default_rng(4)
    n_in = 512
    weight = random_weight(rng, name, N_OUT, n_in)
    x = (rng.standard_normal((2, n_in)) * size).astype(np.float32)
    want = x.astype(np.float64) @ decode(name, weight, N_OUT, n_in).T
    runner = product(name, weight, n_in, x, False)
    runner.run([0], outputs=[0])
    assert nmse(runner.logits(0), want[0]) <= FAST
    if size > 1e-4:  # several rows are kept in f16, whose least step is 1e-6 after scaling
        runner.truncate(0)
        runner.run([0, 1], outputs=[0, 1])
        assert nmse(np.stack([runner.logits(0), runner.logits(1)]), want) <= FAST
