"""What clients are told when something is wrong: OpenAI's error object, one place for all statuses.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`code` is always a string. The table at the end turns the worker's error kinds into statuses.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from reflex_protocol.client import WorkerDied, WorkerError
from reflex_protocol.errors import LocalProtocolError, RemoteProtocolError

INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"


class ApiError(Exception):
    """An answer that is an error. `headers` go out with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind or (INVALID if status < 500 else SERVER)
        self.param = param
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON object."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400."""
    return ApiError(400, message, code=code, param=param)


def too_large(what: str, limit: int) -> ApiError:
    """413: a body or a prompt over its limit."""
    return ApiError(413, f"{what}: expected at most {limit} bytes, found more", code="request_too_large")


def overloaded(waiting: int, retry_after_s: int) -> ApiError:
    """429: the queue is full; the header says when a place is likely to be free."""
    return ApiError(
        429,
        f"{waiting} requests are waiting for the model already; retry after {retry_after_s} s",
        code="queue_full",
        kind="rate_limit_error",
        headers={"retry-after": str(retry_after_s)},
    )


def unavailable(message: str, *, code: str, retry_after_s: int = 1) -> ApiError:
    """503: not now, but soon (or elsewhere)."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after_s)})


def timed_out(seconds: float) -> ApiError:
    """504. Trying again would only take as long again, so clients are told not to."""
    return ApiError(
        504,
        f"no complete answer within {seconds:g} s",
        code="timeout",
        headers={"x-should-retry": "false"},
    )


class WorkerGone(ApiError):
    """The worker ended while it had the request."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            503,
            f"the worker ended while it worked on this request and is being restarted ({detail})",
            code="worker_crashed",
            headers={"retry-after": "1"},
        )


# error_kind of the protocol -> (status, code). What is not here is a 500 with the kind as its code.
_WORKER_KINDS: Final[dict[str, tuple[int, str]]] = {
    "context_overflow": (400, "context_length_exceeded"),
    "invalid_input": (400, "invalid_value"),
    "unsupported": (400, "unsupported"),
    "line_too_long": (413, "request_too_large"),
    "busy": (503, "busy"),
    "shutting_down": (503, "shutting_down"),
    "cancelled": (503, "cancelled"),
}


# Fields that the worker and this API call by the same name.
_SHARED: Final = re.compile(
    r"(seed|stop|stop_token_ids|logit_bias|top_k|top_p|min_p|temperature|(?:repetition|frequency|presence)_penalty)"
    r"(?:\[\d+\])?: "
)


def _field_of(message: str) -> str | None:
    """The field that a message of the worker begins with."""
    found = _SHARED.match(message)
    return found[1] if found else None


def from_worker(error: Exception, n_ctx: int = 0) -> ApiError:
    """The answer to a request that the worker, or the protocol library, has refused or lost."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LocalProtocolError):
        message = str(error.args[0]).removeprefix("sampling.")
        return bad_request(message, param=_field_of(message))
    if isinstance(error, WorkerError):
        if error.kind == "io":  # its last: it has lost the model's file, whose name is for the log
            return WorkerGone("it lost the model's file")
        message = error.answer.error
        if error.kind == "context_overflow":
            # The words by which clients (litellm, LangChain) tell this error from others.
            message = f"This model's maximum context length is {n_ctx} tokens: {message}"
        status, code = _WORKER_KINDS.get(error.kind, (500, error.kind))
        headers = {"retry-after": "1"} if status == 503 else {}
        param = _field_of(message) if status == 400 else None
        return ApiError(status, message, code=code, headers=headers, param=param)
    if isinstance(error, WorkerDied):  # its last words on stderr are for the log: they name files and devices
        return WorkerGone(error.brief)
    if isinstance(error, RemoteProtocolError):
        return WorkerGone(str(error))
    raise error
