"""Memory and file descriptors over many requests: they must not grow.

    python sidecar/bench/soak.py --worker-command "python sidecar/tests/fake_worker.py" [--requests N]

Chats whole and streamed, decisions, errors and clients that hang up in the middle, in turn. Compares
what is in use after a tenth of the requests (caches are warm by then) with what is at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overhead import READY

CLIENTS = 8
# Beyond what the allocator moves by itself between two looks.
ALLOWED_MIB = 6.0


def usage(pid: int) -> tuple[float, int]:
    """Resident MiB and open descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def body(i: int) -> tuple[str, dict[str, object]]:
    """The i-th request."""
    messages = [{"role": "user", "content": f"[[say:answer {i} <|im_end|>]]"}]
    kinds: list[tuple[str, dict[str, object]]] = [
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": 3, "n": 2}),
        ("/v1/classify", {"messages": messages, "labels": ["a", "b"]}),
        ("/v1/completions", {"prompt": "x" * 5000, "echo": True}),
        ("/v1/chat/completions", {"messages": "wrong"}),
        ("/v1/responses", {"input": "[[say:hm]]", "stream": True}),
    ]
    return kinds[i % len(kinds)]


async def ask(host: str, port: int, i: int) -> None:
    path, fields = body(i)
    data = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    if i % 10 == 9:
        await reader.read(1)  # and hang up
    else:
        answer = await reader.read()
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), answer[:300]
    writer.close()


async def many(host: str, port: int, first: int, last: int) -> None:
    queue = iter(range(first, last))

    async def client() -> None:
        for i in queue:
            await ask(host, port, i)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--worker-command", default="")
    ap.add_argument("--requests", type=int, default=10_000)
    a = ap.parse_args()
    command = ["--worker-command", a.worker_command] if a.worker_command else []
    with tempfile.NamedTemporaryFile("r+") as log:
        argv = [sys.executable, "-m", "reflex_sidecar", "--demo", "--port", "0", *command]
        server = subprocess.Popen(argv, stderr=log)
        try:
            while not (found := READY.search(Path(log.name).read_text())):
                time.sleep(0.01)
            host, port = found[1].removeprefix("http://").split(":")
            tenth = a.requests // 10
            asyncio.run(many(host, int(port), 0, tenth))
            time.sleep(1)
            before = usage(server.pid)
            started = time.monotonic()
            asyncio.run(many(host, int(port), tenth, a.requests))
            seconds = time.monotonic() - started
            time.sleep(1)
            after = usage(server.pid)
        finally:
            server.terminate()
            server.wait()
    print(
        f"after {tenth}: {before[0]:.1f} MiB, {before[1]} descriptors; "
        f"after {a.requests}: {after[0]:.1f} MiB, {after[1]} descriptors; "
        f"{(a.requests - tenth) / seconds:.0f} requests/s"
    )
    if after[1] > before[1] or after[0] > before[0] + ALLOWED_MIB:
        sys.exit("it grows")


if __name__ == "__main__":
    main()
