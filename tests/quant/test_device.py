"""The block headers under nvcc: they compile for every type, and the GPU decodes to the host's bits."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from reflex_worker import _testing

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "native"
PACKED = [name for name, _, _, _, kind in _testing.quant_types() if kind == "packed"]


def nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found:
        pytest.skip("nvcc is not installed")
    return found


def build(target: Path, *flags: str) -> None:
    """Compiles decode_on_device.cu, warnings being errors."""
    command = [nvcc(), "-std=c++20", "-O2", "-Werror", "all-warnings", "-I", str(NATIVE), *flags]
    command += ["-o", str(target), str(HERE / "decode_on_device.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_block_headers_compile_for_the_gpu(tmp_path: Path):
    build(tmp_path / "decode.o", "-arch=sm_90", "-c")
    assert os.path.getsize(tmp_path / "decode.o") > 0


@pytest.mark.gpu
def test_gpu_decodes_every_type_to_the_bits_of_the_host(tmp_path: Path):
    build(tmp_path / "decode", "-arch=native")
    done = subprocess.run([tmp_path / "decode"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert list(lines) == PACKED
    assert all(line.startswith("0 of") for line in lines.values()), done.stdout
