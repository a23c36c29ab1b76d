"""`reflex stdio` and `reflex uds`: puts loader, worker and transport together.

Loading begins before anything else is imported: msgspec and the protocol come in while the native
core maps the file and starts the device.
"""

from __future__ import annotations

from .descriptors import open_standard_descriptors, take_stdio, why_not_stdio
from .loading import Loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .transport import Bell
    from .worker import Worker

DEFAULT_MAX_LINE_BYTES = 16 << 20
MIN_MAX_LINE_BYTES = 1 << 10
DEFAULT_SOCKET_MODE = 0o600
# As a client's own; it is read and forgotten.
REHEARSED_LINE = b'{"type": "load", "id": "0", "model": "m.gguf"}'
# Somebody has closed our stdout: what is left to say has no reader.
EXIT_NOBODY_READS = 1
# What lives until the process ends without a destructor: unmapping and freeing take longer than exiting.
_kept: list[object] = []


class ServeOptions:
    """What a worker is started with. A plain class: dataclasses alone cost as much as the core.

    model: a GGUF file, or None to wait for a `load` line. device, threads, ctx, exact, isa, load_mode,
    experts: as of `api.Engine`. mode, busy: of the Unix socket. state_dir: not supported yet.
    make_engine: how a path and a `load` line's `experts` become an engine (tests: nothing is made ready).
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        device: str = "auto",
        threads: int = 0,
        ctx: int = 0,
        exact: bool = False,
        isa: str = "",
        load_mode: str = "",
        experts: str = "",
        max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
        mode: int = DEFAULT_SOCKET_MODE,
        busy: bool = False,
        state_dir: str | None = None,
        make_engine: Callable[[str, str | None], Any] | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.threads = threads
        self.ctx = ctx
        self.exact = exact
        self.isa = isa
        self.load_mode = load_mode
        self.experts = experts
        self.max_line_bytes = max_line_bytes
        self.mode = mode
        self.busy = busy
        self.state_dir = state_dir
        self.make_engine = make_engine or self.open_engine
        self.make_ready = self.stand_by if make_engine is None else lambda: None

    def stand_by(self) -> None:
        """What open_engine will need of any file: its imports, the device, and code that has run before (a
        load's milliseconds hold some thousand first touches of it)."""
        from reflex_protocol import LineError, check, decode_line

        from . import api, cli_model
        from ._native import stand_by

        stand_by(device=self.device, exact=self.exact, isa=self.isa, load_mode=self.load_mode)
        rehearsed = decode_line(REHEARSED_LINE)
        if not isinstance(rehearsed, LineError):
            check(rehearsed)
        api.describe(cli_model.demo_path())

    def open_engine(self, path: str, experts: str | None) -> Any:
        """The engine of a file, by these options; experts: what the `load` line says of them."""
        from ._native import report_lost_files
        from .api import Engine
        from .cli_model import note_experts

        report_lost_files()
        wanted = self.experts if experts is None else experts
        engine = Engine(
            path,
            device=self.device,
            threads=self.threads,
            ctx=self.ctx,
            exact=self.exact,
            isa=self.isa,
            load_mode=self.load_mode,
            experts=wanted,
        )
        note_experts(engine, wanted)
        return engine

    def check(self) -> None:
        """Raises OptionError for what cannot work."""
        if self.state_dir is not None:
            raise OptionError("unsupported", "state-dir: this worker cannot keep state files yet")
        if self.max_line_bytes < MIN_MAX_LINE_BYTES:
            raise OptionError(
                "invalid_input",
                f"max-line-bytes: expected {MIN_MAX_LINE_BYTES} or more, found {self.max_line_bytes}",
            )
        if not 0 <= self.mode <= 0o777:
            raise OptionError("invalid_input", f"mode: expected 0 to 777 (octal), found {self.mode:o}")


class OptionError(Exception):
    """An option, or what we were started with, cannot work; `kind` is the protocol's error_kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def run_stdio(options: ServeOptions) -> int:
    """Serve stdin and stdout until the end of input; the exit status. Raises what loading raised, and
    OptionError where there is nothing to serve."""
    options.check()
    open_standard_descriptors()
    problem = why_not_stdio()
    if problem is not None:
        raise OptionError("io", problem)
    in_fd, out_fd = take_stdio()
    loader = _begin(options, in_fd)
    from .transport_stdio import serve_stdio, stdio_channel

    channel = stdio_channel(in_fd, out_fd)
    worker, bell = _assemble(options, loader, "REFLEX_STDIO_READY", {})
    read = serve_stdio(worker, channel, bell)
    if channel.failure is not None:
        raise OptionError("io", f"stdout: {channel.failure.strerror}")
    return _status(worker) if read else EXIT_NOBODY_READS


def run_uds(path: str, options: ServeOptions) -> int:
    """Serve a Unix socket until a signal or a shutdown line; the exit status. Raises what loading
    raised, and SocketError."""
    options.check()
    open_standard_descriptors()
    loader = _begin(options)
    from .transport_uds import SocketFile, serve_uds

    file = SocketFile(path, options.mode)
    try:
        loader.input_fd = file.listener.fileno()
        worker, bell = _assemble(options, loader, "REFLEX_UDS_READY", {"socket": path}, file.remove_now)
        serve_uds(worker, file, bell, busy=options.busy)
    finally:
        file.close()
    return _status(worker)


def _begin(options: ServeOptions, input_fd: int = -1) -> Loader:
    loader = Loader(options.make_engine, options.make_ready)
    loader.input_fd = input_fd
    if options.model is not None:
        loader.start(options.model, interruptible=False)
    import_msgspec()
    return loader


def import_msgspec() -> None:
    """msgspec takes typing_extensions where that is installed, and with it inspect, ast and more:
    half of its import. It does as well without, so for this one import there is none."""
    import sys

    if "msgspec" in sys.modules or "typing_extensions" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["typing_extensions"] = None
    try:
        import msgspec  # noqa: F401
    finally:
        del modules["typing_extensions"]


def _assemble(
    options: ServeOptions,
    loader: Loader,
    tag: str,
    facts: dict[str, Any],
    before_death: Callable[[], None] = lambda: None,
) -> tuple[Worker, Bell]:
    from .energy import Meters
    from .signals import Watch
    from .transport import Bell
    from .worker import Worker

    meters = Meters(gpu_of(options.device))
    worker = Worker(max_line_bytes=options.max_line_bytes, start_load=loader.start, meters=meters)
    _kept.append(worker)
    loader.has_work = lambda: worker.has_waiting
    if options.model is not None:
        worker.load_at_start(options.model)
    else:
        announce(tag, facts, None)
        loader.stand_by()
    watch = Watch(loader.wake, before_death)

    def on_loaded(engine: Any) -> None:
        if options.model is not None:
            announce(tag, facts, engine)

    return worker, Bell(loader, lambda: watch.terminated, on_loaded, set_last_words)


def set_last_words(fd: int, words: bytes) -> None:
    """What the core says to fd should it lose the model's file."""
    from . import _native

    _native.set_last_words(fd, words)


def gpu_of(device: str) -> int:
    """The number of a device `cuda:N`; 0 for what names none."""
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def announce(tag: str, facts: dict[str, Any], engine: Any) -> None:
    """The ready line, on stderr."""
    import posix

    from reflex_protocol import PROTOCOL_VERSION

    from .cli_output import result_line

    line = {"pid": posix.getpid(), "protocol": PROTOCOL_VERSION, **facts}
    if engine is None:
        line["model"] = None
    else:
        info, phases = engine.info, engine.phases
        line.update((key, info[key]) for key in ("architecture", "device", "n_ctx"))
        line["model"] = info["path"]
        line.update((f"{k}_ms", ms) for k, ms in phases.items() if isinstance(ms, (int, float)))
    try:
        posix.write(2, result_line(tag, line, False).encode("utf-8", "surrogateescape"))
    except OSError:
        pass  # nobody listens there; the protocol goes on


def _status(worker: Worker) -> int:
    if worker.load_error is not None:
        raise worker.load_error
    return worker.exit_status
