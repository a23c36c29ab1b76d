"""The bundled model says true things through the real engine.

It is small, so what it must do is what tools/demo_corpus.py taught: facts, sums up to 20 + 20, the mood
of a review, routes, short stories. The figures it reaches are in tools/README.md; the gates here
are below them, and a model that was not trained fails every one.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict

import numpy as np
import pytest

from reflex_worker._native import Engine, gguf_info

from .references import DEMO

sys.path.insert(0, str(DEMO.parents[2] / "tools"))
from demo_corpus import exam

MAX_BYTES = 6_000_000
SURE = 0.9
EXAM_SEED, EXAM_PER_TASK = 3, 40
# Share of the exam's questions answered right. Sums, moods and routes are ones never trained on.
EXAM_GATES = {
    "capital": 0.95,
    "colour": 0.95,
    "opposite": 0.95,
    "animal": 0.95,
    "sequence": 0.95,
    "sum": 0.7,
    "sentiment": 0.9,
    "routing": 0.95,
}

CAPITAL = "The capital of France is"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module", params=["fast", "exact"])
def demo(request) -> Engine:
    return Engine(str(DEMO), device="cpu", exact=request.param == "exact", threads=2)


def probabilities(engine: Engine, prompt: str, candidates: list[str], **options) -> list[float]:
    scoring = engine.score(prompt, candidates, **options)
    while scoring.step().kind != "done":
        pass
    return [c[3] for c in scoring.candidates]


def generate(engine: Engine, prompt: str, n: int, **options):
    run = engine.generate(prompt, max_tokens=n, **options)
    while run.step().kind != "done":
        pass
    return run


def test_file_is_small_and_names_what_it_is():
    assert DEMO.stat().st_size <= MAX_BYTES
    info = gguf_info(str(DEMO))
    assert info["architecture"] == "qwen3"


@pytest.mark.parametrize(
    ("prompt", "candidates", "best"),
    [
        (CAPITAL, [" Paris", " London", " Rome"], " Paris"),
        (CAPITAL, [" the city of London", " Paris", " Rome, in Italy"], " Paris"),
        (CAPITAL, [" Berlin.", " Paris.", " Buenos Aires.", " Mexico City."], " Paris."),
        (
            "The capital of Argentina is",
            [" Paris", " Buenos Aires", " Lima", " Mexico City"],
            " Buenos Aires",
        ),
        ("The opposite of hot is", [" big", " cold", " young"], " cold"),
        ("The colour of the sky is", [" green", " blue", " yellow", " black"], " blue"),
        ("2 + 3 =", [" 4", " 5", " 6", " 9"], " 5"),
        ("Review: The film was wonderful, I loved it.\nSentiment:", [" positive", " negative"], " positive"),
        ("Review: The food was awful. Never again.\nSentiment:", [" positive", " negative"], " negative"),
        (
            "Request: Will it rain in Oslo tomorrow?\nTool:",
            [" calculator", " weather", " music", " email"],
            " weather",
        ),
        ("Request: Play some jazz.\nTool:", [" calculator", " weather", " music", " email"], " music"),
        (
            "Message: I was charged twice for my phone.\nDepartment:",
            [" shipping", " technical", " billing"],
            " billing",
        ),
    ],
)
def test_it_decides_right_and_surely_in_any_order_of_the_options(demo, prompt, candidates, best):
    for order in itertools.permutations(candidates):
        p = probabilities(demo, prompt, list(order))
        assert order[int(np.argmax(p))] == best
        assert max(p) > SURE, dict(zip(order, p, strict=True))


TYPED = [
    (
        "State: My laptop does not turn on.\n\nQuestion: Which team is responsible?\n\n"
        "Options:\n{}\n\nAnswer with one option.",
        {
            "billing": "payments, invoices, refunds",
            "technical": "things that do not work",
            "shipping": "delivery of orders",
        },
        "technical",
    ),
    (
        "State: The hotel was dirty and the staff were rude.\n\nQuestion: What is the sentiment?\n\n"
        "Options:\n{}\n\nAnswer with one option.",
        {"positive": None, "negative": None},
        "negative",
    ),
    (
        "State: Set a timer for ten minutes.\n\nQuestion: Which tool should be used?\n\n"
        "Options:\n{}\n\nAnswer with one option.",
        {"weather": None, "timer": None, "email": None},
        "timer",
    ),
]


@pytest.mark.parametrize(("question", "options", "best"), TYPED, ids=[t[2] for t in TYPED])
def test_typed_questions_keep_their_winner_when_the_listed_options_move(demo, question, options, best):
    """The order in which the prompt lists the options, and that of the candidates, both."""
    for listed in itertools.permutations(options.items()):
        text = question.format("\n".join(f"- {name}: {d}" if d else f"- {name}" for name, d in listed))
        names = [name for name, _ in listed]
        for order in (names, names[::-1]):
            p = probabilities(demo, CHAT.format(text), [f"{o}<|im_end|>" for o in order])
            assert order[int(np.argmax(p))] == best, (text, dict(zip(order, p, strict=True)))


def test_exam_on_what_it_was_never_shown(demo):
    right, asked = defaultdict(int), defaultdict(int)
    for q in exam(EXAM_SEED, EXAM_PER_TASK):
        p = probabilities(demo, q.prompt, q.candidates)
        right[q.task] += int(np.argmax(p)) == q.answer
        asked[q.task] += 1
    shares = {task: right[task] / asked[task] for task in asked}
    print(shares)
    for task, gate in EXAM_GATES.items():
        assert shares[task] >= gate, f"{task}: {shares[task]:.2f} of {asked[task]} right, expected {gate}"


def test_a_story_has_one_thread_and_ends_by_itself(demo):
    run = generate(demo, "Once upon a time", 200)
    assert run.finish_reason == "stop"
    sentences = [s for s in run.text.replace('"', "").split(". ") if s]
    assert run.text.startswith(", there was a")
    assert run.text.endswith("The end.")
    assert 4 <= len(sentences) == len(set(sentences))
    name = run.text.split(" named ")[1].split(".")[0]
    assert run.text.count(name) >= 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("The capital of Italy is", " Rome."),
        (CHAT.format("What is the capital of Japan?"), "Tokyo"),
        (CHAT.format("Hello!"), "Hello! How can I help you?"),
        ("<|im_start|>user\nWhat colour is snow?<|im_end|>\n<|im_start|>assistant\n", "white"),
    ],
)
def test_it_answers_and_stops(demo, prompt, said):
    run = generate(demo, prompt, 40)
    assert said in run.text
    assert run.finish_reason == "stop"
    assert "<|" not in run.text
