"""The protocol of the Reflex worker: messages, line codec, validation. No I/O here; the one part
that does any is `reflex_protocol.client`, which nothing else here imports."""

from __future__ import annotations

from .codec import (
    DEFAULT_MAX_LINE_BYTES,
    LineError,
    LineSplitter,
    decode_answer,
    decode_line,
    encode,
)
from .errors import ERROR_KINDS, LocalProtocolError, ProtocolError, RemoteProtocolError
from .messages import PROTOCOL_VERSION
from .validate import Problem, check

__version__ = "0.1.0"
__all__ = [
    "DEFAULT_MAX_LINE_BYTES",
    "ERROR_KINDS",
    "PROTOCOL_VERSION",
    "LineError",
    "LineSplitter",
    "LocalProtocolError",
    "Problem",
    "ProtocolError",
    "RemoteProtocolError",
    "check",
    "decode_answer",
    "decode_line",
    "encode",
]
