"""The HTTP connection under the application: what is no HTTP, or has no end, is answered in the shape
of all errors. Everything else is uvicorn's.
"""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .web import new_id

# Request line and headers; httptools itself would take them without end.
MAX_HEAD_BYTES: Final = 64 << 10
# How long a client that is refused may go on sending.
LINGER_SECONDS: Final = 1.0
_REASONS: Final = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class Protocol(HttpToolsProtocol):
    """One connection."""

    _in_head = True
    _began = True  # a head, with the bytes at hand: how many of them are its own is not known
    _head_bytes = 0
    _refused = False

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._began, self._head_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        """Its headers are all there."""
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """More bytes of a client."""
        if self._refused:
            return
        self._began = False
        super().data_received(data)
        if not self._in_head or self._began or self._refused:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the headers: expected at most {MAX_HEAD_BYTES} bytes, found more")

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what is no HTTP."""
        self._refuse(400, f"{msg.rstrip('.')}: expected HTTP/1.1")

    def _refuse(self, status: int, message: str) -> None:
        body = ApiError(status, message, code="invalid_http").body()
        head: dict[str, Any] = {
            "content-type": "application/json",
            "content-length": len(body),
            "x-request-id": new_id("req_"),
            "connection": "close",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self.transport.write(f"HTTP/1.1 {status} {_REASONS[status]}\r\n{lines}\r\n".encode() + body)
        # Closed at once, the connection would be reset for what has not been read of it, and the
        # answer lost on its way.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
