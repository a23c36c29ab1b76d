"""The real command with the real engine and the bundled model, over real pipes and sockets. Nothing here
depends on how clever the model is."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess

import msgspec
import pytest
from reflex_protocol.client import AsyncClient, Cancelled, Client, WorkerDied, WorkerError
from reflex_protocol.messages import (
    GenerateFinal,
    LarkConstraint,
    ProgressEvent,
    RegexConstraint,
    Request,
    Sampling,
    ScoreFinal,
    TokenEvent,
)

from tests.conftest import reflex_command

from .process import LIMIT, WAIT, eventually

CONTEXT = 2048  # of the bundled model


@pytest.fixture(scope="module")
def worker():
    """One worker for all tests that only talk."""
    with Client.spawn([*reflex_command(), "stdio", "--demo"], ready_timeout=WAIT) as client:
        yield client
    assert client.exit_status == 0


def fresh() -> Client:
    return Client.spawn([*reflex_command(), "stdio", "--demo"], ready_timeout=WAIT)


def run(
    *args: str, data: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*reflex_command(), *args],
        input=data,
        capture_output=True,
        timeout=LIMIT,
        env={**os.environ, **(env or {})},
    )


# ---- generate ------------------------------------------------------------------------------


def test_three_requests_from_printf_come_back_in_order():
    data = (
        b'{"id":"1","prompt":"Once upon a time","max_tokens":4}\n'
        b'{"id":"2","prompt":"The capital of France is","candidates":[" Paris"," Rome"]}\n'
        b'{"id":"3","prompt":"Once","max_tokens":0}\n'
    )
    done = run("stdio", "--demo", data=data)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(b'"id":')[1][:3] for line in lines] == [b'"1"', b'"2"', b'"3"']
    assert b"REFLEX_STDIO_READY " in done.stderr


def test_streamed_text_is_the_final_text(worker):
    *tokens, final = worker.stream(
        Request(prompt="Once upon a time", max_tokens=24, stream=True), timeout=WAIT
    )
    assert isinstance(final, GenerateFinal)
    assert [t.token_id for t in tokens] == final.token_ids
    assert final.text.startswith("".join(t.text for t in tokens))
    assert worker.detokenize(final.token_ids, skip_special=True, timeout=WAIT).startswith(final.text)
    assert final.usage.completion_tokens == len(final.token_ids) <= 24
    assert final.usage.prompt_tokens == len(worker.tokenize("Once upon a time", timeout=WAIT))
    assert {"launch", "gguf_open", "cuda_init", "model_load", "first_kernel_at"} <= set(final.timings)
    assert {"tokenize", "prompt_eval", "decode", "first_token", "total"} <= set(final.timings)


def test_greedy_is_the_same_twice_and_after_a_long_request_as_in_a_fresh_process(worker):
    first = worker.generate("The sky is", max_tokens=12, timeout=WAIT)
    worker.generate("word " * 1000, max_tokens=2, timeout=WAIT)
    again = worker.generate("The sky is", max_tokens=12, timeout=WAIT)
    with fresh() as other:
        there = other.generate("The sky is", max_tokens=12, timeout=WAIT)
    assert first.token_ids == again.token_ids == there.token_ids


def test_a_seed_gives_the_same_text_and_a_drawn_one_is_told(worker):
    def sample(seed):
        sampling = Sampling(temperature=1.5, top_k=50, seed=seed)
        return worker.generate("Once", max_tokens=16, sampling=sampling, ignore_eos=True, timeout=WAIT)

    drawn = sample(None)
    assert sample(drawn.seed).token_ids == drawn.token_ids
    assert len({tuple(sample(s).token_ids) for s in range(5)}) > 1


def test_ids_in_place_of_a_prompt(worker):
    ids = worker.tokenize("The sky is", timeout=WAIT)
    by_text = worker.generate("The sky is", max_tokens=6, timeout=WAIT)
    by_ids = worker.request(Request(prompt_token_ids=ids, max_tokens=6), timeout=WAIT)
    assert by_ids.token_ids == by_text.token_ids


def test_logit_bias_rules_out_and_forces(worker):
    first = worker.generate("The sky is", max_tokens=1, timeout=WAIT).token_ids[0]
    without = Sampling(logit_bias={first: -1e9})
    assert worker.generate("The sky is", max_tokens=1, sampling=without, timeout=WAIT).token_ids != [first]
    forced = Sampling(logit_bias={7: 1e9})
    answer = worker.generate("The sky is", max_tokens=3, sampling=forced, ignore_eos=True, timeout=WAIT)
    assert answer.token_ids == [7, 7, 7]


def test_stop_strings_and_stop_ids_end_it(worker):
    free = worker.generate("Once upon a time", max_tokens=20, ignore_eos=True, timeout=WAIT)
    word = free.text[len(free.text) // 2 :][:6]
    stopped = worker.generate(
        "Once upon a time", max_tokens=20, stop=["never this", word], ignore_eos=True, timeout=WAIT
    )
    assert (stopped.finish_reason, stopped.stop_match) == ("stop", word)
    assert stopped.text == free.text[: free.text.index(word)]
    by_id = worker.generate(
        "Once upon a time", max_tokens=20, stop_token_ids=[free.token_ids[2]], ignore_eos=True, timeout=WAIT
    )
    assert by_id.finish_reason == "stop" and by_id.stop_match is None
    assert len(by_id.token_ids) <= 3


def test_logprobs_are_log_probabilities(worker):
    final = worker.generate("The sky is", max_tokens=3, logprobs=5, prompt_logprobs=2, timeout=WAIT)
    assert final.logprobs is not None and final.prompt_logprobs is not None
    assert [e.token_id for e in final.logprobs] == final.token_ids
    for entry in final.logprobs:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token_id == entry.token_id, "greedy takes the likeliest"
        assert sum(math.exp(t.logprob) for t in entry.top_logprobs) <= 1 + 1e-6
    ids = worker.tokenize("The sky is", timeout=WAIT)
    assert [e.token_id for e in final.prompt_logprobs] == ids[1:]


def test_max_tokens_0_only_prefills(worker):
    final = worker.generate("The sky is", max_tokens=0, prompt_logprobs=0, timeout=WAIT)
    assert (final.token_ids, final.text, final.finish_reason) == ([], "", "length")
    assert final.prompt_logprobs


def test_control_tokens_in_the_prompt_and_spans_that_are_literal(worker):
    special = (worker.info(timeout=WAIT)).special_tokens
    spelling = worker.detokenize([special["eos"]], timeout=WAIT)
    text = f"a{spelling}b"
    assert special["eos"] in worker.tokenize(text, timeout=WAIT)
    assert special["eos"] not in worker.tokenize(text, parse_special=False, timeout=WAIT)
    span = [(1, 1 + len(spelling))]
    assert special["eos"] not in worker.tokenize(text, literal_spans=span, timeout=WAIT)
    both = worker.tokenize(text + spelling, literal_spans=span, timeout=WAIT)
    assert both.count(special["eos"]) == 1
    ends = worker.generate(text, max_tokens=1, literal_spans=span, timeout=WAIT)
    assert ends.usage.prompt_tokens == len(worker.tokenize(text, literal_spans=span, timeout=WAIT))


def test_a_prompt_that_does_not_fit_and_one_that_runs_out_of_room(worker):
    ids = worker.tokenize("a", timeout=WAIT)[:1]
    with pytest.raises(WorkerError) as e:
        worker.request(Request(prompt_token_ids=ids * (CONTEXT + 1)), timeout=WAIT)
    assert e.value.kind == "context_overflow"
    full = Request(prompt_token_ids=ids * (CONTEXT - 2), max_tokens=50, ignore_eos=True)
    final = worker.request(full, timeout=WAIT)
    assert final.finish_reason == "length" and len(final.token_ids) < 50


def test_an_id_that_the_model_has_not(worker):
    with pytest.raises(WorkerError, match=r"prompt_token_ids\[1\]") as e:
        worker.request(Request(prompt_token_ids=[0, 10_000_000]), timeout=WAIT)
    assert e.value.kind == "invalid_input"


def test_progress_counts_up_to_the_prompt(worker):
    ids = worker.tokenize("a", timeout=WAIT)[:1] * 1100
    request = Request(prompt_token_ids=ids, max_tokens=0, progress=True)
    *progress, final = worker.stream(request, timeout=WAIT)
    assert [type(p) for p in progress] == [ProgressEvent] * len(progress)
    done = [p.done for p in progress]
    assert done == sorted(done) and done[-1] == 1100 and len(done) > 1
    assert {p.total for p in progress} == {1100}
    assert isinstance(final, GenerateFinal)


def test_a_timeout_ends_it_with_what_it_has(worker):
    final = worker.generate("Once", max_tokens=CONTEXT, ignore_eos=True, timeout_ms=40, timeout=WAIT)
    assert final.finish_reason == "timeout"
    assert len(final.token_ids) < CONTEXT - 10


# ---- system1 -------------------------------------------------------------------------------


def test_system1_probabilities_and_entropy(worker):
    answer = worker.score("The sky is", [" blue", " the", " and so on and on"], timeout=WAIT)
    p = [c.probability for c in answer.candidates]
    assert sum(p) == pytest.approx(1) and answer.best_index == p.index(max(p))
    assert answer.entropy == pytest.approx(-sum(x * math.log2(x) for x in p if x > 0), abs=1e-6)
    assert answer.score == "logprob_sum", "what auto means where lengths differ"
    assert [c.text for c in answer.candidates] == [" blue", " the", " and so on and on"]


@pytest.mark.parametrize("kind", ["logit_sum", "logprob_sum", "logprob_mean"])
def test_system1_by_ids_is_system1_by_text(worker, kind):
    texts = [" blue", " the moon"]
    by_text = worker.score("The sky is", texts, score=kind, timeout=WAIT)
    request = Request(
        prompt_token_ids=worker.tokenize("The sky is", timeout=WAIT),
        candidate_token_ids=[c.token_ids for c in by_text.candidates],
        score=kind,
    )
    by_ids = worker.request(request, timeout=WAIT)
    assert isinstance(by_ids, ScoreFinal)
    assert by_ids == by_text or [c.score for c in by_ids.candidates] == [c.score for c in by_text.candidates]
    assert by_ids.score == kind


def test_system1_scores_are_the_prompts_own_logprobs(worker):
    """The score of a continuation is what prompt_logprobs says of the same tokens."""
    answer = worker.score("The sky is", [" blue and the sea"], score="logprob_sum", timeout=WAIT)
    ids = worker.tokenize("The sky is", timeout=WAIT) + answer.candidates[0].token_ids
    check = worker.request(Request(prompt_token_ids=ids, max_tokens=0, prompt_logprobs=0), timeout=WAIT)
    tail = check.prompt_logprobs[-len(answer.candidates[0].token_ids) :]
    assert answer.candidates[0].score == pytest.approx(sum(e.logprob for e in tail), abs=0.05)


def test_a_join_that_is_not_clean_names_the_candidate(worker):
    with pytest.raises(WorkerError, match=r"candidates\[1\]") as e:
        worker.score("The capital of Fra", [" x", "nce"], timeout=WAIT)
    assert e.value.kind == "invalid_input"


# ---- control lines -------------------------------------------------------------------------


def test_hello_and_info(worker):
    hello = worker.hello(timeout=WAIT)
    assert (hello.state, hello.protocol) == ("ready", "1.0")
    assert (hello.model.architecture, hello.limits.n_ctx) == ("qwen3", CONTEXT)
    info = worker.info(timeout=WAIT)
    assert info.model["n_ctx"] == CONTEXT and info.model["chat_template"]
    assert info.special_tokens["end_ids"]
    assert info.phases["ready_at"] > 0


def test_text_survives_the_way_there_and_back(worker):
    for text in (
        "plain",
        "naïve café",
        "你好，世界",
        "🏳️‍🌈 👩‍👩‍👧",
        "line\nline\ttab",
        "\u0000nul",
        "e\u0301",
    ):
        assert worker.detokenize(worker.tokenize(text, timeout=WAIT), timeout=WAIT) == text


def test_half_of_an_emoji_comes_out_as_a_replacement_character(worker):
    ids = worker.tokenize("🏴", parse_special=False, timeout=WAIT)
    if len(ids) > 1:
        assert "\ufffd" in worker.detokenize(ids[:-1], timeout=WAIT)


async def test_cancel_while_it_decodes_and_while_it_reads_the_prompt():
    async with await AsyncClient.spawn([*reflex_command(), "stdio", "--demo"], ready_timeout=WAIT) as worker:
        token = (await worker.tokenize("a", timeout=WAIT))[:1]
        decoding = Request(prompt_token_ids=token, max_tokens=CONTEXT, ignore_eos=True, stream=True)
        # Every row's log-probabilities with many alternatives: a prefill that takes a while.
        reading = Request(
            prompt_token_ids=token * (CONTEXT - 1), max_tokens=0, prompt_logprobs=1000, progress=True
        )
        for request, kind in ((decoding, TokenEvent), (reading, ProgressEvent)):
            so_far = await cancelled_at_its_first_event(worker, request, kind)
            assert len(so_far.token_ids) < CONTEXT - 1
            assert bool(so_far.token_ids) == (kind is TokenEvent)
        assert (await worker.generate("Once", max_tokens=1, timeout=WAIT)).token_ids


async def cancelled_at_its_first_event(worker, request, kind) -> Cancelled:
    """On a busy machine the request may be done before we are scheduled again: then once more."""
    for _ in range(10):
        exchange = await worker.submit(request)
        async for event in exchange:
            assert isinstance(event, kind)
            break
        exchange.cancel()
        try:
            await exchange.final(WAIT)
        except Cancelled as e:
            return e
    raise AssertionError("never cancelled")


async def test_many_clients_of_one_worker_each_get_their_own():
    async with await AsyncClient.spawn([*reflex_command(), "stdio", "--demo"], ready_timeout=WAIT) as worker:
        prompts = ["Once", "The sky", "A cat", "Two"] * 5
        asked = [worker.generate(p, max_tokens=3, logprobs=0, timeout=WAIT) for p in prompts]
        answers = await asyncio.gather(*asked)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == answers[prompts.index(prompt)].token_ids


# ---- starting and ending -------------------------------------------------------------------


def test_a_worker_without_a_model_waits_for_a_load_line(demo_gguf):
    with Client.spawn([*reflex_command(), "stdio"], ready_timeout=WAIT, env=without_model()) as worker:
        assert worker.hello(timeout=WAIT).state == "no_model"
        with pytest.raises(WorkerError) as e:
            worker.load(str(demo_gguf) + ".none", timeout=WAIT)
        assert e.value.kind == "io"
        loaded = worker.load(str(demo_gguf), timeout=WAIT)
        assert loaded.model.architecture == "qwen3" and loaded.phases["gguf_open"] > 0
        assert worker.generate("Once", max_tokens=1, timeout=WAIT).token_ids


def without_model() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "REFLEX_MODEL"}


def test_the_model_by_environment_by_option_and_by_position(demo_gguf):
    line = b'{"prompt":"Once","max_tokens":1}\n'
    for args, env in (
        (["stdio"], {"REFLEX_MODEL": str(demo_gguf)}),
        (["stdio", "--model", str(demo_gguf)], {}),
        (["stdio", str(demo_gguf)], {}),
    ):
        done = run(*args, data=line, env=env)
        assert done.returncode == 0 and b'"ok":true' in done.stdout, done.stderr


def test_a_model_that_is_not_there_or_no_gguf(tmp_path):
    (tmp_path / "text.gguf").write_text("not a model at all, just words")
    for name, status, kind in (("none.gguf", 4, b"[io]"), ("text.gguf", 3, b"[gguf]")):
        done = run("stdio", str(tmp_path / name), data=b"")
        assert done.returncode == status and kind in done.stderr, done.stderr
        assert b"READY" not in done.stderr
    with pytest.raises(WorkerDied):
        Client.spawn([*reflex_command(), "stdio", str(tmp_path / "none.gguf")])


def test_a_model_path_that_is_no_utf8(tmp_path, demo_gguf):
    path = os.fsencode(tmp_path) + b"/m\xff.gguf"
    os.symlink(demo_gguf, path)
    data = b'{"type":"info","id":"i"}\n{"prompt":"Once","max_tokens":1,"id":"g"}\n{"type":"shutdown"}\n'
    done = subprocess.run([*reflex_command(), "stdio", path], input=data, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    info, final = done.stdout.splitlines()
    assert "m\ufffd.gguf".encode() in info and b'"ok":true' in final


def test_sigterm_ends_the_real_worker_with_status_0():
    with fresh() as worker:
        worker.generate("Once", max_tokens=1, timeout=WAIT)
        worker.terminate()
        assert worker.wait(WAIT) == 0


def test_kill_9_of_the_real_worker_is_told_with_its_signal():
    with fresh() as worker:
        exchange = worker.submit(Request(prompt="Once", max_tokens=CONTEXT, ignore_eos=True, stream=True))
        events = worker.events(exchange, WAIT)
        next(events)
        worker.process.kill()
        with pytest.raises(WorkerDied) as e:
            list(events)
        assert e.value.exit_status == -signal.SIGKILL


def test_the_real_worker_on_a_socket(folder):
    path = str(folder / "s")
    command = [*reflex_command(), "uds", path, "--demo", "--mode", "640", "--busy"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr and b"REFLEX_UDS_READY" in process.stderr.readline()
        assert os.stat(path).st_mode & 0o777 == 0o640
        with Client.connect(path) as first:
            assert first.generate("Once", max_tokens=2, timeout=WAIT).token_ids
            with Client.connect(path) as second, pytest.raises(WorkerError) as e:
                second.hello(timeout=WAIT)
            assert e.value.kind == "busy"
        with Client.connect(path) as third:
            assert third.hello(timeout=WAIT).state == "ready"
            third.shutdown(timeout=WAIT)
        assert process.wait(LIMIT) == 0
    assert not os.path.exists(path)


def test_1000_real_requests_leave_memory_and_descriptors_as_they_were(worker):
    pid = worker.process.pid

    def many(n: int) -> None:
        for i in range(n):
            if i % 4 == 0:
                worker.score("The sky is", [" blue", " green"], timeout=WAIT)
            else:
                worker.generate("The sky is", max_tokens=1, logprobs=2, timeout=WAIT)

    many(200)
    rss, fds = rss_kib(pid), len(os.listdir(f"/proc/{pid}/fd"))
    many(1000)
    assert len(os.listdir(f"/proc/{pid}/fd")) == fds
    assert rss_kib(pid) <= rss + 2048


def rss_kib(pid: int) -> int:
    from .process import status_kib

    return status_kib(pid, "VmRSS")


def test_a_reader_that_leaves_ends_the_real_worker():
    with fresh() as worker:
        worker.submit(Request(prompt="Once", max_tokens=CONTEXT, ignore_eos=True, stream=True))
        worker.process.stdout.close()
        assert eventually(lambda: worker.process.poll() == 1)
        worker._ended = True


# ---- constraints ---------------------------------------------------------------------------

CONSTRAINTS = [
    ({"type": "regex", "pattern": "[0-9]{3}-[a-z]{2}"}, r"[0-9]{3}-[a-z]{2}"),
    ({"type": "lark", "grammar": 'start: "yes" | "no"'}, r"yes|no"),
    ({"type": "json_schema", "schema": {"enum": ["red", 7, None]}}, r'"red"|7|null'),
]


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINTS, ids=["regex", "lark", "json_schema"])
def test_a_constraint_decides_what_comes_out(worker, constraint, pattern):
    pytest.importorskip("llguidance", reason="the package is optional")
    assert "constraint" in worker.hello(timeout=WAIT).capabilities
    request = msgspec.convert({"prompt": "Q:", "max_tokens": 64, "constraint": constraint}, Request)
    final = worker.request(request, timeout=WAIT)
    assert final.finish_reason == "stop"
    assert re.fullmatch(pattern, final.text)


def test_a_constraint_that_is_wrong_is_invalid_input(worker):
    pytest.importorskip("llguidance", reason="the package is optional")
    with pytest.raises(WorkerError, match="constraint") as e:
        worker.request(Request(prompt="Q:", constraint=RegexConstraint(pattern="(")), timeout=WAIT)
    assert e.value.kind == "invalid_input"


def test_a_wrong_grammar_is_told_without_quoting_it_all(worker):
    pytest.importorskip("llguidance", reason="the package is optional")
    bad = 'start: "a" b\nb: %json {"type": "nope"}\n'
    with pytest.raises(WorkerError, match="Invalid type: nope") as e:
        worker.request(Request(prompt="Q:", constraint=LarkConstraint(grammar=bad)), timeout=WAIT)
    assert "start:" not in str(e.value)


def test_a_grammar_too_large_to_follow_is_invalid_input_in_one_short_line(worker):
    """llguidance gave up with its whole state in the message, and as an error of no kind."""
    pytest.importorskip("llguidance", reason="the package is optional")
    shapes = [
        {"type": "object", "properties": {letter * n: {"type": "string"} for letter in "abcdefghij"}}
        for n in range(1, 200)
    ]
    schema = {"type": "json_schema", "schema": {"type": "array", "items": {"anyOf": shapes}}}
    request = msgspec.convert({"prompt": "Q:", "max_tokens": 8, "constraint": schema}, Request)
    with pytest.raises(WorkerError, match="constraint") as e:
        worker.request(request, timeout=WAIT)
    assert e.value.kind == "invalid_input"
    assert "\n" not in str(e.value) and len(str(e.value)) < 500
    assert worker.generate("The sky is", max_tokens=1, timeout=WAIT).token_ids
