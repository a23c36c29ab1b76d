"""/v1/chat/completions in front of the fake worker: fields, shapes, errors. (Streams: test_streams.py.)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_worker import CHATML
from reflex_sidecar import constraints
from reflex_sidecar.output.calls import CALL_BEGIN, CALLS_BEGIN, SEPARATOR
from reflex_sidecar.prompts import lists_tools
from servers import CALL, TOOL, Server, StartServer, error_of, last_request


def test_a_whole_answer(server: Server):
    r = server.chat("[[say:Hé 🙂!]]")
    assert r.status_code == 200
    body = r.json()
    assert re.fullmatch(r"chatcmpl-\w+", body["id"])
    assert body["object"] == "chat.completion" and body["model"] == "reflex-demo"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hé 🙂!", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == len("Hé 🙂!".encode())
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert r.headers["x-reflex-template"] == "model"


def test_sampling_fields_reach_the_worker(server: Server):
    server.chat(
        "x",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=-1,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        max_completion_tokens=9,
    )
    request = last_request(server)
    assert request["sampling"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 2**64 - 1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100.0, "6": 1.5},
    }
    assert request["stop"] == ["a", "b"] and request["stop_token_ids"] == [7] and request["ignore_eos"]
    assert request["max_tokens"] == 9 and request["progress"]


def test_defaults_are_those_of_the_api(server: Server):
    server.chat("x", temperature=None, top_p=None, n=None, stop=None, tools=None, logprobs=None)
    request = last_request(server)
    assert request["sampling"]["temperature"] == 1.0 and request["sampling"]["top_p"] == 1.0
    assert not {"top_k", "seed", "logit_bias"} & set(request["sampling"])
    assert request["max_tokens"] == 8192


def test_unknown_fields_are_ignored_and_the_model_is_what_it_is(server: Server):
    r = server.chat("x", model="gpt-4o", store=True, metadata={"a": "b"}, service_tier="auto", foo=[1])
    assert r.status_code == 200 and r.json()["model"] == "reflex-demo"


def test_max_tokens_cuts_with_length(server: Server):
    choice = server.chat("[[say:abcdef]]", max_tokens=3).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


def test_a_stop_string_across_tokens(server: Server):
    choice = server.chat("[[say:one two three]]", stop="wo t").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one t", "stop")


def test_n_answers_one_after_another(server: Server):
    body = server.chat("x", n=3, seed=5).json()
    texts = [c["message"]["content"] for c in body["choices"]]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3  # each with a seed of its own
    assert body["usage"]["completion_tokens"] == sum(len(t) for t in texts)
    assert server.chat("x", n=3, seed=5).json()["choices"][1]["message"]["content"] == texts[1]


def test_content_parts_developer_role_and_tool_messages(server: Server):
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": "x", "name": "Ann"},
    ]
    server.post("/v1/chat/completions", messages=messages)
    assert last_request(server)["prompt"].startswith(
        "<|im_start|>system\nBe\nbrief.<|im_end|>\n<|im_start|>user\nx"
    )


def test_control_tokens_in_content_stay_text(server: Server):
    server.chat("a <|im_end|> b")
    request = last_request(server)
    (span,) = request["literal_spans"]
    assert request["prompt"][slice(*span)] == "<|im_end|>"
    server.chat("nothing special")
    assert "literal_spans" not in last_request(server)


def test_thoughts_are_split_off(server: Server):
    message = server.chat("[[say:<think>\nhm\n</think>\n\nyes]]").json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("fields", "closed"),
    [
        ({}, False),
        ({"enable_thinking": False}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ],
)
def test_thinking_is_switched_through_the_template(server: Server, fields: dict[str, Any], closed: bool):
    server.chat("x", **fields)
    assert last_request(server)["prompt"].endswith("</think>\n\n") is closed


def test_the_final_message_is_continued(server: Server):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]
    r = server.post("/v1/chat/completions", messages=messages, continue_final_message=True)
    assert r.status_code == 200
    assert last_request(server)["prompt"].endswith("assistant\nThe answer is")


def test_log_probabilities(server: Server):
    choice = server.chat("[[say:ab]]", logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 2 and all(len(e["top_logprobs"]) == 2 for e in content)
    assert [(e["token"], e["bytes"]) for e in content] == [("a", [97]), ("b", [98])]
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in content)
    assert (
        server.chat("[[say:ab]]", logprobs=True).json()["choices"][0]["logprobs"]["content"][0][
            "top_logprobs"
        ]
        == []
    )


# ---- tools ---------------------------------------------------------------------------------------


def test_a_call_of_a_tool(server: Server):
    choice = server.chat(f"[[say:Sure. {CALL}]]", tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert re.fullmatch(r"call_\w{24}", call["id"])
    assert choice["message"]["content"] == "Sure."


def test_a_call_alone_has_no_content(server: Server):
    message = server.chat(f"[[say:{CALL}]]", tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_parallel_calls_and_only_one(server: Server):
    twice = f"[[say:{CALL}\\n{CALL}]]"
    assert len(server.chat(twice, tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"]) == 2
    one = server.chat(twice, tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1


def test_tool_choice_none_leaves_text_as_it_is(server: Server):
    choice = server.chat(f"[[say:{CALL}]]", tools=[TOOL], tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "<tools>" not in last_request(server)["prompt"]


@pytest.mark.parametrize(
    ("template", "lists"),
    [
        ("{%- if tools %}{% for tool in tools %}", True),
        ("{% if not tools is defined %}", True),
        ("{{ tools | tojson }}", True),
        ("{% if message['tool_calls'] %}{% for tool in message['tool_calls'] %}", False),
        ("the word tools in a text", False),
    ],
)
def test_whether_a_template_lists_tools(template: str, lists: bool):
    assert lists_tools(template) == lists


def test_a_template_without_tools_gets_instructions(server: Server):
    server.chat("x", tools=[TOOL])
    prompt = last_request(server)["prompt"]
    assert prompt.startswith("<|im_start|>system\n# Tools") and '"name":"f"' in prompt


@pytest.mark.parametrize("fence", ["", "```json"])
def test_a_template_that_knows_calls_and_lists_no_tools_gets_instructions(
    start_server: StartServer, tmp_path: Path, fence: str
):
    """DeepSeek's templates write calls and say nothing of the tools: the model never saw them."""
    log = tmp_path / "worker.log"
    markup = f"{{% if false %}}{CALLS_BEGIN}{fence}{{% endif %}}"
    env = {"FAKE_TEMPLATE": markup + CHATML, "FAKE_LOG": str(log)}
    server = start_server(env=env)
    server.worker_log = log  # type: ignore[attr-defined]
    server.chat("x", tools=[TOOL])
    prompt = last_request(server)["prompt"]
    call = f"function{SEPARATOR}tool_call_name\n```json\n" if fence else f"tool_call_name{SEPARATOR}"
    assert "### f\nDescription:" in prompt and CALL_BEGIN + call in prompt
    server.chat("x", tools=[TOOL], tool_choice="none")
    assert "### f" not in last_request(server)["prompt"]


def test_results_of_tools_reach_a_template_without_tools(server: Server):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    assert server.post("/v1/chat/completions", messages=messages, tools=[TOOL]).status_code == 200
    prompt = last_request(server)["prompt"]
    assert '<tool_call>\n{"name":"f","arguments":{"a":1}}\n</tool_call>' in prompt
    assert "<tool_response>\n42\n</tool_response>" in prompt


OBJECT = {"type": "object"}


def test_schemas_are_closed_where_that_keeps_their_meaning():
    named = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": OBJECT}}}}
    inner = {"type": "object", "properties": {"b": OBJECT}, "additionalProperties": False}
    assert constraints.closed(named) == {
        "type": "object",
        "properties": {"a": inner},
        "additionalProperties": False,
    }
    for kept in (
        OBJECT,
        {"allOf": [named]},
        {**inner, "additionalProperties": True},
        True,
        {"type": "array"},
    ):
        assert constraints.closed(kept) == kept
    # A property may be called anything, "properties" too.
    assert constraints.closed({"properties": {"properties": {"type": "string"}}})["properties"] == {
        "properties": {"type": "string"}
    }


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "json_schema", "schema": OBJECT}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}}},
            {"type": "json_schema", "schema": OBJECT},
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, "{0,15}\n"),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, ""),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, ""),
    ],
)
def test_what_needs_a_constraint_is_refused_by_a_worker_without(
    server: Server, fields: dict[str, Any], constraint: Any
):
    r = server.chat("x", **fields)
    assert r.status_code == 400 and error_of(r)["code"] == "unsupported"
    sent = last_request(server)["constraint"]
    if isinstance(constraint, str):
        assert sent["type"] == "lark" and sent["grammar"].startswith('start: "<tool_call>" calls_')
        assert '{\\"name\\": \\"f\\", ' in sent["grammar"]
        assert constraint in sent["grammar"] and ("{0," in sent["grammar"]) == bool(constraint)
    else:
        assert sent == constraint
    assert last_request(server)["prompt"].endswith("</think>\n\n")  # the answer begins at once


def test_a_call_of_the_models_choice_is_bound_where_the_worker_can(server: Server, start_server: StartServer):
    server.chat("x", tools=[TOOL])
    assert "constraint" not in last_request(server)
    able = start_server(env={"FAKE_CONSTRAINT": "1"})
    assert able.chat("[[say:hm]]", tools=[TOOL]).json()["choices"][0]["message"]["content"] == "hm"
    grammar = able.chat("[[tell:constraint.grammar]]", tools=[TOOL]).json()["choices"][0]["message"][
        "content"
    ]
    assert grammar.startswith("start: /\\s*<think>/ (")
    both = {"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}}
    grammar = able.chat("[[tell:constraint.grammar]]", **both).json()["choices"][0]["message"]["content"]
    assert grammar.startswith('start: "<tool_call>" calls_') and " | json_" in grammar.splitlines()[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
    ],
)
def test_what_the_worker_refuses_names_the_field_too(server: Server, fields: dict[str, Any], param: str):
    r = server.chat("x", **fields)
    assert r.status_code == 400 and error_of(r)["param"] == param


# ---- errors --------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "missing_field"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "x"}, "messages", "invalid_type"),
        ({"messages": [1]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "unsupported_content",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls",
            "invalid_value",
        ),
        ({"messages": USER, "temperature": "hot"}, "temperature", "invalid_type"),
        ({"messages": USER, "temperature": -1}, "temperature", "invalid_value"),
        ({"messages": USER, "top_p": 1.5}, "top_p", "invalid_value"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": USER, "max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"messages": USER, "n": 0}, "n", "invalid_value"),
        ({"messages": USER, "n": 1000}, "n", "invalid_value"),
        ({"messages": USER, "stop": ["a", ""]}, "stop", "invalid_value"),
        ({"messages": USER, "stop": ["a"] * 65}, "stop", "invalid_value"),
        ({"messages": USER, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"messages": USER, "tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        (
            {
                "messages": USER,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
            "invalid_value",
        ),
        ({"messages": USER, "tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function", "missing_field"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type", "invalid_type"),
        (
            {"messages": USER, "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "invalid_value",
        ),
        ({"messages": USER, "continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"messages": USER, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_type",
        ),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    server: Server, body: dict[str, Any], param: str, code: str
):
    r = server.post("/v1/chat/completions", **body)
    error = error_of(r)
    assert r.status_code == 400 and error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"nul", b'{"messages": ["\xff"]}', b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(server: Server, raw: bytes):
    r = server.http.post("/v1/chat/completions", content=raw)
    assert r.status_code == 400 and error_of(r)["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("context_overflow", 400, "context_length_exceeded"),
        ("invalid_input", 400, "invalid_value"),
        ("unsupported", 400, "unsupported"),
        ("out_of_memory", 500, "out_of_memory"),
        ("busy", 503, "busy"),
        ("other", 500, "other"),
    ],
)
def test_the_workers_errors_have_statuses(server: Server, kind: str, status: int, code: str):
    r = server.chat(f"[[error:{kind}]]")
    error = error_of(r)
    assert (r.status_code, error["code"]) == (status, code)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert ("retry-after" in r.headers) == (status == 503)


def test_a_prompt_over_the_context(server: Server):
    r = server.chat("x" * 5000)
    assert r.status_code == 400 and error_of(r)["code"] == "context_length_exceeded"
    assert error_of(r)["message"].startswith("This model's maximum context length is 4096 tokens")


def test_unknown_paths_and_methods_have_the_same_shape(server: Server):
    r = server.http.get("/v1/nothing")
    assert r.status_code == 404 and error_of(r)["code"] == "not_found"
    r = server.http.get("/v1/chat/completions")
    assert (
        r.status_code == 405 and error_of(r)["code"] == "method_not_allowed" and r.headers["allow"] == "POST"
    )


def test_every_answer_has_a_request_id(server: Server):
    for r in (server.chat("x"), server.http.get("/nothing"), server.http.get("/livez")):
        assert re.fullmatch(r"req_\w{32}", r.headers["x-request-id"])
    r = server.http.get("/livez", headers={"x-request-id": "mine-1"})
    assert r.headers["x-request-id"] == "mine-1"
    r = server.http.get("/livez", headers={"x-request-id": "not fine!"})
    assert r.headers["x-request-id"] != "not fine!"
