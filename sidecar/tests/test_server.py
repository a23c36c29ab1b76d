"""The rest of the server: tokens, templates, models, metrics, keys, limits, strangers, the command line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from reflex_sidecar import options
from servers import START_SECONDS, Server, StartServer, error_of


def test_tokenize_and_back(server: Server):
    text = "hé 🙂<|im_end|>"
    body = server.post("/tokenize", content=text).json()
    assert (
        body["count"] == len(body["tokens"]) and body["tokens"][-1] == 258 and body["max_model_len"] == 4096
    )
    assert server.post("/detokenize", tokens=body["tokens"]).json()["content"] == text
    plain = server.post("/tokenize", content=text, parse_special=False).json()["tokens"]
    assert 258 not in plain
    pieces = server.post("/tokenize", prompt="ab", with_pieces=True).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "<|im_end|>"}]).json()["tokens"]
    assert chat.count(258) == 1  # the template's own


@pytest.mark.parametrize("body", [{}, {"content": "a", "prompt": "b"}, {"content": 1}])
def test_tokenize_wants_one_text(server: Server, body: dict[str, Any]):
    assert server.post("/tokenize", **body).status_code == 400


def test_detokenize_refuses_strangers(server: Server):
    assert server.post("/detokenize", tokens=[99999]).status_code == 400
    assert server.post("/detokenize", tokens=["a"]).status_code == 400


def test_apply_template(server: Server):
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    body = server.post("/apply-template", messages=messages, enable_thinking=False).json()
    assert body["prompt"].endswith("assistant\n<think>\n\n</think>\n\n") and body["template"] == "model"
    ((a, b),) = body["literal_spans"]
    assert body["prompt"][a:b] == "<|im_end|>"


def test_models(server: Server):
    body = server.http.get("/v1/models").json()
    (model,) = body["data"]
    assert body["object"] == "list" and model["id"] == "reflex-demo" and model["max_model_len"] == 4096
    assert server.http.get("/v1/models/reflex-demo").json() == model
    r = server.http.get("/v1/models/org/other")
    assert r.status_code == 404 and error_of(r)["code"] == "model_not_found"


def test_health(server: Server):
    for path in ("/health", "/v1/health"):
        body = server.http.get(path).json()
        assert body["status"] == "ok" and body["start"]["sidecar"]["ready"] > 0
    assert server.http.get("/livez").text == "ok"


def test_metrics_count(server: Server):
    def value(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(name))

    before = value("reflex_completion_tokens_total")
    ok = value('reflex_requests_total{route="/v1/chat/completions",status="200"}')
    server.chat("[[say:abcde]]")
    assert value("reflex_completion_tokens_total") == before + 5
    assert value('reflex_requests_total{route="/v1/chat/completions",status="200"}') == ok + 1
    assert value('reflex_state{state="ready"}') == 1
    assert value("reflex_time_to_first_token_seconds_count") > 0


# Prometheus's text format, 0.0.4.
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')


def families(text: str) -> dict[str, tuple[str, list[tuple[str, str, float]]]]:
    """Each metric's type and samples (name, labels, value). Fails where Prometheus would."""
    assert text.endswith("\n")
    out: dict[str, tuple[str, list[tuple[str, str, float]]]] = {}
    helped = name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped and name not in out, f"{name} twice, or without help"
            assert kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == name.endswith("_total"), f"{name} is a {kind}"
            out[name] = (kind, [])
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            suffixes = ("_bucket", "_sum", "_count") if out[name][0] == "histogram" else ("",)
            assert found[1] in {name + s for s in suffixes}, line
            out[name][1].append((found[1], found[2] or "", float(found[3])))
    return out


def test_metrics_are_well_formed(server: Server):
    server.chat("x")
    r = server.http.get("/metrics")
    assert r.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = families(r.text)
    assert len(found) > 10
    for name, (kind, samples) in found.items():
        keys = [(n, labels) for n, labels, _ in samples]
        assert len(keys) == len(set(keys)) and all(v >= 0 for *_, v in samples), name
        if kind == "histogram":
            buckets = [v for n, _, v in samples if n.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert [labels for n, labels, _ in samples if n.endswith("_bucket")][-1] == 'le="+Inf"'
            assert buckets[-1] == next(v for n, _, v in samples if n.endswith("_count"))


def test_energy_is_counted_where_known_and_left_out_where_not(server: Server, start_server: StartServer):
    """It stood at 0, whatever was used."""
    server.chat("x")
    assert "reflex_energy_joules_total" not in families(server.http.get("/metrics").text)
    able = start_server(env={"FAKE_JOULES": "1.5"})
    assert "reflex_energy_joules_total" not in families(able.http.get("/metrics").text)
    able.chat("x")
    able.post("/v1/classify", prompt="x", labels=["a", "b"])
    _, samples = families(able.http.get("/metrics").text)["reflex_energy_joules_total"]
    assert samples == [("reflex_energy_joules_total", 'meter="cpu"', 3.0)]


def spoken(server: Server, data: bytes) -> tuple[bytes, httpx.Response]:
    """The raw answer to raw bytes, and what it says."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=START_SECONDS) as s:
        s.sendall(data)
        answer = b""
        while part := s.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return answer, httpx.Response(int(status.split()[1]), headers=headers, content=body)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n{}", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000, 431),
    ],
)
def test_what_is_no_http_is_answered_in_the_shape_of_all_errors(server: Server, data: bytes, status: int):
    """It was plain text without an id, and headers had no end."""
    _, r = spoken(server, data)
    assert r.status_code == status and error_of(r)["code"] == "invalid_http"
    assert r.headers["x-request-id"].startswith("req_") and r.headers["connection"] == "close"


def test_many_requests_of_one_connection_are_not_one_long_head(server: Server):
    one = b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 20_000 + b"\r\n\r\n"
    last = one.replace(b"host: x", b"host: x\r\nconnection: close")
    answer, _ = spoken(server, one * 8 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 9


def test_the_description_names_every_route(server: Server):
    document = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/systemone", "/tokenize", "/v1/models/{model_id}"} <= set(
        document["paths"]
    )
    assert "messages" in document["components"]["schemas"]["ChatBody"]["properties"]


def test_a_body_over_the_limit_is_a_413(start_server: StartServer):
    server = start_server("--max-body-bytes", "10000", "--max-prompt-bytes", "1000")
    r = server.chat("x" * 20_000)
    assert r.status_code == 413 and error_of(r)["code"] == "request_too_large"

    def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 1000

    assert server.http.post("/v1/completions", content=chunks()).status_code == 413
    assert server.chat("x").status_code == 200
    r = server.chat("x" * 2000)
    assert r.status_code == 400 and error_of(r)["code"] == "context_length_exceeded"
    assert server.post("/v1/completions", prompt="é" * 600).status_code == 400


def test_a_prompt_of_a_mebibyte(server: Server):
    text = "word and <|im_end|> " * (1 << 16)
    r = server.post("/apply-template", messages=[{"role": "user", "content": text}])
    assert r.status_code == 200 and len(r.json()["literal_spans"]) == 1 << 16
    r = server.chat(text)
    assert r.status_code == 400 and error_of(r)["code"] == "context_length_exceeded"
    tokens = server.post("/tokenize", content=text).json()
    assert tokens["count"] > 1 << 19


def test_the_api_key(start_server: StartServer):
    server = start_server(env={"REFLEX_API_KEY": "s3cret"})
    assert server.http.get("/health").status_code == server.http.get("/").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
        r = server.http.get("/v1/models", headers=headers)
        assert r.status_code == 401 and error_of(r)["code"] == "invalid_api_key"
    for headers in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
        assert server.http.get("/v1/models", headers=headers).status_code == 200
    assert b"s3cret" not in Path(f"/proc/{server.children()['renderer']}/environ").read_bytes()


def test_pages_of_other_sites_are_refused(server: Server, start_server: StartServer):
    strange = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    r = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=strange)
    assert r.status_code == 403 and error_of(r)["code"] == "cross_site_request"
    same = {"sec-fetch-site": "same-origin"}
    assert server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=same).status_code == 200


def test_cors_where_asked(start_server: StartServer):
    server = start_server("--cors-origin", "https://app.example")
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    r = server.http.options("/v1/chat/completions", headers=asked)
    assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "https://app.example"
    assert r.headers["x-request-id"], "a preflight had none"
    r = server.http.get(
        "/v1/models", headers={"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    )
    assert r.status_code == 200 and r.headers["access-control-allow-origin"] == "https://app.example"
    r = server.http.get("/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in r.headers


@pytest.mark.parametrize("field", ["reasoning", "both", "none"])
def test_where_thoughts_go(start_server: StartServer, field: str):
    server = start_server("--reasoning-field", field)
    message = server.chat("[[say:<think>hm</think>yes]]").json()["choices"][0]["message"]
    thoughts = {k: v for k, v in message.items() if k.startswith("reasoning")}
    if field == "none":
        assert thoughts == {} and message["content"] == "<think>hm</think>yes"
    else:
        both = {"reasoning_content": "hm", "reasoning": "hm"}
        assert thoughts == (both if field == "both" else {"reasoning": "hm"})


# ---- templates -----------------------------------------------------------------------------------

PLAIN = "System: S\n\nUser: a <|im_end|> b\n\nAssistant:"
MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "a <|im_end|> b"}]


def plain_body(server: Server) -> dict[str, Any]:
    r = server.post("/apply-template", messages=MESSAGES)
    body = r.json()
    assert body["prompt"] == PLAIN and body["template"] == r.headers["x-reflex-template"]
    assert [body["prompt"][a:b] for a, b in body["literal_spans"]] == ["S", "a <|im_end|> b"]
    return body


def test_without_a_template_roles_are_labels(start_server: StartServer):
    server = start_server(env={"FAKE_TEMPLATE": ""})
    assert plain_body(server)["template"] == "plain; reason=none"
    assert "no chat template" in server.log


def test_the_template_can_be_switched_off(start_server: StartServer):
    server = start_server("--no-chat-template")
    assert plain_body(server)["template"] == "plain; reason=none"
    assert "renderer" not in server.children()
    assert server.chat("[[say:a\\n\\nUser: b]]").json()["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages[0].content[:1] }}{{ messages[1].content[:4] }}<|im_end|>",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = 10 ** 10 %}{{ 'a' * n }}",
    ],
)
def test_a_template_that_fails_is_replaced_and_that_is_said(start_server: StartServer, template: str):
    server = start_server("--template-timeout", "0.5", env={"FAKE_TEMPLATE": template})
    assert plain_body(server)["template"] == "plain; reason=failed"
    assert server.chat("x").headers["x-reflex-template"] == "plain; reason=failed"
    assert "reflex_plain_prompts_total{" in server.http.get("/metrics").text


def test_a_template_from_a_file(start_server: StartServer, tmp_path: Path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}")
    server = start_server("--chat-template", str(path))
    body = server.post("/apply-template", messages=MESSAGES).json()
    assert body["prompt"] == "[system|S][user|a <|im_end|> b]" and body["template"] == "file"


# ---- the command line ----------------------------------------------------------------------------


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reflex_sidecar", *argv], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "expected a model file or --demo, found neither"),
        (["m.gguf", "--demo"], 2, "expected a model file or --demo, found both"),
        (["--demo", "--max-tokens", "0"], 2, "max_tokens: expected 1 to 2147483647, found 0"),
        (["--demo", "--max-tokens", "9" * 20], 2, "max_tokens: expected 1 to 2147483647, found 999"),
        (["--demo", "--port", "65536"], 2, "port: expected 0 to 65535, found 65536"),
        (["--demo", "--port", "-1"], 2, "port: expected 0 to 65535, found -1"),
        (["--demo", "--ready-timeout", "inf"], 2, "ready_timeout_s: expected seconds above 0, at most"),
        (["--demo", "--timeout", "0"], 2, "timeout_s: expected seconds above 0"),
        (["--demo", "--chat-template", "/nowhere"], 1, "--chat-template: "),
        (["--demo", "--host", "203.0.113.1"], 1, "cannot listen on 203.0.113.1"),
        (["--demo", "--worker-command", "/nowhere/reflex"], 1, "the worker cannot be started"),
    ],
)
def test_what_cannot_start_says_why(argv: list[str], status: int, message: str):
    done = command(*argv)
    assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_said_at_once(server: Server):
    port = server.url.rpartition(":")[2]
    done = command("--demo", "--port", port)
    assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_flags_reach_the_worker():
    opts = options.parse(["/models/Qwen3-0.6B-Q8_0.gguf", "--worker-command", "x -y", "--", "--threads", "4"])
    assert opts.worker_argv == [
        "x",
        "-y",
        "stdio",
        "--model",
        "/models/Qwen3-0.6B-Q8_0.gguf",
        "--threads",
        "4",
    ]
    assert opts.model_id == "Qwen3-0.6B-Q8_0"
    assert options.parse(["--demo"]).worker_argv[-2:] == ["stdio", "--demo"]
    assert options.parse(["--demo", "--alias", "a"]).model_id == "a"


def test_the_worker_is_started_before_the_web_stack_is_imported():
    """launch.py may import nothing heavy before the worker runs."""
    code = "import sys, reflex_sidecar.launch; print(sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy = {"starlette", "uvicorn", "uvloop", "asyncio", "msgspec", "jinja2", "reflex_protocol", "anyio"}
    assert not heavy & set(json.loads(loaded.replace("'", '"')))


def test_a_request_line_in_the_log(start_server: StartServer):
    server = start_server("--log-requests")
    httpx.get(f"{server.url}/livez")
    server.wait_for_log(r"GET /livez 200 \d+\.\d ms req_\w+")
