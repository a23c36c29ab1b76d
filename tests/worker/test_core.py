"""The protocol's rules, one by one, on the core alone (no process): order, control lines, cancellation,
read-ahead, errors, loading, leaving."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reflex_protocol import ERROR_KINDS
from reflex_protocol.messages import (
    ErrorFinal,
    Loaded,
    ProgressEvent,
    TokenEvent,
)

from reflex_worker.energy import Meters
from reflex_worker.worker import EXIT_FATAL, READ_AHEAD_BYTES, WAITING_LINE_BYTES, Worker

from .harness import FINAL, MAX_LINE_BYTES, Harness, shape


def finals(h: Harness) -> list[tuple[str | None, str | None]]:
    return [(i, kind) for event, i, kind in shape(h.heard) if event == FINAL]


# ---- order ---------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_lines_whatever_they_are():
    h = Harness()
    h.tell(id="1", prompt="a", max_tokens=1)
    h.send(b'{"id":"2","oops":1}\n')
    h.tell(id="3", type="tokenize", text="hi")
    h.tell(id="4", prompt="a", candidates=[])
    h.tell(id="5", type="detokenize", token_ids=[104, 105])
    h.tell(id="6", type="info")
    h.tell(id="7", prompt="a", candidates=["b"])
    assert shape(h.run()) == [
        (FINAL, "1", None),
        (FINAL, "2", "invalid_input"),
        ("tokenize", "3", None),
        (FINAL, "4", "invalid_input"),
        ("detokenize", "5", None),
        ("info", "6", None),
        (FINAL, "7", None),
    ]


def test_strictly_sequential_one_final_before_the_next_starts():
    h = Harness()
    for i in "abc":
        h.tell(id=i, prompt="xy", max_tokens=2, stream=True)
    order = [m.id for m in h.run()]
    assert order == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_it_never_speaks_first():
    h = Harness()
    h.send(b"\n\r\n  \n")
    assert h.run() == []


def test_tokenize_detokenize_info():
    h = Harness()
    h.tell(type="tokenize", text="hi", add_bos=True)
    h.tell(type="detokenize", token_ids=[0xC3, 0xA9, 256])
    h.tell(type="detokenize", token_ids=[9999])
    h.tell(type="info", id="i")
    ids, text, error, info = h.run()
    assert ids.token_ids == [256, 104, 105]
    assert text.text == "é"
    assert error.error_kind == "invalid_input"
    assert info.model["architecture"] == "none"
    assert info.special_tokens["end_ids"] == [257]
    assert info.phases["gguf_open"] == 0.5


# ---- control lines while something runs ----------------------------------------------------


def test_ping_and_hello_overtake_a_running_request_and_its_queue():
    h = Harness()
    h.tell(id="run", prompt="abc", stream=True, max_tokens=3)
    h.tell(id="wait", prompt="abc", max_tokens=1)
    h.step(3)
    h.tell(id="p", type="ping")
    h.tell(id="h", type="hello", protocol="1.0")
    h.run()
    assert [i for _, i, _ in shape(h.heard)] == ["run", "p", "h", "run", "run", "run", "wait"]
    hello = h.heard[2]
    assert (hello.state, hello.model.architecture, hello.limits.max_line_bytes) == (
        "running",
        "none",
        MAX_LINE_BYTES,
    )
    assert {"generate", "system1", "cancel"} <= set(hello.capabilities)


def test_hello_of_another_major_version_is_refused():
    h = Harness()
    h.tell(type="hello", protocol="2.0")
    assert shape(h.heard) == [(FINAL, None, "unsupported")]


# ---- cancel --------------------------------------------------------------------------------


def test_cancel_during_prefill():
    h = Harness(chunk=1)
    h.tell(id="a", prompt="abcdef")
    h.step(2)
    h.tell(type="cancel", target="a")
    assert h.run() == [ErrorFinal(id="a", error="cancelled", error_kind="cancelled", token_ids=[], text="")]


def test_cancel_during_decode_keeps_what_there_is():
    h = Harness()
    h.tell(id="a", prompt="abc")
    h.step(4)
    h.tell(type="cancel", target="a")
    assert h.run() == [
        ErrorFinal(id="a", error="cancelled", error_kind="cancelled", token_ids=[97, 98], text="ab")
    ]


def test_cancel_of_a_waiting_request_is_answered_in_its_place():
    h = Harness()
    for i in "abc":
        h.tell(id=i, prompt="x", max_tokens=1)
    h.step(1)
    h.tell(type="cancel", target="b")
    assert h.heard == []
    h.run()
    assert finals(h) == [("a", None), ("b", "cancelled"), ("c", None)]


def test_cancel_takes_the_oldest_match_and_each_cancel_takes_one():
    h = Harness()
    for text in ("one", "two", "three"):
        h.tell(id="same", prompt=text, max_tokens=1)
    h.step(1)
    h.tell(type="cancel", target="same")
    h.tell(type="cancel", target="same")
    h.run()
    assert finals(h) == [("same", "cancelled"), ("same", "cancelled"), ("same", None)]
    assert h.heard[2].text == "t"


def test_cancel_of_the_unknown_and_of_the_finished_is_ignored():
    h = Harness()
    h.tell(type="cancel", target="nobody")
    h.tell(id="a", prompt="x", max_tokens=1)
    h.run()
    h.tell(type="cancel", target="a")
    h.tell(id="a", prompt="x", max_tokens=1)
    h.run()
    assert finals(h) == [("a", None), ("a", None)]


def test_cancel_does_not_touch_lines_that_are_no_requests():
    h = Harness()
    h.tell(id="a", prompt="x", max_tokens=1)
    h.tell(id="b", type="tokenize", text="x")
    h.send(b'{"id":"b","bad":1}\n')
    h.tell(id="b", prompt="x", max_tokens=1)
    h.tell(type="cancel", target="b")
    h.run()
    assert shape(h.heard)[1:] == [
        ("tokenize", "b", None),
        (FINAL, "b", "invalid_input"),
        (FINAL, "b", "cancelled"),
    ]


def test_cancel_while_the_model_loads_is_answered_before_it_is_there():
    h = Harness(model=False)
    h.worker.load_at_start()
    h.tell(id="a", prompt="x", max_tokens=1)
    h.tell(id="b", prompt="x", max_tokens=1)
    h.tell(type="cancel", target="a")
    h.run()
    assert finals(h) == [("a", "cancelled")]
    h.loaded()
    h.run()
    assert finals(h) == [("a", "cancelled"), ("b", None)]


# ---- read-ahead ----------------------------------------------------------------------------


def test_read_ahead_is_bounded_in_bytes_and_opens_again():
    h = Harness()
    line = json.dumps({"prompt": "x" * 50_000, "max_tokens": 0}).encode() + b"\n"
    n = 0
    while h.worker.wants_input:
        h.send(line)
        n += 1
        assert n * 50_000 < 2 * READ_AHEAD_BYTES
    assert n * len(line) >= READ_AHEAD_BYTES - n * WAITING_LINE_BYTES - len(line)
    h.run()
    assert h.worker.wants_input
    assert len(h.heard) == n


def test_read_ahead_counts_what_a_short_line_costs():
    h = Harness()
    n = 0
    while h.worker.wants_input:
        h.send(b'{"prompt":"x"}\n')
        n += 1
    assert n <= READ_AHEAD_BYTES / WAITING_LINE_BYTES


def test_one_line_longer_than_the_read_ahead_still_passes():
    h = Harness(max_line_bytes=3 * READ_AHEAD_BYTES)
    line = json.dumps({"id": "long", "prompt": "x" * 2 * READ_AHEAD_BYTES, "max_tokens": 0}).encode()
    for i in range(0, len(line), 1 << 16):
        assert h.worker.wants_input
        h.send(line[i : i + (1 << 16)])
    h.send(b"\n")
    assert not h.worker.wants_input
    h.worker.work()
    assert h.worker.wants_input


# ---- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in ERROR_KINDS if k != "fatal"])
@pytest.mark.parametrize("when", ["refuse", "raise"])
def test_an_error_of_any_kind_ends_one_request_only(when, kind):
    h = Harness()
    h.tell(id="a", prompt=f"{when}:{kind}")
    h.tell(id="b", prompt="x", max_tokens=1)
    h.run()
    assert finals(h) == [("a", kind), ("b", None)]
    assert not h.worker.finished


@pytest.mark.parametrize(
    ("prompt", "kind", "text"),
    [("raise:memory", "out_of_memory", "MemoryError"), ("raise:runtime", "other", "RuntimeError: a bug")],
)
def test_pythons_own_errors_end_one_request_only(prompt, kind, text):
    h = Harness()
    h.tell(id="a", prompt=prompt)
    h.tell(id="b", prompt="x", max_tokens=1)
    h.run()
    assert finals(h) == [("a", kind), ("b", None)]
    assert h.heard[0].error == text


def test_after_fatal_nothing_is_run_and_the_exit_status_says_so():
    h = Harness()
    h.tell(id="a", prompt="raise:fatal")
    h.tell(id="b", prompt="x")
    h.run()
    assert finals(h) == [("a", "fatal"), ("b", "shutting_down")]
    assert h.worker.finished
    assert h.worker.exit_status == EXIT_FATAL != 0


@pytest.mark.parametrize(
    "fields",
    [{"import_kv": "x"}, {"export_kv": "x"}],
)
def test_what_does_not_exist_yet_is_unsupported(fields):
    h = Harness()
    h.tell(id="a", prompt="x", **fields)
    h.run()
    assert finals(h) == [("a", "unsupported")]
    assert next(iter(fields)) in h.heard[0].error


def test_a_context_overflow_is_an_error_before_any_work():
    h = Harness(n_ctx=4)
    h.tell(id="a", prompt="abcde", progress=True)
    assert shape(h.run()) == [(FINAL, "a", "context_overflow")]


# ---- loading -------------------------------------------------------------------------------


def test_without_a_model_requests_are_refused_until_a_load():
    h = Harness(model=False)
    h.tell(id="a", prompt="x")
    h.tell(id="t", type="tokenize", text="x")
    h.tell(id="i", type="info")
    h.tell(type="hello")
    assert shape(h.heard) == [("hello", None, None)]
    assert (h.take()[0].state, h.loads) == ("no_model", [])
    assert finals(h) == []
    h.run()
    assert finals(h) == [("a", "invalid_input"), ("t", "invalid_input"), ("i", "invalid_input")]


def test_load_keeps_its_place_and_what_follows_waits_for_it():
    h = Harness(model=False)
    h.tell(id="early", prompt="x", max_tokens=1)
    h.tell(id="l", type="load", model="m.gguf")
    h.tell(id="late", prompt="x", max_tokens=1)
    h.run()
    assert (finals(h), h.loads) == ([("early", "invalid_input")], ["m.gguf"])
    h.tell(id="p", type="ping")
    h.tell(id="h", type="hello")
    assert shape(h.heard)[1:] == [("pong", "p", None), ("hello", "h", None)]
    assert h.heard[-1].state == "loading"
    h.take()
    h.loaded("m.gguf")
    loaded, final = h.run()
    assert isinstance(loaded, Loaded)
    assert (loaded.id, loaded.model.path, loaded.phases["model_load"]) == ("l", "m.gguf", 2.0)
    assert (final.id, final.text) == ("late", "x")


def test_a_second_load_is_an_error():
    h = Harness(model=False)
    h.tell(id="1", type="load", model="m.gguf")
    h.tell(id="2", type="load", model="m.gguf")
    h.run()
    h.loaded()
    h.run()
    assert shape(h.heard) == [("loaded", "1", None), (FINAL, "2", "invalid_input")]
    h = Harness()
    h.tell(id="3", type="load", model="m.gguf")
    h.run()
    assert finals(h) == [("3", "invalid_input")]


def test_a_load_that_fails_may_be_followed_by_one_that_does_not():
    h = Harness(model=False)
    h.tell(id="1", type="load", model="bad")
    h.run()
    error = RuntimeError("no")
    error.kind = "gguf"
    h.worker.load_finished(error)
    h.tell(id="x", prompt="x")
    h.tell(id="2", type="load", model="good")
    h.run()
    h.loaded()
    h.run()
    assert shape(h.heard) == [(FINAL, "1", "gguf"), (FINAL, "x", "invalid_input"), ("loaded", "2", None)]
    assert not h.worker.finished


def test_adapters_are_unsupported_for_now():
    h = Harness(model=False)
    h.tell(id="l", type="load", model="m", lora=["a.gguf"])
    h.run()
    assert finals(h) == [("l", "unsupported")]
    assert h.loads == []


def test_the_model_of_the_command_line_failing_ends_the_worker_with_everything_answered():
    h = Harness(model=False)
    h.worker.load_at_start()
    h.tell(id="a", prompt="x")
    h.tell(id="b", type="tokenize", text="x")
    error = RuntimeError("no such file")
    error.kind = "io"
    h.worker.load_finished(error)
    h.tell(id="c", prompt="x")
    h.run()
    assert finals(h) == [("a", "io"), ("b", "io"), ("c", "io")]
    assert h.worker.finished and h.worker.load_error is error


# ---- leaving -------------------------------------------------------------------------------


def test_shutdown_drain_answers_what_was_before_it_and_refuses_what_comes_after():
    h = Harness()
    h.tell(id="a", prompt="x", max_tokens=1)
    h.tell(id="b", prompt="x", max_tokens=1)
    h.tell(type="shutdown", mode="drain")
    h.tell(id="c", prompt="x", max_tokens=1)
    h.tell(type="hello")
    assert h.heard[0].state == "draining"
    assert not h.worker.finished
    h.run()
    assert finals(h) == [("a", None), ("b", None), ("c", "shutting_down")]
    assert h.worker.finished and h.worker.exit_status == 0


def test_shutdown_drains_unless_said_otherwise():
    h = Harness()
    h.tell(id="a", prompt="x", max_tokens=1)
    h.tell(type="shutdown")
    h.run()
    assert finals(h) == [("a", None)]


def test_shutdown_now_ends_what_runs_too():
    h = Harness()
    h.tell(id="a", prompt="xyz")
    h.tell(id="b", prompt="x")
    h.step(3)
    h.tell(type="shutdown", mode="now")
    h.run()
    assert finals(h) == [("a", "shutting_down"), ("b", "shutting_down")]
    assert h.heard[0].text == "x"
    assert h.worker.finished and h.worker.exit_status == 0


def test_terminate_finishes_what_runs_and_refuses_what_waits():
    h = Harness()
    h.tell(id="a", prompt="x", max_tokens=2)
    h.tell(id="b", prompt="x")
    h.send(b"garbage\n")
    h.step(2)
    h.worker.terminate()
    h.tell(id="c", prompt="x")
    h.run()
    assert finals(h) == [("a", None), ("b", "shutting_down"), (None, "invalid_input"), ("c", "shutting_down")]
    assert h.worker.finished and h.worker.exit_status == 0


def test_terminate_while_the_model_loads_does_not_wait_for_it():
    h = Harness(model=False)
    h.tell(id="l", type="load", model="m")
    h.tell(id="a", prompt="x")
    h.run()
    h.worker.terminate()
    h.run()
    assert finals(h) == [("l", "shutting_down"), ("a", "shutting_down")]
    assert h.worker.finished


def test_drain_waits_for_the_load_in_progress():
    h = Harness(model=False)
    h.tell(id="l", type="load", model="m")
    h.tell(id="a", prompt="x", max_tokens=1)
    h.tell(type="shutdown")
    h.run()
    assert not h.worker.finished
    h.loaded()
    h.run()
    assert shape(h.heard) == [("loaded", "l", None), (FINAL, "a", None)]
    assert h.worker.finished


def test_a_cancelled_request_under_shutdown_now_is_still_cancelled():
    h = Harness()
    h.tell(id="a", prompt="xyz")
    h.step(2)
    h.tell(type="cancel", target="a")
    h.tell(type="shutdown", mode="now")
    h.run()
    assert finals(h) == [("a", "cancelled")]


def test_end_of_input_answers_everything_a_last_line_without_newline_too():
    h = Harness()
    h.send(b'{"id":"a","prompt":"x","max_tokens":1}\n{"id":"b","prompt":"x","max_tokens":1}')
    h.worker.end_of_input()
    assert not h.worker.client_done
    h.run()
    assert finals(h) == [("a", None), ("b", None)]
    assert h.worker.client_done and not h.worker.finished


# ---- a client that is gone -----------------------------------------------------------------


def test_a_client_that_is_gone_cancels_everything_and_the_next_starts_clean():
    h = Harness()
    h.tell(id="a", prompt="abc")
    h.tell(id="b", prompt="abc")
    h.send(b'{"id":"half a li')
    h.step(3)
    h.take()
    h.worker.client_gone()
    assert not h.worker.has_work and h.worker.client_done
    h.worker.connect()
    h.tell(id="c", prompt="x", max_tokens=1)
    h.run()
    assert finals(h) == [("c", None)]


def test_a_load_outlives_the_client_that_asked_for_it():
    h = Harness(model=False)
    h.tell(type="load", model="m")
    h.run()
    h.worker.client_gone()
    h.worker.connect()
    h.tell(id="a", prompt="x", max_tokens=1)
    h.run()
    assert h.heard == []
    h.loaded()
    h.run()
    assert finals(h) == [("a", None)]


def test_a_load_still_waiting_when_its_client_left_happens_all_the_same():
    h = Harness(model=False)
    h.tell(id="a", prompt="x")
    h.tell(type="load", model="m")
    h.worker.client_gone()
    assert h.loads == ["m"]
    h.worker.connect()
    h.tell(type="hello")
    assert h.heard[0].state == "loading"


def test_the_last_words_of_a_client_that_is_gone_still_count():
    h = Harness()
    h.worker.client_gone()
    h.send(b'{"id":"a","prompt":"x"}\n{"type":"ping"}\n{"type":"shutdown"}\n')
    assert h.run() == []
    assert h.worker.finished


# ---- anything at all -----------------------------------------------------------------------

lines = st.sampled_from(
    [
        b'{"id":"%d","prompt":"ab","max_tokens":2}',
        b'{"id":"%d","prompt":"ab","stream":true,"max_tokens":1,"progress":true}',
        b'{"id":"%d","prompt":"ab","candidates":["x","yz"]}',
        b'{"id":"%d","prompt":"ab","candidates":[]}',
        b'{"id":"%d","prompt":"raise:cuda"}',
        b'{"id":"%d","prompt":"refuse:tokenizer"}',
        b'{"id":"%d","nonsense":true}',
        b'{"id":"%d","type":"tokenize","text":"x"}',
        b'{"id":"%d","type":"load","model":"m"}',
    ]
)
actions = st.lists(
    st.one_of(
        lines, st.integers(1, 4), st.tuples(st.just("cancel"), st.integers(0, 12)), st.just(b"\xff garbage")
    ),
    max_size=14,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions, st.integers(1, 64))
def test_any_conversation_gets_one_final_per_line_in_order(script, piece):
    h = Harness(chunk=1)
    expected: list[str | None] = []
    for n, action in enumerate(script):
        if isinstance(action, int):
            h.step(action)
            continue
        if isinstance(action, tuple):
            data = b'{"type":"cancel","target":"%d"}\n' % action[1]
        else:
            has_id = b"%d" in action
            data = (action % n if has_id else action) + b"\n"
            expected.append(str(n) if has_id else None)
        for i in range(0, len(data), piece):
            h.send(data[i : i + piece])
    h.run()
    ended = [m.id for m in h.heard if not isinstance(m, (TokenEvent, ProgressEvent))]
    assert ended == expected
    seen: set[str | None] = set()
    for message in h.heard:
        assert message.id is None or message.id not in seen, "a line after its final"
        if not isinstance(message, (TokenEvent, ProgressEvent)):
            seen.add(message.id)


@pytest.mark.parametrize("experts", ["lazy", None])
def test_a_load_line_says_when_experts_come(experts):
    asked: list[tuple[str, str | None]] = []
    worker = Worker(
        max_line_bytes=MAX_LINE_BYTES, start_load=lambda path, how: asked.append((path, how)), meters=Meters()
    )
    line = {"type": "load", "model": "m.gguf", **({"experts": experts} if experts else {})}
    worker.receive(json.dumps(line).encode() + b"\n")
    while worker.has_work:
        worker.work()
    assert asked == [("m.gguf", experts)]


def test_a_load_that_nothing_stands_before_begins_as_its_line_is_read():
    h = Harness(model=False)
    h.send(b'{"type":"load","model":"m.gguf"}\n{"prompt":"a"}\n{"type":"load","model":"n.gguf"}\n')
    assert h.loads == ["m.gguf"]
    assert not h.worker.has_work
    h.loaded()
    h.run()
    assert h.loads == ["m.gguf"]
    assert [m.id for m in h.heard if isinstance(m, Loaded)] == [None]


def test_a_load_behind_a_line_that_waits_keeps_its_place():
    h = Harness(model=False)
    h.tell(id="r", prompt="a")
    h.tell(type="load", model="m.gguf")
    assert h.loads == []
    h.run()
    assert h.loads == ["m.gguf"]
