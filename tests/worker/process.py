"""Plain processes and sockets for the tests that misbehave on purpose; clients that behave use
reflex_protocol.client."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Seconds after which a test gives up waiting: long, since the machine may be busy.
WAIT = 60.0
LIMIT = int(WAIT)

FAKE_WORKER = str(Path(__file__).with_name("fake_worker.py"))


def fake_argv(transport: str, *, socket: str | None = None, **options: Any) -> list[str]:
    """The command line of a worker around the fake engine."""
    argv = [sys.executable, FAKE_WORKER, transport, json.dumps(options)]
    return argv + ([socket] if socket else [])


class Lines:
    """JSON lines over two descriptors, with a deadline on everything."""

    def __init__(self, in_fd: int, out_fd: int) -> None:
        self._in_fd, self._out_fd = in_fd, out_fd
        self._buffer = b""

    def tell(self, **line: Any) -> None:
        self.write(json.dumps(line).encode() + b"\n")

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._out_fd, view) :]

    def silent(self, seconds: float = 0.0) -> bool:
        """Whether nothing has arrived."""
        return not self._buffer and not select.select([self._in_fd], [], [], seconds)[0]

    def hear(self) -> dict[str, Any]:
        """The next line; AssertionError at the end of input or after WAIT seconds."""
        while b"\n" not in self._buffer:
            assert select.select([self._in_fd], [], [], WAIT)[0], f"nothing heard; so far: {self._buffer!r}"
            data = os.read(self._in_fd, 1 << 16)
            assert data, f"the end; so far: {self._buffer!r}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def hear_until(self, event: str) -> list[dict[str, Any]]:
        """Lines up to and including one of that event."""
        heard = [self.hear()]
        while heard[-1]["event"] != event:
            heard.append(self.hear())
        return heard

    def at_end(self) -> bool:
        """Whether the other side has closed, waiting for it."""
        if self._buffer:
            return False
        assert select.select([self._in_fd], [], [], WAIT)[0], "neither a line nor the end"
        try:
            self._buffer = os.read(self._in_fd, 1 << 16)
        except ConnectionResetError:
            return True
        return not self._buffer


class Process(Lines):
    """A fake worker on stdio."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdin and popen.stdout
        super().__init__(popen.stdout.fileno(), popen.stdin.fileno())
        self.popen = popen
        self.stderr = b""

    def wait_ready(self) -> str:
        """The ready line."""
        return self.wait_stderr("_READY")

    def wait_stderr(self, word: str) -> str:
        assert self.popen.stderr
        while True:
            line = self.popen.stderr.readline()
            assert line, f"stderr ended: {self.stderr.decode()}"
            self.stderr += line
            if word in line.decode():
                return line.decode()

    def terminate_and_wait_until_it_knows(self, client: Lines) -> None:
        """SIGTERM while something runs, until the worker tells a client that it is leaving: a request
        that comes to its turn before that may still run."""
        self.popen.terminate()
        while True:
            client.tell(type="hello")
            if client.hear_until("hello")[-1]["state"] == "draining":
                return

    def close_stdin(self) -> None:
        assert self.popen.stdin
        self.popen.stdin.close()

    def close_stdout(self) -> None:
        assert self.popen.stdout
        self.popen.stdout.close()

    def status(self) -> int:
        """The exit status, waited for."""
        return self.popen.wait(LIMIT)

    def rss_kib(self) -> int:
        return status_kib(self.popen.pid, "VmRSS")

    def n_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))


def status_kib(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {field} in the status of {pid}")


@contextmanager
def stdio_worker(**options: Any) -> Iterator[Process]:
    """A fake worker; killed at the end if the test has not ended it."""
    with started("stdio", None, options) as process:
        yield process


@contextmanager
def uds_worker(path: Path | str, *, ready: bool = True, **options: Any) -> Iterator[Process]:
    """A fake worker on a socket, ready unless said otherwise."""
    with started("uds", str(path), options) as process:
        if ready:
            process.wait_ready()
        yield process


@contextmanager
def started(transport: str, path: str | None, options: dict[str, Any]) -> Iterator[Process]:
    pipe = subprocess.PIPE
    argv = fake_argv(transport, socket=path, **options)
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as popen:
        try:
            yield Process(popen)
        finally:
            if popen.poll() is None:
                popen.kill()
            for stream in (popen.stdin, popen.stdout, popen.stderr):
                if stream:
                    try:
                        stream.close()
                    except BrokenPipeError:
                        pass


class Dialled(Lines):
    """One connection to a socket."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT)
        self.socket.connect(str(path))
        self.socket.setblocking(True)
        super().__init__(self.socket.fileno(), self.socket.fileno())

    def __enter__(self) -> Dialled:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def delivered(pid: int, number: int) -> bool:
    """Whether a signal sent to a process has reached it: two that wait are one."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("ShdPnd:"):
            return not int(line.split()[1], 16) & 1 << (number - 1)
    raise AssertionError("no ShdPnd")


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true within WAIT seconds."""
    deadline = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Whether a process that need not be our child still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
