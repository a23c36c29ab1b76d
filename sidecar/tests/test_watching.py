"""A slow worker is told from a stuck one: the watch by itself, on a clock that jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from reflex_sidecar.supervise import Supervisor, WorkerPlan

PATIENCE_S = 100.0


class Jumping(asyncio.SelectorEventLoop):
    """Its time is what its timers have waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        look = selector.select

        def select(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return look(0)

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class Pipe:
    """A worker with work in hand that says nothing; it answers `pings` pings."""

    def __init__(self, loop: Jumping, pings: int) -> None:
        self._loop = loop
        self._pings = pings
        self.sent: list[float] = []
        self.killed_at: float | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self.open_exchanges = True
        self.last_heard = 0.0

    def send(self, _: Any) -> Any:
        self.sent.append(self._loop.now)
        answered = len(self.sent) <= self._pings
        if answered:
            self.last_heard = self._loop.now
        return SimpleNamespace(exchange=SimpleNamespace(done=answered))

    def kill(self) -> None:
        self.killed_at = self._loop.now
        self.ended.set_result(None)


async def no_preparation(_: Any) -> None:
    pass


def watched(pings: int, seconds: float) -> Pipe:
    """What becomes of such a worker within those seconds."""
    loop = Jumping()
    try:
        plan = WorkerPlan([], PATIENCE_S, ready_timeout_s=1, max_crashes=1, crash_window_s=1)
        supervisor = Supervisor(plan, lambda line: None, no_preparation)
        supervisor.state = "ready"
        pipe: Any = Pipe(loop, pings)
        loop.call_at(seconds, lambda: pipe.ended.done() or pipe.ended.set_result(None))
        watch: Coroutine[Any, Any, None] = supervisor._watch(pipe)
        loop.run_until_complete(watch)
        return pipe
    finally:
        loop.close()


def test_a_worker_that_is_slow_is_not_killed():
    """It answers pings between tokens, so silence longer than the limit is no reason to kill it."""
    pipe = watched(pings=1_000_000, seconds=20 * PATIENCE_S)
    assert pipe.killed_at is None and len(pipe.sent) > 100


def test_a_worker_that_answers_no_ping_is_killed_when_patience_ends():
    pipe = watched(pings=7, seconds=20 * PATIENCE_S)
    assert len(pipe.sent) == 8
    assert pipe.killed_at is not None and PATIENCE_S <= pipe.killed_at - pipe.sent[-1] < PATIENCE_S + 2
