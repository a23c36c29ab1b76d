"""SIGTERM and SIGINT: the first asks the worker to leave, the second ends the process at once.

A thread of its own hears of them through the wake-up descriptor, which the C-level handler writes
to: Python's own handlers run between two lines of Python, and the main thread may be inside a step
that lasts. The handlers are in place before anything that takes time (`take_over`); what comes before
there is anybody to tell waits in the descriptor.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # the C half: `signal` takes enum and more with it
import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIGNALS = (_signal.SIGTERM, _signal.SIGINT)

# Where signals are read from, once they are taken over: it holds for the process.
_bytes_fd = -1


def take_over() -> None:
    """From now on neither signal ends the process by itself. Call it in the main thread, and first of
    all; a Watch must follow."""
    global _bytes_fd
    if _bytes_fd >= 0:
        return
    _bytes_fd, wake = posix.pipe2(posix.O_CLOEXEC)
    posix.set_blocking(wake, False)
    _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in SIGNALS:
        _signal.signal(number, _ignore)


def _ignore(_number: int, _frame: object) -> None:
    """The wake-up descriptor has it already."""


def _has_come() -> bool:
    """Whether a signal waits to be told of."""
    import select

    poll = select.poll()
    poll.register(_bytes_fd, select.POLLIN)
    return bool(poll.poll(0))


class Watch:
    """Acts on both signals, for the rest of the process. Make it in the main thread."""

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        """on_first wakes the worker; on_second cleans up before the process ends with 128 + signal."""
        import _thread

        self.terminated = False
        self._on_first = on_first
        self._on_second = on_second
        take_over()
        if _has_come():  # told here and now: the thread may get its turn after the first request
            self._first()
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if not self.terminated:
            self._first()
        number = self._next()
        try:
            self._on_second()
        finally:
            posix._exit(128 + number)

    def _first(self) -> None:
        self._next()
        self.terminated = True
        self._on_first()

    def _next(self) -> int:
        return posix.read(_bytes_fd, 1)[0]
