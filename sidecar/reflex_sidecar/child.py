"""Child processes that never outlive their parent.

A child is killed by the kernel when the parent's main thread ends (PR_SET_PDEATHSIG), and sees the
end of its stdin. Owns starting and killing; knows nothing of what a child says.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1
# Looked up before any fork: between fork and exec only the call itself is made.
_prctl: Final = ctypes.CDLL(None, use_errno=True).prctl
KILL_WAIT_SECONDS: Final = 10.0


def _tie_to(parent: int) -> Callable[[], None]:
    def tie() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above took effect
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def spawn(
    argv: Sequence[str], *, stderr: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child with pipes on stdin and stdout. Raises OSError where it cannot be started.

    Must be called from the main thread. Signals from the terminal are the parent's to handle, so
    the child is in a session of its own.
    """
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        bufsize=0,
        start_new_session=True,
        preexec_fn=_tie_to(os.getpid()),
    )


def kill(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL and reap; the exit status as subprocess tells it."""
    if process.poll() is None:
        process.kill()
    return process.wait(timeout=KILL_WAIT_SECONDS)


def how_it_ended(status: int) -> str:
    """An exit status for people: `exit status 3`, `SIGSEGV`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
