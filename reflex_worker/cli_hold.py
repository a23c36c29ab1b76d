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
    """Milliseconds that cuInit took. Raises DriverError."""
    import ctypes

    from ._native import now_ms

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DriverError(f"no CUDA driver here: {e}") from None
    begin = now_ms()
    status = cuda.cuInit(0)
    if status != 0:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(status, ctypes.byref(name))
        raise DriverError(f"cuInit: {(name.value or b'error').decode()} ({status})")
    return now_ms() - begin


def main(name, argv):
    import signal

    from .cli import write
    from .cli_output import result_line

    values, _ = parse(argv, OPTIONS, 0)
    took = init_driver()
    write(1, result_line("REFLEX_HOLD_READY", {"cu_init_ms": took}, False))
    if values["once"]:
        return 0
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    signal.sigwait(ending)
    return 0
