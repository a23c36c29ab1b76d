"""The ready line of a worker: `REFLEX_STDIO_READY key=value ...` on its stderr."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_READY: Final = re.compile(r"REFLEX_(?:STDIO|UDS)_READY(?: |$)")
_PAIR: Final = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def parse_ready(line: str) -> dict[str, Any] | None:
    """The pairs of a ready line, values as JSON; None for any other line."""
    head = _READY.match(line)
    if head is None:
        return None
    pairs: dict[str, Any] = {}
    for key, value in _PAIR.findall(line, head.end()):
        try:
            pairs[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            pairs[key] = value
    return pairs
