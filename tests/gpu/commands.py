"""The installed command on a GPU, from outside: cold starts against the floor, bare and with the driver held,
from the page cache and from the disk; a resident worker against fresh processes; joules.

usage: commands.py --reflex REFLEX --logs DIR [--fcold FCOLD] [--runs 10] MODEL.gguf ...

Prints a Markdown table per model; every sample goes to DIR/commands-NAME.json. Runs are interleaved, with a
pause that lets one process's driver teardown end before the next begins.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from resident import ONE_TOKEN, PROMPT, READY_S, Loads, Worker, percentile, runs_of, tell_loads

PAUSE_S = 0.3
DISK_RUNS = 3
RESIDENT_REQUESTS = 30
ENERGY_RUNS = 6
DISK_BYTES = 2_000_000_000  # larger files would take minutes
AS_IT_WAS = "the page cache as it was"  # nothing here has dropped the file from it
REFILLED = "the page cache filled by a cold start"  # in smaller pieces, which cost more to read

Samples = dict[str, list[float]]


def run_cold(command: list[str]) -> tuple[float, float]:
    """Milliseconds from spawn to the first line, and to exit."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    first = (time.perf_counter() - begin) * 1e3
    process.stdout.read()
    status = process.wait()
    if status != 0 or not line:
        raise SystemExit(f"status {status}: {' '.join(command)}")
    return first, (time.perf_counter() - begin) * 1e3


def in_turn(
    commands: dict[str, list[str]],
    runs: int,
    before: Callable[[], None] | None = None,
    samples: Samples | None = None,
) -> Samples:
    """{name: spawn to first line}, {name + ' exit': to exit}; one run of each first that does not count.
    samples: where they go as they come, for whoever may be ended before all are there."""
    samples = {} if samples is None else samples
    for k in range(runs + 1):
        for name, command in commands.items():
            time.sleep(PAUSE_S)
            if before:
                before()
            first, total = run_cold(command)
            if k:
                samples.setdefault(name, []).append(first)
                samples.setdefault(f"{name}, to exit", []).append(total)
    return samples


def forget(path: str) -> Callable[[], None]:
    """Drops the file from the page cache."""

    def drop() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    return drop


def rows(samples: Samples, floor: str) -> list[str]:
    """A Markdown table; ratios are of the medians, to that of the sample named `floor`."""
    out = ["| from spawn | p50 ms | p95 ms | min ms | p50 / floor |", "|---|---|---|---|---|"]
    for name, found in samples.items():
        if name.endswith(", to exit") and not name.startswith((floor, "generate")):
            continue
        base = samples[f"{floor}, to exit" if name.endswith(", to exit") else floor]
        p50, p95 = percentile(found, 0.5), percentile(found, 0.95)
        out.append(
            f"| {name} | {p50:.1f} | {p95:.1f} | {min(found):.1f} | {p50 / percentile(base, 0.5):.2f} |"
        )
    return out


def measure_loads(reflex: str, model: str, what: str, runs: int, out: dict[str, object]) -> None:
    """`load` to first token, as resident.py measures it: samples to `out`, a table to stdout."""
    loads = Loads()
    for _ in range(runs):
        print(f"{what}: {loads.add(reflex, model)}", flush=True)
    out[f"load to first token, {what}"] = {"ms": loads.took, "stages": loads.stages}
    tell_loads(model, {what: loads})


def resident(reflex: str, model: str) -> Samples:
    """One worker, started without a model: `load` alone, then the first request against those after it."""
    system1: dict[str, object] = {"prompt": PROMPT, "candidates": [" there", " in", ","]}
    samples: Samples = {}
    worker = Worker(reflex)
    time.sleep(READY_S)
    samples["load and its hidden step"] = [worker.ask({"type": "load", "model": model})]
    samples["first request"] = [worker.ask(ONE_TOKEN)]
    samples["second request"] = [worker.ask(ONE_TOKEN)]
    for _ in range(RESIDENT_REQUESTS):
        samples.setdefault("resident generate, 1 token", []).append(worker.ask(ONE_TOKEN))
        samples.setdefault("resident system1, 3 candidates", []).append(worker.ask(system1))
    worker.end()
    return samples


def plain_read(path: str) -> Samples:
    """The file from the disk past the page cache, by dd: what cold-disk starts are held against."""
    command = ["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct"]
    samples: Samples = {}
    for _ in range(DISK_RUNS):
        forget(path)()
        begin = time.perf_counter()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        samples.setdefault("plain O_DIRECT read", []).append((time.perf_counter() - begin) * 1e3)
    return samples


def energy(reflex: str, command: list[str], runs: int) -> dict[str, object]:
    done = subprocess.run(
        [reflex, "energy", "--json", "--runs", str(runs), "--", *command], capture_output=True, text=True
    )
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()}


def measure(reflex: str, fcold: str | None, model: str, runs: int) -> dict[str, object]:
    generate = [reflex, "generate", model, PROMPT, "--max-tokens", "1"]
    system1 = [reflex, "system1", model, PROMPT]
    for candidate in (" there", " in", ","):
        system1 += ["--candidate", candidate]
    commands = (
        {"floor": [fcold, model, "8", "2"]} if fcold else {"floor": [reflex, "bench", model, "--floor"]}
    )
    commands |= {"generate, one token": generate, "system1, 3 candidates": system1}
    name = Path(model).stem
    out: dict[str, object] = {}

    def table(title: str, samples: Samples, floor: str = "floor") -> None:
        out[title] = samples
        print(f"\n{name}, {title}\n")
        print("\n".join(rows(samples, floor)), flush=True)

    table("page cache, bare host", in_turn(commands, runs))
    holder = subprocess.Popen([reflex, "hold"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    print(f"\n{holder.stdout.readline().decode().strip()}; {status_kib(holder.pid)} KiB resident")
    print(gpu_processes(), flush=True)
    table("page cache, driver held by `reflex hold`", in_turn(commands, runs))
    out["joules, held"] = energy(reflex, generate, ENERGY_RUNS)
    holder.terminate()
    holder.wait()
    print(f"\n{name}, resident worker; the file's bytes at 48 GB/s: {os.path.getsize(model) / 48e6:.1f} ms\n")
    measure_loads(reflex, model, AS_IT_WAS, runs_of(model), out)
    out["resident"] = warm = resident(reflex, model)
    for what, found in warm.items():
        print(
            f"{what}: p50 {percentile(found, 0.5):.2f} ms, p95 {percentile(found, 0.95):.2f} ms", flush=True
        )
    if os.path.getsize(model) <= DISK_BYTES:
        disk = {"floor": commands["floor"], "generate, one token": generate}
        disk["generate, --load-mode ring"] = [*generate, "--load-mode", "ring"]
        disk["generate, --load-mode direct"] = [*generate, "--load-mode", "direct"]
        table("cold disk, bare host", plain_read(model) | in_turn(disk, DISK_RUNS, forget(model)))
        run_cold(generate)  # back into the page cache
        measure_loads(reflex, model, REFILLED, DISK_RUNS, out)
    for what, command in (("floor", commands["floor"]), ("generate", generate), ("system1", system1)):
        out[f"joules, {what}"] = energy(reflex, command, ENERGY_RUNS)
    for what, found in out.items():
        if what.startswith("joules"):
            print(f"{what}: {json.dumps(found)}", flush=True)
    return out


def status_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def gpu_processes() -> str:
    """What nvidia-smi knows of processes with memory on the card: `reflex hold` must not be among them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    used = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    texts = [subprocess.run(q, capture_output=True, text=True).stdout.strip() for q in (query, used)]
    return f"processes on the card: {texts[0] or 'none'}; memory in use: {texts[1]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reflex", required=True)
    parser.add_argument("--fcold")
    parser.add_argument("--logs", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("models", nargs="+")
    o = parser.parse_args()
    results = {}
    for model in o.models:
        results[Path(model).stem] = measure(o.reflex, o.fcold, model, o.runs)
        (o.logs / f"commands-{Path(model).stem}.json").write_text(json.dumps(results, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
