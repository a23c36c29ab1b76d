"""`reflex stdio [GGUF]` and `reflex uds SOCKET [GGUF]`: the worker's command line."""

from __future__ import annotations

from .cli_args import Option, UsageError, Whole, parse
from .cli_args import usage as usage_text
from .cli_model import MODEL_OPTIONS, boot_driver, demo_path, engine_options
from .descriptors import open_standard_descriptors
from .signals import take_over


class Octal(Whole):
    """Likewise a number in octal."""

    def __init__(self, low, high):
        super().__init__(low, high)
        self.expected = f"an octal number from {low:o} to {high:o}"

    def convert(self, text):
        return int(text, 8)


MODE = Octal(0, 0o777)
LINE_BYTES = Whole(1 << 10)  # serve.MIN_MAX_LINE_BYTES, which is imported when the driver is on its way


STDIO_OPTIONS = [
    Option(
        "--model",
        str,
        None,
        "GGUF",
        help="the model's file; REFLEX_MODEL where absent; else wait for a load line",
    ),
    *MODEL_OPTIONS,
    Option("--max-line-bytes", LINE_BYTES, 16 << 20, "N", help="longest request line"),
    Option("--state-dir", str, None, "FOLDER", help="where state files may lie (not supported yet)"),
]
UDS_OPTIONS = [
    *STDIO_OPTIONS,
    Option("--mode", MODE, 0o600, "OCTAL", help="of the socket file"),
    Option("--busy", help="answer a second connection 'busy' and close it, instead of letting it wait"),
]


def usage(name):
    if name == "uds":
        options = [
            o if o.name != "--mode" else Option("--mode", MODE, "600", "OCTAL", help=o.help)
            for o in UDS_OPTIONS
        ]
        return usage_text(name, "SOCKET [GGUF] | SOCKET --demo", options, PROTOCOL)
    return usage_text(name, "[GGUF] | --demo", STDIO_OPTIONS, PROTOCOL)


PROTOCOL = "One JSON object per line in, one or more per request out: docs/protocol.md."


def enough(name):
    import os

    return name == "stdio" and not os.isatty(0)


def main(name, argv):
    open_standard_descriptors()  # before anything opens a file: it would get the number of a closed one
    take_over()
    boot_driver(argv)
    from .serve import ServeOptions, run_stdio, run_uds

    uds = name == "uds"
    values, positional = parse(argv, UDS_OPTIONS if uds else STDIO_OPTIONS, 2 if uds else 1)
    if uds and not positional:
        raise UsageError(f"{name}: expected the socket's path")
    socket = positional.pop(0) if uds else ""
    options = ServeOptions(
        model=model_path(values, positional, name),
        **engine_options(values),
        max_line_bytes=values["max_line_bytes"],
        state_dir=values["state_dir"],
    )
    if uds:
        options.mode = values["mode"]
        options.busy = values["busy"]
        return run_uds(socket, options)
    return run_stdio(options)


def model_path(values, positional, name):
    """--demo, the positional file, --model or REFLEX_MODEL; at most one on the command line."""
    import os

    given = [g for g in (positional[0] if positional else None, values["model"]) if g is not None]
    if values["demo"]:
        given.append(demo_path())
    if len(given) > 1:
        raise UsageError(f"{name}: expected one model, found {len(given)} (GGUF, --model, --demo)")
    return given[0] if given else os.environ.get("REFLEX_MODEL") or None
