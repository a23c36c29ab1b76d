#!/usr/bin/env python3
"""Reflex against llama.cpp on one CPU and one file, in turn: cold first token, prefill, decode, memory.

usage: versus_llama.py --llama-prefix SITE_PACKAGES [--reflex reflex] [-n 10] [--threads 2] MODEL.gguf ...

SITE_PACKAGES is where llama-cpp-python was installed (it brings llama.h and libllama.so); the
peer program beside this file is compiled against it. Cold means: a fresh process, the file in the
page cache, spawn to the first token's line, prompt ids 12522 5193 264 882 ("Once upon a time" in
Qwen's vocabulary). Ratios are Reflex over llama.cpp, medians of n runs made in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

PROMPT = "Once upon a time"
IDS = ["12522", "5193", "264", "882"]
PREFILL, DECODE = 128, 48


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def first_line(command: list[str], env: dict[str, str], pattern: str) -> tuple[float, str]:
    """Milliseconds from spawn to the first matching line, and the line."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True)
    assert process.stdout is not None
    elapsed, found = float("nan"), ""
    for line in process.stdout:
        if not found and re.search(pattern, line):
            elapsed, found = (time.perf_counter() - begin) * 1e3, line
    if process.wait() != 0 or not found:
        raise SystemExit(f"failed: {' '.join(command)}")
    return elapsed, found


def peak_mib(command: list[str], env: dict[str, str]) -> float:
    """Peak resident memory of a command, of which mapped file pages are a part."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.execvpe(command[0], command, env)
    _, status, usage = os.wait4(pid, 0)
    if status != 0:
        raise SystemExit(f"failed: {' '.join(command)}")
    return usage.ru_maxrss / 1024


def build_peer(prefix: Path, folder: str) -> tuple[str, dict[str, str]]:
    out = f"{folder}/llama_peer"
    source = Path(__file__).with_name("llama_peer.cpp")
    libs = [d for d in (prefix / "lib", prefix / "llama_cpp/lib") if (d / "libllama.so").exists()]
    flags = [f"-I{prefix}/include", f"-L{libs[0]}", "-lllama", "-lggml", "-lggml-base"]
    subprocess.run(["g++", "-O2", "-std=c++17", str(source), "-o", out, *flags], check=True)
    return out, {**os.environ, "LD_LIBRARY_PATH": str(libs[0])}


def bench_reflex(reflex: str, model: str, threads: int) -> tuple[float, float]:
    options = [
        "--threads",
        str(threads),
        "--lengths",
        str(PREFILL),
        "--decode",
        str(DECODE),
        "--repeat",
        "3",
        "--json",
    ]
    out = subprocess.run(
        [reflex, "bench", model, *options], check=True, capture_output=True, text=True
    ).stdout
    rows = {r["event"]: r for r in map(json.loads, out.splitlines())}
    return rows["REFLEX_BENCH_PREFILL_OK"]["prefill_tokens_per_s"], rows["REFLEX_BENCH_DECODE_OK"][
        "tokens_per_s_p50"
    ]


def read_roof_gb_per_s(model: str) -> float:
    """The mapping read once with two threads, as numpy sums over 64-bit words: best of 5."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    data = np.memmap(model, dtype=np.uint64, mode="r", shape=(os.path.getsize(model) // 8,))
    half = len(data) // 2
    best = float("inf")
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(lambda part: int(np.bitwise_xor.reduce(part)), (data[:half], data[half:])))
            best = min(best, time.perf_counter() - begin)
    return data.nbytes / best / 1e9


def compare(model: str, args: argparse.Namespace, peer: str, peer_env: dict[str, str]) -> None:
    threads = str(args.threads)
    ours = [
        args.reflex,
        "generate",
        model,
        PROMPT,
        "--max-tokens",
        "1",
        "--threads",
        threads,
        "--device",
        "cpu",
        "--json",
    ]
    theirs = [peer, model, threads, "0", "0", *IDS]
    first_line(ours, dict(os.environ), "_OK")
    first_line(theirs, peer_env, "first")
    ours_ms, theirs_ms, phases = [], [], []
    for _ in range(args.n):
        time.sleep(0.2)
        elapsed, line = first_line(ours, dict(os.environ), "_OK")
        ours_ms.append(elapsed)
        phases.append(json.loads(line))
        time.sleep(0.2)
        theirs_ms.append(first_line(theirs, peer_env, "first")[0])
    print(f"\n{Path(model).name}: {os.path.getsize(model) / 1e6:.0f} MB, {threads} threads, n={args.n}")
    print(
        f"  cold first token  {median(ours_ms):8.1f} ms   llama.cpp {median(theirs_ms):8.1f} ms   "
        f"ratio {median(ours_ms) / median(theirs_ms):.3f}"
    )
    for key in (
        "launch_ms",
        "gguf_open_ms",
        "model_load_ms",
        "tokenizer_ms",
        "tokenize_ms",
        "prompt_eval_ms",
    ):
        print(f"    {key:16} {median([p[key] for p in phases]):8.2f}")
    ours_speed, theirs_speed = [], []
    for _ in range(3):
        ours_speed.append(bench_reflex(args.reflex, model, args.threads))
        out = subprocess.run(
            [peer, model, threads, str(PREFILL), str(DECODE), *IDS],
            env=peer_env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        theirs_speed.append(tuple(float(re.search(rf"{k} ([\d.]+)", out)[1]) for k in ("prefill", "decode")))  # type: ignore[index]
    roof = read_roof_gb_per_s(model)
    for i, name in enumerate((f"prefill of {PREFILL}", "decode")):
        a, b = max(s[i] for s in ours_speed), max(s[i] for s in theirs_speed)
        print(f"  {name:17} {a:8.1f} tok/s llama.cpp {b:8.1f} tok/s ratio {a / b:.2f}")
    decode = max(s[1] for s in ours_speed)
    gb = decode * os.path.getsize(model) / 1e9
    print(f"  decode reads      {gb:8.1f} GB/s, the mapping is read at {roof:.1f} GB/s ({gb / roof:.0%})")
    ours_mib, theirs_mib = peak_mib(ours, dict(os.environ)), peak_mib(theirs, peer_env)
    file_mib = os.path.getsize(model) / 2**20
    print(
        f"  peak memory       {ours_mib:8.0f} MiB   llama.cpp {theirs_mib:8.0f} MiB   file {file_mib:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--llama-prefix", type=Path, required=True)
    parser.add_argument("--reflex", default="reflex")
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peer, peer_env = build_peer(args.llama_prefix, folder)
        for model in args.models:
            compare(model, args, peer, peer_env)


if __name__ == "__main__":
    main()
