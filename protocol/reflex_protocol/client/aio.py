"""The asyncio client: starts a worker (`spawn`) or dials its socket (`connect`).

One task reads the worker's answers and one its stderr, always; what nobody has taken yet waits in
the exchange, bounded by the request's own max_tokens. Must be used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

from ..codec import MAX_ANSWER_BYTES, LineError, LineSplitter, decode_answer
from ..errors import RemoteProtocolError
from ..messages import (
    Cancel,
    ClientMessage,
    Detokenize,
    DetokenizeAnswer,
    ErrorFinal,
    Experts,
    GenerateFinal,
    Hello,
    HelloAnswer,
    Info,
    InfoAnswer,
    Load,
    Loaded,
    LoraAdapter,
    Ping,
    Pong,
    Request,
    ScoreFinal,
    Shutdown,
    ShutdownMode,
    Tokenize,
    TokenizeAnswer,
    WorkerMessage,
)
from .conversation import Conversation, Exchange
from .failures import WorkerDied, WorkerError, WorkerTimeout
from .limits import EXIT_GRACE_SECONDS, READ_BYTES, STDERR_LINE_BYTES, STDERR_TAIL_LINES
from .ready import parse_ready

_Answer = TypeVar("_Answer", bound=WorkerMessage)


class AsyncExchange:
    """One line that was sent; iterate for its events, the last of which is its final answer.

    An error final is raised as WorkerError (Cancelled where it was cancelled), the end of the
    worker as WorkerDied.
    """

    def __init__(self, client: AsyncClient, exchange: Exchange) -> None:
        self._client = client
        self._exchange = exchange
        self._events: deque[WorkerMessage] = deque()
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def id(self) -> str:
        """The id it was sent with."""
        return self._exchange.id

    @property
    def done(self) -> bool:
        """Whether its final answer has come (it may still wait to be taken) or never will."""
        return self._exchange.done or self._failure is not None

    def cancel(self) -> None:
        """Ask the worker to cancel it; the answer is still one final."""
        if not self.done:
            self._client._write(Cancel(target=self.id))

    def __aiter__(self) -> AsyncExchange:
        return self

    async def __anext__(self) -> WorkerMessage:
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if self._exchange.done:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        if isinstance(event, ErrorFinal):
            raise WorkerError.of(event)
        return event

    async def final(self, timeout: float | None = None) -> WorkerMessage:
        """Its last answer. On a timeout (seconds) it is cancelled and WorkerTimeout raised."""
        try:
            return await asyncio.wait_for(self._last(), timeout)
        except asyncio.TimeoutError:
            self.cancel()
            raise WorkerTimeout(f"{self._exchange.kind} {self.id!r}: no answer in {timeout} s") from None
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _last(self) -> WorkerMessage:
        last: WorkerMessage | None = None
        async for event in self:
            last = event
        if last is None:
            raise RuntimeError("the final answer of this exchange has already been taken")
        return last

    def _deliver(self, event: WorkerMessage) -> None:
        self._events.append(event)
        self._wake.set()

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake.set()


class AsyncClient:
    """A worker to talk to. Make one with `spawn` or `connect`; use as an async context manager.

    Every timeout is in seconds, None for no end; when it comes the request is cancelled and WorkerTimeout
    raised. A refused request raises WorkerError (its kind: docs/protocol.md, "Errors"), a cancelled one
    Cancelled (with the tokens so far), and all of them WorkerDied once the worker has ended.
    """

    def __init__(self) -> None:
        self._conversation = Conversation()
        self._exchanges: dict[str, AsyncExchange] = {}
        self._splitter = LineSplitter(MAX_ANSWER_BYTES)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._gone: asyncio.Future[WorkerDied | RemoteProtocolError] = (
            asyncio.get_running_loop().create_future()
        )
        self.process: asyncio.subprocess.Process | None = None
        self.stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)

    # ---- making one ------------------------------------------------------------------------

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        ready_timeout: float | None = 300.0,
        wait_ready: bool = True,
        **popen: Any,
    ) -> AsyncClient:
        """Start `argv` (for example ["reflex", "stdio", "model.gguf"]) and wait until it is ready.

        Raises WorkerDied when it ends before (its last lines of stderr are in the error) and
        WorkerTimeout when it takes longer than `ready_timeout` seconds; either way nothing of it
        is left running. With wait_ready false, `ready()` waits later; what is sent before is
        answered when the model is there. `popen`: further arguments of subprocess.Popen.
        """
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd=cwd,
            **popen,
        )
        self._reader, self._writer = self.process.stdout, self.process.stdin
        self._tasks.append(asyncio.create_task(self._read_stderr()))
        self._tasks.append(asyncio.create_task(self._read_answers()))
        if wait_ready:
            try:
                await self.ready(ready_timeout)
            except BaseException:
                await self.kill()
                raise
        return self

    @classmethod
    async def connect(cls, path: str, *, timeout: float | None = 10.0) -> AsyncClient:
        """Dial the Unix socket of a running worker."""
        self = cls()
        try:
            self._reader, self._writer = await asyncio.wait_for(
                asyncio.open_unix_connection(path, limit=READ_BYTES), timeout
            )
        except asyncio.TimeoutError:
            raise WorkerTimeout(f"{path}: not connected in {timeout} s") from None
        self._tasks.append(asyncio.create_task(self._read_answers()))
        return self

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- talking ---------------------------------------------------------------------------

    async def submit(self, message: ClientMessage) -> AsyncExchange:
        """Send a request or a control line that is answered; its events are the exchange's.

        Raises LocalProtocolError, with nothing sent, for what the worker would refuse.
        """
        exchange = self._write(message)
        if exchange is None:
            raise TypeError(f"{type(message).__name__} has no answer: use cancel() or shutdown()")
        await self._drain()
        return exchange

    async def stream(self, message: ClientMessage) -> AsyncIterator[WorkerMessage]:
        """The events of a message, its final last; leaving the loop early cancels it."""
        exchange = await self.submit(message)
        try:
            async for event in exchange:
                yield event
        finally:
            exchange.cancel()

    async def request(self, request: Request, *, timeout: float | None = None) -> GenerateFinal | ScoreFinal:
        """The final answer of a request."""
        answer = await (await self.submit(request)).final(timeout)
        assert isinstance(answer, (GenerateFinal, ScoreFinal))
        return answer

    async def generate(self, prompt: str, *, timeout: float | None = None, **fields: Any) -> GenerateFinal:
        """Generate from `prompt`; `fields` are those of `Request`. Log-probabilities are natural logarithms,
        timings milliseconds."""
        return await self._ask(Request(prompt=prompt, **fields), GenerateFinal, timeout)

    async def score(
        self, prompt: str, candidates: list[str], *, timeout: float | None = None, **fields: Any
    ) -> ScoreFinal:
        """Score `candidates` (N texts) after `prompt`; `fields` are those of `Request`. The answer has N
        candidates in that order: score, probability (they sum to 1); and the entropy in bits."""
        request = Request(prompt=prompt, candidates=candidates, **fields)
        return await self._ask(request, ScoreFinal, timeout)

    async def hello(self, *, timeout: float | None = None) -> HelloAnswer:
        """Who the worker is and what it is doing; answered while a request runs."""
        return await self._ask(Hello(), HelloAnswer, timeout)

    async def ping(self, *, timeout: float | None = None) -> None:
        """Returns when the worker has answered, which it does between tokens."""
        await self._ask(Ping(), Pong, timeout)

    async def info(self, *, timeout: float | None = None) -> InfoAnswer:
        """The model's facts."""
        return await self._ask(Info(), InfoAnswer, timeout)

    async def tokenize(self, text: str, *, timeout: float | None = None, **fields: Any) -> list[int]:
        """The token ids of a text; `fields` are those of `Tokenize`."""
        return (await self._ask(Tokenize(text=text, **fields), TokenizeAnswer, timeout)).token_ids

    async def detokenize(self, token_ids: list[int], *, timeout: float | None = None, **fields: Any) -> str:
        """The text of token ids; `fields` are those of `Detokenize`."""
        return (await self._ask(Detokenize(token_ids=token_ids, **fields), DetokenizeAnswer, timeout)).text

    async def load(
        self,
        model: str,
        *,
        lora: Sequence[str | LoraAdapter] = (),
        experts: Experts | None = None,
        timeout: float | None = None,
    ) -> Loaded:
        """Load a model into a worker that was started without one."""
        return await self._ask(Load(model=model, lora=list(lora), experts=experts), Loaded, timeout)

    def cancel(self, request_id: str) -> None:
        """Ask for the cancellation of a request; its exchange still gets its final."""
        self._write(Cancel(target=request_id))

    async def shutdown(self, mode: ShutdownMode = "drain", *, timeout: float | None = None) -> int | None:
        """Ask the worker to leave and wait until it has; its exit status where it was spawned."""
        self._write(Shutdown(mode=mode))
        return await self.wait(timeout)

    async def ready(self, timeout: float | None = None) -> dict[str, Any]:
        """The pairs of the worker's ready line, waited for. Spawned workers only."""
        done, _ = await asyncio.wait(
            [self._ready, self._gone], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if self._ready in done:
            return self._ready.result()
        if self._gone in done:
            raise self._gone.result()
        raise WorkerTimeout(f"the worker was not ready in {timeout} s")

    # ---- its end ---------------------------------------------------------------------------

    @property
    def exit_status(self) -> int | None:
        """Of a spawned worker that has ended (negative: the signal that killed it)."""
        return self.process.returncode if self.process else None

    @property
    def gone(self) -> bool:
        """Whether the worker, or the connection to it, has ended."""
        return self._gone.done()

    async def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the worker or the connection; the exit status where spawned."""
        try:
            await asyncio.wait_for(asyncio.shield(self._gone), timeout)
        except asyncio.TimeoutError:
            raise WorkerTimeout(f"the worker did not end in {timeout} s") from None
        return self.exit_status

    def terminate(self) -> None:
        """SIGTERM: the running request is finished, what waits is refused."""
        if self.process and self.process.returncode is None:
            self.process.terminate()

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process and self.process.returncode is None:
            self.process.kill()
        await self.close(timeout=0)

    async def close(self, timeout: float = 10.0) -> None:
        """End of input: a worker that was spawned answers what it has read and leaves; it is killed
        after `timeout` seconds. A connection is closed."""
        if self._writer is not None:
            self._writer.close()
        if self.process is None:
            for task in self._tasks:
                task.cancel()
        else:
            await asyncio.wait([self._gone], timeout=timeout)
            if self.process.returncode is None:
                self.process.kill()
            await asyncio.wait([self._gone], timeout=2 * EXIT_GRACE_SECONDS)
            self._tasks[0].cancel()  # still reading only where a grandchild holds stderr open
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(WorkerDied(self.exit_status, list(self.stderr_tail)))
        if self._writer is not None:
            try:
                await self._writer.wait_closed()
            except OSError:
                pass  # its end is what was wanted

    # ---- inside ----------------------------------------------------------------------------

    async def _ask(self, message: ClientMessage, kind: type[_Answer], timeout: float | None) -> _Answer:
        answer = await (await self.submit(message)).final(timeout)
        assert isinstance(answer, kind)
        return answer

    def _write(self, message: ClientMessage) -> AsyncExchange | None:
        if self._gone.done():
            raise self._gone.result()
        line, exchange = self._conversation.send(message)
        assert self._writer is not None
        self._writer.write(line)
        if exchange is None:
            return None
        waiting = AsyncExchange(self, exchange)
        self._exchanges[exchange.id] = waiting
        return waiting

    async def _drain(self) -> None:
        assert self._writer is not None
        try:
            await self._writer.drain()
        except OSError:
            pass  # the reading side tells what became of the worker

    async def _read_answers(self) -> None:
        assert self._reader is not None
        failure: RemoteProtocolError | None = None
        try:
            while data := await self._reader.read(READ_BYTES):
                for line in self._splitter.feed(data):
                    self._receive(line)
        except RemoteProtocolError as e:
            failure = e
        except OSError:
            pass  # reset by the peer: the same as its end
        if self.process is not None:
            await self._reap(at_once=failure is not None)
        self._end(failure or WorkerDied(self.exit_status, list(self.stderr_tail)))

    def _receive(self, line: bytes | LineError) -> None:
        if isinstance(line, LineError):
            raise RemoteProtocolError(line.message)
        answer = decode_answer(line)
        exchange = self._conversation.receive(answer)
        waiting = self._exchanges[exchange.id]
        if exchange.done:
            del self._exchanges[exchange.id]
        waiting._deliver(answer)

    async def _read_stderr(self) -> None:
        assert self.process is not None and self.process.stderr is not None
        splitter = LineSplitter(STDERR_LINE_BYTES)
        while data := await self.process.stderr.read(READ_BYTES):
            self._note(splitter.feed(data))
        self._note(splitter.finish())

    def _note(self, lines: list[bytes | LineError]) -> None:
        for line in lines:
            text = line.message if isinstance(line, LineError) else line.decode("utf-8", "replace")
            self.stderr_tail.append(text)
            pairs = parse_ready(text)
            if pairs is not None and not self._ready.done():
                self._ready.set_result(pairs)

    async def _reap(self, at_once: bool) -> None:
        assert self.process is not None
        try:
            await asyncio.wait_for(self.process.wait(), 0 if at_once else EXIT_GRACE_SECONDS)
        except asyncio.TimeoutError:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
        # The last words on stderr; a grandchild may hold it open for ever.
        await asyncio.wait([self._tasks[0]], timeout=EXIT_GRACE_SECONDS)

    def _end(self, why: WorkerDied | RemoteProtocolError) -> None:
        if not self._gone.done():
            self._gone.set_result(why)
        for waiting in self._exchanges.values():
            waiting._fail(self._gone.result())
        self._exchanges.clear()
