"""Command-line options without argparse, which alone would double the interpreter's start.

A command is a table of options; parsing gives a plain dict. Imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class UsageError(Exception):
    """The command line is wrong; the message says how."""


def int32(text):
    """An integer that the core's int holds."""
    value = int(text)
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError
    return value


def uint64(text):
    """A seed: 0 to 2^64 - 1."""
    value = int(text)
    if not 0 <= value < 1 << 64:
        raise ValueError
    return value


class Option:
    """One option: `--name VALUE`, or a flag when convert is None."""

    __slots__ = ("convert", "default", "help", "metavar", "name", "repeat")

    def __init__(self, name, convert=None, default=None, metavar="", repeat=False, help=""):
        self.name = name
        self.convert = convert
        self.default = [] if repeat else (False if convert is None else default)
        self.metavar = metavar
        self.repeat = repeat
        self.help = help

    @property
    def key(self) -> str:
        return self.name[2:].replace("-", "_")


def parse(
    argv: Sequence[str], options: Sequence[Option], max_positional: int
) -> tuple[dict[str, Any], list[str]]:
    """Split argv into ({key: value}, [positional]); `--` ends the options; `--name=value` works.

    Raises UsageError naming the option, what was expected and what was found.
    """
    table = {o.name: o for o in options}
    values: dict[str, Any] = {o.key: ([] if o.repeat else o.default) for o in options}
    positional = []
    args = list(argv)
    i = 0
    while i < len(args):
        arg = args[i]
        i += 1
        if arg == "--":
            positional += args[i:]
            break
        if not arg.startswith("--") or arg == "-":
            if len(arg) > 1 and arg[0] == "-" and not _is_number(arg):
                raise UsageError(f"unknown option {arg}")
            positional.append(arg)
            continue
        name, has_value, value = arg.partition("=")
        option = table.get(name)
        if option is None:
            raise UsageError(f"unknown option {name}")
        if option.convert is None:
            if has_value:
                raise UsageError(f"{name} takes no value")
            values[option.key] = True
            continue
        if not has_value:
            if i >= len(args):
                raise UsageError(f"{name}: expected a value ({option.metavar})")
            value = args[i]
            i += 1
        try:
            converted = option.convert(value)
        except ValueError:
            raise UsageError(f"{name}: expected {option.metavar}, found '{value}'") from None
        if option.repeat:
            values[option.key].append(converted)
        else:
            values[option.key] = converted
    if len(positional) > max_positional:
        raise UsageError(f"unexpected argument '{positional[max_positional]}'")
    return values, positional


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def usage(name, synopsis, options, notes=""):
    """The text of `reflex NAME --help`."""
    lines = [f"usage: reflex {name} {synopsis}".rstrip(), ""]
    width = max((len(o.name) + len(o.metavar) + 1 for o in options), default=0)
    for o in options:
        head = f"{o.name} {o.metavar}".rstrip()
        default = (
            "" if o.convert is None or o.repeat or o.default in (None, "") else f" (default {o.default})"
        )
        lines.append(f"  {head:{width}}  {o.help}{default}")
    if notes:
        lines += ["", notes.rstrip()]
    return "\n".join(lines) + "\n"
