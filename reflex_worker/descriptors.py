"""The process's descriptors 0, 1 and 2: they are there, and the protocol has its own.

Imports nothing that costs: `reflex stdio` and `reflex uds` begin with it.
"""

from __future__ import annotations

import posix


def open_standard_descriptors() -> None:
    """Whoever closed our stdin, stdout or stderr must not have a file of ours take its number."""
    for fd in (0, 1, 2):
        try:
            posix.fstat(fd)
        except OSError:
            posix.open("/dev/null", posix.O_RDWR)  # takes the lowest number that is free: this one


def take_stdio() -> tuple[int, int]:
    """The process's stdin and stdout as private descriptors. From now on descriptor 1 leads to stderr and
    descriptor 0 to nothing, so that no library can write into the protocol or eat a request."""
    in_fd, out_fd = posix.dup(0), posix.dup(1)
    nothing = posix.open("/dev/null", posix.O_RDWR)
    posix.dup2(nothing, 0, inheritable=True)
    try:
        posix.dup2(2, 1, inheritable=True)
    except OSError:  # stderr is closed
        posix.dup2(nothing, 1, inheritable=True)
    posix.close(nothing)
    return in_fd, out_fd
