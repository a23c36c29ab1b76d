"""Clients of a worker: start one, or dial its socket. The one part of this package with I/O.

`Client` blocks, `AsyncClient` is for asyncio; both speak through the same `Conversation`, which
does none. asyncio is imported with `AsyncClient` only, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .conversation import Conversation, Exchange
from .failures import Cancelled, WorkerDied, WorkerError, WorkerTimeout

if TYPE_CHECKING:
    from .aio import AsyncClient, AsyncExchange
    from .sync import Client

__all__ = [
    "AsyncClient",
    "AsyncExchange",
    "Cancelled",
    "Client",
    "Conversation",
    "Exchange",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
]


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "AsyncExchange"):
        from . import aio

        return getattr(aio, name)
    if name == "Client":
        from .sync import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
