"""What a token costs here: CPU time of the sidecar's process per token event, and time to ready.

    python sidecar/bench/overhead.py [--worker-command COMMAND] [--tokens N] [--runs N]

CPU time is read from /proc, so a busy machine changes it little. The client is another process. With
no worker command the bundled model is asked; the fake worker of the tests
(`python sidecar/tests/fake_worker.py`) writes faster than any model and shows the worst case.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

READY = re.compile(r"^REFLEX_OPENAI_READY url=(\S+) .*process_start_to_ready_ms=(\d+)", re.M)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's threads so far, to the nanosecond (/proc/PID/schedstat)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def stream(url: str, n_tokens: int) -> tuple[int, float]:
    """Streams one chat; events seen and seconds taken."""
    body = (
        b'{"messages":[{"role":"user","content":"[[say:abcdefgh]][[never-end]]"}],"stream":true,'
        b'"ignore_eos":true,"max_tokens":%d}' % n_tokens
    )
    started = time.monotonic()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        n = sum(line.startswith(b"data: ") for line in answer)
    return n, time.monotonic() - started


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--worker-command", default="")
    ap.add_argument("--tokens", type=int, default=1500)
    ap.add_argument("--runs", type=int, default=5)
    a = ap.parse_args()
    command = ["--worker-command", a.worker_command] if a.worker_command else []
    ready, costs = [], []
    for _ in range(a.runs):
        with tempfile.NamedTemporaryFile("r+") as log:
            argv = [sys.executable, "-m", "reflex_sidecar", "--demo", "--port", "0", *command]
            server = subprocess.Popen(argv, stderr=log)
            try:
                while not (found := READY.search(Path(log.name).read_text())):
                    time.sleep(0.01)
                ready.append(float(found[2]))
                stream(found[1], 50)
                before = cpu_seconds(server.pid)
                n, seconds = stream(found[1], a.tokens)
                costs.append((cpu_seconds(server.pid) - before) / n * 1000)
                print(
                    f"ready {ready[-1]:.0f} ms; {n} events in {seconds:.2f} s, {costs[-1]:.3f} ms of CPU each"
                )
            finally:
                server.terminate()
                server.wait()
    print(f"median: ready {statistics.median(ready):.0f} ms (least {min(ready):.0f}), "
          f"{statistics.median(costs):.3f} ms of CPU per event")  # fmt: skip


if __name__ == "__main__":
    main()
