"""Loads the model in a thread of its own, so that the worker answers while it does.

The native loader holds no GIL; this module imports nothing that costs, so that it can start before
the worker's own imports. Owns the one file descriptor that wakes the worker's poll().
"""

from __future__ import annotations

import _thread
import posix
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


# Between two looks at whether the worker has taken in what it read.
_LOOK_S = 0.0002


class Loader:
    """At most one load at a time: `start`, then a byte at `wake_fd`, then `take`."""

    def __init__(
        self, make_engine: Callable[[str, str | None], Any], make_ready: Callable[[], None] = lambda: None
    ) -> None:
        """make_ready: what can be done before a model is named; whatever it raises make_engine raises too."""
        self._make_engine = make_engine
        self._make_ready = make_ready
        self._result: object = None
        self._finished = False
        self.wake_fd, self._wake_in = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        # Input that somebody has sent already; then the first request is not made to wait for the
        # hidden one that would have warmed the model up for it.
        self.input_fd = -1
        self.taking_in = False  # what was read from there is on its way to has_work
        self.has_work: Callable[[], bool] = lambda: False
        self.stands_by = False  # a thread waits at `_named` for what `_job` will say
        self._named = _thread.allocate_lock()
        self._named.acquire()
        self._job: tuple[str, str | None, bool, Any] | None = None

    def start(self, path: str, experts: str | None = None, *, interruptible: bool = True) -> None:
        """Begin to load, experts as it says or as the worker was told. Returns once the thread is on its way
        into native code. interruptible: the hidden step is given up where a request comes meanwhile, which
        then begins with the layers that are there."""
        self._finished = False
        on_its_way = _thread.allocate_lock()
        on_its_way.acquire()
        job = (path, experts, interruptible, on_its_way)
        if self.stands_by:
            self.stands_by, self._job = False, job
            self._named.release()
        else:
            _thread.start_new_thread(self._run, job)
        on_its_way.acquire()

    def stand_by(self) -> None:
        """No model is named yet: make ready what the first one will need, in a thread of its own, which then
        waits to load it: starting one takes longer than waking it."""
        _thread.start_new_thread(self._stand_by, ())

    def _stand_by(self) -> None:
        try:
            self._make_ready()
        except Exception:
            pass  # the load meets it again and tells whoever asked for it
        self.stands_by = True
        self._named.acquire()
        if self._job is not None:
            self._run(*self._job)

    def take(self) -> tuple[bool, Any]:
        """(whether a load has ended since, the engine or the exception it ended with)."""
        finished, result = self._finished, self._result
        if finished:
            self._finished, self._result = False, None
        return finished, result

    def wake(self) -> None:
        """Make `wake_fd` readable; callable from any thread."""
        try:
            posix.write(self._wake_in, b"!")
        except BlockingIOError:
            pass  # it is readable already

    def clear_wake(self) -> None:
        """Empty `wake_fd`."""
        try:
            posix.read(self.wake_fd, 4096)
        except BlockingIOError:
            pass

    def _run(self, path: str, experts: str | None, interruptible: bool, on_its_way: Any) -> None:
        on_its_way.release()
        try:
            engine = self._make_engine(path, experts)
            if not self._somebody_waits():
                # A line that is answered at once (a ping) waits for nothing: only what is put off counts.
                engine.warm_up((lambda: self.has_work()) if interruptible else None)
            self._result = engine
        except BaseException as e:  # whatever it is, the worker must hear of it
            self._result = e
        self._finished = True
        self.wake()

    def _somebody_waits(self) -> bool:
        # In the order that a request takes, so that none is missed on its way.
        if self.input_fd >= 0:
            poll = select.poll()
            poll.register(self.input_fd, select.POLLIN)
            if poll.poll(0):
                return True
        # A load may end while the lines that came with it are still being read: until then nobody can say.
        while self.taking_in:
            time.sleep(_LOOK_S)
        return self.has_work()
