"""A chat answered: from a plan to parts, as they come. Shared by chat completions and responses.

Owns the order of things (n answers one after another) and the reading of what the model writes.
Knows no wire shape.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from reflex_protocol.messages import (
    Constraint,
    GenerateFinal,
    Request,
    Sampling,
    TokenEvent,
    Usage,
)

from .constraints import ToolUse
from .output.answer import AnswerSplitter
from .output.calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from .output.parts import Part
from .prompts import Prompt
from .services import Services
from .work import Job, is_sign_of_life

FinishReason = Literal["stop", "length", "tool_calls"]

# Markup that the splitters read: asked for in the text even where the vocabulary hides it.
_MARKUP: Final = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
)


@dataclass(frozen=True)
class Plan:
    """Everything about an answer that is known before the worker is asked."""

    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    constraint: Constraint | None = None
    use: ToolUse = field(default_factory=lambda: ToolUse("none"))
    tools: list[dict[str, Any]] = field(default_factory=list)
    parallel_calls: bool = True
    split_thoughts: bool = True


@dataclass(frozen=True)
class Begun:
    """The worker is at work: what could fail early has not."""


@dataclass(frozen=True)
class Piece:
    """Something new of answer `index`; `token` is there where log-probabilities were asked for."""

    index: int
    parts: list[Part]
    token: TokenEvent | None = None


@dataclass(frozen=True)
class Finished:
    """The end of answer `index`."""

    index: int
    reason: FinishReason
    final: GenerateFinal


Happening = Begun | Piece | Finished | None


@dataclass
class Tally:
    """Usage over all answers: the prompt counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, usage: Usage) -> None:
        """One answer's."""
        self.prompt_tokens = max(self.prompt_tokens, usage.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, usage.cached_tokens)
        self.completion_tokens += usage.completion_tokens

    def body(self) -> dict[str, Any]:
        """The API's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def answers(services: Services, plan: Plan) -> AsyncGenerator[Happening, None]:
    """What happens, in order; None stands for a while of silence."""
    hidden = _hidden_markup(services)
    async with Job(services) as job:
        for index in range(plan.n):
            async with aclosing(_answer(job, plan, index, hidden)) as happenings:
                async for happening in happenings:
                    yield happening


async def _answer(
    job: Job, plan: Plan, index: int, hidden: dict[int, str] | None
) -> AsyncGenerator[Happening, None]:
    splitter = AnswerSplitter(
        split_thoughts=plan.split_thoughts,
        inside_thought=plan.prompt.inside_thought,
        tools=plan.tools if plan.use.mode != "none" else None,
        parallel=plan.parallel_calls,
        forced=plan.use.forced,
    )
    streamed = 0
    begun = False
    async with aclosing(job.events(_request(plan, index, skip_special=hidden is None))) as events:
        async for event in events:
            if event is None:
                yield None
                continue
            if not begun and is_sign_of_life(event):
                begun = True
                yield Begun()
            if isinstance(event, TokenEvent):
                streamed += len(event.text)
                text = event.text
                if hidden and event.token_id in hidden:
                    text = text.replace(hidden[event.token_id], "")
                parts = splitter.feed(text)
                if parts or plan.logprobs is not None:
                    yield Piece(index, parts, event if plan.logprobs is not None else None)
            elif isinstance(event, GenerateFinal):
                # What was held back for a stop string that did not come is in the final text only.
                parts = splitter.feed(event.text[streamed:]) + splitter.finish()
                if parts:
                    yield Piece(index, parts)
                yield Finished(index, _reason(event, splitter.n_calls), event)


def _request(plan: Plan, index: int, *, skip_special: bool) -> Request:
    sampling = plan.sampling
    if index and sampling.seed is not None:  # n answers of one seed would be n times the same
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**64)
    return Request(
        prompt=plan.prompt.text,
        literal_spans=plan.prompt.spans,
        max_tokens=plan.max_tokens,
        sampling=sampling,
        stream=True,
        stop=[*plan.stops, *plan.prompt.stops],
        stop_token_ids=list(plan.stop_token_ids),
        ignore_eos=plan.ignore_eos,
        logprobs=plan.logprobs,
        skip_special=skip_special,
        constraint=plan.constraint,
        progress=True,
    )


def _hidden_markup(services: Services) -> dict[int, str] | None:
    """Control tokens to take out of texts ourselves, since some that we read are control tokens too.

    None where the worker can do it.
    """
    controls = [t for t in services.facts.control_tokens or () if not t.user_defined]
    if not any(t.text in _MARKUP for t in controls):
        return None
    return {t.id: t.text for t in controls if t.text not in _MARKUP}


def _reason(final: GenerateFinal, n_calls: int) -> FinishReason:
    if n_calls and final.finish_reason == "stop":
        return "tool_calls"
    return "stop" if final.finish_reason == "stop" else "length"
