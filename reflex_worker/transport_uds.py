"""`reflex uds`: the same lines on a Unix socket, one connection at a time.

Owns the socket file: how it is made without stealing a live one, and that only our own is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import time

from reflex_protocol import LineError, LineSplitter, decode_line, encode
from reflex_protocol.messages import ErrorFinal

from .transport import READ_BYTES, Bell, Channel, Watcher, converse
from .worker import Worker

# sockaddr_un.sun_path less its final NUL.
MAX_PATH_BYTES = 107
# What a socket file is called until somebody listens on it.
NEW_SUFFIX = ".new"
# Connections that the kernel keeps while another is being served.
BACKLOG = 64
# The folder's lock is held for microseconds; whoever holds it longer is not one of us.
LOCK_SECONDS = 5.0
LOCK_RETRY_SECONDS = 0.01
# With --busy: callers that have not said anything yet, and how much of their first line is read.
MAX_CALLERS = 16
MAX_CALLER_LINE_BYTES = 1 << 16


class SocketError(Exception):
    """The socket cannot be made; `kind` is the protocol's error_kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SocketFile:
    """A listening Unix socket and its file. `close` removes the file if it is still this one."""

    def __init__(self, path: str, mode: int) -> None:
        """Raises SocketError: the path is too long, is no socket, or a live process listens there.

        A file that nobody listens on any more is replaced. Two workers that try that at the same
        time exclude each other by a lock on the folder, so neither can unlink the other's socket.
        """
        n_bytes = len(os.fsencode(path))
        if not 0 < n_bytes <= MAX_PATH_BYTES:
            raise SocketError(
                "invalid_input", f"socket path: expected 1 to {MAX_PATH_BYTES} bytes, found {n_bytes}: {path}"
            )
        self.path = path
        self._folder = os.path.dirname(path) or "."
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _FolderLock(self._folder, LOCK_SECONDS) as folder_fd:
                _check_free(path)
                self._publish(folder_fd, mode)
                self._identity = _identity(path)
        except OSError as e:
            self.listener.close()
            raise SocketError("io", f"{path}: {e.strerror or e}") from None
        except SocketError:
            self.listener.close()
            raise

    def _publish(self, folder_fd: int, mode: int) -> None:
        """Listen under another name first, so that whoever sees the file can connect to it."""
        new = self.path + NEW_SUFFIX
        if len(os.fsencode(new)) > MAX_PATH_BYTES:
            new = f"/proc/self/fd/{folder_fd}/.reflex{NEW_SUFFIX}"
        if os.path.lexists(new):  # of a worker that was killed right here
            os.unlink(new)
        # On Linux a socket file takes the mode of its descriptor, less the umask: it is at no moment
        # open to more than `mode`.
        os.fchmod(self.listener.fileno(), mode)
        self.listener.bind(new)
        os.chmod(new, mode)
        self.listener.listen(BACKLOG)
        os.rename(new, self.path)

    def remove(self, *, seconds: float = LOCK_SECONDS) -> None:
        """Remove the file unless another socket has taken its place. Where the folder's lock cannot be
        had in `seconds`, the file stays: the next worker finds nobody listening and replaces it."""
        try:
            with _FolderLock(self._folder, seconds):
                if _identity(self.path) == self._identity:
                    os.unlink(self.path)
        except OSError:
            pass  # it, or its folder, is gone already

    def remove_now(self) -> None:
        """The same without waiting for anybody: the process is about to end."""
        self.remove(seconds=0)

    def close(self) -> None:
        """Listen no more and remove the file."""
        self.remove()
        self.listener.close()


class _FolderLock:
    """An advisory lock on a folder, held while its socket files are looked at and changed."""

    def __init__(self, folder: str, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self._fd = -1

    def __enter__(self) -> int:
        """The folder's descriptor. Raises TimeoutError where somebody else holds it for longer than
        `seconds`."""
        self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self._fd)
                    why = f"its folder has been locked for {self._seconds:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, why) from None
            time.sleep(LOCK_RETRY_SECONDS)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _check_free(path: str) -> None:
    """Raises SocketError unless nothing, or a socket on which nobody listens any more, is there."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketError("io", f"{path}: expected nothing or a socket there, found another kind of file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        outcome = probe.connect_ex(path)
    if outcome in (0, errno.EAGAIN):  # EAGAIN: it listens, and its backlog is full
        raise SocketError("io", f"{path}: expected no listener there, found a process that listens")
    if outcome not in (errno.ECONNREFUSED, errno.ENOENT):
        raise OSError(outcome, os.strerror(outcome))


class BusyDoor(Watcher):
    """With --busy: further callers are told so, and let go, once they have said their first line."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._callers: dict[int, tuple[socket.socket, bytearray]] = {}

    def fds(self) -> list[int]:
        listening = [self._listener.fileno()] if len(self._callers) < MAX_CALLERS else []
        return listening + list(self._callers)

    def ready(self, fd: int) -> None:
        if fd == self._listener.fileno():
            caller = accept(self._listener)
            if caller is not None:
                caller.setblocking(False)
                self._callers[caller.fileno()] = caller, bytearray()
        elif fd in self._callers:
            self._listen_to(*self._callers[fd])

    def next_in_line(self) -> tuple[socket.socket, bytes] | None:
        """The caller that has waited longest without a whole line, and what it has said so far: it is
        served now that the connection before it has closed."""
        for fd, (caller, said) in self._callers.items():
            del self._callers[fd]
            return caller, bytes(said)
        return None

    def close(self) -> None:
        """Let all callers go."""
        for caller, _ in self._callers.values():
            caller.close()
        self._callers.clear()

    def _listen_to(self, caller: socket.socket, said: bytearray) -> None:
        try:
            data = caller.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        splitter = LineSplitter(MAX_CALLER_LINE_BYTES)
        lines = splitter.feed(bytes(said)) or ([] if data else splitter.finish())
        if data and not lines:
            return
        del self._callers[caller.fileno()]
        with caller:
            if lines:
                self._turn_away(caller, lines[0])

    def _turn_away(self, caller: socket.socket, line: bytes | LineError) -> None:
        message = line if isinstance(line, LineError) else decode_line(line)
        busy = ErrorFinal(id=message.id, error="another connection is being served", error_kind="busy")
        try:
            caller.send(encode(busy))
        except OSError:
            pass  # it did not wait for the answer


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection; None where the caller has left again."""
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return None
    return connection


def serve_uds(worker: Worker, file: SocketFile, bell: Bell, *, busy: bool) -> None:
    """One connection after the other, until the worker is to leave."""
    file.listener.setblocking(False)
    poll = select.poll()
    poll.register(file.listener, select.POLLIN)
    poll.register(bell.fd, select.POLLIN)
    door = BusyDoor(file.listener) if busy else None
    while not worker.finished:
        connection, said = (door.next_in_line() if door else None) or (None, b"")
        if connection is None:
            ready = dict(poll.poll())
            if bell.fd in ready:
                bell.answer(worker)
                continue
            connection = accept(file.listener)
        if connection is not None:
            with connection:
                connection.setblocking(True)
                channel = Channel(connection.fileno(), connection.fileno(), two_way=True)
                converse(worker, channel, bell, door, said)
    if door is not None:
        door.close()
