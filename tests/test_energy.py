"""Energy counters: a wrap is counted, and a machine without any says so."""

from __future__ import annotations

import os

import pytest

from reflex_worker import cli_energy


def make_package(root, name: str, micro_joules: int, span: int = 1000_000_000):
    folder = root / name
    folder.mkdir()
    (folder / "energy_uj").write_text(f"{micro_joules}\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")
    return folder


def test_rapl_sums_packages_and_counts_a_wrap(tmp_path):
    a = make_package(tmp_path, "intel-rapl:0", 999_000_000)
    make_package(tmp_path, "intel-rapl:1", 5_000_000)
    make_package(tmp_path, "intel-rapl:0:0", 123)  # a part of package 0: not counted twice
    read = cli_energy.rapl_joules(str(tmp_path))
    assert read is not None
    before = read()
    assert before == pytest.approx(1004.0)
    (a / "energy_uj").write_text("2000000\n")  # wrapped: 1 J to the top, 2 J beyond
    assert read() - before == pytest.approx(3.0)


def test_rapl_absent_or_unreadable_is_no_meter(tmp_path):
    assert cli_energy.rapl_joules(str(tmp_path / "none")) is None
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    assert cli_energy.rapl_joules(str(tmp_path)) is None


def test_energy_expects_a_command(reflex):
    done = reflex("energy", "--runs", "1")
    assert done.returncode == 2 and "expected -- and a command" in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has an NVIDIA driver")
def test_hold_without_a_driver_is_a_cuda_error(reflex):
    done = reflex("hold")
    assert done.returncode == 6 and "[cuda]: no CUDA driver here" in done.stderr
