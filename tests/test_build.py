"""What a build does about CUDA: it goes on without nvcc and says so; for which cards its kernels are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT

# What cmake asks of a compiler; it compiles nothing.
NVCC = """#!/bin/sh
case $1 in
--version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
--list-gpu-arch) for a in 75 80 86 87 88 89 90 100 103 110 120 121; do echo compute_$a; done ;;
--help) echo "--compress-mode" ;;
--dryrun) echo "#$ TOP={top}" >&2 ;;
esac
"""


@pytest.fixture
def configure(tmp_path: Path):
    """Runs cmake with a pretended nvcc of a version, None: without any; the process and its build.ninja."""
    if not (shutil.which("cmake") and shutil.which("ninja") and (ROOT / "CMakeLists.txt").exists()):
        pytest.skip("configures a build: wants the sources, cmake and ninja")

    def run(version: str | None, *options: str) -> tuple[subprocess.CompletedProcess[str], str]:
        nvcc = "REFLEX_NVCC-NOTFOUND"
        if version:
            (tmp_path / "include").mkdir(exist_ok=True)
            (tmp_path / "include/cuda.h").touch()
            (tmp_path / "nvcc").write_text(NVCC.format(version=version, top=tmp_path))
            (tmp_path / "nvcc").chmod(0o755)
            nvcc = str(tmp_path / "nvcc")
        build = tmp_path / "build"
        shutil.rmtree(build, ignore_errors=True)
        where = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DREFLEX_PYTHON=OFF"]
        done = subprocess.run(
            [*where, f"-DREFLEX_NVCC={nvcc}", *options], capture_output=True, text=True, timeout=300
        )
        ninja = build / "build.ninja"
        return done, ninja.read_text() if ninja.exists() else ""

    return run


@pytest.mark.parametrize(
    ("version", "why"), [("11.8", "11.8.1, 12.0 or newer is needed"), (None, "nvcc is not found")]
)
def test_without_a_usable_nvcc_the_build_says_so_and_goes_on(configure, version, why):
    done, ninja = configure(version)
    if version is None and "kernels for" in done.stdout:
        pytest.skip("cmake finds this machine's nvcc all the same")
    assert done.returncode == 0, done.stderr
    assert why in done.stdout and "building for the CPU only" in done.stdout
    assert "no_cuda.cpp" in ninja and "--fatbin" not in ninja


def test_cuda_that_was_asked_for_and_cannot_be_is_an_error(configure):
    done, _ = configure("11.8", "-DREFLEX_CUDA=ON")
    assert done.returncode != 0 and "REFLEX_CUDA=ON" in done.stderr


@pytest.mark.parametrize(
    ("options", "machine_code", "ptx"),
    [
        ([], ["75", "80", "86", "89", "90a", "100", "120"], "120"),
        (["-DREFLEX_CUDA_ARCHS=120;80;90a"], ["80", "90a", "120"], "120"),
        (["-DREFLEX_CUDA_ARCHS=86;75"], ["75", "86"], "86"),
    ],
)
def test_images_are_machine_code_for_each_architecture_and_ptx_of_the_newest(
    configure, options, machine_code, ptx
):
    done, ninja = configure("13.0", *options)
    assert done.returncode == 0, done.stderr
    line = next(row for row in ninja.splitlines() if "--fatbin" in row and "embed.cu" in row)
    codes = [word.partition(",code=")[2] for word in line.split() if word.startswith("arch=compute_")]
    assert codes == [f"sm_{a}" for a in machine_code] + [f"compute_{ptx}"]
    assert "--compress-mode=none" in line
