"""Questions to a card that commands.py's table leaves open, each a command of its own.

usage: experiments.py load --reflex REFLEX [--bench CUDA_BENCH] [--runs N] [--variants] MODEL
       experiments.py turns --reflex REFLEX [--runs 20] [--read] MODEL
       experiments.py exit --reflex REFLEX [--fcold FCOLD] [--bench CUDA_BENCH] [--runs 6] MODEL
       experiments.py disk --reflex REFLEX [--runs 3] [--lazy] MODEL

load: a driver-ready worker from its `load` line to the first token, stage by stage, as resident.py
measures it (10 runs, of a large model 3), and the same in one process without Python (cuda_bench load);
--variants: by reading, with more connections to the card, with a request that comes later,
with other numbers of threads. turns: system1 against generate, many runs in turn, and what the pairs
differ by; --read: generate by `--load-mode read` against generate too. exit: from a process's last line
to its wait status, and which piece of a context costs what. disk: from a cold page cache; --lazy: a
mixture whose experts come as they are chosen.

Every line that begins with '|' is a row of check.sh's last table.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from commands import DISK_RUNS, PAUSE_S, Samples, forget, in_turn, run_cold
from resident import LINK_BYTES_PER_MS, LOAD_AT_MOST, PROMPT, Loads, percentile, runs_of, spread, tell_loads

ENDED = 124  # as timeout itself
LATER_S = 0.004  # after the load line: while bytes come
MORE_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"}
BENCHES = (("auto", 8), ("tokenizer", 8), ("read", 8), ("cold", 8))
MORE_BENCHES = (("auto", 10), ("auto", 12), ("auto", 16), ("read", 12))


# ---- load ------------------------------------------------------------------------------------


def load(o: argparse.Namespace) -> None:
    settings: dict[str, dict[str, Any]] = {"load and a request": {}}
    if o.variants:
        settings |= {
            "the same by reading": {"options": ("--load-mode", "read")},
            "the same, 8 connections": {"env": MORE_CONNECTIONS},
            "load, the request 4 ms later": {"later_s": LATER_S},
        }
    loads = {what: Loads() for what in settings}
    try:
        for _ in range(o.runs or runs_of(o.model)):
            for what, how in settings.items():
                print(f"{what}: {loads[what].add(o.reflex, o.model, **how)}", flush=True)
    finally:
        tell_loads(o.model, loads)
    if o.bench:
        bench_loads(o.bench, o.model, BENCHES + (MORE_BENCHES if o.variants else ()))


def bench_loads(bench: str, model: str, benches: tuple[tuple[str, int], ...]) -> None:
    """cuda_bench load: the driver's and the loader's part alone."""
    name, at_most = Path(model).stem, LOAD_AT_MOST * os.path.getsize(model) / LINK_BYTES_PER_MS
    for mode, threads in benches:
        done = subprocess.run([bench, "load", model, mode, str(threads), "3"], capture_output=True, text=True)
        sys.stdout.write(done.stdout + done.stderr)
        totals = [float(t) for t in re.findall(r"total ([\d.]+) ms", done.stdout)]
        rates = [float(r) for r in re.findall(r"([\d.]+) GB/s from compiled", done.stdout)]
        if not totals:
            print(f"| {name}: cuda_bench, {mode}, {threads} threads | {at_most:.1f} | failed | |", flush=True)
            continue
        told = f"{max(rates):.1f} GB/s at best from the plan on"
        print(
            f"| {name}: cuda_bench, {mode}, {threads} threads | {at_most:.1f} | {spread(totals)} | {told} |",
            flush=True,
        )


# ---- system1 against generate -----------------------------------------------------------------


def turns(o: argparse.Namespace) -> None:
    name = Path(o.model).stem
    system1 = [o.reflex, "system1", o.model, PROMPT]
    for candidate in (" there", " in", ","):
        system1 += ["--candidate", candidate]
    generate = [o.reflex, "generate", o.model, PROMPT, "--max-tokens", "1"]
    commands = {"generate": generate, "system1": system1}
    if o.read:
        commands["generate by reading"] = [*generate, "--load-mode", "read"]
    print(
        "| spawn to answer, in turn | generate p50 ms | the other p50 ms | of the pairs: median, quartiles |"
    )
    print("|---|---|---|---|")
    for held in (False, True):
        holder = subprocess.Popen([o.reflex, "hold"], stdout=subprocess.PIPE) if held else None
        if holder and holder.stdout:
            holder.stdout.readline()
        samples: Samples = {}
        try:
            in_turn(commands, o.runs, samples=samples)
        finally:
            if holder:
                holder.terminate()
                holder.wait()
            for other in list(commands)[1:]:
                tell_pairs(f"{name}, {'held' if held else 'bare'}, {other}", samples, other)


def tell_pairs(what: str, samples: Samples, other: str) -> None:
    pairs = [s - g for g, s in zip(samples.get("generate", []), samples.get(other, []), strict=False)]
    if not pairs:
        return
    slower = sum(p > 0 for p in pairs)
    told = ", ".join(f"{percentile(pairs, q):+.1f}" for q in (0.5, 0.25, 0.75))
    g, s = (percentile(samples[k], 0.5) for k in ("generate", other))
    print(f"| {what}, n = {len(pairs)} | {g:.1f} | {s:.1f} | {told}; slower in {slower} |", flush=True)


# ---- exit ------------------------------------------------------------------------------------


PIECES = ("init", "context", "ring", "arena", "streams", "mapping", "copies")
RING_BYTES, COPY_THREADS = 32 << 20, 8


class Cuda:
    """The driver by ctypes, for a child that sets up some of what a worker has, and leaves."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: object) -> None:
        result = getattr(self.lib, name)(*args)
        if result:
            raise SystemExit(f"{name}: CUDA error {result}")


def set_up(pieces: list[str], model: str) -> list[object]:
    """The pieces named, in the order of a start; what must live until the end."""
    cuda, kept = Cuda(), []
    cuda("cuInit", 0)
    if "context" in pieces:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        cuda("cuDeviceGet", ctypes.byref(device), 0)
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        cuda("cuCtxSetCurrent", context)
    size, arena = os.path.getsize(model), ctypes.c_ulonglong()
    ring = mmap.mmap(-1, RING_BYTES)
    at = ctypes.addressof(ctypes.c_char.from_buffer(ring))
    if "ring" in pieces:
        for i in range(0, RING_BYTES, mmap.PAGESIZE):
            ring[i] = 1
        cuda("cuMemHostRegister_v2", ctypes.c_void_p(at), ctypes.c_size_t(RING_BYTES), 3)
    if "arena" in pieces:
        cuda("cuMemAlloc_v2", ctypes.byref(arena), ctypes.c_size_t(size))
    streams = [ctypes.c_void_p() for _ in range(COPY_THREADS)]
    if "streams" in pieces:
        for s in streams:
            cuda("cuStreamCreate", ctypes.byref(s), 1)
    with open(model, "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    if "mapping" in pieces:

        def touch(first: int) -> None:
            for i in range(first * mmap.PAGESIZE, size, COPY_THREADS * mmap.PAGESIZE):
                mapped[i]

        threads = [threading.Thread(target=touch, args=(k,)) for k in range(COPY_THREADS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if "copies" in pieces:
        for k, begin in enumerate(range(0, size, RING_BYTES)):
            n = min(RING_BYTES, size - begin)
            cuda(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_ulonglong(arena.value + begin),
                ctypes.c_void_p(at),
                ctypes.c_size_t(n),
                streams[k % COPY_THREADS],
            )
        cuda("cuCtxSynchronize")
    kept += [ring, mapped, cuda]
    return kept


def piece_child(upto: str, model: str) -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "1")
    kept = set_up(list(PIECES[: PIECES.index(upto) + 1]), model)
    os.write(1, b"piece_OK\n")
    os._exit(0 if kept else 1)


def exit_time(o: argparse.Namespace) -> None:
    me = [sys.executable, os.path.abspath(__file__), "_piece"]
    commands = {f"... and {p}" if k else p: [*me, p, o.model] for k, p in enumerate(PIECES)}
    commands["reflex generate"] = [o.reflex, "generate", o.model, PROMPT, "--max-tokens", "1"]
    if o.bench:
        commands["cuda_bench first (no Python)"] = [o.bench, "first", o.model]
        commands["the same by pread (no mapping to undo)"] = [o.bench, "first", o.model, "read"]
    if o.fcold:
        commands["fcold"] = [o.fcold, o.model, "8", "2"]
    samples: Samples = {}
    try:
        in_turn(commands, o.runs, samples=samples)
    finally:
        print("| from the last line to the wait status, bare | p50 ms (range) |\n|---|---|")
        for what in commands:
            both = zip(samples.get(what, []), samples.get(f"{what}, to exit", []), strict=False)
            spans = [end - first for first, end in both]
            if spans:
                print(f"| {Path(o.model).stem}: {what} | {spread(spans)} |", flush=True)


# ---- from the disk ----------------------------------------------------------------------------


def disk(o: argparse.Namespace) -> None:
    name, drop = Path(o.model).stem, forget(o.model)
    generate = [o.reflex, "generate", o.model, PROMPT, "--max-tokens", "1"]
    plain: list[float] = []
    for _ in range(1 if o.lazy else o.runs):
        drop()
        begin = time.perf_counter()
        subprocess.run(
            ["dd", f"if={o.model}", "of=/dev/null", "bs=16M", "iflag=direct"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        plain.append((time.perf_counter() - begin) * 1e3)
    first: list[float] = []
    for _ in range(o.runs):
        time.sleep(PAUSE_S)
        drop()
        first.append(run_cold([*generate, "--experts", "lazy"] if o.lazy else generate)[0])
    what = "lazy experts" if o.lazy else "the whole file"
    ratio = percentile(plain, 0.5) / percentile(first, 0.5)
    print("| cold disk, spawn to first token | p50 ms (range) | plain O_DIRECT read of all, p50 ms | ratio |")
    print("|---|---|---|---|")
    print(f"| {name}: {what} | {spread(first)} | {percentile(plain, 0.5):.0f} | {ratio:.2f} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["_piece"]:
        return piece_child(sys.argv[2], sys.argv[3])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, runs in (
        ("load", load, 0),
        ("turns", turns, 20),
        ("exit", exit_time, 6),
        ("disk", disk, DISK_RUNS),
    ):
        p = commands.add_parser(name)
        p.set_defaults(run=run)
        p.add_argument("--reflex", required=True)
        p.add_argument("--runs", type=int, default=runs)
        if name in ("load", "exit"):
            p.add_argument("--bench")
        if name == "exit":
            p.add_argument("--fcold")
        if name == "load":
            p.add_argument("--variants", action="store_true")
        if name == "turns":
            p.add_argument("--read", action="store_true")
        if name == "disk":
            p.add_argument("--lazy", action="store_true")
        p.add_argument("model")
    o = parser.parse_args()
    # Whoever is ended for the time it takes still tells what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))
    o.run(o)


if __name__ == "__main__":
    main()
