"""The openai package against the bundled model: sync, async, streams, parsed answers, tools, responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from servers import Server, StartServer

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Pick(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    sure: bool


@pytest.fixture
def client(demo: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: Any):
    assert [m.id for m in client.models.list()] == ["reflex-demo"]
    assert client.models.retrieve("reflex-demo").id == "reflex-demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_and_its_stream(client: Any):
    whole = client.chat.completions.create(model="m", messages=USER, temperature=0)
    assert "Paris" in whole.choices[0].message.content and whole._request_id.startswith("req_")
    stream = client.chat.completions.create(
        model="m", messages=USER, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage


def test_a_completion_with_echo(client: Any):
    body = client.completions.create(
        model="m", prompt="The sky is", echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    assert (
        body.choices[0].text.startswith("The sky is") and body.choices[0].logprobs.token_logprobs[0] is None
    )


async def test_async_and_its_stream(demo: Server):
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="m", messages=USER, temperature=0)
        stream = await client.chat.completions.create(model="m", messages=USER, temperature=0, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == whole.choices[0].message.content


def test_parsed_answers(client: Any):
    pytest.importorskip("llguidance", reason="the worker's optional package")
    answer = client.chat.completions.parse(model="m", messages=USER, response_format=Pick, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Pick)
    answer = client.responses.parse(
        model="m", input="The capital of France?", text_format=Pick, temperature=0
    )
    assert isinstance(answer.output_parsed, Pick)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_tools(client: Any, choice: Any):
    pytest.importorskip("llguidance", reason="the worker's optional package")
    asked: dict[str, Any] = {
        "model": "m",
        "messages": USER,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "pick"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.parsed_arguments["city"] in ("Paris", "Rome")
    assert streamed.function.arguments == call.function.arguments


def test_responses_and_their_stream(client: Any):
    whole = client.responses.create(model="m", input="What is the capital of France?", temperature=0)
    assert "Paris" in whole.output_text and whole.status == "completed"
    with client.responses.stream(model="m", input="What is the capital of France?", temperature=0) as stream:
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and final.usage == whole.usage


def test_errors_are_the_sdks_own(client: Any):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x " * 5000}])
    assert e.value.code == "context_length_exceeded" and e.value.type == "invalid_request_error"


def test_a_stream_that_fails_in_the_middle_raises(start_server: StartServer):
    server = start_server()
    asked: list[Any] = [{"role": "user", "content": "[[say:abc]][[crash-after:1]]"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model="m", messages=asked, stream=True)
        with pytest.raises(openai.APIError, match="the worker ended"):
            list(stream)
