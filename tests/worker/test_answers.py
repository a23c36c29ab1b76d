"""What requests are answered with, field by field, on the core alone (no process)."""

from __future__ import annotations

from msgspec import UNSET
from reflex_protocol import encode
from reflex_protocol.messages import (
    CandidateScore,
    GenerateFinal,
    ProgressEvent,
    ScoreFinal,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    Usage,
)

from reflex_worker.energy import Meters

from .harness import FINAL, Harness, shape


def test_a_generate_final_has_every_field():
    h = Harness()
    h.tell(id="a", prompt="abc", max_tokens=4)
    assert h.run() == [
        GenerateFinal(
            id="a",
            token_ids=[97, 98, 99, 97],
            text="abca",
            finish_reason="length",
            stop_match=None,
            logprobs=None,
            prompt_logprobs=None,
            seed=12345,
            usage=Usage(prompt_tokens=3, completion_tokens=4),
            timings={"launch": 1.0, "gguf_open": 0.5, "model_load": 2.0, "total": 1.0},
        )
    ]


def test_a_system1_final_has_every_field():
    h = Harness()
    h.tell(id="s", prompt="abc", candidates=["xy", "z"])
    assert h.run() == [
        ScoreFinal(
            id="s",
            candidates=[
                CandidateScore(text="xy", token_ids=[120, 121], score=-2.0, probability=0.5),
                CandidateScore(text="z", token_ids=[122], score=-1.0, probability=0.5),
            ],
            entropy=1.0,
            best_index=1,
            score="logit_sum",
            usage=Usage(prompt_tokens=3),
            timings={"launch": 1.0, "gguf_open": 0.5, "model_load": 2.0, "total": 1.0},
        )
    ]


def test_candidates_as_ids_and_a_prompt_as_ids():
    h = Harness()
    h.tell(prompt_token_ids=[97], candidate_token_ids=[[98], [99, 100]], score="logprob_mean")
    (final,) = h.run()
    assert [c.text for c in final.candidates] == ["b", "cd"]
    assert final.score == "logprob_mean"


def test_streaming_gives_a_line_per_token_and_whole_characters():
    h = Harness()
    h.tell(id="t", prompt="é!", max_tokens=4, stream=True)
    *tokens, final = h.run()
    assert tokens == [
        TokenEvent(id="t", token_id=0xC3, text=""),
        TokenEvent(id="t", token_id=0xA9, text="é"),
        TokenEvent(id="t", token_id=0x21, text="!"),
        TokenEvent(id="t", token_id=0xC3, text=""),
    ]
    assert final.text == "é!"


def test_without_stream_and_progress_there_is_only_the_final():
    h = Harness(chunk=1)
    h.tell(prompt="abcdef")
    assert shape(h.run()) == [(FINAL, None, None)]


def test_progress_is_a_line_per_prefill_chunk():
    h = Harness(chunk=2)
    h.tell(id="p", prompt="abcde", max_tokens=0, progress=True)
    h.tell(id="q", prompt="abcde", candidates=["x"], progress=True)
    heard = h.run()
    for i, line_id in ((0, "p"), (4, "q")):
        assert heard[i : i + 3] == [
            ProgressEvent(id=line_id, done=2, total=5),
            ProgressEvent(id=line_id, done=4, total=5),
            ProgressEvent(id=line_id, done=5, total=5),
        ]
        assert shape(heard[i + 3 : i + 4]) == [(FINAL, line_id, None)]


def test_logprobs_ride_on_tokens_and_in_the_final():
    h = Harness()
    h.tell(prompt="ab", max_tokens=1, stream=True, logprobs=2, prompt_logprobs=1)
    token, final = h.run()
    top = [TopLogprob(token_id=i, logprob=-1.0 - i, bytes=[i]) for i in range(2)]
    assert (token.logprob, token.top_logprobs, token.bytes) == (-0.5, top, [97])
    assert final.logprobs == [TokenLogprob(token_id=97, logprob=-0.5, top_logprobs=top, bytes=[97])]
    (second,) = final.prompt_logprobs
    assert second == TokenLogprob(token_id=98, logprob=-1.0, top_logprobs=top[:1], bytes=[98])


def test_logprobs_of_zero_alternatives_are_not_null():
    h = Harness()
    h.tell(prompt="ab", max_tokens=1, stream=True, logprobs=0)
    token, final = h.run()
    assert (token.logprob, token.top_logprobs) == (-0.5, [])
    assert final.logprobs == [TokenLogprob(token_id=97, logprob=-0.5, top_logprobs=[], bytes=[97])]


def test_a_stop_string_and_a_timeout_end_it():
    h = Harness()
    h.tell(prompt="ab;", stop=[";a"])
    h.tell(prompt="ab", timeout_ms=0)
    stopped, late = h.run()
    assert (stopped.finish_reason, stopped.stop_match, stopped.text) == ("stop", ";a", "ab")
    assert (late.finish_reason, late.text) == ("timeout", "")


def test_sampling_fields_reach_the_engine():
    h = Harness()
    seen = {}
    engine = h.worker._engine
    generate = engine.generate
    engine.generate = lambda *a, **k: (seen.update(k), generate(*a, **k))[1]
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {"5": -1.5},
    }
    fields = {
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "skip_special": False,
        "parse_special": False,
        "literal_spans": [[0, 1]],
        "add_bos": True,
        "timeout_ms": 5000,
    }
    body = {"type": "json_schema", "schema": {"type": "integer"}}
    h.tell(prompt="ab", sampling=sampling, constraint=body, **fields)
    h.run()
    assert seen["constraint"] == ("json_schema", {"type": "integer"})
    want = {**sampling, "logit_bias": {5: -1.5}, **fields, "literal_spans": [(0, 1)]}
    assert {k: seen[k] for k in want} == want
    h.tell(prompt="ab")
    seen.clear()
    h.run()
    assert "temperature" not in seen, "without sampling the engine's own default, greedy, holds"


def test_score_from_reaches_the_engine():
    h = Harness()
    seen = {}
    engine = h.worker._engine
    score = engine.score
    engine.score = lambda *a, **k: (seen.update(k), score(*a, **k))[1]
    h.tell(prompt="ab", candidate_token_ids=[[1, 2], [3]], score_from=[1, 0])
    h.run()
    assert seen["score_from"] == [1, 0]


class FakeMeters(Meters):
    """One joule more at each look; `cpu` only where a test says so."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.opened: list[bool] = []
        self._names, self._joules = names, 0.0

    def open(self, on_gpu: bool) -> None:
        self.opened.append(on_gpu)

    def read(self) -> dict[str, float]:
        self._joules += 1
        return dict.fromkeys(self._names, self._joules)


def test_energy_is_told_where_asked_for_and_known():
    h = Harness(meters=FakeMeters("gpu", "cpu"))
    h.tell(prompt="a", max_tokens=1, energy=True)
    h.tell(prompt="a", candidates=["b"], energy=True)
    h.tell(prompt="a", max_tokens=1)
    first, second, third = h.run()
    assert isinstance(first, GenerateFinal) and first.energy == {"gpu": 1.0, "cpu": 1.0}
    assert isinstance(second, ScoreFinal) and second.energy == {"gpu": 1.0, "cpu": 1.0}
    assert isinstance(third, GenerateFinal) and third.energy is UNSET
    assert b"energy" not in encode(third)


def test_without_a_meter_energy_is_left_out_and_not_zero():
    h = Harness(meters=FakeMeters())
    h.tell(prompt="a", max_tokens=1, energy=True)
    (final,) = h.run()
    assert isinstance(final, GenerateFinal) and final.energy is UNSET


def test_meters_are_opened_by_who_may_ask_and_by_nobody_else():
    """NVML costs milliseconds: a cold first request pays for it only if it asks."""
    meters = FakeMeters("cpu")
    h = Harness(meters=meters)
    h.tell(prompt="a", max_tokens=1)
    h.run()
    assert meters.opened == []
    h.tell(type="info")
    h.tell(prompt="a", max_tokens=1, energy=True)
    h.run()
    assert meters.opened == [False, False]
