"""Both clients against a scripted worker: start, answers, cancellation, timeouts, death.

Against the real worker they are used in tests/worker.
"""

import asyncio
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from reflex_protocol import LocalProtocolError, RemoteProtocolError
from reflex_protocol.client import (
    AsyncClient,
    Cancelled,
    Client,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from reflex_protocol.messages import GenerateFinal, Request, TokenEvent

SCRIPT = str(Path(__file__).with_name("scripted_worker.py"))

# Seconds after which a test gives up waiting: long, since the machine may be busy.
WAIT = 60.0


def argv(behaviour=""):
    return [sys.executable, "-u", SCRIPT, behaviour]


# ---- asyncio -------------------------------------------------------------------------------


async def test_async_ready_line_and_answers():
    async with await AsyncClient.spawn(argv()) as worker:
        assert await worker.ready() == {"pid": 1, "model": 'm "q".gguf', "load_ms": 1.5, "odd": "a/b"}
        assert (await worker.generate("x", timeout=WAIT)).text == "ab"
        assert (await worker.score("x", [" a", " b"], timeout=WAIT)).best_index == 0
        assert await worker.tokenize("four", timeout=WAIT) == [4]
        await worker.ping(timeout=WAIT)
        assert len((await worker.generate("huge", timeout=WAIT)).text) == 3_000_000
    assert worker.exit_status == 0


async def test_async_stream_yields_tokens_and_then_the_final():
    async with await AsyncClient.spawn(argv()) as worker:
        events = [e async for e in worker.stream(Request(prompt="x", stream=True))]
        assert [type(e) for e in events] == [TokenEvent, TokenEvent, GenerateFinal]


async def test_async_many_at_once_come_back_in_order():
    async with await AsyncClient.spawn(argv()) as worker:
        answers = await asyncio.gather(*(worker.generate("x", timeout=WAIT) for _ in range(50)))
        assert [a.id for a in answers] == sorted((a.id for a in answers), key=lambda i: int(i[1:]))


async def test_async_an_error_final_is_an_exception_with_its_kind():
    async with await AsyncClient.spawn(argv()) as worker:
        with pytest.raises(WorkerError) as e:
            await worker.generate("refuse", timeout=WAIT)
        assert e.value.kind == "context_overflow"
        assert (await worker.generate("x", timeout=WAIT)).text == "ab"


async def test_async_cancel_gives_what_there_was():
    async with await AsyncClient.spawn(argv()) as worker:
        exchange = await worker.submit(Request(prompt="silence"))
        exchange.cancel()
        with pytest.raises(Cancelled) as e:
            await exchange.final(WAIT)
        assert (e.value.token_ids, e.value.text) == ([1], "a")


async def test_async_leaving_a_stream_early_cancels_it():
    async with await AsyncClient.spawn(argv()) as worker:
        stream = worker.stream(Request(prompt="silence", stream=True))
        async for _ in stream:
            break
        await stream.aclose()
        await worker.ping(timeout=WAIT)  # the cancel before it has been read by now
        assert not worker._exchanges


async def test_async_a_timeout_cancels():
    async with await AsyncClient.spawn(argv()) as worker:
        with pytest.raises(WorkerTimeout):
            await worker.generate("silence", timeout=0.05)
        await worker.ping(timeout=WAIT)
        assert not worker._exchanges


async def test_async_a_cancelled_task_cancels_its_request():
    async with await AsyncClient.spawn(argv()) as worker:
        task = asyncio.create_task(worker.generate("silence"))
        await worker.ping(timeout=WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await worker.ping(timeout=WAIT)
        assert not worker._exchanges


async def test_async_death_fails_everything_that_waits():
    worker = await AsyncClient.spawn(argv())
    running = await worker.submit(Request(prompt="die", stream=True))
    queued = await worker.submit(Request(prompt="x"))
    for exchange in (running, queued):
        with pytest.raises(WorkerDied) as e:
            await exchange.final(WAIT)
        assert e.value.exit_status == -signal.SIGKILL
        assert e.value.stderr[-1] == "last words"
    with pytest.raises(WorkerDied):
        await worker.ping()
    assert await worker.wait(WAIT) == -signal.SIGKILL
    await worker.close()


async def test_async_garbage_ends_the_worker():
    worker = await AsyncClient.spawn(argv())
    with pytest.raises(RemoteProtocolError):
        await worker.generate("garbage", timeout=WAIT)
    await worker.close()
    assert worker.exit_status == -signal.SIGKILL


async def test_async_a_worker_that_dies_before_it_is_ready():
    with pytest.raises(WorkerDied, match="status 3; last on stderr: no such model"):
        await AsyncClient.spawn(argv("dies-early"))


async def test_async_a_worker_that_is_never_ready_is_killed():
    with pytest.raises(WorkerTimeout):
        await AsyncClient.spawn(argv("never-ready"), ready_timeout=0.3)


async def test_async_megabytes_of_stderr_do_not_block_the_worker():
    async with await AsyncClient.spawn(argv("chatty"), ready_timeout=WAIT) as worker:
        assert (await worker.generate("x", timeout=WAIT)).text == "ab"
        assert len(worker.stderr_tail) <= 20


async def test_async_a_worker_that_does_not_leave_is_killed():
    worker = await AsyncClient.spawn(argv("stays"))
    await worker.close(timeout=0.2)
    assert worker.exit_status == -signal.SIGKILL


async def test_async_shutdown_and_nothing_after_it():
    async with await AsyncClient.spawn(argv()) as worker:
        assert await worker.shutdown(timeout=WAIT) == 0
        with pytest.raises((WorkerDied, LocalProtocolError)):
            await worker.ping()


async def test_async_environment_and_folder_reach_the_worker(tmp_path):
    code = (
        "import os, sys;"
        "print('REFLEX_STDIO_READY', 'x=' + os.environ['X'], 'cwd=' + os.getcwd(), file=sys.stderr)"
    )
    async with await AsyncClient.spawn(
        [sys.executable, "-c", code], env={"X": "7"}, cwd=str(tmp_path)
    ) as worker:
        assert await worker.ready() == {"x": 7, "cwd": str(tmp_path)}


# ---- blocking ------------------------------------------------------------------------------


def test_ready_line_and_answers():
    with Client.spawn(argv()) as worker:
        assert worker.ready()["model"] == 'm "q".gguf'
        assert worker.generate("x", timeout=WAIT).text == "ab"
        assert worker.score("x", [" a", " b"], timeout=WAIT).entropy == 1.0
        assert worker.tokenize("four", timeout=WAIT) == [4]
        worker.ping(timeout=WAIT)
        assert len(worker.generate("huge", timeout=WAIT).text) == 3_000_000
        assert len(worker.generate("y" * 3_000_000, timeout=WAIT).text) == 2
    assert worker.exit_status == 0


def test_stream_yields_tokens_and_then_the_final():
    with Client.spawn(argv()) as worker:
        events = list(worker.stream(Request(prompt="x", stream=True), timeout=WAIT))
        assert [type(e) for e in events] == [TokenEvent, TokenEvent, GenerateFinal]


def test_an_error_final_is_an_exception_with_its_kind():
    with Client.spawn(argv()) as worker:
        with pytest.raises(WorkerError) as e:
            worker.generate("refuse", timeout=WAIT)
        assert e.value.kind == "context_overflow"
        assert worker.generate("x", timeout=WAIT).text == "ab"


def test_cancel_gives_what_there_was():
    with Client.spawn(argv()) as worker:
        exchange = worker.submit(Request(prompt="silence"))
        worker.cancel(exchange.id)
        with pytest.raises(Cancelled) as e:
            worker.final(exchange, WAIT)
        assert (e.value.token_ids, e.value.text) == ([1], "a")


def test_leaving_a_stream_early_cancels_it():
    with Client.spawn(argv()) as worker:
        for _ in worker.stream(Request(prompt="silence", stream=True), timeout=WAIT):
            break
        worker.ping(timeout=WAIT)
        assert worker._conversation.open == [] and not worker._events


def test_a_timeout_cancels():
    with Client.spawn(argv()) as worker:
        with pytest.raises(WorkerTimeout):
            worker.generate("silence", timeout=0.05)
        worker.ping(timeout=WAIT)
        assert worker._conversation.open == [] and not worker._events


def test_death_tells_status_and_last_words():
    worker = Client.spawn(argv())
    with pytest.raises(WorkerDied) as e:
        list(worker.stream(Request(prompt="die", stream=True), timeout=WAIT))
    assert e.value.exit_status == -signal.SIGKILL
    assert e.value.stderr[-1] == "last words"
    with pytest.raises(WorkerDied):
        worker.ping()
    worker.close()


def test_garbage_ends_the_worker():
    worker = Client.spawn(argv())
    with pytest.raises(RemoteProtocolError):
        worker.generate("garbage", timeout=WAIT)
    worker.close()
    assert worker.exit_status == -signal.SIGKILL


def test_a_worker_that_dies_before_it_is_ready():
    with pytest.raises(WorkerDied, match="status 3; last on stderr: no such model"):
        Client.spawn(argv("dies-early"))


def test_a_worker_that_is_never_ready_is_killed():
    with pytest.raises(WorkerTimeout):
        Client.spawn(argv("never-ready"), ready_timeout=0.3)


def test_megabytes_of_stderr_do_not_block_the_worker():
    with Client.spawn(argv("chatty"), ready_timeout=WAIT) as worker:
        assert worker.generate("x", timeout=WAIT).text == "ab"


def test_a_worker_that_does_not_leave_is_killed():
    worker = Client.spawn(argv("stays"))
    worker.close(timeout=0.2)
    assert worker.exit_status == -signal.SIGKILL


# ---- a socket ------------------------------------------------------------------------------


@pytest.fixture
def echo_socket():
    """A Unix socket that answers every ping of one connection, then closes at `shutdown`."""
    import json
    import socket

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/s"
        listener.bind(path)
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if message["type"] == "shutdown":
                        return
                    lines.write(json.dumps({"event": "pong", "id": message["id"]}).encode() + b"\n")
                    lines.flush()

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()


async def test_async_dial_and_lose_a_connection(echo_socket):
    async with await AsyncClient.connect(echo_socket) as worker:
        await worker.ping(timeout=WAIT)
        assert await worker.shutdown(timeout=WAIT) is None
        assert worker.gone
        with pytest.raises(WorkerDied, match="closed the connection"):
            await worker.ping()


def test_dial_and_lose_a_connection(echo_socket):
    with Client.connect(echo_socket) as worker:
        worker.ping(timeout=WAIT)
        assert worker.shutdown(timeout=WAIT) is None
        with pytest.raises(WorkerDied, match="closed the connection"):
            worker.ping()


async def test_dialling_nothing_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Client.connect(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        await AsyncClient.connect(str(tmp_path / "none"))
