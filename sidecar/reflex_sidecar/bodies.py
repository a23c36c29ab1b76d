"""Request bodies as msgspec structs: the fields that mean something here, with their types.

Unknown fields are ignored, null is the same as absent, a wrong type is a 400 that names the field.
Ranges are checked where the values are used (sampling.py), messages in messages.py.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from .errors import ApiError, bad_request

ToolChoice = str | dict[str, Any]


class StreamOptions(Struct, kw_only=True):
    """What a stream tells besides tokens."""

    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """How tokens are drawn and when they end; shared by chat and plain completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # llama-server's name for it
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class Function(Struct, kw_only=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool; functions are the only kind there is."""

    type: Literal["function"] = "function"
    function: Function


class JsonSchema(Struct, kw_only=True):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # llama-server: a schema with json_object


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Prompt = str | list[Any]


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    response_format: ResponseFormat | None = None


class ClassifyBody(Struct, kw_only=True):
    """POST /v1/classify: which label continues the prompt, or answers the messages?"""

    labels: list[str]
    prompt: str | None = None
    messages: list[Any] | None = None
    temperature: float | None = None
    score: Literal["auto", "logit_sum", "logprob_sum", "logprob_mean"] | None = None
    model: str | None = None


class SystemOneBody(Struct, kw_only=True):
    """POST /v1/systemone: typed questions about a state."""

    state: str | dict[str, Any] | list[Any]
    questions: dict[str, Any]
    model: str | None = None


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize: of a text (`content` as llama-server, `prompt` as vLLM), or of messages."""

    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class DetokenizeBody(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    skip_special: bool | None = None
    model: str | None = None


class TemplateBody(Struct, kw_only=True):
    """POST /apply-template: the prompt that a chat would be answered from."""

    messages: list[Any]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str | None = None


class ResponsesReasoning(Struct, kw_only=True):
    """How much to think."""

    effort: str | None = None


class ResponsesFormat(Struct, kw_only=True):
    """What the text must look like; the schema lies flat here."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponsesText(Struct, kw_only=True):
    """Options of the text."""

    format: ResponsesFormat | None = None


class ResponsesBody(Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    text: ResponsesText | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


_Body = TypeVar("_Body", bound=Struct)
_AT: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """The body as `kind`. ApiError 400 for anything else."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as e:
        raise _wrong(str(e)) from None
    except msgspec.DecodeError as e:
        raise bad_request(f"the body is not JSON: {e}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


_DECODERS: Final[dict[type, msgspec.json.Decoder[Any]]] = {}


def _decoder(kind: type[_Body]) -> msgspec.json.Decoder[_Body]:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    return decoder


def _wrong(message: str) -> ApiError:
    """msgspec's message as ours: the field first."""
    match = _AT.search(message)
    param = match[1] if match else ""
    text = message[: match.start()] if match else message
    if missing := _MISSING.fullmatch(text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return bad_request(f"{param}: expected a value, found none", param=param, code="missing_field")
    text = text.replace("`", "").replace(", got ", ", found ")
    if text.startswith("Expected"):
        text = "e" + text[1:]
    return bad_request(f"{param}: {text}" if param else text, param=param or None, code="invalid_type")
