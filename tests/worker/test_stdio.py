"""`reflex stdio` as a process, around the fake engine: pipes, signals, hostile lines, death of either
side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from reflex_protocol import DEFAULT_MAX_LINE_BYTES
from reflex_protocol.client import Cancelled, WorkerDied, WorkerError
from reflex_protocol.messages import GenerateFinal, ProgressEvent, Request, TokenEvent

from .process import LIMIT, WAIT, alive, delivered, eventually, fake_argv, stdio_worker


def run_to_end(data: bytes, **options) -> tuple[int, list[dict], str]:
    """Everything in, end of input, everything out: (status, lines, stderr)."""
    done = subprocess.run(
        fake_argv("stdio", **options),
        input=data,
        capture_output=True,
        timeout=LIMIT,
    )
    return done.returncode, [json.loads(x) for x in done.stdout.splitlines()], done.stderr.decode()


# ---- input and its end ---------------------------------------------------------------------


def test_three_requests_from_a_pipe_are_answered_in_order_and_it_exits_0():
    data = b'{"id":"1","prompt":"ab","max_tokens":2}\r\n\n'
    data += b'{"id":"2","prompt":"a","candidates":["x","yz"]}\n'
    data += b'{"id":"3","prompt":"c","max_tokens":1}'  # the last line needs no newline
    status, lines, stderr = run_to_end(data)
    assert status == 0
    assert [(x["id"], x["ok"]) for x in lines] == [("1", True), ("2", True), ("3", True)]
    assert "REFLEX_STDIO_READY pid=" in stderr


def test_no_input_at_all_exits_0():
    assert run_to_end(b"")[:2] == (0, [])


def test_every_bad_line_gets_its_final_and_the_next_line_is_answered():
    bad = [
        b"nope",
        b"[1]",
        b'{"id":"b","x":1}',
        b"\xef\xbb\xbf{}",
        b'{"prompt":"\0"}',
        b'{"prompt":"\xff"}',
        b"{}",
    ]
    data = b"".join(line + b'\n{"id":"ok","prompt":"a","max_tokens":1}\n' for line in bad)
    status, lines, _ = run_to_end(data)
    assert status == 0
    assert [x["ok"] for x in lines] == [False, True] * len(bad)
    assert {x["error_kind"] for x in lines[::2]} == {"invalid_input"}


def test_a_line_of_16_mib_passes_and_one_byte_more_is_too_long():
    frame = len(b'{"id":"x","prompt":"","max_tokens":0}')
    line = b'{"id":"x","prompt":"' + b"a" * (DEFAULT_MAX_LINE_BYTES - frame) + b'","max_tokens":0}'
    assert len(line) == DEFAULT_MAX_LINE_BYTES
    longer = line.replace(b'"a', b'"aa', 1)
    data = line + b"\n" + longer + b'\n{"id":"after","prompt":"a","max_tokens":1}\n'
    status, lines, _ = run_to_end(data, engine={"chunk": 1 << 30})
    assert status == 0
    assert [(x["id"], x.get("error_kind")) for x in lines] == [
        ("x", None),
        ("x", "line_too_long"),
        ("after", None),
    ]
    assert lines[0]["usage"]["prompt_tokens"] == DEFAULT_MAX_LINE_BYTES - frame


def test_max_line_bytes_is_an_option():
    line = b'{"id":"x","prompt":"' + b"a" * 2000 + b'","max_tokens":1}\n'
    _, lines, _ = run_to_end(line, max_line_bytes=1024)
    assert [x["error_kind"] for x in lines] == ["line_too_long"]
    _, lines, _ = run_to_end(line, max_line_bytes=4096)
    assert lines[0]["ok"]


def test_a_line_without_end_does_not_fill_the_memory():
    with stdio_worker() as worker:
        worker.wait_ready()
        before = worker.rss_kib()
        piece = b"x" * (1 << 20)
        for _ in range(100):
            worker.write(piece)
        assert worker.hear()["error_kind"] == "line_too_long"
        worker.write(b"\n")
        worker.tell(type="ping")
        assert worker.hear() == {"event": "pong", "id": None}
        assert worker.rss_kib() < before + 3 * DEFAULT_MAX_LINE_BYTES // 1024


def test_a_line_in_pieces_waits_for_its_newline():
    with stdio_worker() as worker:
        worker.wait_ready()
        line = json.dumps({"id": "é", "prompt": "ab", "max_tokens": 1}, ensure_ascii=False).encode() + b"\n"
        for i in range(len(line)):
            assert worker.silent()
            worker.write(line[i : i + 1])
        assert worker.hear()["id"] == "é"


# ---- what goes where -----------------------------------------------------------------------


def test_it_never_speaks_first():
    with stdio_worker() as worker:
        worker.wait_ready()
        assert worker.silent(0.2)


def test_stdout_carries_protocol_lines_only_even_when_a_library_prints():
    status, lines, stderr = run_to_end(b'{"id":"1","prompt":"print:","max_tokens":1}\n')
    assert (status, [x["id"] for x in lines]) == (0, ["1"])
    assert "a library talks" in stderr and "and so does Python" in stderr


def test_the_ready_line_tells_what_was_loaded():
    with stdio_worker(model="dir/my model.gguf") as worker:
        line = worker.wait_ready()
        assert line.startswith(f'REFLEX_STDIO_READY pid={worker.popen.pid} protocol="1.0" ')
        assert 'model="dir/my model.gguf"' in line and "model_load_ms=2.0" in line


def test_a_stderr_that_nobody_reads_is_survived():
    with stdio_worker(engine={"load_ms": 300}) as worker:
        assert worker.popen.stderr
        worker.popen.stderr.close()
        worker.tell(id="a", prompt="ab", max_tokens=1)
        assert worker.hear()["ok"]


def test_the_model_loads_before_msgspec_is_imported():
    _, lines, _ = run_to_end(b'{"type":"info"}\n')
    loaded = lines[0]["model"]["modules_at_load"]
    assert "reflex_worker.loading" in loaded
    assert not {"msgspec", "reflex_protocol", "reflex_worker.worker"} & set(loaded)


def test_a_resident_worker_warms_up_before_it_says_ready():
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.tell(type="info")
        assert worker.hear()["model"]["warmed_up"] is True


def test_a_request_that_waits_already_is_not_made_to_wait_for_a_hidden_step(tmp_path):
    gate = tmp_path / "gate"
    with stdio_worker(engine={"gate": str(gate)}) as worker:
        worker.tell(type="info")
        gate.touch()
        assert worker.hear()["model"]["warmed_up"] is False


def test_a_request_that_waits_is_seen_by_a_load_that_ends_before_the_imports():
    """Stdin was looked at only once the worker's own imports were through."""
    out_end, in_end = os.pipe()
    os.write(in_end, b'{"type":"info"}\n')
    os.close(in_end)
    done = subprocess.run(fake_argv("stdio"), stdin=out_end, capture_output=True, timeout=LIMIT)
    os.close(out_end)
    assert json.loads(done.stdout)["model"]["warmed_up"] is False


UNUSABLE = {"<&-": "stdin", "0>/dev/null": "stdin", ">&-": "stdout", "1</dev/null": "stdout"}


@pytest.mark.parametrize("redirect", ["2>&-", *UNUSABLE, "<&- >&- 2>&-"])
def test_standard_descriptors_that_are_closed(redirect):
    """Once a pipe of our own took the number of a closed stdin, and the worker read it for ever. Later it was
    the end of input, and a stdout of that kind took every answer, without a word and with status 0."""
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *fake_argv("stdio")]
    line = b'{"id":"a","prompt":"ab","max_tokens":1}\n'
    done = subprocess.run(command, input=line, capture_output=True, timeout=LIMIT)
    unusable = UNUSABLE.get(redirect)
    if redirect == "2>&-":
        assert done.returncode == 0 and b'"id":"a"' in done.stdout
    else:
        assert done.returncode != 0 and done.stdout == b""
    if unusable:
        assert f"[io]: {unusable}: expected it open for".encode() in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("model", ["--demo", ""])
def test_the_command_itself_with_closed_descriptors(closed, model):
    """The pipe of signals took the number of a closed descriptor: a ready line was read as two signals."""
    argv = ["stdio", *filter(None, [model])]
    code = f"import sys; from reflex_worker import cli; sys.exit(cli.main({argv}))"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    line = b'{"type":"ping","id":"a"}\n'
    # cwd: the installed package, not the source folder of a checkout
    done = subprocess.run(command, input=line, capture_output=True, timeout=WAIT, cwd="/")
    unusable = "stdin" if "<" in closed else "stdout" if ">&-" in closed.replace("2>&-", "") else None
    assert done.returncode == (4 if unusable else 0), done.stderr
    assert (b'"id":"a"' in done.stdout) == (unusable is None) and b"Traceback" not in done.stderr
    if unusable and "2>&-" not in closed:
        assert done.stderr.startswith(f"reflex: error [io]: {unusable}: expected it open for".encode())
        assert done.stderr.count(b"\n") == 1


def test_nothing_overtakes_the_answer_to_a_load(tmp_path):
    """A line that was refused as it came was answered before the load that stood in front of it."""
    gate = tmp_path / "gate"
    with stdio_worker(model=None, engine={"gate": str(gate)}) as worker:
        worker.tell(type="load", id="L", model="m.gguf")
        worker.tell(id="bad", promt=1)
        worker.tell(id="b", prompt="ab", max_tokens=1)
        worker.tell(type="ping", id="now")
        assert worker.hear()["id"] == "now"  # control lines go first: all four have been read
        gate.touch()
        assert [worker.hear()["id"] for _ in range(3)] == ["L", "bad", "b"]


def test_files_in_place_of_pipes(tmp_path):
    (tmp_path / "in").write_bytes(b'{"id":"a","prompt":"ab","max_tokens":1}\n' * 3)
    with open(tmp_path / "in", "rb") as given, open(tmp_path / "out", "wb") as taken:
        done = subprocess.run(fake_argv("stdio"), stdin=given, stdout=taken, timeout=LIMIT)
    assert done.returncode == 0
    assert len((tmp_path / "out").read_bytes().splitlines()) == 3


def test_a_full_disk_ends_it_with_a_line_that_says_so():
    """It ended as if nobody had read stdout: status 1 and not a word."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            fake_argv("stdio"),
            input=b'{"prompt":"ab","max_tokens":1}\n',
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
        )
    assert done.returncode == 4
    assert done.stderr.endswith(b"reflex: error [io]: stdout: No space left on device\n"), done.stderr


# ---- while it runs -------------------------------------------------------------------------


async def test_stream_progress_and_final(spawn):
    worker = await spawn(engine={"chunk": 2})
    events = [
        e async for e in worker.stream(Request(prompt="abcd", max_tokens=2, stream=True, progress=True))
    ]
    assert [type(e) for e in events] == [ProgressEvent, ProgressEvent, TokenEvent, TokenEvent, GenerateFinal]


async def test_ping_and_hello_are_answered_while_a_request_runs(spawn):
    worker = await spawn()
    running = await worker.submit(Request(prompt="slow:", max_tokens=1_000_000))
    await worker.ping(timeout=WAIT)
    assert (await worker.hello(timeout=WAIT)).state == "running"
    assert not running.done
    running.cancel()
    with pytest.raises(Cancelled):
        await running.final(WAIT)


async def test_ping_and_hello_are_answered_while_the_model_loads(spawn, tmp_path):
    worker = await spawn(wait_ready=False, engine={"gate": str(tmp_path / "gate")})
    hello = await worker.hello(timeout=WAIT)
    await worker.ping(timeout=WAIT)
    assert (hello.state, hello.model) == ("loading", None)
    (tmp_path / "gate").touch()
    assert (await worker.generate("ab", max_tokens=1, timeout=WAIT)).text == "a"
    assert (await worker.hello(timeout=WAIT)).state == "ready"


@pytest.mark.parametrize("prompt", ["slow:" + "p" * 100_000, "slow:"], ids=["prefill", "decode"])
async def test_cancel_while_it_runs(spawn, prompt):
    worker = await spawn(engine={"chunk": 8})
    request = Request(prompt=prompt, max_tokens=1_000_000, stream=True, progress=True)
    exchange = await worker.submit(request)
    kind = ProgressEvent if "p" in prompt[5:] else TokenEvent
    async for event in exchange:
        if isinstance(event, kind):
            break
    exchange.cancel()
    with pytest.raises(Cancelled) as e:
        await exchange.final(WAIT)
    assert bool(e.value.token_ids) == (kind is TokenEvent)
    assert (await worker.generate("ab", max_tokens=1, timeout=WAIT)).text == "a"


async def test_cancel_of_a_queued_request_while_the_model_loads(spawn, tmp_path):
    worker = await spawn(wait_ready=False, engine={"gate": str(tmp_path / "gate")})
    first = await worker.submit(Request(prompt="ab", max_tokens=1))
    second = await worker.submit(Request(prompt="ab", max_tokens=1))
    third = await worker.submit(Request(prompt="ab", max_tokens=1))
    second.cancel()
    await worker.ping(timeout=WAIT)
    assert not second.done, "its place is after the first"
    (tmp_path / "gate").touch()
    assert (await first.final(WAIT)).text == "a"
    with pytest.raises(Cancelled):
        await second.final(WAIT)
    assert (await third.final(WAIT)).text == "a"


async def test_a_load_line_into_a_worker_without_a_model(spawn):
    worker = await spawn(model=None)
    assert await worker.ready() == {"pid": worker.process.pid, "protocol": "1.0", "model": None}
    with pytest.raises(WorkerError, match="no model"):
        await worker.generate("x", timeout=WAIT)
    with pytest.raises(WorkerError) as e:
        await worker.load("bad.gguf", timeout=WAIT)
    assert e.value.kind == "gguf"
    loaded = await worker.load("good.gguf", timeout=WAIT)
    assert (loaded.model.path, loaded.phases["model_load"]) == ("good.gguf", 2.0)
    with pytest.raises(WorkerError, match="already"):
        await worker.load("good.gguf", timeout=WAIT)
    assert (await worker.generate("ab", max_tokens=1, timeout=WAIT)).text == "a"


async def test_a_slow_reader_blocks_the_worker_and_loses_nothing():
    n = 20_000
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.tell(id="s", prompt="ab", max_tokens=n, stream=True)
        worker.hear()
        before = worker.rss_kib()
        assert eventually(lambda: waits_in_write(worker.popen.pid))
        assert worker.rss_kib() < before + 20_000
        heard = worker.hear_until("final")
        assert len(heard) == n and len(heard[-1]["token_ids"]) == n


def waits_in_write(pid: int) -> bool:
    """Whether the main thread sleeps in the kernel's pipe code."""
    with open(f"/proc/{pid}/wchan") as f:
        where = f.read()
    if where not in ("", "0"):
        return "pipe" in where
    with open(f"/proc/{pid}/syscall") as f:  # kernels that hide wchan tell the number
        return f.read().split()[0] == "1"


# ---- leaving -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_when_idle_exits_0(number):
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.popen.send_signal(number)
        assert worker.status() == 0


EARLY = """
import os, sys
from reflex_worker import cli, cli_serve
def boot_driver(argv):
    os.kill(os.getpid(), {number})
cli_serve.boot_driver = boot_driver
cli.main(["stdio", "--demo"])
"""


# The same where new threads get their turn late, as on a busy machine; all but the loader's.
LATE_THREADS = """
import _thread, time
from reflex_worker.signals import Watch
start = _thread.start_new_thread
def start_late(function, arguments):
    late = isinstance(getattr(function, "__self__", None), Watch)
    return start(lambda *a: (time.sleep(0.5 * late), function(*a)), arguments)
_thread.start_new_thread = start_late
"""


@pytest.mark.parametrize("threads", ["", LATE_THREADS], ids=["", "late"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_worker_is_up_answers_what_is_queued(number, threads):
    """Handlers were installed after the imports and the load's start, some 80 ms in: a signal before
    that left requests unanswered. Then only a thread knew of it, and the first request could run
    before that thread did."""
    queued = b'{"id":"a","prompt":"x"}\n{"id":"b","prompt":"x","candidates":["y"]}\n{"type":"ping"}\n'
    code = threads + EARLY.format(number=int(number))
    # cwd: the installed package, not the source folder of a checkout
    done = subprocess.run(
        [sys.executable, "-c", code], input=queued, capture_output=True, timeout=WAIT, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    heard = [json.loads(line) for line in done.stdout.splitlines()]
    assert {x.get("id"): x.get("error_kind") for x in heard} == {
        "a": "shutting_down",
        "b": "shutting_down",
        None: None,
    }


def test_sigterm_finishes_what_runs_and_refuses_what_waits_read_or_not(tmp_path):
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.tell(id="run", prompt=f"until:{tmp_path}/end", max_tokens=1_000_000, stream=True)
        worker.hear_until("token")
        worker.tell(id="wait", prompt="ab")
        worker.tell(type="ping")
        worker.hear_until("pong")  # so both have been read
        worker.terminate_and_wait_until_it_knows(worker)
        worker.tell(id="late", prompt="ab")
        (tmp_path / "end").touch()
        assert worker.hear_until("final")[-1]["finish_reason"] == "length"
        assert [(x["id"], x["error_kind"]) for x in (worker.hear(), worker.hear())] == [
            ("wait", "shutting_down"),
            ("late", "shutting_down"),
        ]
        assert worker.at_end() and worker.status() == 0


def test_a_second_sigterm_stops_at_once_even_inside_a_step():
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.tell(id="h", prompt="hang:", progress=True)
        worker.hear_until("progress")
        worker.popen.terminate()
        assert eventually(lambda: delivered(worker.popen.pid, signal.SIGTERM))
        assert worker.silent(0.1) and worker.popen.poll() is None
        worker.popen.terminate()
        assert worker.status() == 128 + signal.SIGTERM


def test_sigterm_while_the_model_loads_does_not_wait_for_it():
    with stdio_worker(engine={"load_ms": 3_600_000}) as worker:
        worker.tell(id="a", prompt="x")
        worker.tell(type="ping")
        worker.hear_until("pong")
        worker.popen.terminate()
        assert worker.hear()["error_kind"] == "shutting_down"
        assert worker.status() == 0


def test_sigterm_while_a_slow_reader_blocks_it():
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.tell(id="s", prompt="ab", max_tokens=20_000, stream=True)
        worker.hear()
        assert eventually(lambda: waits_in_write(worker.popen.pid))
        worker.popen.terminate()
        heard = worker.hear_until("final")
        assert len(heard[-1]["token_ids"]) == 20_000
        assert worker.status() == 0


@pytest.mark.parametrize(("mode", "ok"), [("drain", True), ("now", False)])
async def test_shutdown(spawn, mode, ok):
    worker = await spawn()
    exchange = await worker.submit(Request(prompt="slow:", max_tokens=5 if ok else 1_000_000))
    await worker.ping(timeout=WAIT)
    assert await worker.shutdown(mode, timeout=WAIT) == 0
    if ok:
        assert (await exchange.final(WAIT)).finish_reason == "length"
    else:
        with pytest.raises(WorkerError) as e:
            await exchange.final(WAIT)
        assert e.value.kind == "shutting_down"


@pytest.mark.parametrize("read", [True, False], ids=["read", "not read yet"])
def test_a_model_that_will_not_load_answers_what_waits_and_exits_with_its_status(tmp_path, read):
    with stdio_worker(model="bad.gguf", engine={"gate": str(tmp_path / "gate")}) as worker:
        if read:
            worker.tell(type="ping")
            worker.hear_until("pong")
        worker.tell(id="a", prompt="x")
        (tmp_path / "gate").touch()
        answer = worker.hear()
        assert (answer["id"], answer["error_kind"]) == ("a", "gguf")
        line = worker.wait_stderr("reflex: error [gguf]: bad.gguf: will not load")
        assert worker.at_end() and worker.status() == 3
        assert "READY" not in worker.stderr.decode() + line


async def test_a_model_that_will_not_load_is_told_to_whoever_started_it(spawn):
    with pytest.raises(WorkerDied, match=r"bad\.gguf: will not load") as e:
        await spawn(model="bad.gguf")
    assert e.value.exit_status == 3


def test_fatal_exits_non_zero_after_its_final():
    status, lines, _ = run_to_end(b'{"id":"a","prompt":"raise:fatal"}\n{"id":"b","prompt":"x"}\n')
    assert status == 6
    assert [(x["id"], x["error_kind"]) for x in lines] == [("a", "fatal"), ("b", "shutting_down")]


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ({"state_dir": "/tmp"}, 3, "[unsupported]: state-dir"),
        ({"max_line_bytes": 10}, 2, "[invalid_input]: max-line-bytes"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(options, status, text):
    found, lines, stderr = run_to_end(b"", **options)
    assert (found, lines) == (status, [])
    assert text in stderr


# ---- the other side dies -------------------------------------------------------------------


@pytest.mark.parametrize("line", [None, "slow:"], ids=["idle", "running"])
def test_nobody_reads_stdout_any_more(line):
    with stdio_worker() as worker:
        worker.wait_ready()
        if line:
            worker.tell(id="r", prompt=line, max_tokens=100_000, progress=True)
            worker.hear_until("progress")
        worker.close_stdout()
        assert worker.status() == 1


def test_a_streaming_reader_that_leaves_ends_the_worker():
    with stdio_worker() as worker:
        worker.wait_ready()
        worker.tell(id="r", prompt="ab", max_tokens=100_000_000, stream=True)
        worker.hear()
        worker.close_stdout()
        assert worker.status() == 1


PARENT = """
import subprocess, sys, time
worker = subprocess.Popen({argv!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
worker.stdin.write({data!r})
worker.stdin.flush()
for line in iter(worker.stderr.readline, b""):
    if b"READY" in line or {early!r}:
        break
if {heard!r}:
    worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("stage", "engine", "data", "heard"),
    [
        ("idle", {}, b"", False),
        ("loading", {"load_ms": 2000}, b"", False),
        ("prefill", {"chunk": 1}, b'{"prompt":"slow:%s","progress":true}\n' % (b"p" * 50_000), True),
        ("decode", {}, b'{"prompt":"slow:","stream":true,"max_tokens":1000000}\n', True),
        ("queued", {}, b'{"prompt":"slow:","stream":true,"max_tokens":1000000}\n' * 9, True),
        ("half a line", {}, b'{"prompt":"sl', False),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kill_9_of_the_parent_leaves_no_worker_behind(stage, engine, data, heard):
    argv = fake_argv("stdio", engine=engine)
    early = stage == "loading"
    if early:
        argv = ["sh", "-c", 'echo started >&2; exec "$@"', "sh", *argv]
    code = PARENT.format(argv=argv, data=data, heard=heard, early=early)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout
        worker = int(parent.stdout.readline())
        assert alive(worker)
        parent.kill()
        assert eventually(lambda: not alive(worker))


# ---- a long life ---------------------------------------------------------------------------


def test_10_000_requests_leave_memory_and_descriptors_as_they_were():
    with stdio_worker() as worker:
        worker.wait_ready()

        def many(n: int) -> None:
            line = json.dumps({"id": "m", "prompt": "abc", "max_tokens": 2, "stream": True}).encode() + b"\n"
            bad = b'{"id":"m","oops":1}\n'
            for _ in range(n // 50):
                worker.write(line * 40 + bad * 10)
                finals = 0
                while finals < 50:
                    finals += worker.hear()["event"] == "final"

        many(2000)
        rss, fds = worker.rss_kib(), worker.n_fds()
        many(10_000)
        assert worker.n_fds() == fds
        assert worker.rss_kib() <= rss + 1024


def test_descriptors_0_and_1_lead_nowhere_dangerous():
    with stdio_worker() as worker:
        worker.wait_ready()
        folder = f"/proc/{worker.popen.pid}/fd"
        assert os.readlink(f"{folder}/0") == "/dev/null"
        assert os.readlink(f"{folder}/1") == os.readlink(f"{folder}/2")
