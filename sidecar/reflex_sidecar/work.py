"""One HTTP request's claim on the worker: its place in line, its deadline, its cancellation.

    async with Job(services) as job:          # waits for the turn
        async for event in job.events(request):   # None: nothing new for a while
            ...

A job may send several requests one after another within its turn (n answers, a batch of prompts).
Whatever ends it early, an exception or the client's hanging up, cancels what the worker is doing for
it; the next in line need not wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET
from reflex_protocol.client import WorkerDied, WorkerError
from reflex_protocol.errors import LocalProtocolError, RemoteProtocolError
from reflex_protocol.messages import (
    ClientMessage,
    GenerateFinal,
    ProgressEvent,
    Request,
    ScoreFinal,
    TokenEvent,
    WorkerMessage,
)

from .errors import from_worker, timed_out, unavailable
from .pipe import Answer, WorkerPipe

if TYPE_CHECKING:
    from .services import Services

# A worker that says it has lost its model's file ends at once; the next in line must not be sent to it.
_ENDING_SECONDS = 5.0

_WORKER_ERRORS = (WorkerError, WorkerDied, LocalProtocolError, RemoteProtocolError)


class Job:
    """See above. Use as an async context manager."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._loop = asyncio.get_running_loop()
        self._timeout_s = services.options.timeout_s
        self._started = self._loop.time()
        self._deadline = self._started + self._timeout_s
        self._stack = AsyncExitStack()
        self._pipe: WorkerPipe | None = None
        self._seen_token = False

    async def __aenter__(self) -> Job:
        services = self._services
        if not services.ready:
            raise services.not_ready()
        try:
            await self._stack.enter_async_context(services.turns.turn(self._left()))
            services.metrics.queue_wait.observe(self._loop.time() - self._started)
            # The worker may have crashed while this waited; a new one is on its way.
            self._pipe = await services.supervisor.ready(self._left())
        except TimeoutError:
            await self._stack.aclose()
            raise timed_out(self._timeout_s) from None
        except WorkerDied:
            await self._stack.aclose()
            raise unavailable("the worker is gone", code="worker_gone") from None
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def events(self, request: Request) -> AsyncGenerator[WorkerMessage | None, None]:
        """The worker's events for a request, its final last; None stands for a while of silence."""
        if "energy" in self._services.facts.capabilities:
            request = msgspec.structs.replace(request, energy=True)
        answer = self._send(request)
        try:
            while True:
                event = await self._next(answer)
                if event is not None:
                    self._count(event)
                yield event
                if isinstance(event, (GenerateFinal, ScoreFinal)):
                    return
        finally:
            answer.close()
            if self._pipe is not None:
                self._pipe.cancel(answer)

    async def final(self, request: Request) -> GenerateFinal | ScoreFinal:
        """The last event."""
        async with aclosing(self.events(request)) as events:
            async for event in events:
                if isinstance(event, (GenerateFinal, ScoreFinal)):
                    return event
        raise AssertionError("events() ends with a final")

    async def ask(self, *messages: ClientMessage) -> list[WorkerMessage]:
        """The answers to control lines, all sent before the first is waited for."""
        answers = [self._send(message) for message in messages]
        out: list[WorkerMessage] = []
        for answer in answers:
            while (event := await self._next(answer)) is None:
                pass
            answer.close()
            out.append(event)
        return out

    def _send(self, message: ClientMessage) -> Answer:
        assert self._pipe is not None
        try:
            return self._pipe.send(message)
        except _WORKER_ERRORS as e:
            raise from_worker(e, self._services.facts.n_ctx) from None

    async def _next(self, answer: Answer) -> WorkerMessage | None:
        left = self._left()
        if left <= 0:
            raise timed_out(self._timeout_s)
        try:
            return await answer.next(min(left, self._services.options.keep_alive_s))
        except _WORKER_ERRORS as e:
            if isinstance(e, WorkerError) and e.kind == "io" and self._pipe is not None:
                await asyncio.wait([self._pipe.ended], timeout=_ENDING_SECONDS)
            raise from_worker(e, self._services.facts.n_ctx) from None

    def _count(self, event: WorkerMessage) -> None:
        metrics = self._services.metrics
        if isinstance(event, TokenEvent):
            if not self._seen_token:
                self._seen_token = True
                metrics.first_token.observe(self._loop.time() - self._started)
        elif isinstance(event, (GenerateFinal, ScoreFinal)):
            metrics.prompt_tokens.add(event.usage.prompt_tokens)
            metrics.completion_tokens.add(event.usage.completion_tokens)
            metrics.cached_tokens.add(event.usage.cached_tokens)
            metrics.note_timings(event.timings)
            metrics.note_energy({} if event.energy is UNSET else event.energy)
            self._services.note_final(event)

    def _left(self) -> float:
        return self._deadline - self._loop.time()


def is_sign_of_life(event: WorkerMessage | None) -> bool:
    """Whether the worker has begun: what fails early has failed by now."""
    return isinstance(event, (ProgressEvent, TokenEvent, GenerateFinal, ScoreFinal))
