"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def reflex_command() -> list[str]:
    """REFLEX_LAUNCHER's command, or the one installed beside this interpreter, else the module."""
    launcher = Path(os.environ.get("REFLEX_LAUNCHER") or Path(sys.executable).with_name("reflex"))
    return [str(launcher)] if launcher.exists() else [sys.executable, "-m", "reflex_worker"]


@pytest.fixture(scope="session")
def reflex():
    """Runs `reflex ARGS...`; returns the finished process with text output."""

    def run(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
        kwargs.setdefault("timeout", 120)
        kwargs.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run([*reflex_command(), *args], capture_output=True, text=True, **kwargs)

    return run


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The bundled model, as installed."""
    import reflex_worker

    path = Path(reflex_worker.__file__).parent / "data/demo.gguf"
    assert path.exists(), f"{path} is missing"
    return path


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real vocabularies and templates that may stand beside a checkout."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return SHARED


def pytest_report_header() -> str | None:
    folder = os.environ.get("REFLEX_EMULATOR")
    return f"CUDA is emulated (no GPU): {folder}" if folder else None


def pytest_collection_modifyitems(items):
    """Tests marked gpu skip where the build or the machine has none. REFLEX_EMULATOR, the folder of the
    emulated driver, runs them on a card that is none (it must be on LD_LIBRARY_PATH too)."""
    if not any("gpu" in item.keywords for item in items):
        return
    if os.environ.get("REFLEX_EMULATOR", "-") in os.environ.get("LD_LIBRARY_PATH", ""):
        return
    if os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl"):
        return
    skip = pytest.mark.skip(reason="no NVIDIA driver here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
