"""Requests of every family on real fixture files, small enough for a sanitizer: exact and fast, a few tokens
and a few candidates each.

usage: compute-sanitizer --tool memcheck|initcheck|racecheck python3 sanitize_models.py FIXTURES [NAME ...]

A family that the GPU does not run says so and is no failure. Leaves without tearing the driver down, as the
command does.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from reflex_worker._native import Engine, ReflexError

# One of each family, quantised where there is one: fast mode then takes its own kernels.
NAMES = (
    "qwen3-q4_k",
    "qwen2-q8_0",
    "llama-q4_0",
    "qwen3moe-q4_k",
    "qwen2moe-q4_0",
    "deepseek-q8_0",
    "deepseek2-q8_0",
    "qwen3next-q4_0",
    "qwen35-q8_0",
    "qwen35moe-q8_0",
    "deepseek32-q8_0",
    "deepseek4-q8_0",
    "qwen4exp-q8_0",
)
PROMPT_ROWS, TOKENS = 37, 4  # an odd number of rows; the last passes are captured and replayed
CANDIDATES = [[5], [6, 7, 8], [6, 9]]
NOT_THERE = ("unsupported", "unsupported_architecture")


def requests(path: Path, exact: bool) -> str:
    engine = Engine(str(path), device="cuda", exact=exact)
    ids = [(7 * i + 3) % engine.info["n_vocab"] for i in range(PROMPT_ROWS)]
    generation = engine.generate(prompt_token_ids=ids, max_tokens=TOKENS, ignore_eos=True)
    while generation.step().kind != "done":
        pass
    scoring = engine.score(prompt_token_ids=ids, candidate_token_ids=CANDIDATES, score="logprob_sum")
    while scoring.step().kind != "done":
        pass
    return f"tokens {list(generation.token_ids)}, best {scoring.best_index}"


def main() -> int:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or NAMES
    failed = 0
    for name in names:
        for exact in (True, False):
            what = f"{name}, {'exact' if exact else 'fast'}"
            path = folder / f"{name}.gguf"
            if not path.exists():
                print(f"{what}: there is no such fixture", flush=True)
                failed = 1
                continue
            try:
                print(f"{what}: {requests(path, exact)}", flush=True)
            except ReflexError as e:
                there = e.kind not in NOT_THERE
                failed |= there
                print(f"{what}: {'FAILED' if there else 'not on a GPU'}: [{e.kind}] {e}", flush=True)
            except Exception:
                failed = 1
                print(f"{what}: FAILED: {traceback.format_exc()}", flush=True)
    return int(failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
