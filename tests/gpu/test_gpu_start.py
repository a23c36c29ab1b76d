"""Starting the driver: what the command sets and the Python API leaves alone; devices that are not there; a
card without room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import reflex_command

pytestmark = pytest.mark.gpu


def run(code: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_api_sets_no_environment_and_starts_no_driver() -> None:
    code = """
import os
before = dict(os.environ)
import reflex_worker
reflex_worker.Engine
maps = open("/proc/self/maps").read()
print(dict(os.environ) == before, "libcuda" in maps)
"""
    assert run(code) == "True False"


def test_an_engine_of_the_api_sets_no_environment() -> None:
    code = """
import ctypes
from reflex_worker import Engine
from reflex_worker.cli_model import demo_path
e = Engine(demo_path(), device="cuda")
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"CUDA_DEVICE_MAX_CONNECTIONS"), e.info["device"].split()[0])
"""
    assert run(code) == "None CUDA"


def test_the_commands_driver_is_the_one_that_boot_started(reflex) -> None:
    done = reflex("generate", "--demo", "Once", "--max-tokens", "1", "--device", "cuda", "--json")
    row = json.loads(done.stdout)
    stages = row["device_stages_ms"]
    assert row["device"].startswith("CUDA")
    assert list(stages) == ["start", "driver", "init", "context", "ring"]
    assert stages["start"] < row["launch_ms"], "the driver was started after the core was there"
    assert sorted(stages.values()) == list(stages.values())
    assert row["first_kernel_at_ms"] >= stages["context"]


def test_tokens_are_the_cpus(reflex) -> None:
    ids = []
    for device in ("cpu", "cuda", "auto"):
        done = reflex("generate", "--demo", "Once upon a time", "--exact", "--device", device, "--json")
        ids.append(json.loads(done.stdout)["token_ids"])
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize("device", ["cuda:63", "cuda:1000"])
def test_a_device_that_is_not_there(reflex, device: str) -> None:
    done = reflex("generate", "--demo", "x", "--device", device)
    assert done.returncode == 6 and "[cuda]" in done.stderr and done.stderr.count("\n") == 1


def test_no_visible_device_is_an_error_for_cuda_and_the_cpu_for_auto(reflex) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = reflex("generate", "--demo", "x", "--device", "cuda", env=env)
    assert done.returncode == 6 and "[cuda]" in done.stderr
    done = reflex("generate", "--demo", "x", "--max-tokens", "1", "--json", env=env)
    assert done.returncode == 0 and json.loads(done.stdout)["device"].startswith("CPU")


def test_a_card_without_room_is_out_of_memory_with_need_and_have() -> None:
    code = """
import ctypes, sys
from reflex_worker import Engine, ReflexError
from reflex_worker.cli_model import demo_path
Engine(demo_path(), device="cuda")
cuda = ctypes.CDLL("libcuda.so.1")
context, free, total, p = (ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_ulonglong())
device = ctypes.c_int()
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
cuda.cuCtxSetCurrent(context)
step = 1 << 34
while step >= 1 << 20:  # take all but a megabyte
    if cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(step)):
        step //= 2
try:
    Engine(demo_path(), device="cuda")
except ReflexError as e:
    print(e.kind, "needed" in str(e), "free" in str(e))
"""
    assert run(code) == "out_of_memory True True"


def test_smoke_and_doctor_on_the_card(reflex) -> None:
    done = reflex("smoke", "--device", "cuda")
    assert done.returncode == 0 and 'device="CUDA' in done.stdout
    facts = json.loads(reflex("doctor", "--json").stdout)
    assert "machine code for" in facts["gpu_0"]
    assert facts["cu_init_ms"] > 0 and facts["cu_init_held_ms"] > 0
    assert facts["nvml"] and facts["nvcc_at_build"][0].isdigit()


def test_hold_has_called_cu_init_and_holds_no_memory_of_the_card() -> None:
    holder = subprocess.Popen([*reflex_command(), "hold"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().startswith("REFLEX_HOLD_READY")
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        assert str(holder.pid) not in subprocess.run(query, capture_output=True, text=True).stdout.split()
        stat = Path(f"/proc/{holder.pid}/stat")
        ticks = stat.read_text().split()[13:15]
        time.sleep(1)
        assert stat.read_text().split()[13:15] == ticks, "it used the CPU"
    finally:
        holder.terminate()
    assert holder.wait(timeout=60) == 0


def test_the_floor_reads_every_byte(reflex, demo_gguf) -> None:
    done = reflex("bench", "--demo", "--floor", "--json")
    row = json.loads(done.stdout)
    assert row["file_bytes"] == demo_gguf.stat().st_size
    assert 0 < row["init_ms"] < row["context_ms"] < row["bytes_ms"]


def test_bench_cold_on_the_card_has_the_cards_floor(reflex) -> None:
    done = reflex("bench", "--demo", "--cold", "2", "--device", "cuda", "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["device"].startswith("CUDA") and "on the card" in last["floor"]
    assert last["floor_ms_p50"] > 10


@pytest.mark.parametrize("sig", ["TERM", "INT", "KILL"])
def test_a_killed_command_leaves_the_card_as_it_was(sig: str) -> None:
    used = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    before = int(subprocess.run(used, capture_output=True, text=True).stdout.split()[0])
    process = subprocess.Popen(
        [*reflex_command(), "generate", "--demo", "Once", "--max-tokens", "1900", "--ignore-eos"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(0.25)
    process.send_signal(getattr(signal, f"SIG{sig}"))
    process.wait(timeout=60)
    for _ in range(50):
        now = int(subprocess.run(used, capture_output=True, text=True).stdout.split()[0])
        if now <= before + 16:
            return
        time.sleep(0.1)
    raise AssertionError(f"{now} MiB are in use, {before} were before")


def test_a_long_request_tells_the_cards_joules() -> None:
    worker = subprocess.Popen(
        [*reflex_command(), "stdio", "--demo", "--device", "cuda"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    line = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "energy": True}
    said, _ = worker.communicate(2 * (json.dumps(line) + "\n"), timeout=120)
    final = json.loads(said.splitlines()[1])  # the meters are opened beside the first
    assert final["ok"] and final["usage"]["completion_tokens"] == 1900
    assert final["energy"]["gpu"] > 1
