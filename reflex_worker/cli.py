"""The `reflex` command: dispatch, errors and exit status. Nothing heavy is imported here; each
command is a module of its own, and the two on the cold path import the native core first."""

from __future__ import annotations

# Exit status by error kind (README, "Exit status"); kinds not listed are 1.
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_STATUS = {
    "invalid_input": 2,
    "gguf": 3,
    "unsupported_architecture": 3,
    "unsupported": 3,
    "tokenizer": 3,
    "io": 4,
    "out_of_memory": 5,
    "cuda": 6,
    "fatal": 6,
    "context_overflow": 7,
}

STREAMS = ("stdin", "stdout", "stderr")

COMMANDS = {
    "generate": ("cli_generate", "continue a prompt: tokens out"),
    "system1": ("cli_system1", "score candidate continuations in one pass: a decision out"),
    "stdio": ("cli_serve", "serve requests as JSON lines on stdin and stdout"),
    "uds": ("cli_serve", "serve the same lines on a Unix socket"),
    "info": ("cli_info", "what a GGUF file holds and whether it will run"),
    "check": ("cli_check", "fast against exact arithmetic on a text: error, KL, top-1"),
    "bench": ("cli_bench", "warm latency by prompt length, decode speed; cold starts with --cold"),
    "doctor": ("cli_doctor", "what this machine offers and what would make a start slow"),
    "energy": ("cli_energy", "joules of a whole command, idle subtracted"),
    "hold": ("cli_hold", "keep the GPU registered, so that workers on this host start faster"),
    "smoke": ("cli_smoke", "the whole pipeline once, on the bundled model"),
}


def write(fd, text):
    """All of text to a file descriptor, as UTF-8, at once: nothing is left in a buffer at exit."""
    import posix

    data = text.encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[posix.write(fd, data) :]
    except OSError as e:  # a BrokenPipeError stays one
        raise OSError(e.errno, e.strerror, STREAMS[fd]) from None


def can_write(fd):
    """Whether it is open for that. Asked before the work, not found out after it."""
    import posix

    try:
        posix.write(fd, b"")
    except OSError:
        return False
    return True


def leave(status):
    """End the process without tearing anything down: no unmapping, no driver shutdown."""
    import posix

    posix._exit(status)


def help_text():
    lines = ["usage: reflex COMMAND ...", ""]
    lines += [f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "reflex COMMAND --help tells more. reflex --version prints the version."]
    return "\n".join(lines) + "\n"


def report(kind, message):
    """One line on stderr, with the category."""
    if isinstance(message, OSError) and message.filename and message.strerror:
        message = f"{message.filename}: {message.strerror}"
    line = " ".join(str(message).split("\n"))
    write(2, f"reflex: error [{kind}]: {line}\n")


def run(argv):
    """Run a command; returns its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        write(1 if argv else 2, help_text())
        return 0 if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        from . import __version__

        write(1, f"reflex {__version__}\n")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        report("invalid_input", f"unknown command '{name}' (expected one of {', '.join(COMMANDS)})")
        return EXIT_USAGE
    if COMMANDS[name][0] != "cli_serve" and not can_write(1):  # they want stdin too, or neither
        from .descriptors import why_not_stdout

        problem = why_not_stdout()
        if problem is not None:
            report("io", problem)
            return EXIT_STATUS["io"]
    module = __import__(f"reflex_worker.{COMMANDS[name][0]}", fromlist=["main"])
    options = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if "--help" in options or "-h" in options:
        write(1, module.usage(name))
        return 0
    if len(argv) == 1 and not module.enough(name):
        write(2, module.usage(name))
        return EXIT_USAGE
    return module.main(name, argv[1:])


def main(argv):
    """Entry point of the command: never returns."""
    from .cli_args import UsageError

    try:
        status = run(argv)
    except UsageError as e:
        report("invalid_input", e)
        status = EXIT_USAGE
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        status = 1
    except MemoryError:
        report("out_of_memory", "the host is out of memory")
        status = EXIT_STATUS["out_of_memory"]
    except Exception as e:
        kind = getattr(e, "kind", None)
        if kind is None:
            if isinstance(e, OSError):
                kind = "io"
            else:
                import traceback

                write(2, traceback.format_exc())
                kind = "other"
        report(kind, e)
        status = EXIT_STATUS.get(kind, 1)
    leave(status)
