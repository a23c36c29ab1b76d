"""Starting the worker. Apart from supervise.py so that it can happen before asyncio is imported."""

from __future__ import annotations

import subprocess

from . import child


def start(argv: list[str]) -> subprocess.Popen[bytes]:
    """Start a worker. Raises OSError."""
    return child.spawn(argv, stderr=subprocess.PIPE)
