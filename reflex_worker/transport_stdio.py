"""`reflex stdio`: requests on stdin, answers on stdout, everything else on stderr."""

from __future__ import annotations

import os

from .transport import Bell, Channel, converse
from .worker import Worker


def take_stdio() -> Channel:
    """The process's stdin and stdout as a private channel. From now on descriptor 1 leads to stderr
    and descriptor 0 to nothing, so that no library can write into the protocol or eat a request."""
    in_fd, out_fd = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0, inheritable=True)
    try:
        os.dup2(2, 1, inheritable=True)
    except OSError:  # stderr is closed
        os.dup2(nothing, 1, inheritable=True)
    os.close(nothing)
    return Channel(in_fd, out_fd, two_way=False)


def serve_stdio(worker: Worker, channel: Channel, bell: Bell) -> bool:
    """Until the end of input or until the worker is to leave. False where nobody reads stdout."""
    converse(worker, channel, bell)
    return not worker.client_is_gone
