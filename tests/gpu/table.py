"""The table of check.sh's logs, as Markdown for docs/performance.md.

usage: table.py LOGS
"""

from __future__ import annotations

import datetime
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


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def warm_rows(logs: Path) -> list[str]:
    rows = ["| what | wanted | measured | |", "|---|---|---|---|"]
    for log, pattern, what, wanted, unit in WANTED:
        path = logs / log
        found = re.search(pattern, path.read_text()) if path.exists() else None
        if not found:
            rows.append(f"| {what} | {wanted} {unit} | not measured | |")
            continue
        value, bound = float(found[1]), float(wanted[3:])
        holds = value >= bound if wanted.startswith(">=") else value <= bound
        rows.append(f"| {what} | {wanted} {unit} | {value:g} {unit} | {'holds' if holds else 'MISSED'} |")
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
    return rows


def main() -> None:
    logs = Path(sys.argv[1])
    gpu = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()[0]
    commit = output("git", "rev-parse", "--short", "HEAD")
    print(f"\n{gpu}; {datetime.date.today()}; commit {commit}\n")
    print("\n".join(warm_rows(logs)), end="\n\n")
    print("\n".join(cold_rows(logs)))


if __name__ == "__main__":
    main()
