"""A worker that was started without a model, its driver ready: from the `load` line to the first token, one
way to measure it for commands.py and experiments.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

PROMPT = "Once upon a time"
ONE_TOKEN: dict[str, object] = {"prompt": PROMPT, "max_tokens": 1}
READY_S = 1.0  # from spawn: the driver is there, and what stands by
LINK_BYTES_PER_MS = 48e6  # what a good upload reaches (docs/performance.md)
LOAD_AT_MOST = 1.5  # of the bytes at that rate: the figure
LARGE_BYTES = 2_000_000_000  # a load takes a tenth of a second, and varies little


def percentile(samples: list[float], p: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def spread(samples: list[float]) -> str:
    return f"{percentile(samples, 0.5):.1f} ({min(samples):.1f} to {max(samples):.1f})"


def runs_of(model: str) -> int:
    """Loads that a median is taken of."""
    return 10 if os.path.getsize(model) < LARGE_BYTES else 3


class Worker:
    """`reflex stdio` without a model; lines and the milliseconds until they are answered."""

    def __init__(self, reflex: str, env: dict[str, str] | None = None, options: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [reflex, "stdio", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )

    def send(self, *lines: dict[str, object]) -> float:
        """All of them at once; the time at which they were sent."""
        assert self.process.stdin is not None
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        begin = time.perf_counter()
        self.process.stdin.write(data)
        self.process.stdin.flush()
        return begin

    def hear(self, begin: float) -> tuple[float, dict[str, object]]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        took = (time.perf_counter() - begin) * 1e3
        answer = json.loads(line)
        if answer.get("event") == "error" or answer.get("ok") is False:
            raise SystemExit(f"resident worker: {answer}")
        return took, answer

    def ask(self, line: dict[str, object]) -> float:
        return self.hear(self.send(line))[0]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Loads:
    """What several loads of one kind took, in milliseconds from the line."""

    def __init__(self) -> None:
        self.took: list[float] = []  # to the first token
        self.stages: list[dict[str, float]] = []  # when each was reached

    def add(
        self,
        reflex: str,
        model: str,
        *,
        env: dict[str, str] | None = None,
        options: tuple[str, ...] = (),
        later_s: float = 0,
    ) -> str:
        """One more, in a fresh worker; a line that tells of it. later_s: between the load and the request,
        else both are sent at once."""
        worker = Worker(reflex, env, options)
        time.sleep(READY_S)
        begin = worker.send({"type": "load", "model": model}, *([] if later_s else [ONE_TOKEN]))
        if later_s:
            time.sleep(later_s)
            worker.send(ONE_TOKEN)
        loaded, _ = worker.hear(begin)
        took, final = worker.hear(begin)
        _, info = worker.hear(worker.send({"type": "info"}))
        worker.end()
        timings, phases = final["timings"], info["phases"]
        assert isinstance(timings, dict) and isinstance(phases, dict)
        # The process's clock and ours meet at the first token: the answer's way to us counts with the line's.
        line = timings["first_token_at"] - took
        stages = {
            "core asked": timings["launch"] - line,
            "file open": timings["launch"] + timings["gguf_open"] - line,
            "loaded said": loaded,
            "first kernel": timings["first_kernel_at"] - line,
            "last byte": phases["weights_loaded_at"] - line,
        }
        self.took.append(took)
        self.stages.append(stages)
        return f"{took:.1f} ms; " + ", ".join(f"{k} {v:.1f}" for k, v in stages.items())


def tell_loads(model: str, loads: dict[str, Loads]) -> None:
    """A row of a table for each kind that was measured."""
    print(
        "| `load` to first token, driver ready | at most | p50 ms (range) | the first | stages, p50 ms |\n"
        "|---|---|---|---|---|"
    )
    at_most = LOAD_AT_MOST * os.path.getsize(model) / LINK_BYTES_PER_MS
    for what, found in loads.items():
        if not found.took:
            continue
        told = ", ".join(f"{k} {percentile([s[k] for s in found.stages], 0.5):.1f}" for k in found.stages[0])
        print(
            f"| {Path(model).stem}: {what}, n = {len(found.took)} | {at_most:.1f} | {spread(found.took)} "
            f"| {found.took[0]:.1f} | {told} |",
            flush=True,
        )
