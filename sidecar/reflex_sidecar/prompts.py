"""From chat messages to the text that the worker gets, by the model's template or without one.

The template's plain render is the prompt. Where content spells control tokens, the ranges go along
as literal spans; where that cannot be told, or the template fails, the plain prompt with role labels
is used instead and the answer says so (header x-reflex-template).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from .bodies import Tool
from .errors import bad_request
from .messages import PLAIN_STOPS, normalise, plain_prompt
from .output.calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    CallFormat,
    format_of,
)
from .output.thoughts import CLOSE, OPEN
from .rendering.renderer import RenderFailed
from .services import Services

# A failing template would write a line per request.
_LOG_EVERY_SECONDS: Final = 10.0
_last_logged = -_LOG_EVERY_SECONDS

# How templates are told not to think: Qwen3's name for it, and DeepSeek V3.1's.
THINKING_OFF: Final = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True)
class Prompt:
    """What to send to the worker, and how to read what comes back."""

    text: str
    spans: list[tuple[int, int]]
    stops: tuple[str, ...] = ()
    inside_thought: bool = False
    call_format: CallFormat = "json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatSpec:
    """A conversation to be rendered."""

    messages: list[Any]
    tools: Sequence[Tool] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
    # The answer must begin right here: thoughts that the template has opened are closed.
    answer_now: bool = False


def thinking_kwargs(
    kwargs: dict[str, Any] | None, enable_thinking: bool | None, reasoning_effort: str | None
) -> dict[str, Any]:
    """Variables for the template from the fields that speak of thinking."""
    out: dict[str, Any] = {}
    if reasoning_effort is not None:
        out["reasoning_effort"] = reasoning_effort
        out["enable_thinking"] = out["thinking"] = reasoning_effort not in ("none", "minimal")
    if enable_thinking is not None:
        out["enable_thinking"] = out["thinking"] = enable_thinking
    if kwargs:
        if "enable_thinking" in kwargs:
            out["thinking"] = kwargs["enable_thinking"]
        out.update(kwargs)
    return out


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates and parsers read them, absent fields left out."""
    out = []
    for tool in tools:
        function = {k: v for k, v in msgspec.structs.asdict(tool.function).items() if v is not None}
        function.pop("strict", None)
        out.append({"type": "function", "function": function})
    return out


async def chat_prompt(services: Services, spec: ChatSpec) -> Prompt:
    """The prompt of a conversation. ApiError 400 for one that is wrong or too long."""
    source = services.renderer.source
    messages = normalise(spec.messages, keep_developer="developer" in source)
    if spec.continue_final and messages[-1]["role"] != "assistant":
        raise bad_request(
            "continue_final_message: expected the last message to be the assistant's",
            param="continue_final_message",
        )
    tools = tool_dicts(spec.tools)
    spelled = format_of(source)
    if spelled is None and (tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)):
        messages = _without_tool_support(messages, tools)
        tools = []
    elif spelled is not None and tools and not lists_tools(source):
        messages = _with_instructions(messages, _listed(spelled, tools))
        tools = []
    kwargs = {**spec.kwargs, **THINKING_OFF} if spec.answer_now else spec.kwargs
    try:
        if services.options.no_chat_template:
            raise RenderFailed("none", "--no-chat-template")
        rendered = await services.renderer.render(
            messages,
            tools=tools or None,
            kwargs=kwargs,
            add_generation_prompt=spec.add_generation_prompt and not spec.continue_final,
            continue_final=spec.continue_final,
        )
    except RenderFailed as e:
        if e.kind == "too_long":
            raise bad_request(f"the rendered prompt: {e}", code="context_length_exceeded") from None
        prompt = _plain(services, messages, spec, e)
    else:
        text, inside = rendered.prompt, _thought_is_open(rendered.prompt, messages, spec)
        if inside and spec.answer_now:
            text, inside = f"{text.rstrip()}\n{CLOSE}\n\n", False
        prompt = Prompt(
            text, rendered.spans, inside_thought=inside, call_format=spelled or "json",
            headers={"x-reflex-template": "file" if services.options.chat_template else "model"},
        )  # fmt: skip
    check_length(services, prompt.text)
    return prompt


def check_length(services: Services, text: str) -> None:
    """ApiError 400 for a prompt over the limit."""
    limit = services.options.max_prompt_bytes
    if len(text) > limit or len(text.encode()) > limit:
        raise bad_request(
            f"the prompt: expected at most {limit} bytes, found more", code="context_length_exceeded"
        )


def _plain(services: Services, messages: list[dict[str, Any]], spec: ChatSpec, why: RenderFailed) -> Prompt:
    services.metrics.templates.add(reason=why.kind)
    if why.kind != "none":
        _log(services, f"chat template not used: {why}")
    text, spans = plain_prompt(messages, continue_final=spec.continue_final)
    reason = "none" if why.kind == "none" else "failed"
    return Prompt(text, spans, stops=PLAIN_STOPS, headers={"x-reflex-template": f"plain; reason={reason}"})


def _log(services: Services, line: str) -> None:
    global _last_logged
    if time.monotonic() - _last_logged >= _LOG_EVERY_SECONDS:
        _last_logged = time.monotonic()
        services.log(line)


def _thought_is_open(prompt: str, messages: list[dict[str, Any]], spec: ChatSpec) -> bool:
    """Whether the model continues inside a thought."""
    if spec.continue_final:
        text = messages[-1]["content"] or ""
        return text.rfind(OPEN) > text.rfind(CLOSE)
    return spec.add_generation_prompt and prompt.rstrip().endswith(OPEN)


# How a template speaks of the tools that it is given (DeepSeek's know calls, and list no tools).
_LISTS_TOOLS: Final = re.compile(r"\b(?:if|elif|in|and|or|not)\s+tools\b|\btools\s*(?:\||is\b|\[|\))")

# For templates that know no tools: the instructions that Qwen's and Hermes's templates give.
_TOOLS_HEAD: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
# DeepSeek V3.1's model card: how its tools are told to it.
_DEEPSEEK_HEAD: Final = "## Tools\nYou have access to the following tools:\n\n"
_DEEPSEEK_TAIL: Final = (
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{example}\n\nWhere:\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them {joined}"
)


def lists_tools(template: str) -> bool:
    """Whether a chat template tells the model which tools there are."""
    return _LISTS_TOOLS.search(template) is not None


def _listed(spelled: CallFormat, tools: list[dict[str, Any]]) -> str:
    """Tools as the model was taught to read them, for a template that leaves them out."""
    if spelled not in ("deepseek", "deepseek_fenced"):
        return f"{_TOOLS_HEAD}{_lines(tools)}{_TOOLS_TAIL}"
    described = "".join(
        f"### {f['name']}\nDescription: {f.get('description', '')}\n\n"
        f"Parameters: {json.dumps(f.get('parameters', {}), ensure_ascii=False)}\n\n"
        for f in (t["function"] for t in tools)
    )
    name, arguments = "tool_call_name", "tool_call_arguments"
    if spelled == "deepseek_fenced":
        call = f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"
        joined = "with one newline between them"
    else:
        call = f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"
        joined = "directly without separators or spaces"
    example = f"{CALLS_BEGIN}{call}{{{{additional_tool_calls}}}}{CALLS_END}"
    return _DEEPSEEK_HEAD + described + _DEEPSEEK_TAIL.format(example=example, joined=joined)


def _lines(tools: list[dict[str, Any]]) -> str:
    return "\n".join(msgspec.json.encode(t).decode() for t in tools)


def _without_tool_support(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and their results written into texts."""
    out: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        if message["role"] == "tool":
            message["role"] = "user"
            message["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
        for call in message.pop("tool_calls", ()):
            text = msgspec.json.encode(call["function"]).decode()
            before = f"{message['content']}\n" if message["content"] else ""
            message["content"] = f"{before}<tool_call>\n{text}\n</tool_call>"
        out.append(message)
    return _with_instructions(out, _listed("json", tools)) if tools else out


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """A text at the end of the system message, or as one."""
    out = list(messages)
    if out[0]["role"] == "system":
        out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{text}"}
    else:
        out.insert(0, {"role": "system", "content": text})
    return out
