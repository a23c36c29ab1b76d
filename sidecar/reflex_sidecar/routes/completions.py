"""POST /v1/completions: a prompt as it is, with echo and the prompt's own log-probabilities.

A list of prompts is a batch: one after another within one turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from reflex_protocol.messages import Detokenize, DetokenizeAnswer, GenerateFinal, Request, TokenEvent

from .. import constraints, sampling, sse
from ..bodies import CompletionBody, decode
from ..errors import ApiError, bad_request
from ..generate import Tally
from ..messages import kind_of
from ..prompts import check_length
from ..services import Services
from ..sse import Stream
from ..tokens import LegacyLogprobs, piece
from ..web import Call, Reply, json_reply, new_id
from ..work import Job, is_sign_of_life

# What OpenAI's API writes when nothing is asked.
DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 256


@dataclass(frozen=True)
class _Plan:
    """A checked body. A prompt is a text or a list of ids."""

    prompts: list[str | list[int]]
    request: Request  # but for its prompt
    n: int
    echo: bool
    logprobs: int | None


async def completions(call: Call) -> Reply | Stream:
    """The handler."""
    body = decode(call.body, CompletionBody)
    plan = _plan(call.services, body)
    shape = _Shape(call)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        if usage:  # as the API has it: null until the last chunk
            shape.common["usage"] = None
        return await sse.begin(_chunks(shape, plan, include_usage=usage))
    return await _whole(shape, plan)


def _plan(services: Services, body: CompletionBody) -> _Plan:
    if body.suffix:
        raise ApiError(
            400, "suffix: filling in the middle is not supported", code="unsupported", param="suffix"
        )
    n = sampling.n_of(body)
    if body.best_of is not None and body.best_of != n:
        raise ApiError(400, "best_of: only the value of n is supported", code="unsupported", param="best_of")
    logprobs = None if body.logprobs is None else sampling.top_logprobs_of(body.logprobs, "logprobs")
    prompts = _prompts(body.prompt)
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(services, prompt)
    limit = services.options.max_tokens
    echo = bool(body.echo)
    request = Request(
        max_tokens=sampling.max_tokens_of(body.max_tokens, limit, DEFAULT_MAX_TOKENS, "max_tokens", low=0),
        sampling=sampling.sampling_of(body),
        stream=True,
        stop=sampling.stops_of(body),
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        constraint=constraints.of_format(body.response_format),
        progress=True,
    )
    return _Plan(prompts, request, n, echo, logprobs)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The body's prompt in its four forms: a text, ids, a list of texts, a list of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt: expected a text or token ids, found an empty list", param="prompt")
    if all(isinstance(p, int) and not isinstance(p, bool) for p in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt: expected at most {MAX_PROMPTS}, found {len(prompt)}", param="prompt")
    for i, one in enumerate(prompt):
        ids = (
            isinstance(one, list) and one and all(isinstance(t, int) and not isinstance(t, bool) for t in one)
        )
        if not (isinstance(one, str) or ids):
            raise bad_request(
                f"prompt[{i}]: expected a text or token ids, found {kind_of(one)}", param="prompt"
            )
    return prompt


class _Shape:
    """The JSON of this route."""

    def __init__(self, call: Call) -> None:
        self.services = call.services
        self.common: dict[str, Any] = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": call.created,
            "model": call.services.model_id,
            "system_fingerprint": call.services.fingerprint,
        }

    def object(self, **fields: Any) -> dict[str, Any]:
        return {**self.common, **fields}

    def chunk(
        self, index: int, text: str, *, logprobs: LegacyLogprobs | None = None, reason: str | None = None
    ) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs.body() if logprobs else None,
            "finish_reason": reason,
        }
        return sse.data(self.object(choices=[choice]))


def _for(plan: _Plan, prompt: str | list[int], k: int) -> Request:
    """The request of the k-th answer to a prompt."""
    request = plan.request
    if k and request.sampling and request.sampling.seed is not None:
        seed = (request.sampling.seed + k) % 2**64
        request = msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, seed=seed)
        )
    if isinstance(prompt, str):
        return msgspec.structs.replace(request, prompt=prompt)
    return msgspec.structs.replace(request, prompt_token_ids=prompt)


def _reason(final: GenerateFinal) -> str:
    return "stop" if final.finish_reason == "stop" else "length"


async def _echoed(job: Job, plan: _Plan, prompt: str | list[int]) -> str:
    """The prompt's text, to be repeated before its completion."""
    if not plan.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    (answer,) = await job.ask(Detokenize(token_ids=prompt, skip_special=False))
    assert isinstance(answer, DetokenizeAnswer)
    return answer.text


def _echoed_logprobs(into: LegacyLogprobs, text: str, final: GenerateFinal) -> None:
    """The prompt's tokens: the first is what the others leave of the text's bytes."""
    scored = final.prompt_logprobs or []
    data = text.encode()
    rest = sum(len(piece(t)[1]) for t in scored)
    into.first(data[: max(0, len(data) - rest)].decode("utf-8", "replace"))
    into.add(scored)


async def _whole(shape: _Shape, plan: _Plan) -> Reply:
    tally = Tally()
    prompt_tokens = 0
    choices: list[dict[str, Any]] = []
    async with Job(shape.services) as job:
        for prompt in plan.prompts:
            echoed = await _echoed(job, plan, prompt)
            tally.prompt_tokens = 0
            for k in range(plan.n):
                final = await job.final(_for(plan, prompt, k))
                assert isinstance(final, GenerateFinal)
                tally.add(final.usage)
                logprobs = None
                if plan.logprobs is not None:
                    logprobs = LegacyLogprobs()
                    if plan.echo:
                        _echoed_logprobs(logprobs, echoed, final)
                    logprobs.add(final.logprobs or [])
                choices.append(
                    {
                        "index": len(choices),
                        "text": echoed + final.text,
                        "logprobs": logprobs.body() if logprobs else None,
                        "finish_reason": _reason(final),
                    }
                )
            prompt_tokens += tally.prompt_tokens
    tally.prompt_tokens = prompt_tokens
    return json_reply(shape.object(choices=choices, usage=tally.body()))


async def _chunks(shape: _Shape, plan: _Plan, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    tally = Tally()
    prompt_tokens = index = 0
    async with Job(shape.services) as job:
        for prompt in plan.prompts:
            echoed = await _echoed(job, plan, prompt)
            tally.prompt_tokens = 0
            for k in range(plan.n):
                async with aclosing(
                    _answer(shape, plan, job, _for(plan, prompt, k), index, echoed, tally)
                ) as chunks:
                    async for chunk in chunks:
                        yield chunk
                index += 1
            prompt_tokens += tally.prompt_tokens
    tally.prompt_tokens = prompt_tokens
    if include_usage:
        yield sse.data(shape.object(choices=[], usage=tally.body()))


async def _answer(
    shape: _Shape, plan: _Plan, job: Job, request: Request, index: int, echoed: str, tally: Tally
) -> AsyncGenerator[bytes, None]:
    """One answer's chunks. The prompt's log-probabilities come with the final, so an echo with
    log-probabilities comes as a whole at the end."""
    late_echo = plan.echo and plan.logprobs is not None
    begun, streamed, offset = False, 0, len(echoed)
    async with aclosing(job.events(request)) as events:
        async for event in events:
            if event is None:
                if begun:
                    yield sse.KEEP_ALIVE
                continue
            if not begun and is_sign_of_life(event):
                begun = True
                yield shape.chunk(index, "" if late_echo else echoed)
            if isinstance(event, TokenEvent) and not late_echo:
                logprobs = None
                if plan.logprobs is not None:
                    logprobs = LegacyLogprobs(offset)
                    logprobs.add([event])
                streamed += len(event.text)
                offset += len(event.text)
                if event.text or logprobs:
                    yield shape.chunk(index, event.text, logprobs=logprobs)
            elif isinstance(event, GenerateFinal):
                tally.add(event.usage)
                text, logprobs = event.text[streamed:], None
                if late_echo:
                    text, logprobs = echoed + event.text, LegacyLogprobs()
                    _echoed_logprobs(logprobs, echoed, event)
                    logprobs.add(event.logprobs or [])
                if text:
                    yield shape.chunk(index, text, logprobs=logprobs)
                yield shape.chunk(index, "", reason=_reason(event))
