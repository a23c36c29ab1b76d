"""The command `reflex-openai`: starts the worker first, and imports the web stack while it loads.

Imports are the order of things here: options, then the socket, then the worker and the render
process, then everything else.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import NoReturn

from . import child, options
from .rendering import boot
from .worker_process import start

LISTEN_BACKLOG = 2048


def main() -> None:
    """The process; ends it with a status."""
    main_at = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):  # until the server takes them: nobody has been heard yet
        signal.signal(number, _leave)
    opts = options.parse(sys.argv[1:])
    template = None
    if opts.chat_template:
        try:
            with open(opts.chat_template, encoding="utf-8") as f:
                template = f.read()
        except (OSError, UnicodeDecodeError) as e:
            _fail(f"--chat-template: {e}")
    try:
        listening = _listen(opts.host, opts.port)
    except OSError as e:
        _fail(f"cannot listen on {opts.host}:{opts.port}: {e.strerror or e}")
    try:
        worker = start(opts.worker_argv)
    except OSError as e:
        _fail(f"the worker cannot be started: {e}")
    spawned_at = time.monotonic()
    renderer = None if opts.no_chat_template else boot.start(opts.template_memory_mib)

    from . import serve  # takes as long as the worker needs to load

    try:
        status = serve.run(
            serve.Started(
                options=opts,
                listening=listening,
                worker=worker,
                renderer=renderer,
                template=template,
                process_start=_process_start(main_at),
                main_at=main_at,
                spawned_at=spawned_at,
            )
        )
    except BaseException:
        child.kill(worker)
        raise
    sys.stderr.flush()
    # Nothing is left to tidy up that the kernel does not do faster.
    os._exit(status)


def _leave(_number: int, _frame: object) -> None:
    os._exit(0)  # worker and renderer end with their parent


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    sock.listen(LISTEN_BACKLOG)
    return sock


def _process_start(now: float) -> float:
    """When the kernel started this process, on the clock of time.monotonic()."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])  # proc(5): field 22, starttime
        boot_clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = boot_clock - ticks / os.sysconf("SC_CLK_TCK")
        return min(now, time.monotonic() - age)
    except (OSError, ValueError, IndexError):
        return now


def _fail(message: str) -> NoReturn:
    print(f"reflex-openai: {message}", file=sys.stderr)
    sys.exit(1)
