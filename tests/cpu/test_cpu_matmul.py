"""Every product of every instruction set against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from reflex_worker import _testing

from .plans import ISAS, TYPES, Product, decode, nmse, random_weight

EXACT, FAST = 1e-10, 1e-4  # NMSE, design.md
ROWS = [1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130]
COMPUTABLE = [name for name, (_, _, _, kind) in TYPES.items() if kind != "other"]


def n_in_of(name: str) -> int:
    """A row of several blocks, and for the floats one that no vector divides."""
    values = TYPES[name][1]
    return 75 if values == 1 else max(values * 3, 96)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", COMPUTABLE)
def test_product_of_every_type(name: str, isa: str) -> None:
    rng = np.random.default_rng(TYPES[name][0])
    n_out, n_in = 45, n_in_of(name)
    weight = random_weight(rng, name, n_out, n_in)
    x = rng.standard_normal((max(ROWS), n_in)).astype(np.float32)
    want = x.astype(np.float64) @ decode(name, weight, n_out, n_in).T
    worst = {True: 0.0, False: 0.0}
    for rows in ROWS:
        for exact in (True, False):
            got = Product(name, weight, n_out, n_in, x[:rows], isa=isa, exact=exact)()
            worst[exact] = max(worst[exact], nmse(got, want[:rows]))
    print(f"{isa} {name}: exact {worst[True]:.2e}, fast {worst[False]:.2e}")
    assert worst[True] <= EXACT
    assert worst[False] <= FAST


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_weights_may_lie_at_any_address(name: str, isa: str) -> None:
    rng = np.random.default_rng(1)
    n_out, n_in = 13, 256
    weight = random_weight(rng, name, n_out, n_in)
    x = rng.standard_normal((5, n_in)).astype(np.float32)
    for rows in (1, 5):
        aligned = Product(name, weight, n_out, n_in, x[:rows], isa=isa)()
        for misalign in (1, 2, 7):
            got = Product(name, weight, n_out, n_in, x[:rows], isa=isa, misalign=misalign)()
            assert np.array_equal(got, aligned)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "Q5_1"])
def test_long_rows_and_extreme_blocks(name: str, isa: str) -> None:
    """Blocks of the largest magnitudes: an accumulator of 16 bits, or a saturating one, would break."""
    rng = np.random.default_rng(2)
    n_out, n_in = 7, 3072
    weight = np.frombuffer(random_weight(rng, name, n_out, n_in), np.uint8).copy()
    if name == "Q8_0":
        blocks = weight.reshape(-1, 34)
        blocks[::2, 2:] = 0x80  # -128
        blocks[1::2, 2:] = 0x7F
    x = np.sign(rng.standard_normal((18, n_in))).astype(np.float32)
    x[0] = 1.0
    want = x.astype(np.float64) @ decode(name, weight.tobytes(), n_out, n_in).T
    for rows in (1, 2, 18):
        got = Product(name, weight.tobytes(), n_out, n_in, x[:rows], isa=isa)()
        assert nmse(got, want[:rows]) <= 1e-9  # +-1 is exact in 8 bits


@pytest.mark.parametrize("isa", ISAS)
def test_zero_and_tiny_and_huge_activations(isa: str) -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, "Q8_0", 9, 64)
    w = decode("Q8_0", weight, 9, 64)
    x = rng.standard_normal((4, 64)).astype(np.float32) * np.float32([[0], [1e-30], [1e30], [1]])
    for rows in (4, 1):
        got = Product("Q8_0", weight, 9, 64, x[:rows], isa=isa)()
        assert np.array_equal(got[0], np.zeros(9))
        for r in range(1, rows):
            assert nmse(got[r], x[r].astype(np.float64) @ w.T) <= FAST


@pytest.mark.parametrize("isa", ISAS)
def test_a_value_that_is_not_finite_shows(isa: str) -> None:
    weight = random_weight(np.random.default_rng(4), "Q8_0", 9, 64)
    for bad in (np.nan, np.inf, -np.inf):
        for rows in (1, 3):
            x = np.ones((rows, 64), np.float32)
            x[0, 5] = bad
            got = Product("Q8_0", weight, 9, 64, x, isa=isa)()
            assert np.isnan(got[0]).all()
            assert np.isfinite(got[1:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("exact", [True, False])
def test_same_bits_for_any_number_of_threads(isa: str, exact: bool) -> None:
    rng = np.random.default_rng(5)
    n_out, n_in = 203, 256
    for name in ("Q8_0", "Q6_K", "F16"):
        weight = random_weight(rng, name, n_out, n_in)
        x = rng.standard_normal((37, n_in)).astype(np.float32)
        for rows in (1, 3, 37):
            one = Product(name, weight, n_out, n_in, x[:rows], isa=isa, exact=exact, threads=1)()
            for threads in (2, 3, 5):
                more = Product(name, weight, n_out, n_in, x[:rows], isa=isa, exact=exact, threads=threads)
                assert np.array_equal(one, more())
                assert np.array_equal(one, more())


def test_unusable_types_are_refused() -> None:
    for name, (_, values, size, kind) in TYPES.items():
        if kind == "other":
            with pytest.raises(_testing.Error, match=f"tensor 'w': type {name} .* cannot be computed with"):
                Product(name, bytes(size * 4 * 256 // values), 4, 256, np.zeros((1, 256), np.float32))
