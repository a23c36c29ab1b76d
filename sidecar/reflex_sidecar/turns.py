"""Whose turn it is: the worker does one thing at a time, and this is the line in front of it.

First come, first served, with a bound on how many may wait. Measures how long turns take, so that
who is turned away is told when to come back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from .errors import overloaded

# Weight of the newest turn in the running mean: about the last ten turns count.
_PACE_WEIGHT: Final = 0.2
_MAX_RETRY_AFTER_S: Final = 3600


class Turns:
    """A fair lock with a bounded line."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.busy = False
        self.mean_turn_s = 0.0
        self._line: OrderedDict[int, asyncio.Future[None]] = OrderedDict()
        self._n_tickets = 0

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    def retry_after_s(self) -> int:
        """Whole seconds until a place in a full line is likely to be free."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self.mean_turn_s)))

    @asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncIterator[None]:
        """Wait for the turn, and have it.

        ApiError 429 where the line is full, TimeoutError where the turn does not come in time.
        """
        await self._enter(timeout_s)
        started = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - started
            self.mean_turn_s = (
                took if self.mean_turn_s == 0 else self.mean_turn_s + _PACE_WEIGHT * (took - self.mean_turn_s)
            )
            self._leave()

    async def _enter(self, timeout_s: float) -> None:
        if not self.busy:
            self.busy = True
            return
        if len(self._line) >= self.max_waiting:
            raise overloaded(len(self._line), self.retry_after_s())
        self._n_tickets += 1
        ticket = self._n_tickets
        loop = asyncio.get_running_loop()
        called = self._line[ticket] = loop.create_future()
        timer = loop.call_later(timeout_s, give_up, called)
        try:
            await called
        except asyncio.CancelledError:
            if not called.cancelled() and called.exception() is None:
                self._leave()  # called and cancelled at once: the turn goes on to the next
            raise
        finally:
            timer.cancel()
            self._line.pop(ticket, None)

    def _leave(self) -> None:
        while self._line:
            _, called = self._line.popitem(last=False)
            if not called.done():
                called.set_result(None)
                return
        self.busy = False


def give_up(waiting: asyncio.Future[Any]) -> None:
    """The end of somebody's patience, for call_later."""
    if not waiting.done():
        waiting.set_exception(TimeoutError())
