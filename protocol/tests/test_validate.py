"""Checks that JSON cannot provoke: values that only a program can build.

What JSON can provoke stands in golden/refused.jsonl."""

import math

import pytest
from reflex_protocol import check
from reflex_protocol.messages import Load, LoraAdapter, Request, Sampling

NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", NUMBERS)
def test_sampling_refuses_what_is_not_finite(field, value):
    problem = check(Request(prompt="a", sampling=Sampling(**{field: value})))
    assert problem is not None and problem.kind == "invalid_input"
    assert problem.message.startswith(f"sampling.{field}: expected ")
    assert problem.message.endswith(f"found {value}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_other_numbers_that_are_not_finite(value):
    bias = check(Request(prompt="a", sampling=Sampling(logit_bias={3: value})))
    assert bias is not None
    expected = "a number from -3.40282e+38 to 3.40282e+38"
    assert bias.message == f"sampling.logit_bias[3]: expected {expected}, found {value}"
    score = check(Request(prompt="a", candidates=["x"], temperature=value))
    assert score is not None and score.message.startswith("temperature: ")
    lora = check(Load(model="m", lora=["a", LoraAdapter(path="b", scale=value)]))
    assert lora is not None and lora.message.startswith("lora[1].scale: ")


def test_limits_are_inside():
    sampling = Sampling(temperature=0, top_p=1, min_p=1, seed=2**64 - 1, top_k=2**31 - 1)
    assert check(Request(prompt="", max_tokens=0, timeout_ms=0, logprobs=1000, sampling=sampling)) is None
    assert check(Request(prompt="ab", literal_spans=[(0, 2), (2, 2), (0, 0)])) is None
    assert check(Request(prompt_token_ids=[0, 2**31 - 1])) is None


def test_a_default_of_the_other_kind_says_nothing_and_passes():
    assert check(Request(prompt="a", candidates=["b"], max_tokens=32, stop=[], stream=False)) is None
    assert check(Request(prompt="a", temperature=1.0, score="auto")) is None
