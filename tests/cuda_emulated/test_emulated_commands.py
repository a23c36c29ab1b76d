"""The commands that tell of a GPU, where the driver is the emulated one: phases, the doctor, the floor
of a cold start, a held driver; and what goes wrong on a card that is full or too old. No time is judged.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from ..conftest import reflex_command
from .conftest import run_python

Run = Callable[..., subprocess.CompletedProcess[str]]

DOCTOR = """
import json
from reflex_worker import cli_doctor
cli_doctor.has_driver = lambda: True  # the emulated one has no device file
warnings = []
print(json.dumps([cli_doctor.gpu_facts(warnings), warnings]))
"""
# What is imported may not touch the process: no environment, no driver, no thread, and it goes on.
IMPORTS = """
import ctypes, os
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
names = (b"CUDA_VISIBLE_DEVICES", b"CUDA_DEVICE_MAX_CONNECTIONS", b"CUDA_DEVICE_MAX_COPY_CONNECTIONS")
before = dict(os.environ)
import reflex_worker
from reflex_worker import Engine, ReflexError, api
maps = open("/proc/self/maps").read()
print(dict(os.environ) == before, "libcuda" in maps, len(os.listdir("/proc/self/task")))
try:
    Engine("/nowhere.gguf", device="cuda")
except ReflexError as e:
    print(e.kind)
print([getenv(name) for name in names] == [None] * 3)
"""

# The command's first import, in a process that nothing else has set up.
BOOT = """
import ctypes
from reflex_worker import _boot
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
boot = _boot.start(device=2)
names = (b"CUDA_VISIBLE_DEVICES", b"CUDA_DEVICE_MAX_CONNECTIONS", b"CUDA_DEVICE_MAX_COPY_CONNECTIONS")
print(*[getenv(name).decode() for name in names])
import sys
print([m for m in ("numpy", "msgspec", "argparse", "json", "tokenizers", "asyncio") if m in sys.modules])
# As every command leaves: the driver's thread may be at work, which what exit() takes apart is not to meet.
import os
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def emulated(emulated_environment: dict[str, str]) -> Run:
    """Runs `reflex ARGS...`, settings of the emulator or of CUDA as keywords."""

    def run(*args: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*reflex_command(), *args],
            capture_output=True,
            text=True,
            timeout=600,
            env={**emulated_environment, **settings},
            stdin=subprocess.DEVNULL,
        )

    return run


def python(env: dict[str, str], code: str, **settings: str) -> list[str]:
    return run_python({**env, **settings}, code).splitlines()


def test_smoke_tells_every_phase(emulated: Run) -> None:
    row = json.loads(emulated("smoke", "--device", "cuda", "--json").stdout)
    assert row["device"].startswith("CUDA emulated")
    for phase in ("launch", "gguf_open", "model_load", "tokenize", "prompt_eval", "first_kernel_at", "total"):
        assert row[f"{phase}_ms"] > 0, phase
    assert row["cuda_init_ms"] >= 0
    assert list(row["device_stages_ms"]) == ["start", "driver", "init", "context", "ring"]
    assert (
        row["device_stages_ms"]["context"] <= row["first_kernel_at_ms"] <= row["weights_loaded_at_ms"] + 1e5
    )


def test_the_worker_tells_every_phase(emulated_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*reflex_command(), "stdio", "--demo", "--device", "cuda"],
        input='{"id":"a","prompt":"Once","max_tokens":2}\n',
        capture_output=True,
        text=True,
        timeout=600,
        env=emulated_environment,
    )
    timings = json.loads(done.stdout)["timings"]
    assert {"launch", "gguf_open", "cuda_init", "model_load", "first_kernel_at"} < timings.keys()
    assert {"tokenize", "prompt_eval", "total"} < timings.keys() and timings["first_kernel_at"] > 0


def test_the_doctor_tells_the_card_without_nvml_and_what_a_start_costs(
    emulated_environment: dict[str, str],
) -> None:
    facts, _ = json.loads(python(emulated_environment, DOCTOR)[0])
    assert facts["gpu_0"].startswith("CUDA emulated") and "machine code for" in facts["gpu_0"]
    assert facts["nvml"].startswith("none") and "gpu_driver" in facts
    for fact in ("cu_init_ms", "cu_init_held_ms", "start_ms", "start_held_ms"):
        assert facts[fact] > 0
    assert facts["cuda_visible_devices"] == "not set: all"
    assert facts["nvidia_persistenced"] == "not seen from here" or "running" in facts["nvidia_persistenced"]


def test_the_doctor_names_what_makes_a_start_slow(emulated_environment: dict[str, str]) -> None:
    settings = {"CUDA_VISIBLE_DEVICES": "0,1,2", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    facts, warnings = json.loads(python(emulated_environment, DOCTOR, **settings)[0])
    assert facts["cuda_visible_devices"] == "0,1,2"
    assert any("lists 3 GPUs" in w for w in warnings)
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=8" in w for w in warnings)


def test_the_doctor_sees_who_holds_the_driver(emulated_environment: dict[str, str]) -> None:
    command = [*reflex_command(), "hold"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=emulated_environment) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline().startswith("REFLEX_HOLD_READY cu_init_ms=")
            facts, _ = json.loads(python(emulated_environment, DOCTOR)[0])
        finally:
            holder.terminate()
        assert holder.wait(timeout=120) == 0
    assert "reflex hold" in facts["uvm_held_by"]
    assert facts["without_hold"].startswith("not measured")


def test_a_card_older_than_every_image_is_told_in_a_sentence(
    emulated: Run, emulated_environment: dict[str, str]
) -> None:
    for command in (["smoke"], ["generate", "--demo", "Once"]):
        done = emulated(*command, "--device", "cuda", REFLEX_EMULATOR_CAPABILITY="70")
        assert done.returncode == 6 and done.stderr.count("\n") == 1
        assert "[cuda]" in done.stderr and "compute capability 7.0" in done.stderr
        assert "this build has kernels for" in done.stderr
    facts, warnings = json.loads(python(emulated_environment, DOCTOR, REFLEX_EMULATOR_CAPABILITY="70")[0])
    assert "compute capability 7.0" in facts["start_ms"]
    assert "the bundled model does not run on the GPU" in warnings


def test_a_driver_older_than_the_kernels_is_not_told_as_a_card_without_kernels(emulated: Run) -> None:
    done = emulated("generate", "--demo", "Once", "--device", "cuda", REFLEX_EMULATOR_OLD_DRIVER="1")
    assert done.returncode == 6 and done.stderr.count("\n") == 1
    assert "the NVIDIA driver (CUDA 13.0) is too old" in done.stderr


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_card_too_full_for_a_context_is_out_of_memory_and_no_fault_of_the_driver(
    emulated: Run, device: str
) -> None:
    done = emulated("generate", "--demo", "Once", "--device", device, REFLEX_EMULATOR_MEMORY="0")
    assert done.returncode == 5 and done.stderr.count("\n") == 1
    assert "[out_of_memory]" in done.stderr and "are needed" in done.stderr and "free" in done.stderr


@pytest.mark.parametrize("megabytes", ["1", "30", "64"])
def test_out_of_memory_at_any_point_of_a_load_names_need_and_have(emulated: Run, megabytes: str) -> None:
    done = emulated("generate", "--demo", "Once", "--device", "cuda", REFLEX_EMULATOR_MEMORY=megabytes)
    assert done.returncode == 5 and done.stderr.count("\n") == 1
    assert "[out_of_memory]" in done.stderr and "MiB are needed" in done.stderr
    assert f"of its {megabytes} MiB are free" in done.stderr


def test_importing_the_api_beside_a_driver_leaves_the_process_alone(
    emulated_environment: dict[str, str],
) -> None:
    env = {k: v for k, v in emulated_environment.items() if not k.startswith("CUDA_")}
    assert python(env, IMPORTS) == ["True False 1", "io", "True"]


def test_bench_cold_has_the_cards_floor_beside_it(emulated: Run) -> None:
    done = emulated("bench", "--demo", "--cold", "1", "--pause", "0", "--device", "cuda", "--json")
    *phases, last = map(json.loads, done.stdout.splitlines())
    assert "on the card" in last["floor"] and last["floor_ms_p50"] > 0
    told = {row["phase"]: row["p50"] for row in phases}
    assert told["first_kernel_at_ms"] > 0 and told["weights_loaded_at_ms"] > 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "2 1 1"),
        ({"CUDA_VISIBLE_DEVICES": "5,6,7", "CUDA_DEVICE_MAX_CONNECTIONS": "4"}, "5,6,7 4 1"),
    ],
)
def test_device_and_one_connection_are_set_by_the_first_import_unless_the_user_did(
    emulated_environment: dict[str, str], given: dict[str, str], wanted: str
) -> None:
    env = {k: v for k, v in emulated_environment.items() if not k.startswith("CUDA_")}
    assert python(env, BOOT, **given) == [wanted, "[]"]
