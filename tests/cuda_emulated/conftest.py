"""Where the emulated CUDA driver is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import reflex_worker

from ..conftest import ROOT


@pytest.fixture(scope="session")
def emulated_environment() -> dict[str, str]:
    """The environment of a process that finds the emulated driver."""
    built = ROOT / "build/tests/tests/native/emulator/emulator"
    folder = Path(os.environ.get("REFLEX_EMULATOR") or built)
    if not (folder / "libcuda.so.1").exists():
        pytest.skip("no emulated CUDA driver here (REFLEX_EMULATOR: a build with nvcc and tests has one)")
    path = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("LD_LIBRARY_PATH")]))
    package = str(Path(reflex_worker.__file__).resolve().parent.parent)
    return {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": package}
