"""Options that every command with a model shares, and the engine they ask for."""

from __future__ import annotations

from .cli_args import Option, UsageError, Whole, parse

MAX_THREADS = 1024  # kMaxThreads of the core

MODEL_OPTIONS = [
    Option("--demo", help="use the bundled model instead of a GGUF file"),
    Option("--device", str, "auto", "auto|cpu|cuda[:N]", help="where to run"),
    Option(
        "--threads",
        Whole(0, MAX_THREADS),
        0,
        "N",
        help="CPU threads, 0: what the machine and its cgroup allow",
    ),
    Option("--ctx", Whole(), 0, "N", help="cap on the context in tokens, 0: the model's own"),
    Option(
        "--load-mode",
        str,
        "",
        "MODE",
        help="how a GPU's weights are read: ring, map, read or direct; chosen if absent",
    ),
    Option(
        "--experts",
        str,
        "",
        "WHEN",
        help="when a mixture's experts come to a GPU: lazy (as they are chosen), eager or auto (by size)",
    ),
    Option("--exact", help="f32 activations and KV"),
    Option("--isa", str, "", "NAME", help="force a CPU instruction set: portable, avx2, avx512vnni"),
]

ENERGY_OPTION = Option(
    "--energy", help="tell joules by phase, of every counter here and of phases that last long enough for it"
)


def demo_path():
    """The bundled model's file."""
    return __file__.rpartition("/")[0] + "/data/demo.gguf"


def take_model(values, positional, name):
    """The model's path: --demo, or the first positional argument (which is then removed)."""
    if values["demo"]:
        return demo_path()
    if not positional:
        raise UsageError(f"{name}: expected a GGUF file (or --demo)")
    return positional.pop(0)


def begin(name, argv, options):
    """What a command with a model and a prompt does first: (values, the model's path, the prompt)."""
    boot_driver(argv)
    from . import _native  # noqa: F401  (mapped before anything else is looked at)

    values, positional = parse(argv, options, 2)
    path = take_model(values, positional, name)
    return values, path, take_prompt(positional, name)


def engine_options(values):
    """What MODEL_OPTIONS ask of an engine, by its own names."""
    names = ("device", "threads", "ctx", "exact", "isa", "load_mode", "experts")
    return {name: values[name] for name in names}


def open_engine(path, values):
    from ._native import Engine, report_lost_files

    report_lost_files()
    engine = Engine(path, **engine_options(values))
    note_experts(engine, values["experts"])
    return engine


def open_metered(path, values):
    """The engine, and what --energy reads (None without it), which has the load behind it."""
    meter = phase_meter(values)
    engine = open_engine(path, values)
    if meter:
        meter.mark("model_load")
    return engine, meter


def phase_meter(values):
    """What --energy reads; None without it. Costs the milliseconds of opening NVML."""
    if not values["energy"]:
        return None
    from .energy import PhaseMeter
    from .serve import gpu_of

    meter = PhaseMeter(None if values["device"] == "cpu" else gpu_of(values["device"]))
    if not meter.joules():
        import posix

        posix.write(2, b"reflex: --energy: no counter here: neither NVML nor a readable RAPL\n")
    return meter


def note_experts(engine, experts):
    """Says on stderr that --experts asks for nothing on a CPU."""
    if experts and engine.info["device"].startswith("CPU"):
        import posix

        line = b"reflex: --experts: on the CPU the file's mapping brings experts as they are chosen\n"
        posix.write(2, line)


def command_head():
    """The command line of a fresh `reflex`: the installed launcher where there is one."""
    import os
    import sys

    launcher = os.environ.get("REFLEX_LAUNCHER") or os.path.join(os.path.dirname(sys.executable), "reflex")
    return [launcher] if os.access(launcher, os.X_OK) else [sys.executable, "-m", "reflex_worker"]


PROGRESS_FROM_BYTES = 1_000_000_000
PROGRESS_EVERY_S = 0.1


class Progress:
    """How far a model's weights have come, on stderr: on a terminal, for a file of over a gigabyte, from a
    thread of its own until the load is over or clear() is called."""

    def __init__(self, engine):
        import posix

        self.shown = posix.isatty(2) and engine.info["file_bytes"] >= PROGRESS_FROM_BYTES
        if not self.shown:
            return
        import _thread

        self.line = _thread.allocate_lock()  # held while it is written, so that clear() comes last
        if not engine.load_progress[2]:
            _thread.start_new_thread(self.tell, (engine,))

    def tell(self, engine):
        import time

        while self.look(engine):
            time.sleep(PROGRESS_EVERY_S)

    def look(self, engine):
        """Write how far the load is; whether there will be more to tell."""
        from .cli import write

        done, total, finished = engine.load_progress
        if finished or done >= total:
            self.clear()
            return False
        with self.line:
            if self.shown:
                write(2, f"\rloading {done / 1e9:.1f} of {total / 1e9:.1f} GB, {100 * done // total}%")
            return self.shown

    def clear(self):
        """Empty the line: what comes next is the result."""
        if not self.shown:
            return
        from .cli import write

        with self.line:
            if self.shown:
                self.shown = False
                write(2, "\r\x1b[K")


def with_tokenizer(engine, path, ask):
    """ask(engine). Where the core does not know the file's pre-tokenizer, ask(the Python API's engine
    around it), which has the `tokenizers` package to fall back on; imported then, never before."""
    from ._native import ReflexError

    try:
        return ask(engine)
    except ReflexError as e:
        if e.kind != "tokenizer" or engine.info["tokenizer_known"] or engine.info["tokenizer_error"]:
            raise
    from .api import Engine

    return ask(Engine.around(engine, path))


def boot_driver(argv):
    """Start the CUDA driver in its own thread, before anything else is imported, where this machine
    has one and the command line does not say cpu. The command's first act."""
    import posix

    if not any(posix.access(path, posix.F_OK) for path in ("/dev/nvidiactl", "/dev/dxg")):
        return
    device = "auto"
    for i, arg in enumerate(argv):
        if arg == "--device" and i + 1 < len(argv):
            device = argv[i + 1]
        elif arg.startswith("--device="):
            device = arg.partition("=")[2]
    if device not in ("auto", "cuda") and not (device.startswith("cuda:") and device[5:].isdecimal()):
        return
    from . import _boot

    capsule = _boot.start(device=int(device.partition(":")[2] or 0))  # pyright: ignore
    if capsule is not None:
        from ._native import adopt_boot

        adopt_boot(capsule)


def take_prompt(positional, name):
    """The prompt argument; '-' or nothing while stdin is no terminal: all of stdin."""
    if positional and positional[0] != "-":
        text = positional.pop(0)
    else:
        import sys

        if sys.stdin is not None and not positional and sys.stdin.isatty():
            raise UsageError(f"{name}: expected a prompt (or '-' and text on stdin)")
        positional[:] = positional[1:]
        text = read_stdin().decode("utf-8", "surrogateescape")
    if positional:
        raise UsageError(f"unexpected argument '{positional[0]}'")
    return checked_text(text, "PROMPT")


def read_stdin():
    """All of stdin, as a prompt. Not Python's own, which is none where it was closed."""
    import posix

    data = []
    try:
        while not data or data[-1]:
            data.append(posix.read(0, 1 << 16))
    except OSError as e:
        raise OSError(e.errno, f"expected a prompt there, found: {e.strerror}", "stdin") from None
    return b"".join(data)


def checked_text(text, what):
    """text, where it is valid Unicode; argv holds bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(f"{what}: expected valid UTF-8, found a stray byte at character {e.start}") from None
    return text
