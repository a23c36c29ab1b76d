"""Starts workers: around the fake engine, and the real command with the bundled model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from reflex_protocol.client import AsyncClient

from .process import WAIT, fake_argv


@pytest.fixture
async def spawn():
    """Starts a fake worker on stdio, and sees to its end: `await spawn(load_ms=50)`."""
    started: list[AsyncClient] = []

    async def start(**options) -> AsyncClient:
        wait_ready = options.pop("wait_ready", True)
        argv = fake_argv("stdio", **options)
        client = await AsyncClient.spawn(argv, ready_timeout=WAIT, wait_ready=wait_ready)
        started.append(client)
        return client

    yield start
    for client in started:
        await client.kill()


@pytest.fixture
def folder():
    """A folder with a short name: a socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="rx") as name:
        yield Path(name)
