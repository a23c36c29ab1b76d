"""NVIDIA's management library (libnvidia-ml.so.1): what it tells of this machine's cards, and their energy
counters. Owns loading it and every call into it. A machine without it has none, and that is no error.

It numbers cards in an order of its own; whoever means a CUDA device asks by the bus it sits on.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Read = Callable[[], float]

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96  # nvml.h: names take up to 96, versions 80
PERSISTENCE = {0: "off", 1: "on"}


class Card:
    """What is fixed about one card, by NVML's index."""

    def __init__(self, nvml: Any, index: int, handle: ctypes.c_void_p) -> None:
        major, minor, mode = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(-1)
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlDeviceGetPersistenceMode(handle, ctypes.byref(mode))
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        self.index = index
        self.name = _text(lambda text, n: nvml.nvmlDeviceGetName(handle, text, n))
        self.memory_bytes = int(memory[0])
        self.capability = 10 * major.value + minor.value
        self.persistence = PERSISTENCE.get(mode.value, "not told")
        self.counts_energy = energy_counter(nvml, handle) is not None


class System:
    """The driver and its cards."""

    def __init__(self, nvml: Any) -> None:
        self.driver = _text(nvml.nvmlSystemGetDriverVersion)
        self.version = _text(nvml.nvmlSystemGetNVMLVersion)
        self.cards: list[Card] = []
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                self.cards.append(Card(nvml, index, handle))


def system() -> System | None:
    """What there is; None without the library."""
    nvml = _open()
    return None if nvml is None else System(nvml)


def joules(index: int, bus_id: bytes | None = None, uuid: bytes | None = None) -> Read | None:
    """The energy counter of the card on a PCI bus, or of that UUID, else of that index: joules so far. None
    where there is none."""
    nvml = _open()
    if nvml is None:
        return None
    handle = ctypes.c_void_p()
    if bus_id is not None:
        failed = nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle))
    elif uuid is not None:
        failed = nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    else:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    return None if failed else energy_counter(nvml, handle)


def energy_counter(nvml: Any, handle: ctypes.c_void_p) -> Read | None:
    """Joules so far of a card, refreshed every 100 ms; None where it counts none."""
    count = ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(count)):
        return None

    def read() -> float:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(count))
        return count.value / 1e3  # millijoules

    return read


def _open() -> Any | None:
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml


def _text(ask: Callable[[Any, int], int]) -> str:
    text = ctypes.create_string_buffer(TEXT_BYTES)
    ask(text, TEXT_BYTES)
    return text.value.decode()
