"""The Python API: the real engine with the bundled model, and what it does for a file whose pre-tokenizer the
core does not know."""

from __future__ import annotations

import sys
import types

import pytest

import reflex_worker
from reflex_worker import Engine, ReflexError, api


@pytest.fixture(scope="module")
def engine(demo_gguf):
    return Engine(str(demo_gguf), device="cpu")


def test_generate_runs_whole_or_step_by_step(engine):
    whole = engine.generate("Once upon a time", max_tokens=8, ignore_eos=True).run()
    assert whole.finish_reason == "length" and len(whole.token_ids) == 8
    events = list(engine.generate("Once upon a time", max_tokens=8, ignore_eos=True))
    assert [e.kind for e in events] == ["progress", *["token"] * 8, "done"]
    assert "".join(e.text for e in events) == whole.text
    assert whole.usage["completion_tokens"] == 8 and whole.timings["total"] > 0


def test_a_generation_that_is_dropped_is_cancelled_and_the_next_is_whole(engine):
    expected = engine.generate("The sky is", max_tokens=4).run().token_ids
    half = engine.generate("Once upon a time", max_tokens=50, ignore_eos=True)
    for _ in range(5):
        half.step()
    del half
    assert engine.generate("The sky is", max_tokens=4).run().token_ids == expected


def test_score(engine):
    decision = engine.score("The sky is", [" blue", " a cat"]).run()
    assert [c[0] for c in decision.candidates] == [" blue", " a cat"]
    assert sum(c[3] for c in decision.candidates) == pytest.approx(1)
    assert decision.score_kind == "logprob_sum"
    assert 0 <= decision.entropy <= 1 and decision.best_index in (0, 1)
    assert decision.usage["prompt_tokens"] == len(engine.tokenize("The sky is"))


def test_tokenize_and_facts(engine):
    ids = engine.tokenize("The sky is blue")
    assert engine.detokenize(ids) == "The sky is blue"
    assert engine.info["n_ctx"] == 2048 and engine.info["tokenizer_known"]
    assert engine.special_tokens["end_ids"] and engine.phases["ready_at"] > 0
    engine.warm_up()


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda e: e.generate("x", max_tokens=-1), "invalid_input", "max_tokens"),
        (lambda e: e.generate("x", prompt_token_ids=[1]), "invalid_input", "both"),
        (lambda e: e.generate(prompt_token_ids=[0] * 5000), "context_overflow", "2048"),
        (lambda e: e.score("x", []), "invalid_input", "candidates"),
        (lambda e: e.detokenize([10**9]), "invalid_input", "token_ids"),
    ],
)
def test_failures_are_reflex_errors_with_a_kind(engine, call, kind, text):
    with pytest.raises(ReflexError, match=text) as e:
        call(engine)
    assert e.value.kind == kind


INT = "expected a whole number from 0 to 2147483647"
B = 1 << 40


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda e: e.generate("x", max_tokens=B), f"max_tokens: {INT}, found {B}"),
        (lambda e: e.generate("x", top_k=10**30), f"top_k: {INT}, found {10**30}"),
        (lambda e: e.generate("x", timeout_ms=B), f"timeout_ms: {INT}, found {B}"),
        (
            lambda e: e.generate("x", logprobs=B),
            f"logprobs: expected a whole number from 0 to 1000, found {B}",
        ),
        (
            lambda e: e.generate("x", seed=-1),
            f"seed: expected a whole number from 0 to {2**64 - 1}, found -1",
        ),
        (lambda e: e.generate(prompt_token_ids=[1, B]), rf"prompt_token_ids\[1\]: {INT}, found {B}"),
        (lambda e: e.generate("x", stop_token_ids=[B]), rf"stop_token_ids\[0\]: {INT}, found {B}"),
        (lambda e: e.generate("x", logit_bias={B: 1.0}), f"logit_bias: a key: {INT}, found {B}"),
        (lambda e: e.generate("x", literal_spans=[(-1, 2)]), r"literal_spans\[0\]\[0\]: .*, found -1"),
        (lambda e: e.score("x", [" a"], score_from=[B]), rf"score_from\[0\]: {INT}, found {B}"),
        (
            lambda e: e.score("x", candidate_token_ids=[[B]]),
            rf"candidate_token_ids\[0\]\[0\]: {INT}, found {B}",
        ),
        (lambda e: e.score("x", [" a"], timeout_ms=B), f"timeout_ms: {INT}, found {B}"),
        (
            lambda e: e.tokenize("x", literal_spans=[(0, 10**30)]),
            rf"literal_spans\[0\]\[1\]: .*, found {10**30}",
        ),
        (lambda e: e.detokenize([B]), rf"token_ids\[0\]: {INT}, found {B}"),
        (lambda e: e.token_bytes(10**9), r"token_id: expected a token id in \[0, \d+\), found 1000000000"),
        (lambda e: Engine("x", threads=B), f"threads: {INT}, found {B}"),
        (lambda e: Engine("x", ctx=-B), f"ctx: {INT}, found -{B}"),
    ],
)
def test_a_number_that_the_cores_types_do_not_hold_is_refused_by_its_range(engine, call, text):
    """It was a TypeError that listed every argument of the call and named none."""
    with pytest.raises(ReflexError, match=text) as e:
        call(engine)
    assert e.value.kind == "invalid_input"


def test_a_wrong_type_is_still_a_type_error(engine):
    with pytest.raises(TypeError):
        engine.generate("x", max_tokens="many")


def test_a_mask_that_leaves_no_token_is_invalid_input_not_token_0(engine):
    n_bytes = (engine.info["n_vocab"] + 7) // 8
    for temperature in (0.0, 1.0):
        generation = engine._native.generate("x", max_tokens=4, temperature=temperature)
        generation.allow(bytes(n_bytes))
        with pytest.raises(ReflexError, match="no token is left to choose from") as e:
            while generation.step().kind != "done":
                pass
        assert e.value.kind == "invalid_input"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ReflexError, match="none") as e:
        Engine(str(tmp_path / "none.gguf"))
    assert e.value.kind == "io"


def test_poll_is_called_while_loading_and_may_end_it(demo_gguf):
    calls = []
    Engine(str(demo_gguf), device="cpu", poll=lambda: calls.append(1))
    assert calls

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine(str(demo_gguf), device="cpu", poll=stop)


def test_the_package_names_its_api():
    assert reflex_worker.Engine is api.Engine and reflex_worker.ReflexError is api.ReflexError
    with pytest.raises(AttributeError):
        _ = reflex_worker.Motor


# ---- a pre-tokenizer that the core does not know -------------------------------------------


class StubNative:
    """A core that takes ids only."""

    info = types.MappingProxyType({"tokenizer_known": False, "tokenizer_error": ""})

    def __init__(self, model, **options):
        self.asked = {}

    def generate(self, prompt, **options):
        self.asked = {"prompt": prompt, **options}
        return types.SimpleNamespace(step=None)

    def score(self, prompt, candidates, **options):
        self.asked = {"prompt": prompt, "candidates": candidates, **options}
        return types.SimpleNamespace(
            step=None, candidates=[("", ids, 0.0, 0.5) for ids in options["candidate_token_ids"]]
        )


class StubTokenizer:
    """Pairs of letters are one token, as far as they go; `add_bos` is 1."""

    def __init__(self, model):
        self.model = model

    def tokenize(self, text, *, parse_special, literal_spans, add_bos):
        self.seen = (parse_special, literal_spans)
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
        return [1] * bool(add_bos) + [sum(map(ord, p)) for p in pairs]


@pytest.fixture
def other(monkeypatch):
    """An engine on a file whose pre-tokenizer the core does not know."""
    module = types.ModuleType("reflex_worker.fallback_tokenizer")
    module.FallbackTokenizer = StubTokenizer
    monkeypatch.setitem(sys.modules, "reflex_worker.fallback_tokenizer", module)
    monkeypatch.setattr(api, "_NativeEngine", StubNative)
    return Engine("other.gguf")


PAIR = ord("a") + ord("b")


def test_a_prompt_reaches_the_core_as_ids(other):
    other.generate("abab", literal_spans=[(0, 2)], parse_special=False, add_bos=True, max_tokens=3)
    asked = other._native.asked
    assert (asked["prompt"], asked["prompt_token_ids"], asked["max_tokens"]) == (None, [1, PAIR, PAIR], 3)
    assert asked["literal_spans"] == ()
    assert other._fallback_tokenizer.seen == (False, [(0, 2)])
    assert other._fallback_tokenizer.model == "other.gguf"
    assert other.tokenize("ab") == [PAIR]


def test_ids_pass_as_they_are(other):
    other.generate(prompt_token_ids=[5, 6])
    assert other._native.asked["prompt_token_ids"] == [5, 6]


def test_candidates_are_joined_to_the_prompt_and_keep_their_text(other):
    scoring = other.score("abab", ["ab", "abab"])
    asked = other._native.asked
    assert (asked["prompt"], asked["candidates"]) == (None, None)
    assert asked["prompt_token_ids"] == [PAIR, PAIR]
    assert asked["candidate_token_ids"] == [[PAIR], [PAIR, PAIR]]
    assert [c[:2] for c in scoring.candidates] == [("ab", [PAIR]), ("abab", [PAIR, PAIR])]


def test_a_join_that_is_not_clean_names_the_candidate(other):
    with pytest.raises(ReflexError, match=r"candidates\[1\]") as e:
        other.score("abab" + "a", ["", "b"])
    assert e.value.kind == "invalid_input"


def test_after_ids_a_candidate_is_encoded_alone(other):
    other.score(None, ["ab"], prompt_token_ids=[9], add_bos=True)
    asked = other._native.asked
    assert (asked["prompt_token_ids"], asked["candidate_token_ids"]) == ([9], [[PAIR]])
