"""What a client raises when the worker, not the caller, is the reason."""

from __future__ import annotations

from msgspec import UNSET

from ..errors import ProtocolError
from ..messages import ErrorFinal


class WorkerError(ProtocolError):
    """The worker answered a line with an error; `kind` is the protocol's error_kind."""

    def __init__(self, answer: ErrorFinal) -> None:
        super().__init__(f"[{answer.error_kind}] {answer.error}")
        self.kind = answer.error_kind
        self.answer = answer

    @staticmethod
    def of(answer: ErrorFinal) -> WorkerError:
        """The exception of an error final."""
        return Cancelled(answer) if answer.error_kind == "cancelled" else WorkerError(answer)


class Cancelled(WorkerError):
    """The request was cancelled; `token_ids` and `text` are what it had by then."""

    def __init__(self, answer: ErrorFinal) -> None:
        super().__init__(answer)
        self.token_ids: list[int] = [] if answer.token_ids is UNSET else answer.token_ids
        self.text: str = "" if answer.text is UNSET else answer.text


class WorkerDied(ProtocolError):
    """The worker, or the connection to it, ended before it had answered.

    `exit_status` is that of the process (negative: killed by that signal) where the client
    started it, else None; `stderr` holds the last lines it wrote there;
    `brief` says how it ended, without them.
    """

    def __init__(self, exit_status: int | None, stderr: list[str]) -> None:
        how = "closed the connection" if exit_status is None else f"ended with status {exit_status}"
        tail = f"; last on stderr: {stderr[-1]}" if stderr else ""
        super().__init__(f"the worker {how}{tail}")
        self.brief = f"the worker {how}"
        self.exit_status = exit_status
        self.stderr = stderr


class WorkerTimeout(ProtocolError, TimeoutError):
    """The worker did not answer in time."""
