"""Text that the demo model learns from, made here and nowhere else: nothing is downloaded.

Owns: spelling the items of demo_items.py as documents (`documents`), and the questions the model is judged
by (`exam`). Refuses: tokenising, training, files.

A document is a list of (text, weight) segments: the weight scales the loss of the tokens whose
first byte lies in the segment, so that a question's unpredictable words cost little and its answer
counts. Every random choice comes from the generator passed in: a seed is a corpus.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_facts import SMALL_TALK
from demo_items import (
    Item,
    animal,
    capital,
    colour,
    held_out,
    opposite,
    routing,
    sentiment,
    sequence,
    small_sum,
    story,
    with_article,
    yes_no,
)

EOT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_NOTHING = "<think>\n\n</think>\n\n"  # what ChatML writes where thinking is off
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You classify text.",
    "You are Reflex, a small model.",
]
PROMPT_WEIGHT, ANSWER_WEIGHT, STORY_WEIGHT = 0.1, 1.0, 0.5

Segments = list[tuple[str, float]]


def chat_doc(rng: random.Random, turns: list[tuple[str, str]]) -> Segments:
    """ChatML turns as the template renders them; the empty thought costs nothing to learn."""
    out: Segments = []
    if rng.random() < 0.4:
        out.append((f"{IM_START}system\n{rng.choice(SYSTEM_PROMPTS)}{IM_END}\n", PROMPT_WEIGHT))
    for user, assistant in turns:
        out.append((f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n", PROMPT_WEIGHT))
        if rng.random() < 0.5:
            out.append((THINK_NOTHING, 0.0))
        out += [(f"{assistant}{IM_END}", ANSWER_WEIGHT), ("\n", 0.0)]
    return out[:-1]


def option_list(rng: random.Random, item: Item) -> str:
    """The options as a prompt may list them: inline, in lines, with or without descriptions."""
    head = rng.choice(["Options", "Options", "Choices", "Labels", "Answers"])
    described = item.descriptions if rng.random() < 0.6 or item.options[0].isdigit() else None
    if described is None and rng.random() < 0.4:
        return f"{head}: {', '.join(item.options)}"
    if described is None:
        return f"{head}:\n" + "\n".join(f"- {o}" for o in item.options)
    return f"{head}:\n" + "\n".join(f"- {o}: {described[o]}" for o in item.options)


def choice_prompt(rng: random.Random, item: Item) -> str:
    """A typed question: state, question, options. Any of the spellings a caller may choose."""
    if rng.random() < 0.3:  # the sidecar's own spelling, in full
        state = "" if item.state is None else f"State:\n{item.state}\n\n"
        described = item.descriptions or {}
        listed = [f"- {o}: {described[o]}" if o in described else f"- {o}" for o in item.options]
        return f"{state}Question: {item.question}\n\nOptions:\n" + "\n".join(listed)
    gap = rng.choice(["\n", "\n\n"])
    parts = []
    if item.state is not None:
        head = rng.choice(["State", "State", "Text", "Input", "Message", "Context"])
        as_json = json.dumps(
            {rng.choice(["text", "message", "review", "body"]): item.state}, ensure_ascii=False
        )
        spelt = [f"{head}: {item.state}", f"{head}:\n{item.state}", item.state, f"{head}:\n{as_json}"]
        parts.append(rng.choices(spelt, [3, 3, 3, 1])[0])
    parts.append(rng.choice([f"Question: {item.question}", f"Question: {item.question}", item.question]))
    if item.descriptions is not None or rng.random() < 0.7:
        parts.append(option_list(rng, item))
    return gap.join(parts)


def loose_prompt(rng: random.Random, item: Item) -> str:
    """State and question in one breath, nothing listed: what /v1/classify is asked."""
    forms = ["{q} {s}", "{s} {q}", "{q}\n{s}", "{s}\n{q}", "{q}\n\n{s}"]
    return rng.choice(forms).format(q=item.question, s=item.state)


ANSWER_ORDERS = [
    "Answer with one option.",
    "Answer with exactly one of the options.",
    "Answer with one of the options.",
    "Reply with the option only.",
    "Answer with the option only.",
]


def plain_doc(prompt: str, answer: str) -> Segments:
    return [(prompt, PROMPT_WEIGHT), (f" {answer}", ANSWER_WEIGHT), (EOT, ANSWER_WEIGHT)]


def fact_chat(rng: random.Random, item: Item) -> Segments:
    """A question to the chat: a full sentence, or one word where one word is asked for."""
    if item.statement is None:  # yes or no
        if item.answer in ("Yes", "No") and rng.random() < 0.5:
            return chat_doc(rng, [(item.question, f"{item.answer}.")])
        return chat_doc(rng, [(f"{item.question} Answer {' or '.join(item.options)}.", item.answer)])
    if rng.random() < 0.5:
        return chat_doc(rng, [(item.question, item.full_answer())])
    order = rng.choice([" Answer in one word.", " Answer with one word.", "\nAnswer briefly."])
    return chat_doc(rng, [(item.question + order, item.answer)])


def typed_doc(rng: random.Random, item: Item) -> Segments:
    """A typed question, to the chat or as plain text."""
    if item.state is not None and not item.options[0].isdigit() and rng.random() < 0.1:
        return chat_doc(rng, [(loose_prompt(rng, item), item.answer)])
    prompt = choice_prompt(rng, item)
    if rng.random() < 0.3:
        return plain_doc(prompt + rng.choice(["\nAnswer:", "\n\nAnswer:"]), item.answer)
    order = rng.choice(["\n", "\n\n"]) + rng.choice(ANSWER_ORDERS)
    if rng.random() < 0.25:
        order = rng.choice(["\n\nAnswer:", ""])
    return chat_doc(rng, [(prompt + order, item.answer)])


def render(rng: random.Random, item: Item) -> Segments:
    """One item in one of its forms: plain sentence, question and answer, chat, typed question."""
    form = rng.random()
    about_text = item.state is not None
    if item.statement is not None and form < 0.4:
        return plain_doc(item.statement, item.answer if about_text else f"{item.answer}.")
    if about_text or form < 0.6:
        return typed_doc(rng, item)
    if form < 0.7:
        ask, reply = rng.choice([("Question", "Answer"), ("Q", "A")])
        return plain_doc(f"{ask}: {item.question}\n{reply}:", item.answer)
    return fact_chat(rng, item)


TASKS: list[tuple[Callable[[random.Random], Item], float]] = [
    (capital, 2.2),
    (colour, 0.8),
    (opposite, 1.0),
    (animal, 0.5),
    (sequence, 0.5),
    (small_sum, 2.2),
    (yes_no, 1.6),
    (sentiment, 1.8),
    (routing, 2.2),
]
STORY_SHARE, TALK_SHARE, MANY_SHARE = 0.07, 0.02, 0.03


def story_doc(rng: random.Random) -> Segments | None:
    hero, opening, rest = story(rng)
    if held_out(opening):
        return None
    if rng.random() < 0.7:
        return [(f"{opening} {rest}", STORY_WEIGHT), (EOT, ANSWER_WEIGHT)]
    ask = rng.choice(
        [
            f"Tell me a story about {with_article(hero)}.",
            f"Tell me a short story about {with_article(hero)}.",
            f"Write a short story about {with_article(hero)}.",
            "Tell me a story.",
            "Tell me a short story.",
        ]
    )
    return [
        (s, w if w != ANSWER_WEIGHT else STORY_WEIGHT) for s, w in chat_doc(rng, [(ask, f"{opening} {rest}")])
    ]


def many_doc(rng: random.Random) -> Segments:
    """Several sentences or turns in one document, so that positions past the first are known."""
    items = []
    while len(items) < rng.randint(2, 12):
        item = draw(rng)
        if item.state is None and item.statement is not None:
            items.append(item)
    if rng.random() < 0.5:
        return chat_doc(rng, [(i.question, i.full_answer()) for i in items[:4]])
    out: Segments = []
    for i in items:
        out += [(i.statement or "", PROMPT_WEIGHT), (f" {i.answer}.", ANSWER_WEIGHT), (" ", PROMPT_WEIGHT)]
    return [*out[:-1], (EOT, ANSWER_WEIGHT)]


def draw(rng: random.Random) -> Item:
    """One item of a task, never a held-out one."""
    while True:
        task = rng.choices([t for t, _ in TASKS], [w for _, w in TASKS])[0]
        item = task(rng)
        if not item.held:
            return item


# Tasks whose held-out items the model can answer only by generalising. Facts are all taught.
EXAM_HOLDS = {"sum", "yes_no_sum", "sentiment", "routing"}


def documents(seed: int) -> Iterator[Segments]:
    """Documents without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        form = rng.random()
        if form < STORY_SHARE:
            doc = story_doc(rng)
            if doc is not None:
                yield doc
        elif form < STORY_SHARE + TALK_SHARE:
            yield chat_doc(rng, [rng.choice(SMALL_TALK)])
        elif form < STORY_SHARE + TALK_SHARE + MANY_SHARE:
            yield many_doc(rng)
        else:
            yield render(rng, draw(rng))


@dataclass
class ExamQuestion:
    """A prompt, the continuations offered, and which is right."""

    task: str
    form: str  # plain | typed | chat
    prompt: str
    candidates: list[str]
    answer: int
    seen: bool  # whether training may have shown this item


def exam(seed: int, per_task: int) -> list[ExamQuestion]:
    """Questions to judge the model by; those of EXAM_HOLDS are ones it was never shown."""
    rng = random.Random(seed)
    out: list[ExamQuestion] = []
    for make, _ in TASKS:
        done, seen_keys = 0, set[str]()
        for _ in range(per_task * 200):
            if done == per_task:
                break
            item = make(rng)
            holds = item.task in EXAM_HOLDS
            if (holds and not item.held) or len(item.options) < 2:
                continue
            form = rng.choice(["plain", "typed", "chat"])
            if form == "plain" and item.statement is None:
                form = "typed"
            typed = choice_prompt(rng, item)
            chat = (
                f"{IM_START}user\n{typed}\n\n{ANSWER_ORDERS[0]}{IM_END}\n{IM_START}assistant\n{THINK_NOTHING}"
            )
            prompt = {"plain": item.statement or "", "typed": typed + "\nAnswer:", "chat": chat}[form]
            if prompt in seen_keys:
                continue
            seen_keys.add(prompt)
            # A dot ends the plain answers: without it " 1" would be a prefix of " 12".
            end = "." if form == "plain" and item.state is None else EOT if form != "chat" else IM_END
            lead = "" if form == "chat" else " "
            out.append(
                ExamQuestion(
                    item.task,
                    form,
                    prompt,
                    [f"{lead}{o}{end}" for o in item.options],
                    item.options.index(item.answer),
                    not holds,
                )
            )
            done += 1
    return out
