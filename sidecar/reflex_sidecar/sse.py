"""Server-sent events: the bytes of a stream, and how it begins and ends. No routes, no worker.

A stream's status line goes out with its first chunk: what fails before is an answer with its own
status; what fails after becomes an event, and the stream still ends with [DONE].
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from .errors import ApiError

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"

_encoder: Final = msgspec.json.Encoder()


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """One event with a type."""
    return b"event: " + event.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """A failure in the middle of a stream, as OpenAI's SDKs recognise it."""
    return b"data: " + error.body() + b"\n\n"


class Stream:
    """Chunks, the first of which is known to exist."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self.first = first
        self.rest = rest
        self.headers = headers


async def begin(
    chunks: AsyncGenerator[bytes, None],
    *,
    headers: dict[str, str] | None = None,
    on_error: Callable[[ApiError], bytes] = error_event,
    done: bytes = DONE,
) -> Stream:
    """Wait for the first chunk: an ApiError before it is raised here and keeps its status."""
    first = await anext(chunks)
    return Stream(first, _guarded(chunks, on_error, done), headers or {})


async def _guarded(
    chunks: AsyncGenerator[bytes, None], on_error: Callable[[ApiError], bytes], done: bytes
) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield chunk
    except ApiError as e:
        yield on_error(e)
    finally:
        await chunks.aclose()
    yield done
