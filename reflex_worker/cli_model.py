"""Options that every command with a model shares, and the engine they ask for."""

from __future__ import annotations

from .cli_args import Option, UsageError

MODEL_OPTIONS = [
    Option("--demo", help="use the bundled model instead of a GGUF file"),
    Option("--device", str, "auto", "auto|cpu|cuda[:N]", help="where to run"),
    Option("--threads", int, 0, "N", help="CPU threads, 0: what the machine and its cgroup allow"),
    Option("--ctx", int, 0, "N", help="cap on the context in tokens, 0: the model's own"),
    Option("--exact", help="f32 activations and KV"),
    Option("--isa", str, "", "NAME", help="force a CPU instruction set: portable, avx2, avx512vnni"),
]


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


def open_engine(path, values):
    from ._native import Engine

    return Engine(
        path,
        device=values["device"],
        threads=values["threads"],
        ctx=values["ctx"],
        exact=values["exact"],
        isa=values["isa"],
    )


def take_prompt(positional, name):
    """The prompt argument; '-' or nothing while stdin is no terminal: all of stdin."""
    if positional and positional[0] != "-":
        text = positional.pop(0)
    else:
        import sys

        if not positional and sys.stdin.isatty():
            raise UsageError(f"{name}: expected a prompt (or '-' and text on stdin)")
        positional[:] = positional[1:]
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    return checked_text(text, "PROMPT")


def checked_text(text, what):
    """text, where it is valid Unicode; argv holds bytes that are not UTF-8 as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(f"{what}: expected valid UTF-8, found a stray byte at character {e.start}") from None
    return text
