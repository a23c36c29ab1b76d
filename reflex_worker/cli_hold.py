"""`reflex hold`: keep the GPU registered with the driver, so that workers on this host start faster.

The process has called cuInit and sleeps: no context, no GPU memory, no CPU. While it lives, the
driver's largest single cost at a worker's start (registering the GPU for unified memory) is paid.
"""

from __future__ import annotations

from .cli_args import Option, parse
from .cli_args import usage as usage_text

OPTIONS = [Option("--once", help="start the driver, say how long it took, and end")]


def usage(name):
    return usage_text(
        name,
        "",
        OPTIONS,
        "Runs until SIGTERM or SIGINT. deploy/ has a systemd unit and a Kubernetes DaemonSet for it.",
    )


def enough(_name):
    return True


class DriverError(Exception):
    """The CUDA driver is missing or would not start."""

    kind = "cuda"


def init_driver():
    """How many devices the driver sees, and the milliseconds that cuInit took. Raises DriverError."""
    import time

    from . import _boot

    begin = time.perf_counter()
    try:
        devices = _boot.init_only()
    except RuntimeError as e:
        raise DriverError(str(e)) from None
    return devices, (time.perf_counter() - begin) * 1e3


def main(name, argv):
    import signal

    from .cli import write
    from .cli_output import result_line

    values, _ = parse(argv, OPTIONS, 0)
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before the driver's own threads begin
    devices, took = init_driver()
    write(1, result_line("REFLEX_HOLD_READY", {"cu_init_ms": took, "devices": devices}, False))
    if not values["once"]:
        signal.sigwait(ending)
    return 0
