"""POST /v1/systemone: typed questions about a state, on any model.

Each question becomes a chat message: the state first (so that all questions share it), then the
question and its options. How options are scored stands in judge.py. The order in which a request
lists its options changes nothing: they are listed to the model in the order of their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..bodies import SystemOneBody, decode
from ..errors import ApiError, bad_request
from ..judge import Question, answer_end, ask_chat, judge, softmax
from ..messages import kind_of
from ..web import Call, Reply, json_reply
from ..work import Job

Kind = Literal["choice", "score", "noul"]

MAX_QUESTIONS: Final = 256
MAX_OPTIONS: Final = 256
MIN_LEVELS: Final = 2
MAX_LEVELS: Final = 10
YES_NO: Final = ("true", "false")


@dataclass(frozen=True)
class _Asked:
    """A checked question. `options`: (what the model would answer, its description or None)."""

    kind: Kind
    instructions: str
    options: list[tuple[str, str | None]]


async def systemone(call: Call) -> Reply:
    """The handler."""
    body = decode(call.body, SystemOneBody)
    asked = _questions(body)
    state = _text(body.state)
    questions = []
    headers: dict[str, str] = {}
    for one in asked.values():
        prompt = await ask_chat(call.services, [{"role": "user", "content": _prompt(state, one)}])
        headers = prompt.headers
        questions.append(Question(prompt, [option for option, _ in one.options]))
    end = await answer_end(call.services)
    async with Job(call.services) as job:
        verdict = await judge(call.services, job, questions, end)
    answers = {
        name: _answer(one, softmax(scores), body.questions[name])
        for (name, one), scores in zip(asked.items(), verdict.scores, strict=True)
    }
    usage = {
        "input_tokens": verdict.prompt_tokens,
        "input_tokens_details": {"shared_tokens": verdict.shared_tokens},
        "output_tokens": 0,
        "total_tokens": verdict.prompt_tokens,
    }
    return json_reply({"model": call.services.model_id, "answers": answers, "usage": usage}, headers=headers)


# ---- checking ------------------------------------------------------------------------------


def _questions(body: SystemOneBody) -> dict[str, _Asked]:
    if not body.questions:
        raise bad_request('"questions" must be a non-empty object', param="questions")
    if len(body.questions) > MAX_QUESTIONS:
        raise bad_request(f'"questions" must hold at most {MAX_QUESTIONS}', param="questions")
    return {name: _question(name, q) for name, q in body.questions.items()}


def _wrong(name: str, message: str) -> ApiError:
    where = f"questions.{name}"
    return bad_request(f"{where}: {message}", param=where)


def _question(name: str, question: Any) -> _Asked:
    if not isinstance(question, dict):
        raise _wrong(name, f"must be an object, found {kind_of(question)}")
    instructions = question.get("instructions")
    if not isinstance(instructions, (str, dict, list)) or not instructions:
        raise _wrong(name, '"instructions" must be a non-empty string, object or array')
    kind, criteria = question.get("type"), question.get("criteria")
    if kind == "choice":
        options = _choice(name, criteria)
    elif kind == "score":
        options = _score(name, criteria)
    elif kind == "noul":
        options = _noul(name, criteria)
    else:
        raise _wrong(name, '"type" must be "choice", "score" or "noul"')
    return _Asked(kind, _text(instructions), options)


def _choice(name: str, criteria: Any) -> list[tuple[str, str | None]]:
    if not isinstance(criteria, dict) or not criteria:
        raise _wrong(name, '"criteria" must be a non-empty object')
    if len(criteria) > MAX_OPTIONS:
        raise _wrong(name, f'"criteria" must hold at most {MAX_OPTIONS} options')
    for option, description in criteria.items():
        if not option.strip():
            raise _wrong(name, '"criteria" must not hold an empty option')
        if not isinstance(description, (str, type(None))):
            raise _wrong(name, f'"criteria.{option}" must be a string or null')
    return sorted(criteria.items())


def _score(name: str, criteria: Any) -> list[tuple[str, str | None]]:
    if not isinstance(criteria, list) or not MIN_LEVELS <= len(criteria) <= MAX_LEVELS:
        raise _wrong(name, f'"criteria" must be an array of {MIN_LEVELS} to {MAX_LEVELS} level descriptions')
    for i, level in enumerate(criteria):
        if not isinstance(level, str):
            raise _wrong(name, f'"criteria[{i}]" must be a string')
    return [(str(i), level) for i, level in enumerate(criteria)]


def _noul(name: str, criteria: Any) -> list[tuple[str, str | None]]:
    if criteria is None:
        criteria = {}
    if not isinstance(criteria, dict):
        raise _wrong(name, '"criteria" must be an object with descriptions of "true" and "false"')
    for key, description in criteria.items():
        if key not in YES_NO:
            raise _wrong(name, f'"criteria" may hold "true" and "false", found "{key}"')
        if not isinstance(description, (str, type(None))):
            raise _wrong(name, f'"criteria.{key}" must be a string or null')
    return [(word, criteria.get(word)) for word in YES_NO]


# ---- asking --------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _prompt(state: str, asked: _Asked) -> str:
    listed = "\n".join(f"- {o}: {d}" if d else f"- {o}" for o, d in asked.options)
    return (
        f"State:\n{state}\n\nQuestion: {asked.instructions}\n\nOptions:\n{listed}\n\n"
        "Answer with exactly one of the options."
    )


# ---- answering -----------------------------------------------------------------------------


def _answer(asked: _Asked, probabilities: list[float], question: dict[str, Any]) -> dict[str, Any]:
    by_option = {o: p for (o, _), p in zip(asked.options, probabilities, strict=True)}
    if asked.kind == "choice":
        # In the order of the request; the first of its options wins a tie.
        in_order = {option: by_option[option] for option in question["criteria"]}
        best = max(in_order, key=in_order.__getitem__)
        return {
            "type": "choice",
            "choice": best,
            "probabilities": in_order,
            "confidence": choice_confidence(list(in_order.values())),
        }
    if asked.kind == "score":
        return {
            "type": "score",
            "score": sum(i * p for i, p in enumerate(probabilities)),
            "legend": {str(i): level for i, level in enumerate(question["criteria"])},
            "probabilities": by_option,
            "confidence": score_confidence(probabilities),
        }
    return {"type": "noul", "noul": by_option["true"]}


def choice_confidence(probabilities: list[float]) -> float:
    """How far the best option is above chance, from 0 to 1."""
    n = len(probabilities)
    if n == 1:
        return 1.0
    return max(0.0, (max(probabilities) - 1 / n) / (1 - 1 / n))


def score_confidence(probabilities: list[float]) -> float:
    """How close the levels stay to the likeliest one, against how close chance would."""
    n = len(probabilities)
    top = max(range(n), key=probabilities.__getitem__)
    spread = sum(p * abs(i - top) for i, p in enumerate(probabilities))
    by_chance = sum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return max(0.0, 1 - spread / by_chance)
