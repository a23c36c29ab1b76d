"""What llama.cpp's own logits are off by on the fixtures: the yardstick of fast mode.

    python tools/llama_rms.py    (needs llama-cpp-python; nothing else of this project does)

Prints, per fixture, max |diff| and rms against the committed references with an f32 and an f16 KV cache.
The larger rms of the two is LLAMA_CPP_RMS in tests/oracle/test_logits.py. With F32 files and an f32 cache the
difference is about 1e-5: a check of the fixtures by a third party.
"""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.oracle.references import NAMES, load

CACHES = {"f32": 0, "f16": 1}  # ggml type ids


def errors(name: str, cache: int) -> np.ndarray:
    """(R, V) logits of llama.cpp minus the reference."""
    ref = load(name)
    model = llama_cpp.Llama(
        ref.path,
        n_ctx=512,
        logits_all=True,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
        type_k=cache,
        type_v=cache,
        flash_attn=False,
    )
    model.eval(ref.ids)
    return np.array(model.scores, np.float64)[ref.rows] - ref.logits


def main() -> None:
    for name in NAMES:
        found = {cache: errors(name, kind) for cache, kind in CACHES.items()}
        print(
            f"{name}: "
            + ", ".join(
                f"{c} cache max {np.abs(e).max():.1e} rms {np.sqrt((e**2).mean()):.4f}"
                for c, e in found.items()
            )
        )


if __name__ == "__main__":
    main()
