"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from reflex_protocol.messages import Constraint, JsonSchemaConstraint

from .. import constraints, sampling, sse, tokens
from ..bodies import ChatBody, decode
from ..constraints import ToolUse
from ..errors import bad_request
from ..generate import Begun, Finished, Piece, Plan, Tally, answers
from ..options import ReasoningField
from ..output.parts import Arguments, Part, Text, Thought
from ..output.parts import Call as ToolCall
from ..prompts import ChatSpec, Prompt, chat_prompt, thinking_kwargs, tool_dicts
from ..services import Services
from ..sse import Stream
from ..web import Call, Reply, json_reply, new_id


async def chat(call: Call) -> Reply | Stream:
    """The handler."""
    body = decode(call.body, ChatBody)
    plan = await plan_chat(call.services, body)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        shape = _Shape(call)
        if usage:  # as the API has it: null until the last chunk
            shape.common["usage"] = None
        chunks = _chunks(shape, plan, include_usage=usage)
        return await sse.begin(chunks, headers=plan.prompt.headers)
    return await _whole(_Shape(call), plan)


async def plan_chat(services: Services, body: ChatBody) -> Plan:
    """Check a body and render its prompt. ApiError 400."""
    options = services.options
    use = constraints.tool_use(body.tools, body.tool_choice)
    parallel = body.parallel_tool_calls is not False
    wanted = constraints.of_format(body.response_format)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message: expected without add_generation_prompt, found both",
            param="continue_final_message",
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: expected with logprobs true, found without", param="top_logprobs")
    spec = ChatSpec(
        body.messages,
        tools=() if use.mode == "none" else use.tools,
        kwargs=thinking_kwargs(body.chat_template_kwargs, body.enable_thinking, body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=continue_final,
        answer_now=use.forced or wanted is not None,
    )
    prompt = await chat_prompt(services, spec)
    top = sampling.top_logprobs_of(body.top_logprobs)
    return Plan(
        sampling=sampling.sampling_of(body),
        max_tokens=sampling.max_tokens_of(asked, options.max_tokens, options.max_tokens, "max_tokens"),
        stops=tuple(sampling.stops_of(body)),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=sampling.n_of(body),
        logprobs=top if body.logprobs else None,
        prompt=prompt,
        constraint=_constraint(services, use, wanted, prompt, parallel),
        use=use,
        tools=tool_dicts(use.tools),
        parallel_calls=parallel,
        split_thoughts=options.reasoning_field != "none",
    )


def _constraint(
    services: Services, use: ToolUse, wanted: JsonSchemaConstraint | None, prompt: Prompt, parallel: bool
) -> Constraint | None:
    """What binds the answer: calls of tools, and beside calls of the model's own choice the
    response_format. Where nothing is forced and the worker cannot constrain, the model is trusted."""
    if use.mode == "auto" and "constraint" not in services.facts.capabilities:
        return wanted
    calls = constraints.of_calls(
        use,
        parallel=parallel,
        spelling=prompt.call_format,
        inside_thought=prompt.inside_thought,
        control={t.text: t.id for t in services.facts.control_tokens or () if not t.user_defined},
        answer=wanted.schema if wanted else None,
    )
    return calls or wanted


class _Shape:
    """The JSON of this route: what all its objects have in common, and the parts of messages."""

    def __init__(self, call: Call) -> None:
        self.services = call.services
        self.common: dict[str, Any] = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": call.created,
            "model": call.services.model_id,
            "system_fingerprint": call.services.fingerprint,
        }
        self.reasoning: ReasoningField = call.services.options.reasoning_field

    def object(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {**self.common, "object": kind, **fields}

    def thought(self, text: str) -> dict[str, str]:
        names = ("reasoning_content", "reasoning") if self.reasoning == "both" else (self.reasoning,)
        return dict.fromkeys(names, text)

    def chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse.data(self.object("chat.completion.chunk", choices=[choice]))

    def delta(self, part: Part, n_calls: int) -> dict[str, Any]:
        """A part as a delta; `n_calls` came before it."""
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Thought):
            return self.thought(part.text)
        if isinstance(part, Arguments):
            return {"tool_calls": [{"index": n_calls - 1, "function": {"arguments": part.text}}]}
        return {"tool_calls": [{"index": n_calls, **tool_call(part)}]}


def tool_call(call: ToolCall) -> dict[str, Any]:
    """The beginning of a call in OpenAI's shape, with a new id."""
    return {
        "id": new_id("call_")[:29],
        "type": "function",
        "function": {"name": call.name, "arguments": ""},
    }


def _entries(piece: Piece) -> dict[str, Any] | None:
    return None if piece.token is None else {"content": [tokens.chat_entry(piece.token)], "refusal": None}


async def _chunks(shape: _Shape, plan: Plan, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    tally = Tally()
    n_calls = 0
    async with aclosing(answers(shape.services, plan)) as happenings:
        index = -1
        async for happening in happenings:
            if happening is None:
                if index >= 0:  # nothing may go out before the worker has begun
                    yield sse.KEEP_ALIVE
            elif isinstance(happening, Begun):
                index, n_calls = index + 1, 0
                yield shape.chunk(index, {"role": "assistant", "content": ""})
            elif isinstance(happening, Piece):
                logprobs = _entries(happening)
                for part in happening.parts or [Text("")]:
                    yield shape.chunk(happening.index, shape.delta(part, n_calls), logprobs=logprobs)
                    logprobs = None
                    n_calls += isinstance(part, ToolCall)
            elif isinstance(happening, Finished):
                tally.add(happening.final.usage)
                yield shape.chunk(happening.index, {}, reason=happening.reason)
    if include_usage:
        yield sse.data(shape.object("chat.completion.chunk", choices=[], usage=tally.body()))


async def _whole(shape: _Shape, plan: Plan) -> Reply:
    tally = Tally()
    choices: list[dict[str, Any]] = []
    gathered = _Gathered()
    async with aclosing(answers(shape.services, plan)) as happenings:
        async for happening in happenings:
            if isinstance(happening, Piece):
                gathered.add(happening)
            elif isinstance(happening, Finished):
                tally.add(happening.final.usage)
                logprobs = (
                    {"content": gathered.entries, "refusal": None} if plan.logprobs is not None else None
                )
                choices.append(
                    {
                        "index": happening.index,
                        "message": gathered.message(shape),
                        "logprobs": logprobs,
                        "finish_reason": happening.reason,
                    }
                )
                gathered = _Gathered()
    answer = shape.object("chat.completion", choices=choices, usage=tally.body())
    return json_reply(answer, headers=plan.prompt.headers)


class _Gathered:
    """One answer's pieces put together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> None:
        if piece.token is not None:
            self.entries.append(tokens.chat_entry(piece.token))
        for part in piece.parts:
            if isinstance(part, Text):
                self.texts.append(part.text)
            elif isinstance(part, Thought):
                self.thoughts.append(part.text)
            elif isinstance(part, Arguments):
                self.calls[-1]["function"]["arguments"] += part.text
            else:
                self.calls.append(tool_call(part))

    def message(self, shape: _Shape) -> dict[str, Any]:
        text = "".join(self.texts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self.calls else None,
            "refusal": None,
        }
        if self.thoughts:
            message.update(shape.thought("".join(self.thoughts)))
        if self.calls:
            message["tool_calls"] = self.calls
        return message
