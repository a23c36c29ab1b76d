"""/v1/completions in front of the fake worker, whose tokens are bytes."""

from __future__ import annotations

from typing import Any

import pytest
from servers import Server, error_of, events_of, last_request


def test_a_completion(server: Server):
    body = server.post("/v1/completions", prompt="[[say:abc]]").json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == len("[[say:abc]]")


def test_the_default_is_sixteen_tokens(server: Server):
    choice = server.post("/v1/completions", prompt="[[say:abcdefghijklmnopqrstuvwxyz]]").json()["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


def test_a_prompt_is_taken_as_it_is(server: Server):
    server.post("/v1/completions", prompt="<|im_start|>user\n")
    request = last_request(server)
    assert request["prompt"] == "<|im_start|>user\n" and "literal_spans" not in request


def test_prompts_in_all_forms(server: Server):
    ids = list(b"[[say:z]]")
    assert server.post("/v1/completions", prompt=ids).json()["choices"][0]["text"] == "z"
    for prompt in (["[[say:a]]", "[[say:b]]"], [list(b"[[say:a]]"), list(b"[[say:b]]")]):
        body = server.post("/v1/completions", prompt=prompt, n=2).json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
        assert body["usage"]["prompt_tokens"] == 18 and body["usage"]["completion_tokens"] == 4


def test_echo(server: Server):
    assert (
        server.post("/v1/completions", prompt="[[say:b]]", echo=True).json()["choices"][0]["text"]
        == "[[say:b]]b"
    )
    ids = list(b"[[say:c]]")
    assert server.post("/v1/completions", prompt=ids, echo=True).json()["choices"][0]["text"] == "[[say:c]]c"


def test_prompt_log_probabilities_with_echo_and_nothing_written(server: Server):
    """What harnesses that score texts ask for, and most servers refuse."""
    body = server.post("/v1/completions", prompt="[[say:x]] abc", echo=True, logprobs=1, max_tokens=0).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "[[say:x]] abc" and choice["finish_reason"] == "length"
    n = len("[[say:x]] abc")
    assert "".join(logprobs["tokens"]) == "[[say:x]] abc" and len(logprobs["token_logprobs"]) == n
    assert logprobs["text_offset"] == list(range(n))
    assert logprobs["token_logprobs"][0] is None and all(p <= 0 for p in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 1
    assert body["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_what_was_written(server: Server):
    logprobs = server.post("/v1/completions", prompt="[[say:ab]]", logprobs=0).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["a", "b"] and logprobs["top_logprobs"] == [{}, {}]
    assert logprobs["text_offset"] == [0, 1]


def test_log_probabilities_of_parts_of_characters(server: Server):
    logprobs = server.post("/v1/completions", prompt="[[say:é!]]", logprobs=0).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 1, 1]


def test_a_stream_says_the_same(server: Server):
    fields: dict[str, Any] = {"prompt": ["[[say:é🙂]]", "[[say:b]]"], "n": 2, "max_tokens": 20}
    whole = server.post("/v1/completions", **fields).json()
    events = events_of(
        server.post("/v1/completions", stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for e in events[:-2] for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_with_log_probabilities_says_the_same(server: Server, echo: bool):
    fields: dict[str, Any] = {"prompt": "[[say:abc]]", "logprobs": 2, "echo": echo}
    whole = server.post("/v1/completions", **fields).json()["choices"][0]["logprobs"]
    events = events_of(server.post("/v1/completions", stream=True, **fields))
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for event in events[:-1]:
        for choice in event["choices"]:
            for name in streamed if choice["logprobs"] else ():
                streamed[name] += choice["logprobs"][name]
    del streamed["text_offset"], whole["text_offset"]
    assert streamed == whole


def test_a_stop_string_held_back_to_the_end_is_not_lost(server: Server):
    """The worker holds back what may become a stop string; at the end it is text after all."""
    events = events_of(server.post("/v1/completions", prompt="[[say:abc]]", stop="cd", stream=True))
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "abc"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing_field"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": 3}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 257}, "prompt", "invalid_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported"),
        ({"prompt": "a", "best_of": 3}, "best_of", "unsupported"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
    ],
)
def test_a_wrong_body_is_a_400(server: Server, body: dict[str, Any], param: str, code: str):
    r = server.post("/v1/completions", **body)
    assert r.status_code == 400
    assert (error_of(r)["param"], error_of(r)["code"]) == (param, code)


def test_ids_outside_the_vocabulary_are_a_400(server: Server):
    assert server.post("/v1/completions", prompt=[9999], echo=True).status_code == 400
    assert server.post("/v1/completions", prompt=[-1]).status_code == 400
