"""Servers to test against: the real command, in front of the fake worker or of the bundled model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).resolve().parent
FAKE_WORKER = [sys.executable, str(HERE / "fake_worker.py")]
SHARED_TEMPLATES = HERE.parents[2] / "shared" / "templates"
READY = re.compile(r"^REFLEX_OPENAI_READY url=(\S+) ", re.M)
# Long, since the machine may be busy.
START_SECONDS = 120.0


class Server:
    """A running `reflex-openai`; `http` is a client of it."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path, wait: bool = True) -> None:
        self.log_path = log
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reflex_sidecar", *argv, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env={**os.environ, **env},
        )
        self.url = ""
        self.http = httpx.Client(timeout=START_SECONDS)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until the ready line is there."""
        self.url = self.wait_for_log(READY)[1]
        self.http.base_url = httpx.URL(self.url)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern: re.Pattern[str] | str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Until a line of the log matches."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log):
                return found
            if self.process.poll() is not None and not re.search(pattern, self.log):
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log}")
            time.sleep(0.01)
        pytest.fail(f"no {pattern!r} within {seconds} s:\n{self.log}")

    def until(self, condition: Callable[[], Any], seconds: float = START_SECONDS) -> Any:
        """Until a condition holds; its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.01)
        pytest.fail(f"a condition did not come true within {seconds} s; the log:\n{self.log}")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        """One user message."""
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)

    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()

    def children(self) -> dict[str, int]:
        """Pids of the worker and of the render process."""
        out: dict[str, int] = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            out["renderer" if "rendering.child" in command else "worker"] = int(pid)
        return out

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


StartServer = Callable[..., Server]


def fake_argv(*flags: str) -> list[str]:
    """The command line of a server in front of the fake worker."""
    return ["--demo", "--worker-command", " ".join(FAKE_WORKER), *flags]


def real_worker() -> list[str]:
    """The command of the real worker: installed beside this interpreter, or importable by it."""
    beside = Path(sys.executable).with_name("reflex")
    if beside.exists():
        return [str(beside)]
    if importlib.util.find_spec("reflex_worker") is None:
        pytest.skip("reflex_worker is not installed here")
    return [sys.executable, "-m", "reflex_worker"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def last_request(server: Server) -> dict[str, Any]:
    """The last generate request that the worker has read."""
    lines = server.worker_log.read_text().splitlines()  # type: ignore[attr-defined]
    return [r for line in lines if "prompt" in (r := json.loads(line)) or "prompt_token_ids" in r][-1]


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["code"], str)
    return error


def events_of(response: httpx.Response) -> list[Any]:
    """The data of a finished stream's events, [DONE] as that string."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any]) -> str:
    """The content of a chat stream."""
    deltas = [c["delta"] for e in events if isinstance(e, dict) for c in e.get("choices", ())]
    return "".join(d.get("content") or "" for d in deltas)
