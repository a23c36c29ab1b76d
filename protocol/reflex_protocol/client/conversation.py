"""What a client has asked and what it may hear, without I/O.

Every line that is answered opens an `Exchange`. The transitions of all exchanges stand in one
table; an answer that has no entry there, or comes out of order, is a RemoteProtocolError.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

import msgspec

from ..codec import encode
from ..errors import LocalProtocolError, RemoteProtocolError
from ..messages import (
    Cancel,
    ClientMessage,
    Detokenize,
    ErrorFinal,
    GenerateFinal,
    Hello,
    Info,
    Load,
    Ping,
    ProgressEvent,
    Request,
    ScoreFinal,
    Shutdown,
    TokenEvent,
    Tokenize,
    WorkerMessage,
)
from ..validate import check


class State(enum.Enum):
    """Of an exchange: nothing heard, something heard, over."""

    ASKED = "asked"
    RUNNING = "running"
    DONE = "done"


# kind of exchange -> event heard -> state after it. `final` and its shapes are told apart, since
# a generate request must not end with candidates. Absent: not allowed.
TRANSITIONS: Final[dict[str, dict[str, State]]] = {
    "generate": {
        "progress": State.RUNNING,
        "token": State.RUNNING,
        "generate_final": State.DONE,
        "error": State.DONE,
    },
    "system1": {"progress": State.RUNNING, "score_final": State.DONE, "error": State.DONE},
    "hello": {"hello": State.DONE, "error": State.DONE},
    "info": {"info": State.DONE, "error": State.DONE},
    "ping": {"pong": State.DONE, "error": State.DONE},
    "tokenize": {"tokenize": State.DONE, "error": State.DONE},
    "detokenize": {"detokenize": State.DONE, "error": State.DONE},
    "load": {"loaded": State.DONE, "error": State.DONE},
}

# Answered as soon as they are seen; all others are answered in the order they were sent.
AT_ONCE: Final = frozenset({"hello", "ping"})

_KIND_OF: Final[dict[type, str]] = {
    Hello: "hello",
    Info: "info",
    Ping: "ping",
    Tokenize: "tokenize",
    Detokenize: "detokenize",
    Load: "load",
}


class Exchange:
    """One line that was sent and what has come back for it."""

    __slots__ = ("answer", "id", "kind", "state", "wants_progress", "wants_tokens")

    def __init__(self, kind: str, line_id: str, message: ClientMessage) -> None:
        self.kind = kind
        self.id = line_id
        self.state = State.ASKED
        self.answer: WorkerMessage | None = None
        self.wants_tokens = isinstance(message, Request) and message.stream
        self.wants_progress = isinstance(message, Request) and message.progress

    @property
    def done(self) -> bool:
        """Whether its one last line has come."""
        return self.state is State.DONE


class Conversation:
    """Hands out lines to send and sorts what comes back into exchanges.

    Ids are given where the caller gave none, and must be unique among what is unanswered: the
    protocol does not ask for that, but it makes `cancel` and every answer mean one thing.
    """

    def __init__(self) -> None:
        self._open: dict[str, Exchange] = {}
        self._ordered: deque[Exchange] = deque()
        self._n_ids = 0
        self._leaving = False

    @property
    def open(self) -> list[Exchange]:
        """What is unanswered, oldest first."""
        return list(self._open.values())

    def send(self, message: ClientMessage) -> tuple[bytes, Exchange | None]:
        """The line to write, and its exchange (None where nothing will come back).

        Raises LocalProtocolError, with nothing changed, for a message that the worker would refuse.
        """
        if self._leaving:
            raise LocalProtocolError("nothing can be sent after shutdown")
        problem = check(message)
        if problem is not None:
            raise LocalProtocolError(problem.message, problem.kind)
        if isinstance(message, Cancel):
            return encode(message), None
        if isinstance(message, Shutdown):
            self._leaving = True
            return encode(message), None
        kind = _KIND_OF.get(type(message)) or ("system1" if _scores(message) else "generate")
        line_id = message.id
        if line_id is None:
            line_id = self._next_id()
            message = msgspec.structs.replace(message, id=line_id)
        elif line_id in self._open:
            raise LocalProtocolError(f"id: expected one that is not in use, found '{line_id}'")
        line = encode(message)
        exchange = Exchange(kind, line_id, message)
        self._open[line_id] = exchange
        if kind not in AT_ONCE:
            self._ordered.append(exchange)
        return line, exchange

    def receive(self, answer: WorkerMessage) -> Exchange:
        """The exchange that an answer belongs to, brought forward by it."""
        exchange = self._open.get(answer.id) if answer.id is not None else None
        event = _event_name(answer)
        if exchange is None:
            raise RemoteProtocolError(f"an answer to nothing that was asked: {event}, id {answer.id!r}")
        after = TRANSITIONS[exchange.kind].get(event)
        if after is None:
            raise RemoteProtocolError(f"{exchange.kind} {exchange.id!r} was answered by {event}")
        if exchange.kind not in AT_ONCE and self._ordered[0] is not exchange:
            raise RemoteProtocolError(
                f"{exchange.kind} {exchange.id!r} was answered before {self._ordered[0].id!r}"
            )
        if (event == "token" and not exchange.wants_tokens) or (
            event == "progress" and not exchange.wants_progress
        ):
            raise RemoteProtocolError(f"{exchange.kind} {exchange.id!r} did not ask for {event} lines")
        exchange.state = after
        if after is State.DONE:
            exchange.answer = answer
            del self._open[exchange.id]
            if exchange.kind not in AT_ONCE:
                self._ordered.popleft()
        return exchange

    def _next_id(self) -> str:
        while True:
            self._n_ids += 1
            line_id = f"#{self._n_ids}"
            if line_id not in self._open:
                return line_id


def _scores(message: ClientMessage) -> bool:
    return isinstance(message, Request) and message.scores


def _event_name(answer: WorkerMessage) -> str:
    if isinstance(answer, TokenEvent):
        return "token"
    if isinstance(answer, ProgressEvent):
        return "progress"
    if isinstance(answer, GenerateFinal):
        return "generate_final"
    if isinstance(answer, ScoreFinal):
        return "score_final"
    if isinstance(answer, ErrorFinal):
        return "error"
    return str(answer.__struct_config__.tag)
