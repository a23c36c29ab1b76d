"""Energy counters: joules so far, of the GPU (nvml.py) and of the CPU's packages (RAPL, where the kernel
lets us read it). Owns which are read, and RAPL. A machine without any has none, and that is no error.

NVML's counter refreshes every 100 ms: one short request may show nothing, many show their sum, and a phase
has joules of its own only where it lasts long enough (`PhaseMeter`).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[], float]

PCI_BUS_ID_BYTES = 64
# How often a counter moves, in seconds: NVML's as measured on an H200 with driver 580.
REFRESH_S = {"gpu": 0.1, "cpu": 0.001}
# A phase is told where it lasts this many refreshes: what a reading lags behind is then a third at most.
PHASE_REFRESHES = 3


class Meters:
    """The counters of a worker's machine, opened in a thread of their own: NVML takes milliseconds that
    no request should wait for. Until they are open there are none."""

    def __init__(self, gpu: int = 0) -> None:
        """gpu: the CUDA device that is used, if one is."""
        self._gpu = gpu
        self._opening = False
        self._meters: dict[str, Read] = {}

    def open(self, on_gpu: bool) -> None:
        """Begin to open them, once. on_gpu: whether a GPU computes."""
        if self._opening:
            return
        self._opening = True
        import _thread

        _thread.start_new_thread(self._open, (self._gpu if on_gpu else None,))

    def _open(self, gpu: int | None) -> None:
        self._meters = find_meters(gpu)

    def read(self) -> dict[str, float]:
        """Joules so far by meter; {} where there is none, or none yet."""
        try:
            return {name: read() for name, read in self._meters.items()}
        except (OSError, ValueError):  # a counter that is no longer there
            self._meters = {}
            return {}


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was used between two readings, of the meters that are in both."""
    return {name: max(0.0, after[name] - joules) for name, joules in before.items() if name in after}


def find_meters(gpu: int | None = 0) -> dict[str, Read]:
    """{name: function that returns joules so far}."""
    meters: dict[str, Read] = {}
    for name, read in (("gpu", None if gpu is None else nvml_joules(gpu)), ("cpu", rapl_joules())):
        if read is not None:
            meters[name] = read
    return meters


class PhaseMeter:
    """Joules of one phase after the other. Opened where it is made, which takes milliseconds."""

    def __init__(self, gpu: int | None = 0) -> None:
        """gpu: the CUDA device that will be used; None: none."""
        import time

        self._clock = time.monotonic
        self._meters = find_meters(gpu)
        self._marks: list[tuple[str, float, dict[str, float]]] = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """What has gone since the mark before belongs to this phase."""
        self._marks.append((phase, self._clock(), {name: read() for name, read in self._meters.items()}))

    def joules(self) -> dict[str, dict[str, float | None]]:
        """By meter: of each phase and in `total`; None where it was too short for the meter."""
        phases = [(end[0], begin, end) for begin, end in zip(self._marks, self._marks[1:], strict=False)]
        phases.append(("total", self._marks[0], self._marks[-1]))
        return {
            meter: {
                name: end[2][meter] - begin[2][meter]
                if end[1] - begin[1] >= PHASE_REFRESHES * REFRESH_S[meter]
                else None
                for name, begin, end in phases
            }
            for meter in self._meters
        }


def nvml_joules(gpu: int = 0) -> Read | None:
    """The counter of a CUDA device (NVML counts in an order of its own, so it is found by its bus). Where
    CUDA does not run in this process, of the card that CUDA_VISIBLE_DEVICES puts in that place."""
    import os

    from . import nvml

    bus = _pci_bus_id(gpu)
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if bus is None and gpu < len(visible) and visible[gpu]:
        if visible[gpu].startswith("GPU-"):
            return nvml.joules(gpu, uuid=visible[gpu].encode())
        if visible[gpu].isdecimal():
            gpu = int(visible[gpu])
    return nvml.joules(gpu, bus)


def _pci_bus_id(gpu: int) -> bytes | None:
    """Where a CUDA device sits; None where CUDA does not run in this process."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        device, count = ctypes.c_int(), ctypes.c_int()
        bus = ctypes.create_string_buffer(PCI_BUS_ID_BYTES)
        # A command narrows what it sees to its one device, which then has number 0.
        if cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value == 1:
            gpu = 0
        failed = cuda.cuDeviceGet(ctypes.byref(device), gpu)
        failed = failed or cuda.cuDeviceGetPCIBusId(bus, PCI_BUS_ID_BYTES, device)
    except (OSError, AttributeError):
        return None
    return None if failed else bus.value


def rapl_joules(root: str = "/sys/class/powercap") -> Read | None:
    """Sum over the packages, wraps counted."""
    import os

    packages: list[tuple[str, int, list[int]]] = []  # counter, its span, [last value, wraps so far]
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return None
    for name in names:
        if name.count(":") != 1 or "rapl" not in name:
            continue
        try:
            with open(f"{root}/{name}/energy_uj") as f:
                first = int(f.read())
            with open(f"{root}/{name}/max_energy_range_uj") as f:
                span = int(f.read())
        except (OSError, ValueError):
            continue
        packages.append((f"{root}/{name}/energy_uj", span, [first, 0]))
    if not packages:
        return None

    def read() -> float:
        total = 0
        for path, span, state in packages:
            with open(path) as f:
                now = int(f.read())
            if now < state[0]:
                state[1] += span
            state[0] = now
            total += now + state[1]
        return total / 1e6  # microjoules

    return read
