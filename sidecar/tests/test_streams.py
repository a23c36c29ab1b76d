"""Streams: the order of events, what fails before and after the first byte, silence, broken characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servers import CALL, TOOL, Server, StartServer, error_of, events_of, text_of


def test_a_stream_in_order(server: Server):
    r = server.chat("[[say:Hi!]]", stream=True)
    assert (
        r.headers["content-type"].startswith("text/event-stream") and r.headers["cache-control"] == "no-cache"
    )
    events = events_of(r)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({c["id"] for c in chunks}) == 1 and all(c["object"] == "chat.completion.chunk" for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]] == ["H", "i", "!"]
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in c for c in chunks)


def test_usage_comes_last_where_asked(server: Server):
    whole = server.chat("[[say:abc]]").json()["usage"]
    events = events_of(server.chat("[[say:abc]]", stream=True, stream_options={"include_usage": True}))
    assert events[-2]["choices"] == [] and events[-2]["usage"] == whole
    # As the API has it: null until then.
    assert all(e["usage"] is None for e in events[:-2])
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(server.post("/v1/completions", prompt="[[say:abc]]", **fields))
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert all(e["usage"] is None for e in events[:-2])


def test_an_emoji_split_across_tokens_arrives_whole(server: Server):
    """The fake worker's tokens are bytes: every character beyond ASCII is split."""
    text = "a🙂é👩‍👩‍👧‍👦中"
    events = events_of(server.chat(f"[[say:{text}]]", stream=True))
    assert text_of(events) == text
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


def test_a_stop_string_across_tokens_never_shows(server: Server):
    events = events_of(server.chat("[[say:one two three]]", stop=["o th"], stream=True))
    assert text_of(events) == "one tw"


def test_n_streams_one_after_another(server: Server):
    events = events_of(server.chat("x", n=2, seed=1, stream=True))[:-1]
    indexes = [c["index"] for e in events for c in e["choices"]]
    assert indexes == sorted(indexes) and set(indexes) == {0, 1}
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == [
        "stop",
        "stop",
    ]
    roles = [c["index"] for e in events for c in e["choices"] if "role" in c["delta"]]
    assert roles == [0, 1]


def test_thoughts_and_calls_stream_as_their_own_deltas(server: Server):
    events = events_of(
        server.chat(f"[[say:<think>\nhm\n</think>\nok\\n{CALL}\\n{CALL}]]", tools=[TOOL], stream=True)
    )
    deltas = [c["delta"] for e in events[:-1] for c in e["choices"]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas) == "ok"
    calls = [c for d in deltas for c in d.get("tool_calls", ())]
    begun = [c for c in calls if "id" in c]
    assert [c["index"] for c in begun] == [0, 1] and begun[0]["id"] != begun[1]["id"]
    assert [c["index"] for c in calls] == sorted(c["index"] for c in calls)
    for i in (0, 1):
        fragments = [c["function"]["arguments"] for c in calls if c["index"] == i]
        assert len(fragments) > 3 and "".join(fragments) == '{"a": 1}'
    assert calls[0]["function"] == {"name": "f", "arguments": ""} and calls[0]["type"] == "function"
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_log_probabilities_come_with_every_token(server: Server):
    whole = server.chat("[[say:<think>a</think>bc]]", logprobs=True, top_logprobs=1).json()["choices"][0][
        "logprobs"
    ]
    events = events_of(server.chat("[[say:<think>a</think>bc]]", logprobs=True, top_logprobs=1, stream=True))
    streamed = [
        x for e in events[:-1] for c in e["choices"] for x in (c["logprobs"] or {}).get("content", ())
    ]
    assert streamed == whole["content"] and len(streamed) == 5


@pytest.mark.parametrize("kind", ["context_overflow", "out_of_memory", "unsupported"])
def test_an_early_failure_keeps_its_status(server: Server, kind: str):
    r = server.chat(f"[[error:{kind}]]", stream=True)
    assert r.status_code in (400, 500) and r.headers["content-type"] == "application/json"
    assert "as told" in error_of(r)["message"]


def test_a_failure_in_the_middle_is_an_event_and_then_done(start_server: StartServer):
    server = start_server()
    events = events_of(server.chat("[[say:abcdef]][[crash-after:3]]", stream=True))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "worker_crashed" and isinstance(events[-2]["error"]["message"], str)
    assert text_of(events) == "abc"


def lines_until_alive(start_server: StartServer, gate: Path, text: str, comments: int) -> list[str]:
    """The lines of a stream that is held by `gate` until so many comments have come."""
    server = start_server("--keep-alive", "0.05")
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    lines: list[str] = []
    with server.http.stream("POST", "/v1/chat/completions", json=body) as r:
        for line in r.iter_lines():
            lines.append(line)
            if lines.count(": keep-alive") == comments:
                gate.touch()
    assert lines.count(": keep-alive") >= comments
    return lines


def test_silence_is_filled_with_comments(start_server: StartServer, tmp_path: Path):
    gate = tmp_path / "gate"
    lines = lines_until_alive(start_server, gate, f"[[say:ab]][[until:{gate}]]", 3)
    assert text_of([json.loads(line[6:]) for line in lines if line.startswith("data: {")]) == "ab"


def test_nothing_goes_out_before_the_worker_has_begun(start_server: StartServer):
    """A long wait before the first event must not become a 200 that then fails."""
    server = start_server("--keep-alive", "0.05")
    r = server.chat("[[chunk:300]][[prefill:1]][[error:context_overflow]]", stream=True)
    assert r.status_code == 400


def test_a_long_prefill_shows_life(start_server: StartServer, tmp_path: Path):
    gate = tmp_path / "gate"
    lines = lines_until_alive(start_server, gate, f"[[prefill:3]][[until:{gate}]][[say:x]]", 1)
    first_token = next(i for i, line in enumerate(lines) if '"content":"x"' in line)
    assert any("keep-alive" in line for line in lines[:first_token])


def test_a_timeout_in_the_middle_is_an_event(start_server: StartServer, tmp_path: Path):
    for seconds in ("0.6", "6", "60"):  # as long as this machine needs to begin
        server = start_server("--timeout", seconds)
        r = server.chat(f"[[say:abc]][[until:{tmp_path}/never]]", stream=True)
        if r.status_code == 200:
            break
    events = events_of(r)
    assert events[-2]["error"]["code"] == "timeout" and events[-1] == "[DONE]"


# ---- /v1/responses -------------------------------------------------------------------------------


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    out = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        out.append((lines["event"], json.loads(lines["data"])))
    return out


def test_a_response(server: Server):
    body = server.post("/v1/responses", input="[[say:<think>hm</think>Hi]]", instructions="Be brief.").json()
    assert body["object"] == "response" and body["status"] == "completed" and body["store"] is False
    thought, message = body["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Hi" and message["role"] == "assistant"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_response_that_was_cut_is_incomplete(server: Server):
    body = server.post("/v1/responses", input="[[say:abcdef]]", max_output_tokens=2).json()
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


def test_a_response_streams_its_items(server: Server):
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    r = server.post("/v1/responses", input=f"[[say:<think>hm</think>Hi {CALL}]]", tools=tools, stream=True)
    events = named_events(r.text)
    assert [e["sequence_number"] for _, e in events] == list(range(len(events)))
    assert all(name == e["type"] for name, e in events)
    names = [name for name, _ in events]
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    added = [e["item"]["type"] for name, e in events if name == "response.output_item.added"]
    done = [e["item"]["type"] for name, e in events if name == "response.output_item.done"]
    assert added == done == ["reasoning", "message", "function_call"]
    output = events[-1][1]["response"]["output"]
    assert output[1]["content"][0]["text"] == "Hi" and output[2]["arguments"] == '{"a": 1}'
    text = "".join(e["delta"] for name, e in events if name == "response.output_text.delta")
    assert text == "Hi"


def test_a_conversation_with_calls_as_input(server: Server):
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    assert server.post("/v1/responses", input=given).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "unsupported"),
        ({"input": "x", "conversation": "conv_1"}, "unsupported"),
        ({"input": "x", "background": True}, "unsupported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "unsupported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported"),
        ({"input": [1]}, "invalid_value"),
        ({"input": []}, "invalid_value"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "invalid_value"),
        ({}, "missing_field"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "unsupported"),
    ],
)
def test_what_a_stateless_response_cannot_be(server: Server, body: dict[str, Any], code: str):
    r = server.post("/v1/responses", **body)
    assert r.status_code == 400 and error_of(r)["code"] == code


def test_a_response_that_fails_in_the_middle_says_so(start_server: StartServer):
    server = start_server()
    events = named_events(
        server.post("/v1/responses", input="[[say:abc]][[crash-after:1]]", stream=True).text
    )
    name, last = events[-1]
    assert name == "response.failed" and last["response"]["error"]["code"] == "worker_crashed"
