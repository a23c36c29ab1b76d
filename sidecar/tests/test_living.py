"""Living with a worker that does one thing at a time: the line, hung-up clients, crashes, the end."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import READY, START_SECONDS, Server, StartServer, error_of, events_of

SLOW = "[[say:x]][[never-end]][[slow:20]]"


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def cancelled(log: Path) -> int:
    return sum("cancelled" in line for line in lines_of(log))


@pytest.fixture
def worker_log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def logged(start_server: StartServer, worker_log: Path) -> Server:
    return start_server(env={"FAKE_LOG": str(worker_log)})


OpenRequest = Callable[..., socket.socket]


@pytest.fixture
def open_request() -> Iterator[OpenRequest]:
    """A connection on which a request has been written by hand; closed by the end of the test."""
    connections: list[socket.socket] = []

    def open_one(server: Server, body: bytes, *, length: int | None = None) -> socket.socket:
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=START_SECONDS)
        connections.append(connection)
        n = len(body) if length is None else length
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {n}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    yield open_one
    for connection in connections:
        connection.close()


def chat_body(text: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


# ---- clients that hang up ------------------------------------------------------------------------


def test_hanging_up_cancels_within_a_token(logged: Server, worker_log: Path, open_request: OpenRequest):
    connection = open_request(logged, chat_body(SLOW, stream=True))
    assert b"200 OK" in connection.recv(1000)
    while b'"content":"x"' not in connection.recv(1000):
        pass
    connection.close()
    logged.until(lambda: cancelled(worker_log) == 1)
    logged.until(lambda: not logged.health()["busy"])
    assert logged.chat("[[say:ok]]").json()["choices"][0]["message"]["content"] == "ok"


def test_hanging_up_on_a_whole_answer_cancels_too(
    logged: Server, worker_log: Path, open_request: OpenRequest
):
    connection = open_request(logged, chat_body(SLOW))
    logged.until(lambda: logged.health()["busy"])
    connection.close()
    logged.until(lambda: cancelled(worker_log) == 1)


def test_hanging_up_during_prefill_cancels(logged: Server, worker_log: Path, open_request: OpenRequest):
    connection = open_request(logged, chat_body("[[prefill:20000]][[chunk:20]]", stream=True))
    logged.until(lambda: logged.health()["busy"])
    connection.close()
    logged.until(lambda: cancelled(worker_log) == 1)


def test_hanging_up_in_line_takes_the_request_out(
    logged: Server, worker_log: Path, open_request: OpenRequest
):
    first = open_request(logged, chat_body(SLOW))
    logged.until(lambda: logged.health()["busy"])
    waiting = open_request(logged, chat_body("never sent"))
    logged.until(lambda: logged.health()["queue"]["waiting"] == 1)
    waiting.close()
    logged.until(lambda: logged.health()["queue"]["waiting"] == 0)
    first.close()
    logged.until(lambda: not logged.health()["busy"])
    assert not any("never sent" in line.get("prompt", "") for line in lines_of(worker_log))


def test_hanging_up_in_the_middle_of_a_body_is_harmless(logged: Server, open_request: OpenRequest):
    connection = open_request(logged, b'{"messages": [', length=1000)
    connection.close()
    assert logged.chat("x").status_code == 200


def test_hanging_up_between_two_of_n_answers_cancels(
    logged: Server, worker_log: Path, open_request: OpenRequest
):
    connection = open_request(logged, chat_body("[[say:abc]][[slow:200]]", n=64, stream=True))
    seen = b""
    while b'"index":2' not in seen:
        seen += connection.recv(4096)
    connection.close()
    logged.until(lambda: not logged.health()["busy"])
    assert sum("prompt" in line for line in lines_of(worker_log)) < 64


def test_a_client_that_does_not_read_stops_nobody_else(logged: Server, open_request: OpenRequest):
    idle = open_request(logged, chat_body("[[say:xxxxxxxxxx]][[never-end]]", stream=True, max_tokens=3000))
    answer = logged.chat("[[say:ok]]")
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
    idle.close()


# ---- the line ------------------------------------------------------------------------------------


def test_a_full_line_is_a_429_that_says_when(start_server: StartServer, open_request: OpenRequest):
    server = start_server("--max-queue", "1")
    server.chat("[[say:x]][[slow:1200]]")  # one turn of more than a second sets the pace
    first = open_request(server, chat_body(SLOW))
    server.until(lambda: server.health()["busy"])
    second = open_request(server, chat_body(SLOW))
    server.until(lambda: server.health()["queue"]["waiting"] == 1)
    r = server.chat("x")
    assert r.status_code == 429 and error_of(r)["code"] == "queue_full"
    assert error_of(r)["type"] == "rate_limit_error"
    assert int(r.headers["retry-after"]) >= 2
    first.close()
    second.close()


def test_two_hundred_clients_at_once(start_server: StartServer):
    server = start_server()

    def ask(i: int) -> tuple[int, str]:
        with httpx.Client(base_url=server.url, timeout=START_SECONDS) as http:
            body = {"messages": [{"role": "user", "content": f"[[say:answer {i}]]"}], "stream": i % 2 == 0}
            r = http.post("/v1/chat/completions", json=body)
            if body["stream"]:
                deltas = [c["delta"] for e in events_of(r)[:-1] for c in e["choices"]]
                return r.status_code, "".join(d.get("content") or "" for d in deltas)
            return r.status_code, r.json()["choices"][0]["message"]["content"]

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    assert answers == [(200, f"answer {i}") for i in range(200)]
    assert server.health()["queue"]["waiting"] == 0


def test_waiting_too_long_is_a_504_not_to_be_tried_again(
    start_server: StartServer, tmp_path: Path, open_request: OpenRequest
):
    server = start_server("--timeout", "0.5")
    first = open_request(server, chat_body("[[hang]]"))
    server.until(lambda: server.health()["busy"])
    r = server.chat("x")
    assert r.status_code == 504 and error_of(r)["code"] == "timeout"
    assert r.headers["x-should-retry"] == "false"
    first.close()


def test_running_too_long_is_a_504_and_cancels(start_server: StartServer, worker_log: Path):
    server = start_server("--timeout", "0.5", env={"FAKE_LOG": str(worker_log)})
    r = server.chat(SLOW)
    assert r.status_code == 504
    server.until(lambda: cancelled(worker_log) == 1)


# ---- a worker that crashes -----------------------------------------------------------------------


def test_a_crash_is_told_and_the_worker_comes_back(start_server: StartServer):
    server = start_server()
    before = server.children()["worker"]
    r = server.chat("[[crash]]")
    assert (
        r.status_code == 503 and error_of(r)["code"] == "worker_crashed" and r.headers["retry-after"] == "1"
    )
    assert "exit status 70" in server.log or "status 70" in error_of(r)["message"]
    server.until(lambda: server.health()["status"] == "ok")
    assert server.children()["worker"] != before
    assert server.chat("[[say:back]]").json()["choices"][0]["message"]["content"] == "back"
    assert server.health()["restarts"] == 1


def test_who_waits_in_line_outlives_a_crash(start_server: StartServer, tmp_path: Path):
    """Only the request in hand is lost; nothing is silently sent twice."""
    server = start_server()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        doomed = pool.submit(server.chat, f"[[say:abc]][[until:{tmp_path}/gate]][[crash-after:2]]")
        server.until(lambda: server.health()["busy"])
        waiting = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json={"prompt": "[[say:ok]]"}, timeout=START_SECONDS
        )
        server.until(lambda: server.health()["queue"]["waiting"] == 1)
        (tmp_path / "gate").touch()
        assert doomed.result().status_code == 503
        assert waiting.result().json()["choices"][0]["text"] == "ok"


def test_kill_9_of_the_worker(start_server: StartServer):
    server = start_server()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        doomed = pool.submit(server.chat, SLOW)
        server.until(lambda: server.health()["busy"])
        os.kill(server.children()["worker"], signal.SIGKILL)
        assert error_of(doomed.result())["code"] == "worker_crashed"
    server.until(lambda: server.health()["status"] == "ok")
    assert "SIGKILL" in server.log


def test_kill_9_of_the_render_process(start_server: StartServer):
    server = start_server()
    os.kill(server.children()["renderer"], signal.SIGKILL)
    server.until(lambda: "renderer" not in server.children() or server.chat("x").status_code == 200)
    answers = [server.chat("[[say:ok]]") for _ in range(2)]
    assert answers[-1].headers["x-reflex-template"] == "model"


def test_kill_9_of_the_server_takes_its_children_along(start_server: StartServer, open_request: OpenRequest):
    server = start_server()
    children = server.children()
    assert set(children) == {"worker", "renderer"}
    open_request(server, chat_body("[[hang]]"))
    server.until(lambda: server.health()["busy"])
    server.process.kill()
    server.process.wait()
    for pid in children.values():
        server.until(lambda pid=pid: is_gone(pid))


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_crashing_over_and_over_ends_the_server(start_server: StartServer):
    server = start_server("--max-crashes", "2")
    server.chat("[[crash]]")
    server.until(lambda: server.health()["status"] == "ok")
    with pytest.raises((httpx.HTTPError, AssertionError)):
        assert server.chat("[[crash]]").status_code == 200
    assert server.process.wait(START_SECONDS) == 1
    assert "crashed 2 times within 120 s, so this ends here" in server.log


def test_a_worker_that_is_stuck_is_killed(start_server: StartServer):
    server = start_server("--stuck-timeout", "1")
    r = server.chat("[[hang]]")
    assert r.status_code == 503 and error_of(r)["code"] == "worker_crashed"
    # What the worker said last names files and devices: it is for the log, not for clients.
    assert "stderr" not in error_of(r)["message"]
    assert "stuck" in server.log
    server.until(lambda: server.health()["status"] == "ok")


def test_a_worker_that_fails_to_load_again_counts_as_crashing(start_server: StartServer, tmp_path: Path):
    crash = tmp_path / "crash"
    server = start_server("--max-crashes", "3", env={"FAKE_CRASH_AT_START": str(crash)})
    crash.write_text("1")
    server.chat("[[crash]]")
    server.until(lambda: server.health()["status"] == "ok")
    assert server.health()["restarts"] == 2


# ---- the beginning and the end -------------------------------------------------------------------


def test_while_loading_requests_are_told_so(start_server: StartServer, tmp_path: Path):
    gate = tmp_path / "gate"
    server = start_server(env={"FAKE_LOAD_GATE": str(gate)}, wait=False)
    port = server.until(lambda: listening_port(server.process.pid))
    server.http.base_url = httpx.URL(f"http://127.0.0.1:{port}")
    server.until(lambda: answers(server, "/livez"))
    r = server.chat("x")
    assert r.status_code == 503 and error_of(r)["code"] == "loading" and "retry-after" in r.headers
    assert server.http.get("/healthz").status_code == server.http.get("/ping").status_code == 204
    assert server.http.get("/health").status_code == 503 and server.health()["status"] == "loading"
    gate.touch()
    server.wait_ready()
    assert server.http.get("/healthz").status_code == 200 and server.chat("x").status_code == 200


def answers(server: Server, path: str) -> bool:
    try:
        return server.http.get(path).status_code == 200
    except httpx.HTTPError:
        return False


def listening_port(pid: int) -> int | None:
    """The port on which a process listens, from /proc."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            return int(fields[1].split(":")[1], 16)
    return None


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(start_server: StartServer):
    server = start_server(env={"FAKE_LOAD_FAIL": "gguf"}, wait=False)
    assert server.process.wait(START_SECONDS) == 3
    assert "reflex-openai: the worker did not start (exit status 3): reflex: error [gguf]" in server.log


def test_sigterm_finishes_what_is_in_hand(start_server: StartServer, tmp_path: Path):
    server = start_server()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.chat, f"[[say:abc]][[until:{tmp_path}/gate]]")
        server.until(lambda: server.health()["busy"])
        waiting = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json={"prompt": "[[say:ok]]"}, timeout=START_SECONDS
        )
        server.until(lambda: server.health()["queue"]["waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("stopping")
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=START_SECONDS)
        assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
        (tmp_path / "gate").touch()
        assert running.result().json()["choices"][0]["message"]["content"] == "abc"
        assert waiting.result().json()["choices"][0]["text"] == "ok"
    assert server.process.wait(START_SECONDS) == 0


EARLY = """
import os
from reflex_sidecar import launch
def start(argv):
    os.kill(os.getpid(), {number})
    return real(argv)
real, launch.start = launch.start, start
launch.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_is_up_leaves_without_a_traceback(number: signal.Signals):
    """Until the web stack was imported SIGINT ended in a KeyboardInterrupt, SIGTERM in a death by signal."""
    code = EARLY.format(number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", code, "--demo", "--port", "0"], capture_output=True, timeout=START_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_second_signal_ends_at_once(start_server: StartServer, open_request: OpenRequest):
    server = start_server("--drain-timeout", "3600")
    open_request(server, chat_body("[[hang]]"))
    server.until(lambda: server.health()["busy"])
    server.process.send_signal(signal.SIGINT)
    server.wait_for_log("stopping")
    server.process.send_signal(signal.SIGINT)
    server.process.wait(START_SECONDS)


def test_a_drain_has_an_end(start_server: StartServer, open_request: OpenRequest):
    server = start_server("--drain-timeout", "0.5")
    open_request(server, chat_body(SLOW))
    server.until(lambda: server.health()["busy"])
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(START_SECONDS) == 0


def test_the_ready_line_is_written_once(start_server: StartServer):
    server = start_server()
    server.chat("[[crash]]")
    server.until(lambda: server.health()["status"] == "ok")
    assert len(READY.findall(server.log)) == 1
