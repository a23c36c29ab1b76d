"""Small plans for one kernel at a time, and random weights of any type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reflex_worker import _testing

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

ISAS: list[str] = _testing.cpu_isas()
TYPES: dict[str, tuple[int, int, int, str]] = {
    name: (id_, values, size, kind) for name, id_, values, size, kind in _testing.quant_types()
}
F32 = TYPES["F32"][0]

# Byte offsets of the half-float fields of a block (quant/<type>.h).
HALVES: dict[str, list[int]] = {
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
}
NO_HALF = {"IQ1_M", "MXFP4", "NVFP4"}


def random_weight(rng: np.random.Generator, name: str, n_out: int, n_in: int) -> bytes:
    """Bytes of (n_out, n_in) values of the type, of about the same size in every block."""
    _, values, size, kind = TYPES[name]
    if kind == "plain":
        x = rng.standard_normal((n_out, n_in)).astype(np.float32)
        if name == "F16":
            return x.astype(np.float16).tobytes()
        return (x.view(np.uint32) >> 16).astype(np.uint16).tobytes() if name == "BF16" else x.tobytes()
    blocks = rng.integers(0, 256, (n_out * n_in // values, size), dtype=np.uint8)
    n = len(blocks)
    if name not in NO_HALF:
        for at in HALVES.get(name, [0]):
            scale = (rng.uniform(0.5, 1.5, n) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    if name == "MXFP4":  # an exponent: about 1
        blocks[:, 0] = rng.integers(125, 129, n)
    if name == "NVFP4":  # e4m3 scales: finite, about 1
        blocks[:, 0:4] = rng.integers(0x30, 0x40, (n, 4))
    if name == "IQ1_M":  # the half lies in the top nibbles of four words: 0x2xxx is about 0.01
        top = [0, 0, rng.integers(0, 16, n), np.full(n, 2)]
        for i in range(4):
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 0x0F) | (np.asarray(top[i]) << 4).astype(
                np.uint8
            )
    return blocks.tobytes()


def decode(name: str, data: bytes, n_out: int, n_in: int) -> Array:
    y = np.frombuffer(_testing.quant_dequantize(TYPES[name][0], data), np.float32)
    return y.reshape(n_out, n_in).astype(np.float64)


def nmse(got: npt.NDArray, want: Array) -> float:
    return float(np.sum((got - want) ** 2) / np.sum(want**2))


class Product:
    """logits (R, n_out) = x (R, n_in) W^T: one weight of any type behind the head."""

    def __init__(self, name: str, weight: bytes, n_out: int, n_in: int, x: Floats, **options) -> None:
        misalign = options.pop("misalign", 0)
        rows = len(x)
        # The table of the Embed and the head's W share n_vocab; the rows beyond x are never read.
        table = np.zeros((max(n_out, rows), n_in), np.float32)
        table[:rows] = x
        vocab = len(table)
        plan = _testing.CpuPlan(vocab)
        e = plan.weight("x", F32, n_in, vocab, table.tobytes())
        padding = bytes(len(weight) // n_out * (vocab - n_out))
        w = plan.weight("w", TYPES[name][0], n_in, vocab, weight + padding, misalign)
        a, b = plan.value(n_in), plan.value(n_in, True)
        plan.embed(e, a)
        plan.select(a, b)
        plan.head(b, w)
        self.rows, self.n_out = rows, n_out
        self.runner = _testing.CpuRunner(plan, max_rows=max(rows, 1), **options)

    def __call__(self) -> Floats:
        rows = list(range(self.rows))
        self.runner.truncate(0)
        self.runner.run(rows, outputs=rows)
        return np.stack([self.runner.logits(r)[: self.n_out] for r in rows])
