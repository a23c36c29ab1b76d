"""The tables of check.sh's logs, as Markdown for docs/performance.md: how each block ended, the figures that
were asked for, rates of the families, and every row that a block printed.

usage: table.py LOGS
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

# What issue and design ask for: (log, pattern with one number, what, least or most, unit)
WANTED = [
    ("warm-0.6b.log", r"decode at +4: +([\d.]+) tok/s", "decode, 0.6B Q8_0", ">= 1400", "tok/s"),
    ("warm-0.6b.log", r"prefill +512:.*?([\d.]+) tok/s", "prefill of 512, 0.6B Q8_0", ">= 80000", "tok/s"),
    ("warm-0.6b.log", r"16 of 1 token *: +([\d.]+) ms", "system1, 30 + 16 candidates, 0.6B", "<= 1.5", "ms"),
    ("warm-8b.log", r"decode at +4: +([\d.]+) tok/s", "decode, 8B Q4_K_M", ">= 450", "tok/s"),
    ("warm-8b.log", r"prefill +512:.*?([\d.]+) tok/s", "prefill of 512, 8B Q4_K_M", ">= 15000", "tok/s"),
]
RATES = {
    "decode at 4 / 1000 / 4000, tok/s": [rf"decode at +{n}: +([\d.]+) tok/s" for n in (4, 1000, 4000)],
    "prefill of 30 / 128 / 512, tok/s": [rf"prefill +{n}:.*?([\d.]+) tok/s" for n in (30, 128, 512)],
    "system1 30 + 16 of 1 / 2 tokens, ms": [rf"16 of {n} tokens? *: +([\d.]+) ms" for n in (1, 2)],
}


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def number(path: Path, pattern: str) -> str | None:
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found[1] if found else None


def warm_rows(logs: Path) -> list[str]:
    rows = ["| what | wanted | measured | |", "|---|---|---|---|"]
    for log, pattern, what, wanted, unit in WANTED:
        found = number(logs / log, pattern)
        if found is None:
            rows.append(f"| {what} | {wanted} {unit} | not measured | |")
            continue
        value, bound = float(found), float(wanted[3:])
        holds = value >= bound if wanted.startswith(">=") else value <= bound
        rows.append(f"| {what} | {wanted} {unit} | {value:g} {unit} | {'holds' if holds else 'MISSED'} |")
    return rows


def rate_rows(logs: Path) -> list[str]:
    rows = ["| model | " + " | ".join(RATES) + " |", "|---" * (1 + len(RATES)) + "|"]
    for path in sorted(logs.glob("warm-*.log")):
        cells = [" / ".join(number(path, p) or "-" for p in patterns) for patterns in RATES.values()]
        rows.append(f"| {path.stem[5:]} | " + " | ".join(cells) + " |")
    return rows


def cold_rows(logs: Path) -> list[str]:
    rows = ["| cold start | p50 ms | p95 ms | min ms | p50 / floor |", "|---|---|---|---|---|"]
    for path in sorted(logs.glob("cold-*.log")):
        floor = None
        for line in path.read_text().splitlines():
            if "first p50" not in line:
                continue
            command = line.split("first p50")[0].strip()
            p50, p95, least = re.findall(r"(?:p50|p95|min) +([\d.]+)", line)[:3]
            floor = floor or float(p50)
            rows.append(
                f"| {path.stem[5:]}: `{command}` | {p50} | {p95} | {least} | {float(p50) / floor:.2f} |"
            )
    return rows if len(rows) > 2 else []


def block_rows(logs: Path) -> list[str]:
    """How each block ended, and its own rows; a block's tables have their heads with them."""
    blocks = logs / "blocks.txt"
    ended = [line.split(" ", 1) for line in blocks.read_text().splitlines()] if blocks.exists() else []
    out = ["| block | |", "|---|---|", *(f"| {name} | {how} |" for name, how in ended), ""]
    for name, _ in ended:
        log = logs / f"block-{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for i, line in enumerate(lines):
            if not line.startswith("|"):
                continue
            if line.startswith("|---"):
                out.append(line)
                continue
            if i + 1 < len(lines) and lines[i + 1].startswith("|---"):
                out.append("")  # a head: Markdown wants a blank line before it
            out.append(line)
    return out


def main() -> None:
    logs = Path(sys.argv[1])
    gpu = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()[0]
    commit = os.environ.get("REFLEX_GPU_COMMIT") or output("git", "rev-parse", "--short", "HEAD")
    print(f"\n{gpu}; {datetime.date.today()}; commit {commit}\n")
    for rows in (block_rows(logs), warm_rows(logs), rate_rows(logs), cold_rows(logs)):
        print("\n".join(rows), end="\n\n")


if __name__ == "__main__":
    main()
