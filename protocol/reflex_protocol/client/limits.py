"""What both clients bound: bytes of one read, a worker's stderr, its time to leave."""

from __future__ import annotations

from typing import Final

READ_BYTES: Final = 1 << 16
# Lines of stderr kept to explain a death.
STDERR_TAIL_LINES: Final = 20
# A line of stderr longer than this is cut: nobody bounds what a library prints.
STDERR_LINE_BYTES: Final = 8192
# After its output has ended a worker has this long to exit before it is killed.
EXIT_GRACE_SECONDS: Final = 5.0
