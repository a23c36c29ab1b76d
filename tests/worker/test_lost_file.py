"""A model file that is truncated in place while the real command has it mapped: its caller is told."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import reflex_command

from .process import LIMIT, Dialled, Process

LOST = "the model file was truncated or could not be read while it was in use"


def lose(path: Path) -> None:
    """Truncate it in place: what is mapped beyond faults from now on."""
    os.truncate(path, 8192)


@pytest.fixture
def model(demo_gguf, tmp_path) -> Path:
    return Path(shutil.copy(demo_gguf, tmp_path / "model.gguf"))


def test_a_file_truncated_under_a_worker_is_told_to_its_client_and_ends_it_with_status_4(model):
    """It was a SIGBUS: no answer, no line, no word of the file."""
    argv = [*reflex_command(), "stdio", str(model), "--device", "cpu"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as popen:
        worker = Process(popen)
        worker.wait_ready()
        worker.tell(id="a", prompt="The sky is", max_tokens=1)
        assert worker.hear()["ok"] is True
        lose(model)
        worker.tell(type="ping", id="p")  # what needs no weights is still answered
        assert worker.hear() == {"event": "pong", "id": "p"}
        worker.write(b'{"id":"b","prompt":"The sky is"}\n{"id":"c","prompt":"The sky is"}\n')
        final = worker.hear()
        assert (final["id"], final["ok"], final["error_kind"]) == ("b", False, "io")
        assert final["error"] == f"{model}: {LOST}"
        assert worker.at_end() and worker.status() == 4
        assert popen.stderr and popen.stderr.read().decode() == f"reflex: error [io]: {model}: {LOST}\n"


def test_a_file_truncated_between_streamed_tokens_ends_in_whole_lines(model):
    """The final that a lost file leaves must not stand in the middle of a token's line."""
    argv = [*reflex_command(), "stdio", str(model), "--device", "cpu"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as popen:
        fcntl.fcntl(popen.stdout, fcntl.F_SETPIPE_SZ, 4096)  # a hundred tokens at most until somebody reads
        worker = Process(popen)
        worker.tell(id="a", prompt="Once", max_tokens=2000, ignore_eos=True, stream=True)
        assert worker.hear()["event"] == "token"
        lose(model)
        heard = worker.hear_until("final")
        assert (heard[-1]["id"], heard[-1]["error_kind"]) == ("a", "io") and len(heard) < 2000
        assert worker.at_end() and worker.status() == 4


def test_a_file_truncated_under_uds_is_told_and_a_client_between_requests_hears_nothing(model, folder):
    argv = [*reflex_command(), "uds", str(folder / "s"), str(model), "--device", "cpu"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as popen:
        assert popen.stderr and b"READY" in popen.stderr.readline()
        with Dialled(folder / "s") as first:  # served and gone: its descriptor is nobody's to write to
            first.tell(id="a", prompt="The sky is", max_tokens=1)
            assert first.hear()["ok"] is True
        lose(model)
        with Dialled(folder / "s") as client:
            client.tell(id="b", prompt="The sky is")
            assert client.hear()["error_kind"] == "io" and client.at_end()
        assert popen.wait(LIMIT) == 4


def test_a_file_truncated_under_generate_is_one_line_and_status_4(model):
    argv = [*reflex_command(), "generate", str(model), "Once", "--device", "cpu"]
    argv += ["--max-tokens", "2000", "--ignore-eos", "--stream", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
        assert popen.stdout and popen.stderr
        fcntl.fcntl(popen.stdout, fcntl.F_SETPIPE_SZ, 4096)
        assert popen.stdout.readline()
        lose(model)
        assert b"REFLEX_GENERATE_OK" not in popen.stdout.read()
        assert popen.wait(LIMIT) == 4
        assert popen.stderr.read().decode() == f"reflex: error [io]: {model}: {LOST}\n"


def test_another_sigbus_still_ends_the_command_as_a_sigbus(model):
    argv = [*reflex_command(), "stdio", str(model), "--device", "cpu"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
        assert popen.stderr and b"READY" in popen.stderr.readline()
        popen.send_signal(signal.SIGBUS)
        assert popen.wait(LIMIT) == -signal.SIGBUS


def test_the_python_api_leaves_the_signal_to_its_program(model):
    code = (
        "import os, sys; from reflex_worker import Engine; e = Engine(sys.argv[1], device='cpu');"
        "os.truncate(sys.argv[1], 8192); e.generate('x').run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], cwd="/", capture_output=True, timeout=LIMIT
    )
    assert (done.returncode, done.stderr) == (-signal.SIGBUS, b"")
