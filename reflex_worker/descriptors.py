"""The process's descriptors 0, 1 and 2: they are there, and the protocol has its own.

Imports nothing that costs: `reflex stdio` and `reflex uds` begin with it.
"""

from __future__ import annotations

import posix

# What a descriptor says of being closed or open the other way round, and a directory. Whatever else it says
# (that the disk is full) is for whoever writes to it.
EBADF, EISDIR = 9, 21

# How /dev/null is opened for one that is closed. Stdin and stdout the wrong way round, so that whoever wants
# them is told (`why_not_stdio`); what is said to a closed stderr goes nowhere. As the launcher does.
_IN_PLACE = ((0, posix.O_WRONLY), (1, posix.O_RDONLY), (2, posix.O_WRONLY))


def open_standard_descriptors() -> None:
    """Whoever closed our stdin, stdout or stderr must not have a file of ours take its number."""
    for fd, flags in _IN_PLACE:
        try:
            posix.fstat(fd)
        except OSError:
            posix.open("/dev/null", flags)  # takes the lowest number that is free: this one


def why_not_stdio() -> str | None:
    """Why requests cannot be read from stdin, or answers written to stdout."""
    try:
        posix.read(0, 0)
    except OSError as e:
        if e.errno in (EBADF, EISDIR):
            return f"stdin: expected it open for reading, found it closed or of another kind ({e.strerror})"
    return why_not_stdout()


def why_not_stdout() -> str | None:
    """Why nothing can be written to stdout."""
    try:
        posix.write(1, b"")
    except OSError as e:
        if e.errno in (EBADF, EISDIR):
            return f"stdout: expected it open for writing, found it closed or of another kind ({e.strerror})"
    return None


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
