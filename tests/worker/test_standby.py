"""Before a model is named, and while one loads: what is made ready; the hidden step that a request ends."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from reflex_worker.loading import Loader

from .process import LIMIT, eventually, stdio_worker


def result_of(loader: Loader) -> Any:
    assert select.select([loader.wake_fd], [], [], LIMIT)[0]
    loader.clear_wake()
    finished, result = loader.take()
    assert finished
    return result


class Engine:
    def __init__(self) -> None:
        self.interrupt: Callable[[], bool] | None = None

    def warm_up(self, interrupt: Callable[[], bool] | None = None) -> None:
        self.interrupt = interrupt


def test_a_device_that_cannot_be_made_ready_is_the_loads_to_tell():
    made, tried = Engine(), os.pipe()

    def make_ready() -> None:
        os.write(tried[1], b"!")
        raise RuntimeError("no card")

    loader = Loader(lambda path, experts: made, make_ready)
    loader.stand_by()
    assert os.read(tried[0], 1) == b"!"
    loader.start("m.gguf")
    assert result_of(loader) is made


def test_the_thread_that_made_ready_loads_the_first_model_and_a_new_one_the_next():
    ready, threads = [], []

    def make_engine(path: str, experts: str | None) -> Engine:
        threads.append(threading.get_ident())
        if path == "bad.gguf":
            raise ValueError(path)
        return Engine()

    loader = Loader(make_engine, lambda: ready.append(threading.get_ident()))
    loader.stand_by()
    assert eventually(lambda: loader.stands_by)
    loader.start("bad.gguf")
    assert isinstance(result_of(loader), ValueError)
    assert threads == ready and not loader.stands_by
    loader.start("m.gguf")
    assert isinstance(result_of(loader), Engine)


def test_a_model_named_before_all_is_ready_waits_for_nothing():
    go_on = threading.Event()
    loader = Loader(lambda path, experts: Engine(), lambda: go_on.wait(LIMIT) and None)
    loader.stand_by()
    loader.start("m.gguf")
    assert isinstance(result_of(loader), Engine)
    go_on.set()


@pytest.mark.parametrize("asked_for_by", ["a line", "the command line"])
def test_only_a_load_that_a_line_asked_for_looks_out_for_requests(asked_for_by: str):
    """Whoever starts with its model does what it always did: nothing beside its hidden step."""
    loader = Loader(lambda path, experts: Engine())
    loader.start("m.gguf", interruptible=asked_for_by == "a line")
    assert (result_of(loader).interrupt is not None) == (asked_for_by == "a line")


@pytest.mark.parametrize("behind_it", [False, True], ids=["nothing", "a request"])
def test_a_load_that_ends_before_the_lines_behind_it_are_read_waits_to_know_them(behind_it: bool):
    """It began with its own line; whether a request came with it shows when all that was read is taken in."""
    loader = Loader(lambda path, experts: Engine())
    loader.taking_in = True
    loader.start("m.gguf")
    time.sleep(0.05)
    assert not loader.take()[0]
    loader.has_work = lambda: behind_it
    loader.taking_in = False
    assert (result_of(loader).interrupt is None) == behind_it


def test_a_request_that_comes_during_the_hidden_step_ends_it(tmp_path):
    begun = tmp_path / "begun"
    with stdio_worker(model=None, engine={"hidden_step": str(begun)}) as worker:
        worker.wait_ready()
        worker.tell(id="l", type="load", model="m.gguf")
        assert eventually(begun.exists)
        worker.tell(id="r", prompt="ab", max_tokens=1)
        assert worker.hear()["event"] == "loaded"
        final = worker.hear()
        assert (final["id"], final["ok"]) == ("r", True)
        worker.tell(type="info")
        assert worker.hear()["model"]["warmed_up"] is False


def test_what_is_answered_at_once_does_not_end_the_hidden_step(tmp_path):
    begun = tmp_path / "begun"
    with stdio_worker(model=None, engine={"hidden_step": str(begun)}) as worker:
        worker.wait_ready()
        worker.tell(id="l", type="load", model="m.gguf")
        assert eventually(begun.exists)
        for _ in range(3):
            worker.tell(type="ping")
            assert worker.hear()["event"] == "pong"
        worker.tell(type="shutdown", mode="now")
        final = worker.hear()
        assert (final["id"], final["error_kind"]) == ("l", "shutting_down")
        assert worker.status() == 0
