"""The loop that both transports share: one client's descriptors, one Worker, one poll().

Between two units of work it looks, without waiting, at what has arrived; with nothing to do it
waits. Writing waits for the reader: a slow reader is the client's affair.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

from reflex_protocol.messages import ClientMessage

from .loading import Loader
from .worker import READ_AHEAD_BYTES, Worker

READ_BYTES = 1 << 16

POLL_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


class Channel:
    """The two directions of one client. `two_way`: one socket, whose hang-up means both directions."""

    def __init__(self, in_fd: int, out_fd: int, *, two_way: bool) -> None:
        self.in_fd = in_fd
        self.out_fd = out_fd
        self.two_way = two_way
        self.failure: OSError | None = None  # why nothing more can be written, where not for want of a reader


class Bell:
    """What may wake the loop besides the client: the loader's end and signals, by one descriptor."""

    def __init__(
        self,
        loader: Loader,
        terminated: Callable[[], bool],
        on_loaded: Callable[[Any], None],
        set_last_words: Callable[[int, bytes], None] = lambda fd, words: None,
    ) -> None:
        """set_last_words: what is said to a descriptor should the process lose the model's file and end."""
        self.set_last_words = set_last_words
        self._loader = loader
        self._terminated = terminated
        self._on_loaded = on_loaded
        self.fd = loader.wake_fd

    def taking_in(self, now: bool) -> None:
        """What the client has sent is being read, or has reached the worker."""
        self._loader.taking_in = now

    def answer(self, worker: Worker) -> None:
        """Tell the worker what has happened."""
        self._loader.clear_wake()
        finished, result = self._loader.take()
        if finished:
            worker.load_finished(result)
            if not isinstance(result, BaseException):
                self._on_loaded(result)
        if self._terminated():
            worker.terminate()


class Watcher:
    """More descriptors to look at while a client is served (a socket's other callers)."""

    def fds(self) -> list[int]:
        """To be polled for input now."""
        return []

    def ready(self, fd: int) -> None:
        """One of them has input, or its end."""


def converse(
    worker: Worker, channel: Channel, bell: Bell, watcher: Watcher | None = None, said: bytes = b""
) -> None:
    """Serve one client until it has everything it asked for, is gone, or the worker may leave.

    said: what has been read from it already."""
    worker.connect()
    worker.receive(said)
    loop = _Loop(worker, channel, bell, watcher)
    while not loop.gone:
        loop.write()
        if worker.client_done:
            break
        if worker.finished:
            loop.last_look()
            break
        loop.look()
        loop.work()
    loop.disarm()  # the descriptor may soon be another's


class _Loop:
    def __init__(self, worker: Worker, channel: Channel, bell: Bell, watcher: Watcher | None) -> None:
        self.worker = worker
        self.channel = channel
        self.bell = bell
        self.watcher = watcher
        self.gone = False
        self._eof = False
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._armed: ClientMessage | None = None  # the line that last words answer
        self._words_of: ClientMessage | None = None  # and the one that they were last made for
        self._words = b""

    def work(self) -> None:
        """One unit of work."""
        self._arm()
        self.worker.work()

    def _arm(self) -> None:
        """Should the model's file be lost from here on, the line at work is answered."""
        line = self.worker.at_work_on
        if line is self._armed:
            return
        if line is None:
            self.disarm()
            return
        if line is not self._words_of:
            self._words_of, self._words = line, self.worker.last_words(line)
        self._armed = line
        self.bell.set_last_words(self.channel.out_fd, self._words)

    def disarm(self) -> None:
        """Nothing is to be said any more, or in the middle of what is being written."""
        if self._armed is not None:
            self._armed = None
            self.bell.set_last_words(-1, b"")

    def write(self) -> None:
        """Everything the worker has said, waiting for the reader."""
        data = memoryview(self.worker.take_output())
        if data:
            self.disarm()
        try:
            while data:
                try:
                    data = data[os.write(self.channel.out_fd, data) :]
                except BlockingIOError:  # whoever we share it with has made it non-blocking
                    select.select([], [self.channel.out_fd], [])
        except OSError as e:
            if not isinstance(e, ConnectionError):  # EPIPE, ECONNRESET: nobody reads any more
                self.channel.failure = e
            self._lose()

    def look(self) -> None:
        """Take in what has arrived; wait for something only when there is nothing to do."""
        self._watch()
        self._arm()
        timeout = 0 if self.worker.has_work else None
        others: list[int] = []
        for fd, event in self._poll.poll(timeout):
            if fd == self.bell.fd:
                self.bell.answer(self.worker)
            elif fd == self.channel.in_fd and event & select.POLLIN:
                self._read()
                if self.channel.two_way and event & POLL_GONE:
                    self._lose()
            elif fd == self.channel.in_fd and not self.channel.two_way and not self._eof:
                self._read()  # a pipe whose writer has left: its last bytes, then its end
            elif fd in (self.channel.in_fd, self.channel.out_fd) and event & POLL_GONE:
                self._lose()
            else:
                others.append(fd)
        if self.watcher is not None and not self.gone and not self.worker.client_done:
            for fd in others:
                self.watcher.ready(fd)

    def last_look(self) -> None:
        """Before leaving: what the client had sent already is refused by name, not dropped."""
        self._take_in_pending()
        while self.worker.has_work:
            self.worker.work()
        self.write()

    def _watch(self) -> None:
        """What to poll for now."""
        channel = self.channel
        wanted = {self.bell.fd: select.POLLIN, channel.out_fd: 0}
        reads = select.POLLIN if self.worker.wants_input and not self._eof else 0
        if reads or channel.two_way:
            wanted[channel.in_fd] = reads
        if self.watcher is not None:
            wanted.update((fd, select.POLLIN) for fd in self.watcher.fds())
        if wanted == self._watched:
            return
        for fd in self._watched.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, events in wanted.items():
            if self._watched.get(fd) != events:
                self._poll.register(fd, events)
        self._watched = wanted

    def _read(self) -> None:
        self.bell.taking_in(True)
        try:
            self._take_in()
        finally:
            self.bell.taking_in(False)

    def _take_in(self) -> None:
        try:
            data = os.read(self.channel.in_fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # reset by the peer, or a terminal that hung up
        if data:
            self.worker.receive(data)
        else:
            self._eof = True
            self.worker.end_of_input()

    def _lose(self) -> None:
        """The client reads no more. What it had written is still read: it may ask the worker to leave."""
        if self.gone:
            return
        self.gone = True
        self.worker.client_gone()
        if self.channel.two_way:
            self._take_in_pending()

    def _take_in_pending(self) -> None:
        """What lies in the descriptor already, up to the bound on read-ahead."""
        poll = select.poll()
        poll.register(self.channel.in_fd, select.POLLIN)
        for _ in range(READ_AHEAD_BYTES // READ_BYTES):
            if self._eof or not any(event & select.POLLIN for _, event in poll.poll(0)):
                break
            self._read()
