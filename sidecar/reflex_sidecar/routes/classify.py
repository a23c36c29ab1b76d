"""POST /v1/classify: one decision. Which label continues the prompt, or answers the messages?"""

from __future__ import annotations

from typing import Any, Final

from reflex_protocol.messages import Request, ScoreFinal

from ..bodies import ClassifyBody, decode
from ..errors import bad_request
from ..judge import Question, answer_end, ask_chat, entropy_bits, judge, softmax
from ..prompts import check_length
from ..sampling import temperature_of
from ..web import Call, Reply, json_reply, new_id
from ..work import Job

MAX_LABELS: Final = 1000


async def classify(call: Call) -> Reply:
    """The handler."""
    body = decode(call.body, ClassifyBody)
    temperature = temperature_of(body.temperature)
    _check(body)
    if body.messages is not None:
        probabilities, tokens, headers = await _of_messages(call, body, temperature)
    else:
        probabilities, tokens, headers = await _of_prompt(call, body, temperature)
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    answer: dict[str, Any] = {
        "id": new_id("cls-"),
        "object": "classification",
        "created": call.created,
        "model": call.services.model_id,
        "label": body.labels[best],
        "probabilities": dict(zip(body.labels, probabilities, strict=True)),
        "entropy": entropy_bits(probabilities),
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }
    return json_reply(answer, headers=headers)


def _check(body: ClassifyBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("expected exactly one of prompt and messages", param="prompt")
    if not 1 <= len(body.labels) <= MAX_LABELS:
        raise bad_request(f"labels: expected 1 to {MAX_LABELS}, found {len(body.labels)}", param="labels")
    seen: set[str] = set()
    for i, label in enumerate(body.labels):
        if not label:
            raise bad_request(f"labels[{i}]: expected a text, found an empty one", param="labels")
        if label in seen:
            raise bad_request(f"labels[{i}]: found {label[:60]!r} twice", param="labels")
        seen.add(label)


async def _of_messages(
    call: Call, body: ClassifyBody, temperature: float
) -> tuple[list[float], int, dict[str, str]]:
    if body.score is not None:
        raise bad_request(
            "score: expected with prompt; after messages whole answers are scored", param="score"
        )
    assert body.messages is not None
    prompt = await ask_chat(call.services, body.messages)
    end = await answer_end(call.services)
    async with Job(call.services) as job:
        verdict = await judge(call.services, job, [Question(prompt, body.labels)], end)
    return softmax(verdict.scores[0], temperature), verdict.prompt_tokens, prompt.headers


async def _of_prompt(
    call: Call, body: ClassifyBody, temperature: float
) -> tuple[list[float], int, dict[str, str]]:
    prompt = body.prompt
    assert prompt is not None
    check_length(call.services, prompt)
    # A word after a word: the space that belongs between them belongs to the label's first token.
    gap = " " if prompt[-1:].isalnum() or prompt[-1:] in (":", ",", ".", "?", "!") else ""
    candidates = [gap + label if label[0].isalnum() else label for label in body.labels]
    async with Job(call.services) as job:
        final = await job.final(
            Request(
                prompt=prompt,
                candidates=candidates,
                temperature=temperature,
                score=body.score or "auto",
                progress=True,
            )
        )
    assert isinstance(final, ScoreFinal)
    return [c.probability for c in final.candidates], final.usage.prompt_tokens, {}
