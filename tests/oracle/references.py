"""The committed references of tests/fixtures, as the oracle tests read them, and the gates of design.md.

Refuses: computing a reference (tests/fixtures/make.py did, by transformers in float32 on the dequantised
weights; nothing here needs torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
DEMO = FIXTURES.parent.parent / "reflex_worker/data/demo.gguf"
# Sparse attention, whose fast mode chooses other slots: test_sparse.py.
SPARSE = ("deepseek32", "deepseek32-q8_0", "deepseek4", "deepseek4-q8_0")
NAMES = sorted({p.stem for p in FIXTURES.glob("*.npz")} - set(SPARSE))
# Gated DeltaNet: test_recurrent.py too
HYBRIDS = [n for n in NAMES if n.startswith(("qwen35", "qwen3next", "qwen4exp"))]
MIXTURES = [n for n in NAMES if "moe" in n or n.startswith(("deepseek", "qwen3next", "qwen4exp"))]
# Rows with no more slots than top_k have nothing to choose: they are as good as deepseek2's. Behind them,
# 8-bit activations flip narrow choices, and two right engines are up to 0.78 apart where experts flip so.
SPARSE_FAST_RMS = {
    "deepseek32": (0.0035, 0.0035),
    "deepseek32-q8_0": (0.108, 0.78),
    "deepseek4": (0.0035, 0.0035),
    "deepseek4-q8_0": (0.108, 0.78),
}
FIRST_CHOICE = {  # the first row that sees more than it may choose
    "deepseek32": 12,
    "deepseek32-q8_0": 16,
    "deepseek4": 4 * (5 + 1) - 1,  # entries of 4 tokens each
    "deepseek4-q8_0": 4 * (7 + 1) - 1,
}
PROMPT_LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 70, 130, 257)

# Exact mode, on logits whose std is about 3.
EXACT_MAX_DIFF = 3e-4
EXACT_MEAN_KL = 1e-6  # nats


@dataclass(frozen=True)
class Reference:
    """What transformers says of one file. Row i is that of ids[i] after ids[:i]."""

    name: str
    ids: list[int]
    rows: list[int]  # (R,) ascending
    logits: np.ndarray  # (R, V) float64
    greedy_prompts: list[int]  # (P,) prompt lengths
    greedy: np.ndarray  # (P, N) token ids
    margins: np.ndarray  # (P, N) best logit minus second best

    @property
    def path(self) -> str:
        return str(fixture_path(self.name))

    def rows_below(self, length: int) -> list[int]:
        """The kept rows that a prompt of `length` tokens has."""
        return [r for r in self.rows if r < length]

    def at(self, rows: list[int]) -> np.ndarray:
        return self.logits[[self.rows.index(r) for r in rows]]


def fixture_path(name: str) -> Path:
    """The GGUF of a fixture; "demo" is the bundled model, the one trained checkpoint among them."""
    return DEMO if name == "demo" else FIXTURES / f"{name}.gguf"


def load(name: str) -> Reference:
    with np.load(FIXTURES / f"{name}.npz") as z:
        return Reference(
            name,
            z["ids"].tolist(),
            z["rows"].tolist(),
            z["logits"].astype(np.float64),
            z["greedy_prompts"].tolist(),
            z["greedy"],
            z["margins"],
        )


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def mean_kl(reference: np.ndarray, found: np.ndarray) -> float:
    """Mean over rows of KL(reference || found), nats."""
    p, q = log_softmax(reference), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def assert_exact(found: np.ndarray, reference: np.ndarray, what: str) -> None:
    """The gate of exact mode; the worst error is printed."""
    assert found.shape == reference.shape, f"{what}: shape {found.shape}, expected {reference.shape}"
    worst, kl = float(np.abs(found - reference).max()), mean_kl(reference, found)
    gates = f"gates {EXACT_MAX_DIFF:.0e} and {EXACT_MEAN_KL:.0e}"
    print(f"{what}: max |diff| {worst:.2e}, mean KL {kl:.1e} ({gates})")
    assert worst <= EXACT_MAX_DIFF, f"{what}: max |diff| {worst:.2e}"
    assert kl <= EXACT_MEAN_KL, f"{what}: mean KL {kl:.2e}"


def assert_greedy(
    found: list[int], tokens: np.ndarray, margins: np.ndarray, tolerance: float, what: str
) -> None:
    """Equal up to the first step whose margin is below the tolerance, where either token may win."""
    for i, (got, want, margin) in enumerate(zip(found, tokens, margins, strict=True)):
        if got == want:
            continue
        assert margin <= tolerance, f"{what}: step {i}: token {got}, expected {want} (margin {margin:.3f})"
        return
