"""The worker's request loop without I/O: bytes of one client in, bytes out, one unit of work at a time.

The transport calls `receive` with whatever has arrived, `work` while `has_work`, and writes what
`take_output` gives. Owns the order of answers, cancellation, bounded read-ahead and how the worker
leaves. Knows nothing of descriptors, signals, threads or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from reflex_protocol import LineError, LineSplitter, Problem, check, decode_line, encode
from reflex_protocol.messages import (
    Cancel,
    ClientMessage,
    Detokenize,
    DetokenizeAnswer,
    ErrorFinal,
    Hello,
    HelloAnswer,
    Info,
    InfoAnswer,
    Limits,
    Load,
    Loaded,
    ModelSummary,
    Ping,
    Pong,
    Request,
    Shutdown,
    Tokenize,
    TokenizeAnswer,
    WorkerMessage,
    WorkerState,
)
from reflex_protocol.validate import MAX_LOGPROBS

from . import __version__
from .energy import Meters
from .running import Run, error_final, kind_of, summary, utf8

# Lines that wait for their turn may hold this many bytes; past that they wait in the pipe. One
# line of any allowed length still fits: only what waits behind it does not.
READ_AHEAD_BYTES = 1 << 20
# What a waiting line costs beyond its own bytes, so that a million short ones are bounded too.
WAITING_LINE_BYTES = 512

# `constraint` is among them only where the package that it needs is installed.
CAPABILITIES = [
    "generate",
    "system1",
    "stream",
    "progress",
    "logprobs",
    "prompt_logprobs",
    "literal_spans",
    "timeout",
    "energy",
    "score_from",
    "tokenize",
    "detokenize",
    "load",
    "cancel",
    "shutdown",
]

# Exit status once the device is lost (as of the command: README, "Exit status").
EXIT_FATAL = 6


class Waiting:
    """A line in its place in the order: a message to run, or the final it gets when its turn comes."""

    __slots__ = ("item", "n_bytes")

    def __init__(self, item: ClientMessage | ErrorFinal, n_bytes: int) -> None:
        self.item = item
        self.n_bytes = n_bytes + WAITING_LINE_BYTES


class Worker:
    """One model, one client at a time, one request at a time."""

    def __init__(
        self,
        *,
        max_line_bytes: int,
        start_load: Callable[[str, str | None], None],
        meters: Meters,
    ) -> None:
        """start_load begins to load a model; `load_finished` tells how it ended."""
        self.max_line_bytes = max_line_bytes
        self._meters = meters
        self.exit_status = 0
        self.load_error: BaseException | None = None  # of the model that the command line named
        self._start_load = start_load
        self._engine: Any = None
        self._summary: ModelSummary | None = None
        self._loading = False
        self._must_load = False  # the load in progress is the command line's: no worker without it
        self._load_line: Load | None = None  # the line that asked for the load in progress
        self._model = ""  # the file that was last begun to load
        self._leaving = False  # nothing that arrives from now on is run
        self._run: Run | None = None
        self._run_cancelled: str | None = None  # the error_kind the running request is to end with
        self.connect()

    # ---- one client ------------------------------------------------------------------------

    def connect(self) -> None:
        """A client is there; nothing of the one before is left."""
        self._splitter = LineSplitter(self.max_line_bytes)
        self._queue: deque[Waiting] = deque()
        self._waiting_bytes = 0
        self._output: list[bytes] = []
        self._input_open = True
        self._gone = False

    def receive(self, data: bytes) -> None:
        """Bytes from the client. What is answered at once is answered now, the rest takes its place."""
        for line in self._splitter.feed(data):
            self._receive_line(line)

    def end_of_input(self) -> None:
        """The client will send no more; it may still read."""
        if self._input_open:
            self._input_open = False
            for line in self._splitter.finish():
                self._receive_line(line)

    def client_gone(self) -> None:
        """The client reads no more: its requests are cancelled. A load it asked for still happens,
        and what it said last about leaving still counts (`receive`)."""
        self._gone = True
        self._input_open = False
        self._output.clear()
        self._run = self._run_cancelled = None
        self._load_line = None
        waiting, self._queue, self._waiting_bytes = self._queue, deque(), 0
        for w in waiting:
            self._enqueue(w.item, 0)

    @property
    def client_is_gone(self) -> bool:
        """Whether the client has left without having been told everything."""
        return self._gone

    @property
    def wants_input(self) -> bool:
        """Whether there is room for more (the bound on read-ahead)."""
        return self._input_open and self._waiting_bytes < READ_AHEAD_BYTES

    @property
    def client_done(self) -> bool:
        """Whether everything that the client sent is answered and nothing more can come."""
        return not self._input_open and self._run is None and not self._queue and self._load_line is None

    def take_output(self) -> bytes:
        """Lines to write, in order."""
        if not self._output:
            return b""
        out = b"".join(self._output)
        self._output.clear()
        return out

    # ---- work ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something."""
        if self._run is not None:
            return True
        if not self._queue:
            return False
        if self._load_line is not None:  # it is answered before what came after it
            return False
        return not self._loading or isinstance(self._queue[0].item, ErrorFinal)

    @property
    def has_waiting(self) -> bool:
        """Whether a line waits for its turn; safe to ask from another thread."""
        return bool(self._queue)

    @property
    def finished(self) -> bool:
        """Whether the worker may leave, with `exit_status`."""
        return self._leaving and self._run is None and not self._queue and self._load_line is None

    @property
    def at_work_on(self) -> ClientMessage | None:
        """The line whose answer is due next, of those that need the model's file."""
        if self._run is not None:
            return self._run.request
        if self._load_line is not None:
            return self._load_line
        item = self._queue[0].item if self._queue else None
        return None if isinstance(item, ErrorFinal) else item

    def last_words(self, line: ClientMessage) -> bytes:
        """How that line is answered by a process that ends because the file is lost."""
        why = f"{utf8(self._model)}: the model file was truncated or could not be read while it was in use"
        return encode(_error(line.id, "io", why))

    def work(self) -> None:
        """One prefill chunk, one token, or one waiting line."""
        if self._run is not None:
            self._step(self._run)
            return
        if not self.has_work:
            return
        waiting = self._queue.popleft()
        self._waiting_bytes -= waiting.n_bytes
        item = waiting.item
        if isinstance(item, ErrorFinal):
            self._say(item)
        elif isinstance(item, Load):
            self._begin_load(item)
        elif self._engine is None:
            self._say(_error(item.id, "invalid_input", "no model is loaded; send a load line first"))
        elif isinstance(item, Request):
            self._begin(item)
        else:
            self._answer(item)

    def _begin(self, request: Request) -> None:
        try:
            if request.energy:
                self._open_meters()
            self._run = Run(self._engine, request, self._meters)
        except Exception as e:
            self._fail(request.id, e)

    def _open_meters(self) -> None:
        self._meters.open(on_gpu=self._engine.info["device"].startswith("CUDA"))

    def _step(self, run: Run) -> None:
        if self._run_cancelled is not None:
            kind, self._run_cancelled = self._run_cancelled, None
            final = _error(run.request.id, kind, "cancelled" if kind == "cancelled" else "shutting down")
            final.token_ids, final.text = run.so_far()
            self._run = None
            self._say(final)
            return
        try:
            line = run.step()
        except Exception as e:
            self._run = self._run_cancelled = None
            self._fail(run.request.id, e)
            return
        if line is not None:
            self._say(line)
            if line.__struct_config__.tag == "final":
                self._run = self._run_cancelled = None

    def _fail(self, line_id: str | None, error: Exception) -> None:
        final = error_final(line_id, error)
        self._say(final)
        if final.error_kind == "fatal":
            self.exit_status = EXIT_FATAL
            self._refuse_waiting()

    def _answer(self, message: ClientMessage) -> None:
        """The lines that are answered by the model, in their place in the order."""
        engine = self._engine
        try:
            if isinstance(message, Tokenize):
                ids = engine.tokenize(
                    message.text,
                    parse_special=message.parse_special,
                    literal_spans=message.literal_spans,
                    add_bos=message.add_bos,
                )
                self._say(TokenizeAnswer(id=message.id, token_ids=ids))
            elif isinstance(message, Detokenize):
                text = engine.detokenize(message.token_ids, skip_special=message.skip_special)
                self._say(DetokenizeAnswer(id=message.id, text=text))
            elif isinstance(message, Info):
                self._open_meters()  # whoever asks will send requests, and may ask what they cost
                facts = dict(engine.info)
                facts["path"] = utf8(facts["path"])
                special = {**engine.special_tokens, "control": engine.control_tokens}
                phases = engine.phases
                self._say(InfoAnswer(id=message.id, model=facts, special_tokens=special, phases=phases))
        except Exception as e:
            self._fail(message.id, e)

    # ---- loading ---------------------------------------------------------------------------

    def load_at_start(self, model: str = "") -> None:
        """The model that the command line named is being loaded."""
        self._model = model
        self._loading = self._must_load = True

    def _begin_load(self, line: Load) -> None:
        if self._engine is not None:
            self._say(_error(line.id, "invalid_input", "a model is loaded already; one per process"))
            return
        self._loading = True
        self._load_line = line
        self._model = line.model
        self._start_load(line.model, line.experts)

    def load_finished(self, result: Any) -> None:
        """A load has ended with an engine, or with the exception it raised."""
        line, self._load_line, self._loading = self._load_line, None, False
        if not isinstance(result, BaseException):
            self._engine = result
            self._summary = summary(result.info)
            if line is not None:
                self._say(Loaded(id=line.id, model=self._summary, phases=result.phases))
            return
        if line is not None:
            self._say(error_final(line.id, result))
        if self._must_load:
            self.load_error = result
            self._refuse_waiting(result)
        elif kind_of(result) == "fatal":
            self.exit_status = EXIT_FATAL
            self._refuse_waiting()

    # ---- leaving ---------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM: finish what runs, refuse what waits."""
        if self._load_line is not None:
            self._say(_shutting_down(self._load_line.id))
            self._load_line = None
        self._refuse_waiting()

    def _refuse_waiting(self, because: BaseException | None = None) -> None:
        """Everything that waits, and all that may still come, ends without being run."""
        self._leaving = True
        for waiting in self._queue:
            if not isinstance(waiting.item, ErrorFinal):
                line_id = waiting.item.id
                waiting.item = error_final(line_id, because) if because else _shutting_down(line_id)

    def _shutdown(self, line: Shutdown) -> None:
        if line.mode == "now":
            if self._run is not None and self._run_cancelled is None:
                self._run_cancelled = "shutting_down"
            self.terminate()
        self._leaving = True

    # ---- lines -----------------------------------------------------------------------------

    def _receive_line(self, line: bytes | LineError) -> None:
        message = line if isinstance(line, LineError) else decode_line(line)
        n_bytes = 0 if isinstance(line, LineError) else len(line)
        if isinstance(message, LineError):
            self._enqueue(message.final(), n_bytes)
            return
        problem = check(message) or _unsupported(message)
        if isinstance(message, Hello):
            self._say(_error(message.id, *problem) if problem else self._hello(message))
        elif isinstance(message, Ping):
            self._say(Pong(id=message.id))
        elif isinstance(message, Cancel):
            self._cancel(message.target)
        elif isinstance(message, Shutdown):
            self._shutdown(message)
        elif problem:
            self._enqueue(_error(message.id, *problem), n_bytes)
        elif self._leaving:
            self._enqueue(self._refusal(message.id), n_bytes)
        else:
            self._enqueue(message, n_bytes)

    def _refusal(self, line_id: str | None) -> ErrorFinal:
        return error_final(line_id, self.load_error) if self.load_error else _shutting_down(line_id)

    def _enqueue(self, item: ClientMessage | ErrorFinal, n_bytes: int) -> None:
        if self._gone:
            if isinstance(item, Load) and self._engine is None and not self._loading:
                self._loading = True
                self._model = item.model
                self._start_load(item.model, item.experts)
            return
        if isinstance(item, Load) and not (self._queue or self._loading or self._engine is not None):
            self._begin_load(item)  # it is its turn already: bytes move while the lines behind it are read
            return
        waiting = Waiting(item, n_bytes)
        self._queue.append(waiting)
        self._waiting_bytes += waiting.n_bytes

    def _cancel(self, target: str) -> None:
        """The oldest request of that id that has not ended and is not cancelled yet."""
        run = self._run
        if run is not None and run.request.id == target and self._run_cancelled is None:
            self._run_cancelled = "cancelled"
            return
        for waiting in self._queue:
            if isinstance(waiting.item, Request) and waiting.item.id == target:
                final = _error(target, "cancelled", "cancelled")
                final.token_ids, final.text = [], ""
                waiting.item = final
                return

    def _hello(self, message: Hello) -> HelloAnswer:
        model = self._summary
        limits = Limits(
            max_line_bytes=self.max_line_bytes,
            read_ahead_bytes=READ_AHEAD_BYTES,
            max_logprobs=MAX_LOGPROBS,
            n_ctx=model.n_ctx if model else 0,
        )
        return HelloAnswer(
            id=message.id,
            server=f"reflex {__version__}",
            capabilities=_capabilities(),
            limits=limits,
            model=model,
            state=self._state(),
        )

    def _state(self) -> WorkerState:
        if self._leaving:
            return "draining"
        if self._loading:
            return "loading"
        if self._engine is None:
            return "no_model"
        return "ready" if self._run is None else "running"

    def _say(self, message: WorkerMessage) -> None:
        if not self._gone:
            self._output.append(encode(message))


def _capabilities() -> list[str]:
    import importlib.util

    can_constrain = importlib.util.find_spec("llguidance") is not None
    return [*CAPABILITIES, "constraint"] if can_constrain else CAPABILITIES


def _error(line_id: str | None, kind: str, text: str) -> ErrorFinal:
    return ErrorFinal(id=line_id, error=text, error_kind=kind)


def _shutting_down(line_id: str | None) -> ErrorFinal:
    return _error(line_id, "shutting_down", "the worker is shutting down")


def _unsupported(message: ClientMessage) -> Problem | None:
    """What the protocol has and this worker does not."""
    if isinstance(message, Request):
        for field in ("import_kv", "export_kv"):
            if getattr(message, field) is not None:
                return Problem("unsupported", f"{field}: expected null, this worker cannot do it yet")
    if isinstance(message, Load) and message.lora:
        return Problem("unsupported", "lora: expected no adapters, this worker cannot apply them yet")
    return None
