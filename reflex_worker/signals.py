"""SIGTERM and SIGINT: the first asks the worker to leave, the second ends the process at once.

A thread of its own hears of them through the wake-up descriptor, which the C-level handler writes
to: Python's own handlers run between two lines of Python, and the main thread may be inside a step
that lasts.
"""

from __future__ import annotations

import _thread
import os
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Watch:
    """Takes both signals over, for the rest of the process. Make it in the main thread."""

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        """on_first wakes the worker; on_second cleans up before the process ends with 128 + signal."""
        self.terminated = False
        self._on_first = on_first
        self._on_second = on_second
        self._bytes, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._next()
        self.terminated = True
        self._on_first()
        number = self._next()
        try:
            self._on_second()
        finally:
            os._exit(128 + number)

    def _next(self) -> int:
        return os.read(self._bytes, 1)[0]
