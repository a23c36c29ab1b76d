"""Starts the CUDA driver before anything else is imported (native/boot)."""

def start(device: int = 0, set_environment: bool = True) -> object | None:
    """Begin starting the driver in a thread; a capsule for `_native.adopt_boot()`, or None in a build without
    CUDA kernels. Never waits, never raises for want of a GPU."""

def init_only() -> int:
    """Load the driver and cuInit, no context; the number of devices. RuntimeError says why not."""

def floor(path: str | bytes, threads: int) -> dict[str, float]:
    """The driver started and every byte of the file copied to the card: init_ms, context_ms, bytes_ms since
    the driver's start, and file_bytes. RuntimeError says why not."""
