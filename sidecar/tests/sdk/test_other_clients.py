"""LangChain, litellm, instructor and the npm `openai` package against the bundled model.

Skipped where a package is missing; run.sh installs them all and runs this.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from servers import Server

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

# litellm would ask GitHub for prices first.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

HERE = Path(__file__).resolve().parent
FRANCE = "What is the capital of France?"


def chat_model(demo: Server) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    return langchain.ChatOpenAI(
        base_url=f"{demo.url}/v1", api_key="none", model="m", temperature=0, max_retries=0
    )


def test_langchain(demo: Server):
    model = chat_model(demo)
    whole = model.invoke(FRANCE)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(c.content for c in model.stream(FRANCE)) == whole.content
    assert [a.content for a in model.batch([FRANCE] * 3)] == [whole.content] * 3


def test_langchain_tools_and_structured_output(demo: Server):
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance", reason="the worker's optional package")

    class Pick(pydantic.BaseModel):
        """Pick a city."""

        city: Literal["Paris", "Rome"]

    model = chat_model(demo)
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Pick, method=method).invoke(FRANCE).city in ("Paris", "Rome")
    called = model.bind_tools([Pick], tool_choice="Pick").invoke(FRANCE)
    assert called.tool_calls[0]["name"] == "Pick"
    # Arguments come in pieces, which LangChain adds up.
    pieces = list(model.bind_tools([Pick], tool_choice="Pick").stream(FRANCE))
    assert sum(len(p.tool_call_chunks) for p in pieces) > 3
    whole = functools.reduce(operator.add, pieces)
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [
        (c["name"], c["args"]) for c in called.tool_calls
    ]


async def test_langchain_async(demo: Server):
    model = chat_model(demo)
    assert "Paris" in "".join([c.content async for c in model.astream(FRANCE)])


def test_litellm(demo: Server):
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": "openai/reflex-demo",
        "api_base": f"{demo.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": FRANCE}],
        "temperature": 0,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked)
    assert "Paris" in whole.choices[0].message.content and whole.usage.prompt_tokens > 0
    streamed = "".join(c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **asked))
    assert streamed == whole.choices[0].message.content
    asked["messages"] = [{"role": "user", "content": "x " * 5000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked)


def test_litellm_adds_up_a_streamed_call(demo: Server):
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp", reason="litellm imports it for tools")
    pytest.importorskip("llguidance", reason="the worker's optional package")
    properties = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    chunks = litellm.completion(
        model="openai/reflex-demo",
        api_base=f"{demo.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": FRANCE}],
        tools=[{"type": "function", "function": {"name": "pick", "parameters": schema}}],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        stream=True,
    )
    built = litellm.stream_chunk_builder(list(chunks))
    (call,) = built.choices[0].message.tool_calls
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_instructor(demo: Server):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance", reason="the worker's optional package")

    class Pick(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=mode)
            picked = client.chat.completions.create(
                model="m", response_model=Pick, messages=[{"role": "user", "content": FRANCE}], temperature=0
            )
        assert picked.city in ("Paris", "Rome")


def test_npm_openai(demo: Server):
    modules = os.environ.get("REFLEX_NODE_MODULES")
    if not modules:
        pytest.skip("no node modules; run.sh installs them")
    done = subprocess.run(
        ["node", str(HERE / "client.mjs"), f"{demo.url}/v1"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NODE_PATH": modules, "REFLEX_NODE_MODULES": modules},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "Paris" in said["whole"] and said["streamed"] == said["whole"]
    assert said["error"] == ["context_length_exceeded", 400]
    assert said["models"] == ["reflex-demo"] and "Paris" in said["response"]
    if importlib.util.find_spec("llguidance"):
        assert said["call"][0] == "pick" and said["call"][1]["city"] in ("Paris", "Rome")
