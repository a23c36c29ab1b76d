"""Error kinds of the protocol, and the errors of this library. Does no I/O."""

from __future__ import annotations

from typing import Final

# Append-only: a program may switch on these words. Meanings stand in docs/protocol.md.
ERROR_KINDS: Final = (
    "gguf",
    "unsupported_architecture",
    "cuda",
    "out_of_memory",
    "tokenizer",
    "context_overflow",
    "kv_cache",
    "lora",
    "io",
    "invalid_input",
    "cancelled",
    "busy",
    "shutting_down",
    "line_too_long",
    "unsupported",
    "fatal",
    "other",
)


class ProtocolError(Exception):
    """Base of the errors that this library raises."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the protocol does not allow; nothing was sent.

    `kind` is the error_kind that the worker would have answered with.
    """

    def __init__(self, message: str, kind: str = "invalid_input") -> None:
        super().__init__(message)
        self.kind = kind


class RemoteProtocolError(ProtocolError):
    """The other side broke the protocol: an answer nobody asked for, or not an answer at all."""
