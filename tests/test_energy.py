"""What needs a GPU to matter and none to be tested: energy counters, kernel images, timelines, progress."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from reflex_worker import cli, cli_doctor, cli_energy, cli_model, cli_plot, energy


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
    read = energy.rapl_joules(str(tmp_path))
    assert read is not None
    before = read()
    assert before == pytest.approx(1004.0)
    (a / "energy_uj").write_text("2000000\n")  # wrapped: 1 J to the top, 2 J beyond
    assert read() - before == pytest.approx(3.0)


def test_rapl_absent_or_unreadable_is_no_meter(tmp_path):
    assert energy.rapl_joules(str(tmp_path / "none")) is None
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    assert energy.rapl_joules(str(tmp_path)) is None


NVML = r"""
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
  *handle = (void *)(bus[0] == '7' ? 8L : 1L);
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  *handle = (void *)(uuid[4] == 'b' ? 5L : 6L);
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = (void *)(i + 1L); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *mj) {
  static unsigned long long n;
  *mj = (unsigned long long)(long)handle * 1000 + 500 * n++;
  return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "570.1", n); return 0; }
int nvmlSystemGetNVMLVersion(char *text, unsigned n) { strncpy(text, "12.570.1", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned n) {
  strncpy(text, handle == (void *)1L ? "Card A" : "Card B", n);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  *major = 9, *minor = handle != (void *)1L;
  return 0;
}
int nvmlDeviceGetPersistenceMode(void *handle, int *mode) {
  *mode = 1;
  return handle == (void *)1L ? 0 : (*mode = -1, 3);
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long memory[3]) { memory[0] = 80ull << 30; return 0; }
"""
CUDA = r"""
#include <stdlib.h>
int cuDeviceGetCount(int *n) { *n = getenv("ONE_DEVICE") ? 1 : 3; return getenv("NO_CUDA") ? 3 : 0; }
int cuDeviceGet(int *device, int ordinal) {
  int n, failed = cuDeviceGetCount(&n);
  *device = getenv("ONE_DEVICE") ? 2 : ordinal;
  return failed ? failed : ordinal >= n;
}
int cuDeviceGetPCIBusId(char *bus, int n, int device) {
  bus[0] = device == 2 ? '7' : '0';
  bus[1] = 0;
  return 0;
}
"""
READ_ALL = """
import sys
from reflex_worker.energy import Meters, nvml_joules, spent
print(nvml_joules(0)(), nvml_joules(2)())
meters = Meters(2)
meters.open(True)
while not (before := meters.read()):
    pass
print(spent({"gpu": before["gpu"]}, meters.read()))
"""


READ_CARDS = """
from reflex_worker import cli_doctor
facts = {}
for c in cli_doctor.nvml_cards(facts):
    print(c.index, c.name, c.memory_bytes >> 30, c.capability, c.persistence, c.counts_energy)
print(facts["gpu_driver"], facts["nvml"], facts["energy"].startswith("NVML's counter"))
"""


@pytest.fixture
def with_stand_ins(tmp_path):
    """Runs Python code beside stand-ins for NVIDIA's libraries; its lines."""
    if shutil.which("cc") is None:
        pytest.skip("builds a stand-in for NVIDIA's libraries")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has an NVIDIA driver")
    for name, source in (("libnvidia-ml.so.1", NVML), ("libcuda.so.1", CUDA)):
        (tmp_path / "x.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "x.c"], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}

    def lines(code: str, **settings: str) -> list[str]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env={**env, **settings}, capture_output=True, text=True, timeout=60, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return lines


def test_the_gpu_that_is_read_is_the_one_that_computes(with_stand_ins):
    """CUDA and NVML number GPUs in orders of their own: device 2 may be NVML's 7."""
    # One count at each opening, and half a joule more at each look.
    assert with_stand_ins(READ_ALL) == ["1.5 9.5", "{'gpu': 0.5}"]


READ_ONE = "import sys; from reflex_worker.energy import nvml_joules; print(nvml_joules({})())"


def test_the_gpu_that_a_command_has_narrowed_its_view_to_is_number_0_there(with_stand_ins):
    """`--device cuda:2` sets CUDA_VISIBLE_DEVICES: CUDA knew no device 2 then, and NVML's 2 was read."""
    assert with_stand_ins(READ_ONE.format(2), ONE_DEVICE="1") == ["8.5"]


@pytest.mark.parametrize(
    ("visible", "gpu", "joules"), [("3,1", 0, "4.5"), ("3,1", 1, "2.5"), ("GPU-b7", 0, "5.5"), ("", 1, "2.5")]
)
def test_where_cuda_does_not_run_the_card_is_the_one_the_command_will_see(
    with_stand_ins, visible, gpu, joules
):
    """`reflex energy` measures from outside."""
    assert with_stand_ins(READ_ONE.format(gpu), NO_CUDA="1", CUDA_VISIBLE_DEVICES=visible) == [joules]


def test_a_phase_has_joules_of_its_own_where_it_outlasts_the_counters_refresh(monkeypatch):
    import time

    clock, joules = iter([0.0, 0.2, 1.2, 1.21]), iter([100.0, 130.0, 330.0, 331.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(energy, "find_meters", lambda gpu: {"gpu": lambda: next(joules)})
    meter = energy.PhaseMeter(0)
    for phase in ("model_load", "prompt_eval", "decode"):
        meter.mark(phase)
    assert meter.joules() == {
        "gpu": {"model_load": None, "prompt_eval": 200.0, "decode": None, "total": 231.0}
    }


def test_energy_by_phase_on_the_result_line(reflex):
    for args in (["generate", "--demo", "Once"], ["system1", "--demo", "Once", "--candidate", " a"]):
        done = reflex(*args, "--energy", "--json", "--device", "cpu")
        told = json.loads(done.stdout.splitlines()[-1])["energy_j"]
        assert told.keys() <= {"cpu"}  # a machine whose RAPL may be read
        assert bool(told) != ("--energy: no counter here" in done.stderr)
        for phases in told.values():
            assert {"model_load", "prompt_eval", "total"} <= phases.keys()
    assert "energy_j" not in reflex("generate", "--demo", "Once").stdout


def test_doctor_tells_each_card_that_nvml_has(with_stand_ins):
    assert with_stand_ins(READ_CARDS) == [
        "0 Card A 80 90 on True",
        "1 Card B 80 91 not told True",
        "570.1 12.570.1 True",
    ]


def test_energy_subtracts_the_idle_draw_over_n_runs(monkeypatch):
    """A card that draws 100 W, and 60 J more for each run of a command that takes half a second."""
    import time

    now, extra = [0.0], [0.0]

    def sleep(seconds):
        now[0] += seconds

    def run(command, stdout):
        assert command == ["reflex", "generate"]
        sleep(0.5)
        extra[0] += 60.0
        return subprocess.CompletedProcess(command, 0)

    said = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cli, "write", lambda fd, text: said.append(text))
    monkeypatch.setattr(
        cli_energy, "find_meters", lambda gpu: {"gpu": lambda: 7.0 + 100.0 * now[0] + extra[0]}
    )
    assert cli_energy.main("energy", ["--runs", "4", "--json", "--", "reflex", "generate"]) == 0
    told = json.loads(said[0])
    assert told["runs"] == 4 and told["wall_ms_p50"] == pytest.approx(500)
    assert told["gpu_idle_w"] == pytest.approx(100)
    assert told["gpu_net_j"] == pytest.approx(60) and told["gpu_gross_j"] == pytest.approx(110)


def test_energy_expects_a_command(reflex):
    done = reflex("energy", "--runs", "1")
    assert done.returncode == 2 and "expected -- and a command" in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has an NVIDIA driver")
def test_hold_without_a_driver_is_a_cuda_error(reflex):
    done = reflex("hold")
    assert done.returncode == 6 and "[cuda]: there is no NVIDIA driver here" in done.stderr


def test_a_floor_without_a_driver_is_a_cuda_error(reflex):
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has an NVIDIA driver")
    done = reflex("bench", "--demo", "--floor")
    assert done.returncode == 6 and "[cuda]: there is no NVIDIA driver here" in done.stderr


@pytest.mark.parametrize(
    ("archs", "capability", "verdict"),
    [
        ("75 80 86 89 90a 100 120", 75, "machine code for 75"),
        ("75 80 86 89 90a 100 120", 87, "machine code for 86"),
        ("75 80 86 89 90a 100 120", 90, "machine code for 90a"),
        ("75 80 86 89 90a 100 120", 103, "machine code for 100"),
        ("75 80 86 89 90a 100 120", 130, "PTX of 120"),
        ("75 80 86 89 90a 100 120", 70, "none"),
        ("90a", 100, "none"),
        ("80", 90, "PTX of 80"),
        ("", 90, "none"),
    ],
)
def test_which_kernel_image_a_card_runs(archs, capability, verdict):
    assert cli_doctor.kernel_image(archs, capability).startswith(verdict)


def test_a_cold_runs_timeline_has_a_lane_for_what_runs_beside_it():
    line = {
        "launch_ms": 10.0,
        "gguf_open_ms": 1.0,
        "model_load_ms": 180.0,
        "tokenizer_ms": 3.0,
        "prompt_eval_ms": 20.0,
        "process_start_to_first_token_ms": 190.0,
        "first_kernel_at_ms": 165.0,
        "weights_loaded_at_ms": 185.0,
        "device_stages_ms": {"start": 8.0, "driver": 10.0, "init": 100.0, "context": 155.0, "ring": 158.0},
    }
    drawn = {what: (lane, begin, end) for lane, what, begin, end in cli_plot.spans(line)}
    assert drawn["init"] == ("driver", 10.0, 100.0)
    assert drawn["upload"] == ("weights", 155.0, 185.0)
    assert drawn["prompt and head"] == ("prompt", 165.0, 190.0)
    on_cpu = {**line, "device_stages_ms": {}, "first_kernel_at_ms": 0.0, "weights_loaded_at_ms": 0.0}
    assert {lane for lane, *_ in cli_plot.spans(on_cpu)} == {"process", "tokenizer", "prompt"}


class Loading:
    """An engine whose weights come in three looks."""

    def __init__(self, file_bytes: int) -> None:
        self.info = {"file_bytes": file_bytes}
        self.looks = iter([(0, 4 << 30, False), (1 << 30, 4 << 30, False), (3 << 30, 4 << 30, False)])

    @property
    def load_progress(self) -> tuple[int, int, bool]:
        return next(self.looks, (4 << 30, 4 << 30, True))


@pytest.fixture
def terminal(monkeypatch) -> list[tuple[int, str]]:
    """What is written; stderr is a terminal, and a thread that is started has all its turns at once."""
    import _thread
    import posix

    said: list[tuple[int, str]] = []
    monkeypatch.setattr(posix, "isatty", lambda fd: fd == 2)
    monkeypatch.setattr(cli, "write", lambda fd, text: said.append((fd, text)))
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, arguments: run(*arguments))
    monkeypatch.setattr(cli_model, "PROGRESS_EVERY_S", 0)
    return said


def test_progress_of_a_long_load_on_a_terminal(terminal):
    cli_model.Progress(Loading(2 << 30))
    assert terminal == [
        (2, "\rloading 1.1 of 4.3 GB, 25%"),
        (2, "\rloading 3.2 of 4.3 GB, 75%"),
        (2, "\r\x1b[K"),
    ]


@pytest.mark.parametrize(("file_bytes", "on_terminal"), [(2 << 30, False), (5 << 20, True)])
def test_no_progress_of_a_short_load_nor_into_a_file(terminal, monkeypatch, file_bytes, on_terminal):
    import posix

    monkeypatch.setattr(posix, "isatty", lambda fd: on_terminal)
    cli_model.Progress(Loading(file_bytes)).clear()
    assert terminal == []


def test_a_load_that_ends_while_it_is_looked_at_leaves_no_line(terminal, monkeypatch):
    """Between the look and the write the result's command cleared the line: then it came back once more."""
    import _thread

    class Ending(Loading):
        @property
        def load_progress(self) -> tuple[int, int, bool]:
            progress.clear()
            return 1 << 30, 4 << 30, False

    monkeypatch.setattr(_thread, "start_new_thread", lambda run, arguments: None)
    progress = cli_model.Progress(Loading(2 << 30))
    progress.tell(Ending(2 << 30))
    assert terminal == [(2, "\r\x1b[K")]


@pytest.mark.parametrize(
    ("words", "at_work", "holding"),
    [
        ([], "not seen from here", []),
        (["/usr/bin/nvidia-persistenced", "--user", "x"], "running without --uvm-persistence-mode", []),
        (
            ["/usr/bin/nvidia-persistenced", "--uvm-persistence-mode"],
            "running with --uvm-persistence-mode",
            ["nvidia-persistenced --uvm-persistence-mode"],
        ),
        (
            ["/opt/reflex/bin/python3", "-c", "x", "/opt/reflex", "hold"],
            "not seen from here",
            ["reflex hold"],
        ),
    ],
)
def test_doctor_tells_whether_persistenced_or_somebody_holds_the_driver(words, at_work, holding):
    programs = [(os.path.basename(words[0]).encode(), [w.encode() for w in words])] if words else []
    assert cli_doctor.persistenced(programs) == at_work
    assert cli_doctor.holders(programs) == holding


def test_doctor_tells_that_a_held_driver_leaves_nothing_to_compare_with():
    facts, warnings = {"uvm_held_by": "nobody"}, []
    cli_doctor.judge_hold(facts, warnings, 95.0)
    assert "95 ms off every start" in warnings[0] and "without_hold" not in facts
    cli_doctor.judge_hold(facts, [], 0.5)
    assert facts["without_hold"].startswith("not measured")
    assert facts["uvm_held_by"].startswith("nobody seen from here")
