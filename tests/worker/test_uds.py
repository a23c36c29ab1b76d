"""`reflex uds` as a process, around the fake engine: the socket file, one connection at a time, clients
that leave in every way there is."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
from reflex_protocol.client import AsyncClient, Client
from reflex_protocol.messages import Request

from .process import LIMIT, WAIT, Dialled, alive, delivered, eventually, fake_argv, stdio_worker, uds_worker


def fails(path, **options) -> tuple[int, str]:
    """Status and stderr of a worker that cannot have its socket."""
    done = subprocess.run(
        fake_argv("uds", socket=str(path), **options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT,
    )
    assert done.stdout == b""
    return done.returncode, done.stderr.decode()


# ---- the socket file -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "mode"), [({}, 0o600), ({"mode": 0o660}, 0o660), ({"mode": 0o666}, 0o666)]
)
def test_the_mode_of_the_socket(folder, options, mode):
    with uds_worker(folder / "s", **options):
        found = os.lstat(folder / "s")
        assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == mode


def test_the_ready_line_names_the_socket(folder):
    with uds_worker(folder / "s", ready=False) as worker:
        line = worker.wait_ready()
        assert line.startswith("REFLEX_UDS_READY ") and f'socket="{folder}/s"' in line


def test_the_socket_is_there_while_the_model_loads(folder):
    with uds_worker(folder / "s", ready=False, engine={"gate": str(folder / "gate")}) as worker:
        assert eventually(lambda: (folder / "s").exists())
        with Client.connect(str(folder / "s")) as client:
            assert client.hello(timeout=WAIT).state == "loading"
            (folder / "gate").touch()
            assert client.generate("ab", max_tokens=1, timeout=WAIT).text == "a"
        worker.wait_ready()


def test_whoever_sees_the_file_can_connect(folder):
    """Once the file appeared at bind(), a moment before listen(), and callers were refused."""
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    before = os.lstat(path).st_ino
    with uds_worker(path, ready=False) as worker:
        while os.lstat(path).st_ino == before:
            assert worker.popen.poll() is None
        with Dialled(path) as client:
            client.tell(type="ping")
            assert client.hear()["event"] == "pong"
    assert os.listdir(folder) == ["s"]


def test_a_leftover_of_a_worker_killed_while_it_made_its_socket_does_no_harm(folder):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "s.new"))
    with uds_worker(folder / "s"), Dialled(folder / "s") as client:
        client.tell(type="ping")
        assert client.hear()["event"] == "pong"
        assert os.listdir(folder) == ["s"]


def test_a_stale_socket_file_is_replaced(folder):
    with uds_worker(folder / "s") as first:
        first.popen.kill()
        first.status()
    assert (folder / "s").exists()
    with uds_worker(folder / "s"), Client.connect(str(folder / "s")) as client:
        client.ping(timeout=WAIT)


def test_a_live_socket_is_never_stolen(folder):
    with uds_worker(folder / "s") as worker, Client.connect(str(folder / "s")) as client:
        status, stderr = fails(folder / "s")
        assert status == 4
        assert "expected no listener there, found a process that listens" in stderr
        client.ping(timeout=WAIT)
        worker.popen.terminate()
        assert worker.status() == 0
        assert not (folder / "s").exists()


def test_a_live_socket_with_a_full_backlog_is_not_taken_for_a_stale_one(folder):
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        callers = []
        while True:
            caller = socket.socket(socket.AF_UNIX)
            callers.append(caller)
            caller.setblocking(False)
            try:
                caller.connect(path)
            except BlockingIOError:
                break
        status, stderr = fails(path)
        for caller in callers:
            caller.close()
        assert status == 4 and "found a process that listens" in stderr
    assert os.path.exists(path)


def test_of_many_that_find_a_stale_socket_one_wins(folder):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "s"))
    argv = fake_argv("uds", socket=str(folder / "s"))
    pipe = subprocess.PIPE
    racers = [subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=pipe) for _ in range(6)]
    try:
        assert eventually(lambda: sum(r.poll() is not None for r in racers) == 5)
        (winner,) = [r for r in racers if r.poll() is None]
        assert {r.returncode for r in racers if r is not winner} == {4}
        with Client.connect(str(folder / "s")) as client:
            client.ping(timeout=WAIT)
        winner.terminate()
        assert winner.wait(LIMIT) == 0
        assert not (folder / "s").exists()
    finally:
        for racer in racers:
            if racer.poll() is None:
                racer.kill()
            racer.communicate()


@pytest.mark.parametrize("make", ["write_text", "mkdir", "symlink_to"])
def test_a_file_that_is_no_socket_is_left_alone(folder, make):
    path = folder / "s"
    getattr(path, make)(*{"write_text": ["precious"], "symlink_to": [folder / "t"]}.get(make, []))
    status, stderr = fails(path)
    assert status == 4 and "another kind of file" in stderr
    assert os.path.lexists(path)


def test_paths_that_are_too_long_are_refused_with_their_length(folder):
    name = "s" * (107 - len(str(folder)) - 1)
    with uds_worker(folder / name), Client.connect(str(folder / name)) as client:
        client.ping(timeout=WAIT)
    status, stderr = fails(folder / (name + "s"))
    assert status == 2 and "expected 1 to 107 bytes, found 108" in stderr
    status, stderr = fails(folder / ("é" * (len(name) // 2 + 1)))
    assert status == 2 and "bytes" in stderr


def test_a_folder_that_is_not_there_is_an_io_error(folder):
    status, stderr = fails(folder / "none/s")
    assert status == 4 and "No such file or directory" in stderr


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "shutdown"])
def test_the_file_is_removed_at_the_end(folder, end):
    with uds_worker(folder / "s") as worker:
        if end == "shutdown":
            with Client.connect(str(folder / "s")) as client:
                client.shutdown(timeout=WAIT)
        else:
            worker.popen.send_signal(getattr(signal, end))
        assert worker.status() == 0
        assert not (folder / "s").exists()


def test_the_file_is_removed_by_a_second_sigterm_too(folder):
    with uds_worker(folder / "s") as worker, Dialled(folder / "s") as client:
        client.tell(prompt="hang:", progress=True)
        client.hear_until("progress")
        worker.popen.terminate()
        assert eventually(lambda: delivered(worker.popen.pid, signal.SIGTERM))
        assert client.silent(0.1)
        worker.popen.terminate()
        assert worker.status() == 128 + signal.SIGTERM
        assert not (folder / "s").exists()


def test_the_file_of_another_is_not_removed(folder):
    with uds_worker(folder / "s") as worker:
        os.unlink(folder / "s")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(folder / "s"))
            worker.popen.terminate()
            assert worker.status() == 0
            assert (folder / "s").exists()


def test_a_model_that_will_not_load_leaves_no_socket_behind(folder):
    status, stderr = fails(folder / "s", model="bad.gguf")
    assert status == 3 and "[gguf]" in stderr
    assert not (folder / "s").exists()


# ---- one connection at a time --------------------------------------------------------------


def test_one_connection_after_another(folder):
    with uds_worker(folder / "s"):
        for i in range(5):
            with Client.connect(str(folder / "s")) as client:
                assert client.generate("ab", max_tokens=i, timeout=WAIT).text == "abab"[:i]


def test_a_second_hello_waits_until_the_first_connection_closes(folder):
    with uds_worker(folder / "s"):
        with Dialled(folder / "s") as first:
            first.tell(type="ping")
            first.hear()
            second = Dialled(folder / "s")
            second.tell(id="2", type="hello")
            assert second.silent(0.3)
            first.tell(type="ping")
            assert first.hear()["event"] == "pong"
        with second:
            assert second.hear()["id"] == "2"


@pytest.mark.parametrize(
    "line", [b'{"id":"2","type":"hello"}\n', b'{"id":"2","prompt":"x"}\n', b'{"id":"2",oops\n']
)
def test_with_busy_a_second_caller_is_told_so_and_let_go(folder, line):
    with uds_worker(folder / "s", busy=True), Dialled(folder / "s") as first:
        first.tell(id="1", prompt="slow:", max_tokens=20, stream=True)
        first.hear()
        with Dialled(folder / "s") as second:
            assert second.silent(0.1), "it never speaks first"
            second.write(line[:5])
            second.write(line[5:])
            answer = second.hear()
            assert (answer["id"], answer["ok"], answer["error_kind"]) == ("2", False, "busy")
            assert second.at_end()
        assert first.hear_until("final")[-1]["finish_reason"] == "length"


def test_with_busy_a_silent_caller_is_served_when_the_first_has_left(folder):
    with uds_worker(folder / "s", busy=True):
        with Dialled(folder / "s") as first:
            first.tell(type="ping")
            first.hear()
            second = Dialled(folder / "s")
            second.write(b'{"id":"2","ty')
            assert second.silent(0.2)
        with second:
            second.write(b'pe":"ping"}\n')
            assert second.hear() == {"event": "pong", "id": "2"}


def test_with_busy_callers_that_hang_up_or_crowd_in_do_no_harm(folder):
    with uds_worker(folder / "s", busy=True) as worker, Dialled(folder / "s") as first:
        first.tell(type="ping")
        first.hear()
        n_fds = worker.n_fds()
        crowd = [Dialled(folder / "s") for _ in range(40)]
        for caller in crowd[:20]:
            caller.socket.close()
        for caller in crowd[20:]:
            caller.tell(type="hello")
            assert caller.hear()["error_kind"] == "busy"
            caller.socket.close()
        first.tell(type="ping")
        assert first.hear()["event"] == "pong"
        assert eventually(lambda: worker.n_fds() == n_fds)


# ---- clients that leave --------------------------------------------------------------------


def test_a_client_that_shuts_its_sending_side_is_still_answered(folder):
    with uds_worker(folder / "s"), Dialled(folder / "s") as client:
        client.tell(id="1", prompt="slow:", max_tokens=5)
        client.write(b'{"id":"2","prompt":"ab","max_tokens":1}')
        client.socket.shutdown(socket.SHUT_WR)
        assert [client.hear()["id"], client.hear()["id"]] == ["1", "2"]
        assert client.at_end()


LEAVING = {
    "prefill": ({"chunk": 1}, {"prompt": "slow:" + "p" * 50_000, "progress": True}, "progress"),
    "decode": ({}, {"prompt": "slow:", "max_tokens": 100_000, "stream": True}, "token"),
    "decode without a word": ({}, {"prompt": "slow:", "max_tokens": 100_000, "progress": True}, "progress"),
    "fast decode": ({}, {"prompt": "ab", "max_tokens": 100_000_000, "stream": True}, "token"),
}


@pytest.mark.parametrize("half_closed", [False, True], ids=["open", "half-closed"])
@pytest.mark.parametrize("stage", LEAVING)
def test_a_client_that_leaves_cancels_its_requests(folder, stage, half_closed):
    engine, request, event = LEAVING[stage]
    with uds_worker(folder / "s", engine=engine) as worker:
        with Dialled(folder / "s") as client:
            for i in range(3):
                client.tell(id=str(i), **request)
            if half_closed:
                client.socket.shutdown(socket.SHUT_WR)
            client.hear_until(event)
        with Dialled(folder / "s") as after:
            after.tell(id="after", prompt="ab", max_tokens=1)
            assert after.hear()["id"] == "after"
        assert worker.popen.poll() is None


def test_a_client_that_leaves_while_the_model_loads(folder):
    with uds_worker(folder / "s", ready=False, engine={"gate": str(folder / "gate")}):
        assert eventually(lambda: (folder / "s").exists())
        with Dialled(folder / "s") as client:
            client.tell(prompt="slow:", max_tokens=100_000)
            client.tell(type="ping")
            client.hear()
        (folder / "gate").touch()
        with Dialled(folder / "s") as after:
            after.tell(id="after", prompt="ab", max_tokens=1)
            assert after.hear()["id"] == "after"


def test_a_client_that_leaves_a_worker_blocked_in_writing(folder):
    with uds_worker(folder / "s") as worker:
        with Dialled(folder / "s") as client:
            client.tell(prompt="ab", max_tokens=100_000_000, stream=True)
            client.hear()
            assert eventually(lambda: sleeping(worker.popen.pid))
        with Dialled(folder / "s") as after:
            after.tell(id="after", prompt="ab", max_tokens=1)
            assert after.hear()["id"] == "after"


def sleeping(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] == "S"


CLIENT = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect({path!r})
s.sendall({data!r})
s.recv(1)
print(flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("stage", LEAVING)
def test_kill_9_of_the_client(folder, stage):
    engine, request, _ = LEAVING[stage]
    import json

    data = json.dumps({"id": "x", **request}).encode() + b"\n"
    code = CLIENT.format(path=str(folder / "s"), data=data * 2)
    with uds_worker(folder / "s", engine=engine):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as client:
            assert client.stdout
            client.stdout.readline()
            client.kill()
        with Dialled(folder / "s") as after:
            after.tell(id="after", prompt="ab", max_tokens=1)
            assert after.hear()["id"] == "after"


def test_what_a_client_said_before_it_left_about_leaving_still_counts(folder):
    with uds_worker(folder / "s") as worker:
        with Dialled(folder / "s") as client:
            client.write(b'{"prompt":"slow:","max_tokens":1000}\n{"type":"shutdown"}\n')
        assert worker.status() == 0


def test_a_load_line_of_a_client_that_left_at_once(folder):
    with uds_worker(folder / "s", model=None):
        with Dialled(folder / "s") as client:
            client.tell(type="load", model="m.gguf")
        with Dialled(folder / "s") as after:
            after.tell(id="after", prompt="ab", max_tokens=1)
            assert after.hear()["ok"]


def test_signals_while_a_client_is_connected(folder):
    with uds_worker(folder / "s") as worker, Dialled(folder / "s") as client:
        client.tell(id="run", prompt=f"until:{folder}/end", max_tokens=1_000_000, stream=True)
        client.hear()
        client.tell(id="wait", prompt="ab")
        client.tell(type="ping")
        client.hear_until("pong")
        worker.terminate_and_wait_until_it_knows(client)
        (folder / "end").touch()
        assert client.hear_until("final")[-1]["finish_reason"] == "length"
        assert client.hear()["error_kind"] == "shutting_down"
        assert client.at_end() and worker.status() == 0


# ---- a long life ---------------------------------------------------------------------------


def test_500_connections_leave_memory_and_descriptors_as_they_were(folder):
    with uds_worker(folder / "s") as worker:

        def many(n: int) -> None:
            for i in range(n):
                with Dialled(folder / "s") as client:
                    client.tell(prompt="abc", max_tokens=2)
                    if i % 3:
                        client.hear()

        many(100)
        with Dialled(folder / "s") as client:
            client.tell(type="ping")
            client.hear()
            rss, fds = worker.rss_kib(), worker.n_fds()
        many(500)
        with Dialled(folder / "s") as client:
            client.tell(type="ping")
            client.hear()
            assert worker.n_fds() == fds
            assert worker.rss_kib() <= rss + 1024


async def test_the_asyncio_client_over_a_socket(folder):
    with uds_worker(folder / "s"):
        async with await AsyncClient.connect(str(folder / "s")) as client:
            events = [e async for e in client.stream(Request(prompt="ab", max_tokens=3, stream=True))]
            assert events[-1].text == "aba"


def test_stdio_and_uds_answer_alike(folder):
    data = b'{"id":"1","prompt":"ab","max_tokens":2,"stream":true}\nnope\n'
    data += b'{"id":"2","prompt":"a","candidates":["x"]}\n'
    with uds_worker(folder / "s"), stdio_worker() as worker, Dialled(folder / "s") as client:
        for lines in (worker, client):
            lines.write(data)
        for _ in range(5):
            assert worker.hear() == client.hear()


def test_alive_tells_the_living_from_the_dead():
    """The helper that other tests trust."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert alive(os.getpid()) and not alive(process.pid)
