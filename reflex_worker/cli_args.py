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


# What the core's int, float and double hold.
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
FLOAT64_MAX = 1.7976931348623157e308
# The longest pause that is no slip of the hand.
DAY_S = 86400


class Whole:
    """Converts a whole number from `low` to `high`; `expected` says so to who gives another."""

    def __init__(self, low=0, high=INT32_MAX):
        self.low = low
        self.high = high
        self.expected = f"a whole number from {low} to {high}"

    def convert(self, text):
        return int(text)

    def __call__(self, text):
        value = self.convert(text)
        if not self.low <= value <= self.high:
            raise ValueError
        return value


class Number:
    """Likewise a number; `above`: `low` itself is too low."""

    def __init__(self, low, high, above=False):
        self.low = low
        self.high = high
        self.above = above
        self.expected = (
            f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"
        )

    def __call__(self, text):
        value = float(text)
        if not self.low <= value <= self.high or (self.above and value == self.low):
            raise ValueError
        return value


class Option:
    """One option: `--name VALUE`, or a flag when convert is None. A convert that raises ValueError may have
    `expected`, which says what it takes."""

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
            expected = getattr(option.convert, "expected", option.metavar)
            raise UsageError(f"{name}: expected {expected}, found '{value}'") from None
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
