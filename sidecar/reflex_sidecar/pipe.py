"""One worker process as an asyncio object: lines out, answers in, sorted to who asked.

The process is already running when it comes here (it is started before asyncio is imported). Owns
its three pipes. Reading never stops, so the worker never waits for us; what nobody has taken yet
waits in its Answer, bounded by the request's own max_tokens. Decides nothing: no restarts, no queue.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from reflex_protocol.client import Conversation, Exchange, WorkerDied, WorkerError
from reflex_protocol.client.limits import STDERR_LINE_BYTES, STDERR_TAIL_LINES
from reflex_protocol.codec import MAX_ANSWER_BYTES, LineError, LineSplitter, decode_answer
from reflex_protocol.errors import RemoteProtocolError
from reflex_protocol.messages import (
    Cancel,
    ClientMessage,
    ErrorFinal,
    Shutdown,
    ShutdownMode,
    WorkerMessage,
)

# How long the last words on stderr are waited for once stdout has ended.
LAST_WORDS_SECONDS: Final = 10.0


class Answer:
    """What comes back for one line: take its events with `next` until `done`."""

    __slots__ = ("_events", "_failure", "_loop", "_patient_until", "_timer", "_waiter", "exchange")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._patient_until = 0.0
        self._events: deque[WorkerMessage] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        """The id its line was sent with."""
        return self.exchange.id

    async def next(self, patience: float | None = None) -> WorkerMessage | None:
        """The next event, or None after `patience` seconds of silence.

        Raises WorkerError for an error final and WorkerDied when the worker has ended.
        """
        if not self._events:
            if self._failure is not None:
                raise self._failure
            await self._wait(patience)
            if not self._events:
                if self._failure is not None:
                    raise self._failure
                return None
        event = self._events.popleft()
        if isinstance(event, ErrorFinal):
            raise WorkerError.of(event)
        return event

    async def final(self) -> WorkerMessage:
        """The last event, with all before it passed over."""
        while True:
            event = await self.next()
            if event is not None and self.exchange.done and not self._events:
                return event

    async def _wait(self, patience: float | None) -> None:
        waiter = self._waiter = self._loop.create_future()
        if patience is not None:
            self._patient_until = self._loop.time() + patience
            if self._timer is None or self._timer.when() > self._patient_until:
                self._set_timer()
        try:
            await waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._patient_until, self._look_at_time)

    def _look_at_time(self) -> None:
        """One timer serves many waits: events move the time it is for, not the timer."""
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() >= self._patient_until:
            _wake(self._waiter)
        else:
            self._set_timer()

    def close(self) -> None:
        """Nobody will wait for it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def deliver(self, event: WorkerMessage) -> None:
        """An event has come."""
        self._events.append(event)
        if self._waiter is not None:
            _wake(self._waiter)

    def fail(self, failure: Exception) -> None:
        """Nothing more will come."""
        self._failure = failure
        if self._waiter is not None:
            _wake(self._waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Reader(asyncio.Protocol):
    """A pipe's bytes to a function, its end to another."""

    def __init__(self, take: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._take = take
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


class _Writer(asyncio.BaseProtocol):
    """The worker's stdin: whether more may be written without growing the buffer."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def pause_writing(self) -> None:
        self._open.clear()

    def resume_writing(self) -> None:
        self._open.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.set()

    async def drained(self) -> None:
        await self._open.wait()


class WorkerPipe:
    """The conversation with one running worker. Make it with `adopt`."""

    def __init__(self, process: subprocess.Popen[bytes], on_stderr: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.ended: asyncio.Future[WorkerDied | RemoteProtocolError] = loop.create_future()
        self.stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self.last_heard = loop.time()
        self._loop = loop
        self._on_stderr = on_stderr
        self._conversation = Conversation()
        self._answers: dict[str, Answer] = {}
        self._splitter = LineSplitter(MAX_ANSWER_BYTES)
        self._stderr = LineSplitter(STDERR_LINE_BYTES)
        self._stderr_ended = loop.create_future()
        self._writer = _Writer()
        self._stdin: asyncio.WriteTransport | None = None
        self._transports: list[asyncio.BaseTransport] = []
        self._broken: RemoteProtocolError | None = None

    @classmethod
    async def adopt(cls, process: subprocess.Popen[bytes], on_stderr: Callable[[str], None]) -> WorkerPipe:
        """Take over the pipes of a process that `child.spawn` started with stderr=PIPE."""
        self = cls(process, on_stderr)
        loop = self._loop
        stdout, _ = await loop.connect_read_pipe(
            lambda: _Reader(self._receive, self._stdout_ended), process.stdout
        )
        stderr, _ = await loop.connect_read_pipe(lambda: _Reader(self._note, self._note_end), process.stderr)
        stdin, _ = await loop.connect_write_pipe(lambda: self._writer, process.stdin)
        self._stdin = cast(asyncio.WriteTransport, stdin)
        self._transports = [stdout, stderr, stdin]
        return self

    @property
    def open_exchanges(self) -> list[Exchange]:
        """What the worker has not finished answering, oldest first."""
        return self._conversation.open

    def send(self, message: ClientMessage) -> Answer:
        """Write a line that is answered.

        Raises LocalProtocolError, with nothing sent, for what the worker would refuse, and
        WorkerDied where there is no worker any more.
        """
        answer = self._write(message)
        assert answer is not None
        return answer

    async def ask(self, message: ClientMessage) -> WorkerMessage:
        """The final answer to a line."""
        answer = self.send(message)
        await self._writer.drained()
        return await answer.final()

    def cancel(self, answer: Answer) -> None:
        """Ask for the end of a request. Its final still comes; nobody need wait for it."""
        if not answer.exchange.done and not self.ended.done():
            self._write(Cancel(target=answer.id))

    def shutdown(self, mode: ShutdownMode) -> None:
        """Ask the worker to leave."""
        if not self.ended.done():
            self._write(Shutdown(mode=mode))

    def kill(self) -> None:
        """SIGKILL; `ended` tells when it is gone."""
        if self.process.poll() is None:
            self.process.kill()

    def _write(self, message: ClientMessage) -> Answer | None:
        if self.ended.done():
            raise self.ended.result()
        line, exchange = self._conversation.send(message)
        assert self._stdin is not None
        if not self._conversation.open[1:]:
            # Its silence counts from when it had something to answer.
            self.last_heard = self._loop.time()
        if not self._stdin.is_closing():  # else it is ending, and whoever waits is about to hear so
            self._stdin.write(line)
        if exchange is None:
            return None
        answer = self._answers[exchange.id] = Answer(exchange)
        return answer

    def _receive(self, data: bytes) -> None:
        self.last_heard = self._loop.time()
        try:
            for line in self._splitter.feed(data):
                if isinstance(line, LineError):
                    raise RemoteProtocolError(line.message)
                event = decode_answer(line)
                exchange = self._conversation.receive(event)
                answer = self._answers.pop(exchange.id) if exchange.done else self._answers[exchange.id]
                answer.deliver(event)
        except RemoteProtocolError as e:
            self._broken = e
            self.kill()

    def _note(self, data: bytes) -> None:
        for line in self._stderr.feed(data):
            text = line.message if isinstance(line, LineError) else line.decode("utf-8", "replace")
            self.stderr_tail.append(text)
            self._on_stderr(text)

    def _note_end(self) -> None:
        if not self._stderr_ended.done():
            self._stderr_ended.set_result(None)

    def _stdout_ended(self) -> None:
        self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        """Reap, hear the last words, tell everybody who waits, close what is ours."""
        await asyncio.wait([self._stderr_ended], timeout=LAST_WORDS_SECONDS)
        # Whoever closed its stdout has nothing more to say: no worker lives on without it.
        self.kill()
        status = await self._loop.run_in_executor(None, self.process.wait)
        why = self._broken or WorkerDied(status, list(self.stderr_tail))
        for transport in self._transports:
            transport.close()
        answers, self._answers = list(self._answers.values()), {}
        for answer in answers:
            answer.fail(why)
        self.ended.set_result(why)
