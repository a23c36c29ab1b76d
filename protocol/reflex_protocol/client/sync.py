"""The blocking client: starts a worker (`spawn`) or dials its socket (`connect`).

One thread, no locks: every call waits in one poll() over the worker's answers, its stderr and what
is still to be written to it, so that neither side can wait for the other for ever.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

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


class Client:
    """A worker to talk to. Make one with `spawn` or `connect`; use as a context manager.

    Every timeout is in seconds, None for no end; when it comes the request is cancelled and WorkerTimeout
    raised. A refused request raises WorkerError (its kind: docs/protocol.md, "Errors"), a cancelled one
    Cancelled (with the tokens so far), and all of them WorkerDied once the worker has ended.
    """

    def __init__(self, in_fd: int, out_fd: int) -> None:
        self._in_fd = in_fd  # the worker's answers
        self._out_fd = out_fd  # what goes to it
        self._err_fd = -1
        self._socket: socket.socket | None = None
        self._conversation = Conversation()
        self._splitter = LineSplitter(MAX_ANSWER_BYTES)
        self._stderr_splitter = LineSplitter(STDERR_LINE_BYTES)
        self._events: dict[Exchange, deque[WorkerMessage]] = {}
        self._unsent = bytearray()
        self._ready: dict[str, Any] | None = None
        self._ended = False
        self._broken: RemoteProtocolError | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        os.set_blocking(out_fd, False)

    # ---- making one ------------------------------------------------------------------------

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        ready_timeout: float | None = 300.0,
        wait_ready: bool = True,
        **popen: Any,
    ) -> Client:
        """Start `argv` (for example ["reflex", "stdio", "model.gguf"]) and wait until it is ready.

        Raises WorkerDied when it ends before (its last lines of stderr are in the error) and
        WorkerTimeout when it takes longer than `ready_timeout` seconds; either way nothing of it
        is left running. `popen`: further arguments of subprocess.Popen.
        """
        pipe = subprocess.PIPE
        process = cast(
            "subprocess.Popen[bytes]",
            subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd, bufsize=0, **popen
            ),
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self = cls(process.stdout.fileno(), process.stdin.fileno())
        self.process = process
        self._err_fd = process.stderr.fileno()
        if wait_ready:
            try:
                self.ready(ready_timeout)
            except BaseException:
                self.kill()
                raise
        return self

    @classmethod
    def connect(cls, path: str, *, timeout: float | None = 10.0) -> Client:
        """Dial the Unix socket of a running worker."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(path)
        except BaseException as e:
            connection.close()
            if isinstance(e, (TimeoutError, socket.timeout)):
                raise WorkerTimeout(f"{path}: not connected in {timeout} s") from None
            raise
        self = cls(connection.fileno(), connection.fileno())
        self._socket = connection
        return self

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- talking ---------------------------------------------------------------------------

    def submit(self, message: ClientMessage) -> Exchange:
        """Send a message that is answered; `events` and `final` take what comes back.

        Raises LocalProtocolError, with nothing sent, for what the worker would refuse.
        """
        exchange = self._send(message)
        if exchange is None:
            raise TypeError(f"{type(message).__name__} has no answer: use cancel() or shutdown()")
        return exchange

    def events(self, exchange: Exchange, timeout: float | None = None) -> Iterator[WorkerMessage]:
        """Its events as they come, the final last. An error final is raised as WorkerError.

        `timeout`: seconds until the final; then it is cancelled and WorkerTimeout raised.
        """
        deadline = _deadline(timeout)
        queue = self._events[exchange]
        while True:
            while not queue:
                self._wait_for(exchange, deadline)
            event = queue.popleft()
            last = exchange.done and not queue
            if last:
                self._events.pop(exchange, None)
            if isinstance(event, ErrorFinal):
                raise WorkerError.of(event)
            yield event
            if last:
                return

    def stream(self, message: ClientMessage, *, timeout: float | None = None) -> Iterator[WorkerMessage]:
        """The events of a message, its final last; leaving the loop early cancels it."""
        exchange = self.submit(message)
        try:
            yield from self.events(exchange, timeout)
        finally:
            self._events.pop(exchange, None)
            if not exchange.done and not self._ended:
                self.cancel(exchange.id)

    def final(self, exchange: Exchange, timeout: float | None = None) -> WorkerMessage:
        """The final answer of what was submitted."""
        last: WorkerMessage | None = None
        for event in self.events(exchange, timeout):
            last = event
        assert last is not None
        return last

    def request(self, request: Request, *, timeout: float | None = None) -> GenerateFinal | ScoreFinal:
        """The final answer of a request."""
        answer = self.final(self.submit(request), timeout)
        assert isinstance(answer, (GenerateFinal, ScoreFinal))
        return answer

    def generate(self, prompt: str, *, timeout: float | None = None, **fields: Any) -> GenerateFinal:
        """Generate from `prompt`; `fields` are those of `Request`. Log-probabilities are natural logarithms,
        timings milliseconds."""
        return self._ask(Request(prompt=prompt, **fields), GenerateFinal, timeout)

    def score(
        self, prompt: str, candidates: list[str], *, timeout: float | None = None, **fields: Any
    ) -> ScoreFinal:
        """Score `candidates` (N texts) after `prompt`; `fields` are those of `Request`. The answer has N
        candidates in that order: score, probability (they sum to 1); and the entropy in bits."""
        return self._ask(Request(prompt=prompt, candidates=candidates, **fields), ScoreFinal, timeout)

    def hello(self, *, timeout: float | None = None) -> HelloAnswer:
        """Who the worker is and what it is doing."""
        return self._ask(Hello(), HelloAnswer, timeout)

    def ping(self, *, timeout: float | None = None) -> None:
        """Returns when the worker has answered."""
        self._ask(Ping(), Pong, timeout)

    def info(self, *, timeout: float | None = None) -> InfoAnswer:
        """The model's facts."""
        return self._ask(Info(), InfoAnswer, timeout)

    def tokenize(self, text: str, *, timeout: float | None = None, **fields: Any) -> list[int]:
        """The token ids of a text; `fields` are those of `Tokenize`."""
        return self._ask(Tokenize(text=text, **fields), TokenizeAnswer, timeout).token_ids

    def detokenize(self, token_ids: list[int], *, timeout: float | None = None, **fields: Any) -> str:
        """The text of token ids; `fields` are those of `Detokenize`."""
        return self._ask(Detokenize(token_ids=token_ids, **fields), DetokenizeAnswer, timeout).text

    def load(
        self,
        model: str,
        *,
        lora: Sequence[str | LoraAdapter] = (),
        experts: Experts | None = None,
        timeout: float | None = None,
    ) -> Loaded:
        """Load a model into a worker that was started without one."""
        return self._ask(Load(model=model, lora=list(lora), experts=experts), Loaded, timeout)

    def cancel(self, request_id: str) -> None:
        """Ask for the cancellation of a request; it still gets its final."""
        self._send(Cancel(target=request_id))

    def shutdown(self, mode: ShutdownMode = "drain", *, timeout: float | None = None) -> int | None:
        """Ask the worker to leave and wait until it has; its exit status where it was spawned."""
        self._send(Shutdown(mode=mode))
        return self.wait(timeout)

    def ready(self, timeout: float | None = None) -> dict[str, Any]:
        """The pairs of the worker's ready line, waited for. Spawned workers only."""
        deadline = _deadline(timeout)
        while self._ready is None:
            if self._ended:
                raise self._death()
            self._pump(deadline, "the worker was not ready")
        return self._ready

    # ---- its end ---------------------------------------------------------------------------

    @property
    def exit_status(self) -> int | None:
        """Of a spawned worker that has ended (negative: the signal that killed it)."""
        return self.process.poll() if self.process else None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the worker or the connection; the exit status where spawned."""
        deadline = _deadline(timeout)
        while not self._ended:
            self._pump(deadline, "the worker did not end")
        return self.exit_status

    def terminate(self) -> None:
        """SIGTERM: the running request is finished, what waits is refused."""
        if self.process:
            self.process.terminate()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process:
            self.process.kill()
        self.close()

    def close(self, timeout: float = 10.0) -> None:
        """End of input: a worker that was spawned answers what it has read and leaves; it is killed
        after `timeout` seconds. A connection is closed."""
        if self._socket is not None:
            self._socket.close()
            self._ended = True
        if self.process is None:
            return
        assert self.process.stdin is not None
        self._unsent.clear()
        self._out_fd = -1
        self.process.stdin.close()
        try:
            self.wait(timeout)
        except WorkerTimeout:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._ended = True

    # ---- inside ----------------------------------------------------------------------------

    def _ask(self, message: ClientMessage, kind: type[_Answer], timeout: float | None) -> _Answer:
        answer = self.final(self.submit(message), timeout)
        assert isinstance(answer, kind)
        return answer

    def _death(self) -> WorkerDied | RemoteProtocolError:
        return self._broken or WorkerDied(self.exit_status, list(self.stderr_tail))

    def _send(self, message: ClientMessage) -> Exchange | None:
        if self._ended:
            raise self._death()
        line, exchange = self._conversation.send(message)
        if exchange is not None:
            self._events[exchange] = deque()
        self._unsent += line
        self._flush()
        return exchange

    def _wait_for(self, exchange: Exchange, deadline: float | None) -> None:
        if self._ended:
            self._events.pop(exchange, None)
            raise self._death()
        try:
            self._pump(deadline, f"{exchange.kind} {exchange.id!r}: no answer")
        except WorkerTimeout:
            self._events.pop(exchange, None)
            self.cancel(exchange.id)
            raise

    def _pump(self, deadline: float | None, what: str) -> None:
        """Wait for anything to happen and take it in; WorkerTimeout(what) at the deadline."""
        poll = select.poll()
        poll.register(self._in_fd, select.POLLIN)
        if self._err_fd >= 0:
            poll.register(self._err_fd, select.POLLIN)
        if self._unsent and self._out_fd != self._in_fd:
            poll.register(self._out_fd, select.POLLOUT)
        elif self._unsent:
            poll.register(self._in_fd, select.POLLIN | select.POLLOUT)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = dict(poll.poll(left))
        if not ready:
            raise WorkerTimeout(f"{what} in time")
        if self._unsent and ready.get(self._out_fd, 0) & (select.POLLOUT | select.POLLERR):
            self._flush()
        if ready.get(self._err_fd):
            self._read_stderr()
        if ready.get(self._in_fd, 0) & (select.POLLIN | select.POLLHUP | select.POLLERR):
            self._read_answers()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._out_fd, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reading side tells what became of the worker

    def _read_answers(self) -> None:
        try:
            data = os.read(self._in_fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # reset by the peer: the same as its end
        if not data:
            self._reap()
            return
        try:
            for line in self._splitter.feed(data):
                if isinstance(line, LineError):
                    raise RemoteProtocolError(line.message)
                answer = decode_answer(line)
                exchange = self._conversation.receive(answer)
                queue = self._events.get(exchange)
                if queue is not None:  # else nobody waits for it any more
                    queue.append(answer)
        except RemoteProtocolError as e:
            self._broken = e
            if self.process:
                self.process.kill()
            self._reap()

    def _read_stderr(self) -> None:
        data = os.read(self._err_fd, READ_BYTES)
        if not data:
            self._note(self._stderr_splitter.finish())
            self._err_fd = -1
        else:
            self._note(self._stderr_splitter.feed(data))

    def _note(self, lines: list[bytes | LineError]) -> None:
        for line in lines:
            text = line.message if isinstance(line, LineError) else line.decode("utf-8", "replace")
            self.stderr_tail.append(text)
            if self._ready is None:
                self._ready = parse_ready(text)

    def _reap(self) -> None:
        """The output has ended: take the exit status and the last words on stderr."""
        self._ended = True
        if self.process is None:
            return
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        while self._err_fd >= 0:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._err_fd], [], [], left)[0]:
                break
            self._read_stderr()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
