"""Servers to test against, as fixtures; what they are stands in servers.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Helpers of these tests are modules beside them; the package under test is the installed one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from servers import Server, StartServer, fake_argv, real_worker


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in front of the real worker and the bundled model."""
    argv = ["--demo", "--worker-command", " ".join(real_worker())]
    server = Server(argv, {}, tmp_path_factory.mktemp("demo") / "server.log")
    yield server
    status = server.stop()
    assert status == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """start_server(*flags, env={}, wait=True): a server of its own, in front of the fake worker."""
    servers: list[Server] = []

    def start(*flags: str, env: dict[str, str] | None = None, wait: bool = True) -> Server:
        log = tmp_path / f"server{len(servers)}.log"
        servers.append(Server(fake_argv(*flags), env or {}, log, wait))
        return servers[-1]

    yield start
    for server in servers:
        server.http.close()
        server.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as it was. `FAKE_LOG` holds what its worker has read."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(fake_argv(), {"FAKE_LOG": str(folder / "worker.log")}, folder / "server.log")
    server.worker_log = folder / "worker.log"  # type: ignore[attr-defined]
    yield server
    status = server.stop()
    assert status == 0, server.log
    assert "Traceback" not in server.log, server.log
