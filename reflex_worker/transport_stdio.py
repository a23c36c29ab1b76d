"""`reflex stdio`: requests on stdin, answers on stdout, everything else on stderr."""

from __future__ import annotations

from .transport import Bell, Channel, converse
from .worker import Worker


def stdio_channel(in_fd: int, out_fd: int) -> Channel:
    """What stdin and stdout were, as a client's two directions."""
    return Channel(in_fd, out_fd, two_way=False)


def serve_stdio(worker: Worker, channel: Channel, bell: Bell) -> bool:
    """Until the end of input or until the worker is to leave. False where nobody reads stdout."""
    converse(worker, channel, bell)
    return not worker.client_is_gone
