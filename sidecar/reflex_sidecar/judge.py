"""Scoring answers: which of these does the model give here? For classify and systemone.

Options are scored as whole answers: their text and the token that ends the assistant's turn. The
probability of an option is then that of the model saying it and stopping, relative to the others, so
that a short option gains nothing by being the beginning of a longer one, and none needs a letter.

Several questions go to the worker as one request. Their prompts share a beginning, which becomes the
worker's prompt; the rest of each, and then each option, are its candidates:

    shared prompt --+-- rest of question 1 --+-- option 1a
                    |                        +-- option 1b
                    +-- rest of question 2 --+-- option 2a ...

The worker packs candidates into a tree, so that nothing is computed twice, and scores them from their
option on: of a question's own tokens no logits are needed (`score_from`; what the options of one
question share would cancel). A candidate's score is the sum of its option's log-probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reflex_protocol.messages import Request, ScoreFinal, Tokenize, TokenizeAnswer, WorkerMessage

from .errors import ApiError, bad_request
from .prompts import ChatSpec, Prompt, chat_prompt
from .rendering.renderer import RenderFailed
from .services import Services
from .work import Job

_PROBE = "REFLEX_ANSWER_PROBE"
# Ends an answer where no control token does.
_LINE_END = "\n"


@dataclass(frozen=True)
class Question:
    """A prompt and the answers to choose from."""

    prompt: Prompt
    options: list[str]


@dataclass(frozen=True)
class Verdict:
    """Log-probabilities of each question's options, up to a constant per question."""

    scores: list[list[float]]
    prompt_tokens: int  # over all questions
    shared_tokens: int  # of those, counted more than once and computed once


async def ask_chat(services: Services, messages: list[dict[str, object]]) -> Prompt:
    """The prompt at whose end the answer begins, thoughts off."""
    return await chat_prompt(services, ChatSpec(messages, answer_now=True))


async def answer_end(services: Services) -> str:
    """What ends an assistant's turn: the control token that the template writes after it."""
    try:
        if services.options.no_chat_template:
            return _LINE_END
        rendered = await services.renderer.render(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}],
            add_generation_prompt=False,
        )
    except RenderFailed:
        return _LINE_END
    after = rendered.prompt.rpartition(_PROBE)[2]
    spelled = [t.text for t in services.facts.control_tokens or () if after.startswith(t.text)]
    if spelled:
        return max(spelled, key=len)
    return services.facts.eos_token if after.startswith(services.facts.eos_token) else _LINE_END


async def judge(services: Services, job: Job, questions: list[Question], end: str) -> Verdict:
    """Score all options of all questions in one request of the worker."""
    prompts = await _prompt_ids(job, questions)
    options = await _option_ids(services, job, questions, prompts, end)
    n_shared = _common_length(prompts)
    candidates, starts = [], []
    for prompt, each in zip(prompts, options, strict=True):
        candidates += [prompt[n_shared:] + option for option in each]
        starts += [len(prompt) - n_shared] * len(each)
    counts_from = "score_from" in services.facts.capabilities
    final = await job.final(
        Request(
            prompt_token_ids=prompts[0][:n_shared],
            candidate_token_ids=candidates,
            score="logprob_sum",
            score_from=starts if counts_from else [],
            progress=True,
        )
    )
    assert isinstance(final, ScoreFinal)
    scores, at = [], 0
    for each in options:
        scores.append([c.score for c in final.candidates[at : at + len(each)]])
        at += len(each)
    return Verdict(scores, sum(map(len, prompts)), n_shared * (len(prompts) - 1))


def softmax(scores: list[float], temperature: float = 1.0) -> list[float]:
    """Probabilities of log-probabilities."""
    top = max(scores)
    weights = [math.exp((s - top) / temperature) for s in scores]
    total = sum(weights)
    return [w / total for w in weights]


def entropy_bits(probabilities: list[float]) -> float:
    """How undecided, in bits."""
    return -sum(p * math.log2(p) for p in probabilities if p > 0) + 0.0


async def _prompt_ids(job: Job, questions: list[Question]) -> list[list[int]]:
    lines = [Tokenize(text=q.prompt.text, literal_spans=q.prompt.spans) for q in questions]
    prompts = [_ids(a) for a in await job.ask(*lines)]
    if not all(prompts):
        raise bad_request("the prompt: expected at least one token, found none")
    return prompts


async def _option_ids(
    services: Services, job: Job, questions: list[Question], prompts: list[list[int]], end: str
) -> list[list[list[int]]]:
    """The ids of every option as it continues its prompt.

    A control token cuts what is before it off from what is after, so the text after the prompt's
    last one is enough to see how an option joins it.
    """
    tails = [_tail(services, q.prompt) for q in questions]
    lines = []
    for question, (start, spans) in zip(questions, tails, strict=True):
        tail = question.prompt.text[start:]
        lines.append(Tokenize(text=tail, literal_spans=spans, add_bos=False))
        for option in question.options:
            own = (len(tail), len(tail) + len(option))
            lines.append(Tokenize(text=tail + option + end, literal_spans=[*spans, own], add_bos=False))
    alone = [
        Tokenize(text=o + end, literal_spans=[(0, len(o))], add_bos=False)
        for q in questions
        for o in q.options
    ]
    answers = iter([_ids(a) for a in await job.ask(*lines)])
    out: list[list[list[int]]] = []
    unclean = False
    for question, prompt in zip(questions, prompts, strict=True):
        before = next(answers)
        joined = [next(answers) for _ in question.options]
        clean = prompt[len(prompt) - len(before) :] == before and all(
            j[: len(before)] == before for j in joined
        )
        unclean = unclean or not clean
        out.append([j[len(before) :] for j in joined])
    if unclean:  # a border inside a token: the options as they are spelled by themselves
        ids = iter([_ids(a) for a in await job.ask(*alone)])
        out = [[next(ids) for _ in q.options] for q in questions]
    if not all(option for each in out for option in each):
        raise bad_request("an option: expected at least one token, found none")
    return out


def _tail(services: Services, prompt: Prompt) -> tuple[int, list[tuple[int, int]]]:
    """Where the text after the prompt's last control token begins, and the literal spans in it."""
    start = 0
    literal_end = max((b for _, b in prompt.spans), default=0)
    for token in services.facts.control_tokens or ():
        at = prompt.text.rfind(token.text)
        if at >= literal_end:
            start = max(start, at + len(token.text))
    return start, [(a - start, b - start) for a, b in prompt.spans if a >= start]


def _common_length(prompts: list[list[int]]) -> int:
    shortest = min(prompts, key=len)
    for i, token in enumerate(shortest):
        if any(p[i] != token for p in prompts):
            if i == 0:
                raise ApiError(500, "the prompts of the questions share no token", code="internal_error")
            return i
    return len(shortest)


def _ids(answer: WorkerMessage) -> list[int]:
    assert isinstance(answer, TokenizeAnswer)
    return answer.token_ids
