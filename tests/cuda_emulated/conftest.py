"""Where the emulated CUDA driver is, and a process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
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


def run_python(env: dict[str, str], code: str, given: str = "") -> str:
    """What the code prints in a process of its own, with `given` at its stdin."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
