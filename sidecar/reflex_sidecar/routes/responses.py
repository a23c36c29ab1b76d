"""POST /v1/responses, stateless: a chat in the shapes of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from .. import sse, tokens
from ..bodies import ResponsesBody, decode
from ..errors import ApiError
from ..generate import Begun, Finished, Piece, Plan, answers
from ..output.parts import Arguments, Part, Text, Thought
from ..output.parts import Call as ToolCall
from ..responses_input import chat_body
from ..sse import Stream
from ..web import Call, Reply, json_reply, new_id
from .chat import plan_chat

_Kind = Literal["message", "reasoning"]


async def responses(call: Call) -> Reply | Stream:
    """The handler."""
    body = decode(call.body, ResponsesBody)
    plan = await plan_chat(call.services, chat_body(body))
    writer = _Writer(call, body, plan)
    if body.stream:
        return await sse.begin(
            _events(call, plan, writer),
            headers=plan.prompt.headers,
            on_error=writer.failed,
            done=b"",  # this API's streams end with their last event
        )
    async with aclosing(answers(call.services, plan)) as happenings:
        async for happening in happenings:
            if isinstance(happening, Piece):
                for _ in writer.piece(happening):
                    pass  # nobody reads the events; the items grow all the same
            elif isinstance(happening, Finished):
                for _ in writer.finish(happening):
                    pass
    return json_reply(writer.response(), headers=plan.prompt.headers)


async def _events(call: Call, plan: Plan, writer: _Writer) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(answers(call.services, plan)) as happenings:
        async for happening in happenings:
            if happening is None:
                if begun:
                    yield sse.KEEP_ALIVE
            elif isinstance(happening, Begun):
                begun = True
                yield writer.event("response.created", response=writer.response())
                yield writer.event("response.in_progress", response=writer.response())
            elif isinstance(happening, Piece):
                for event in writer.piece(happening):
                    yield event
            elif isinstance(happening, Finished):
                for event in writer.finish(happening):
                    yield event


class _Writer:
    """One response as it grows: its output items, and the events that tell of them."""

    def __init__(self, call: Call, body: ResponsesBody, plan: Plan) -> None:
        self._services = call.services
        self._created = call.created
        self._body = body
        self._plan = plan
        self._id = new_id("resp_")
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._thoughts = 0  # tokens inside thoughts

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event."""
        self._sequence += 1
        return sse.named(kind, {"type": kind, "sequence_number": self._sequence - 1, **fields})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed in the middle."""
        self._status = "failed"
        self._error = {"code": error.code, "message": error.message}
        return self.event("response.failed", response=self.response())

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Events of something new."""
        entries = [tokens.chat_entry(piece.token)] if piece.token is not None else []
        for part in piece.parts:
            if isinstance(part, ToolCall):
                yield from self._close()
                yield from self._call(part)
            elif isinstance(part, Arguments):
                yield from self._arguments(part)
            else:
                yield from self._grow(part, entries)
                entries = []

    def finish(self, finished: Finished) -> Iterator[bytes]:
        """Events of the end."""
        if not self._output:
            yield from self._grow(Text(""), [])
        cut = finished.reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        usage = finished.final.usage
        self._usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thoughts},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        self._status = "incomplete" if cut else "completed"
        yield self.event(f"response.{self._status}", response=self.response())

    # ---- items -----------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _at(self) -> dict[str, Any]:
        """Where an event belongs."""
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index, "content_index": 0}

    def _grow(self, part: Part, entries: list[dict[str, Any]]) -> Iterator[bytes]:
        assert isinstance(part, (Text, Thought))
        kind: _Kind = "reasoning" if isinstance(part, Thought) else "message"
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += part.text
        if kind == "reasoning":
            self._thoughts += 1
            yield self.event("response.reasoning_text.delta", **self._at(), delta=part.text)
            return
        content["logprobs"] += entries
        if part.text:
            yield self.event("response.output_text.delta", **self._at(), delta=part.text, logprobs=entries)

    def _begin(self, kind: _Kind) -> Iterator[bytes]:
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": new_id("msg_"), "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "id": new_id("rs_"), "summary": []}
        self._open = {**item, "status": "in_progress", "content": []}
        self._output.append(self._open)
        yield self.event("response.output_item.added", output_index=self._index, item=self._open)
        self._open["content"].append(part)
        yield self.event("response.content_part.added", **self._at(), part=part)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        self._open["status"] = status
        if self._open["type"] == "function_call":
            call, self._open = self._open, None
            yield from self._close_call(call)
            return
        part = self._open["content"][0]
        if part["type"] == "output_text":
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self.event("response.output_text.done", **self._at(), **done)
        else:
            yield self.event("response.reasoning_text.done", **self._at(), text=part["text"])
        yield self.event("response.content_part.done", **self._at(), part=part)
        yield self.event("response.output_item.done", output_index=self._index, item=self._open)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        self._open = {
            "type": "function_call",
            "id": new_id("fc_"),
            "call_id": new_id("call_")[:29],
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._output.append(self._open)
        yield self.event("response.output_item.added", output_index=self._index, item=self._open)

    def _arguments(self, more: Arguments) -> Iterator[bytes]:
        assert self._open is not None
        self._open["arguments"] += more.text
        at = {"item_id": self._open["id"], "output_index": self._index}
        yield self.event("response.function_call_arguments.delta", **at, delta=more.text)

    def _close_call(self, call: dict[str, Any]) -> Iterator[bytes]:
        at = {"item_id": call["id"], "output_index": self._index}
        yield self.event(
            "response.function_call_arguments.done", **at, arguments=call["arguments"], name=call["name"]
        )
        yield self.event("response.output_item.done", output_index=self._index, item=call)

    # ---- the whole -------------------------------------------------------------------------

    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        body, plan = self._body, self._plan
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        wanted = body.text.format if body.text else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": self._error,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._services.model_id,
            "output": self._output,
            "parallel_tool_calls": plan.parallel_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": plan.sampling.temperature,
            "text": {"format": _given(wanted) if wanted else {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": plan.sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(struct).items() if v is not None}
