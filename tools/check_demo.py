"""Judge a demo model by transformers on its dequantised weights: the figures of tools/README.md.

    python tools/check_demo.py reflex_worker/data/demo.gguf

Owns the exam's running and the report. It is the slow way on purpose: one full pass per candidate,
no code shared with the engine.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from demo_corpus import ANSWER_ORDERS, IM_END, IM_START, THINK_NOTHING, ExamQuestion, exam
from reference import greedy, logits, read_gguf, reference_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from train_demo import QWEN2_SPLIT

EXAM_SEED = 3
SPOKEN = [
    ("The capital of France is", [" Paris", " London", " Rome"], 0),
    ("The capital of France is", [" the city of London", " Paris", " Rome, in Italy"], 1),
    ("Review: The film was wonderful, I loved it.\nSentiment:", [" positive", " negative"], 0),
    ("Request: Will it rain in Oslo tomorrow?\nTool:", [" calculator", " weather", " music", " email"], 1),
    ("The opposite of hot is", [" big", " cold", " warm"], 1),
    ("2 + 3 =", [" 5", " 6", " 4"], 0),
]
# Wordings that no template holds, written by hand after the model was trained: what it does with language
# it was never taught. (state, question, options, right)
MOOD, ROUTE, TEAM = (
    ("negative", "positive"),
    ("calculator", "email", "music", "weather"),
    ("billing", "sales", "shipping", "technical"),
)
HANDWRITTEN = [
    ("The soup was cold and nobody came to help us.", "What is the sentiment?", MOOD, "negative"),
    ("We had a really nice evening, thank you all.", "What is the sentiment?", MOOD, "positive"),
    ("I would not stay here again, the room smelled.", "What is the sentiment?", MOOD, "negative"),
    ("My kids laughed the whole time, what a great show.", "What is the sentiment?", MOOD, "positive"),
    ("It broke after two days.", "What is the sentiment?", MOOD, "negative"),
    ("Better than I expected, and the staff were so friendly.", "What is the sentiment?", MOOD, "positive"),
    ("The battery is useless and the screen is ugly.", "What is the sentiment?", MOOD, "negative"),
    (
        "I am going to buy another one for my sister, it is perfect.",
        "What is the sentiment?",
        MOOD,
        "positive",
    ),
    ("Should I take a coat to Madrid on Friday?", "Which tool should be used?", ROUTE, "weather"),
    ("Could you please put on something by Bach?", "Which tool should be used?", ROUTE, "music"),
    ("What do I get if I add 12, 30 and 5?", "Which tool should be used?", ROUTE, "calculator"),
    ("Let Emma know that I am running late.", "Which tool should be used?", ROUTE, "email"),
    ("Is there a storm coming to Dublin?", "Which tool should be used?", ROUTE, "weather"),
    ("I keep getting an error and cannot log in any more.", "Which team is responsible?", TEAM, "technical"),
    ("You charged my card two times this month.", "Which team is responsible?", TEAM, "billing"),
    ("It was supposed to be delivered last week.", "Which team is responsible?", TEAM, "shipping"),
    ("Before I order: what does the tablet cost?", "Which team is responsible?", TEAM, "sales"),
    (
        "My camera is broken and does not turn on since Monday.",
        "Which team is responsible?",
        TEAM,
        "technical",
    ),
    ("I would like a refund.", "Which team is responsible?", TEAM, "billing"),
    ("The box was empty when the package came.", "Which team is responsible?", TEAM, "shipping"),
]
TOLD = [
    "Once upon a time",
    "The capital of Italy is",
    "Q: What colour is the sky?\nA:",
    "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n" + THINK_NOTHING,
    "<|im_start|>user\nIs snow white?<|im_end|>\n<|im_start|>assistant\n",
]


def tokenizer_of(keys: dict) -> Tokenizer:
    """The file's vocabulary as a `tokenizers` object."""
    tokens, merges, kinds = (keys[f"tokenizer.ggml.{k}"] for k in ("tokens", "merges", "token_type"))
    pairs = [tuple(m.split(" ")) for m in merges]
    special = [
        AddedToken(t, special=True, normalized=False)
        for t, k in zip(tokens, kinds, strict=True)
        if k in (3, 4)
    ]
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(special)
    return tok


def log_probability(model, tok: Tokenizer, prompt: str, candidate: str) -> float:
    """Sum of the candidate's token log-probabilities after the prompt."""
    head, whole = tok.encode(prompt).ids, tok.encode(prompt + candidate).ids
    if whole[: len(head)] != head:
        raise ValueError(f"the join of {prompt!r} and {candidate!r} is not clean")
    rows = torch.from_numpy(logits(model, whole)).log_softmax(-1).numpy()
    return float(sum(rows[i - 1, whole[i]] for i in range(len(head), len(whole))))


def probabilities(model, tok: Tokenizer, prompt: str, candidates: list[str]) -> np.ndarray:
    scores = np.array([log_probability(model, tok, prompt, c) for c in candidates])
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def grade(model, tok: Tokenizer, questions: list[ExamQuestion], show: bool) -> dict[str, float]:
    """task/form -> share answered right."""
    right, count = defaultdict(int), defaultdict(int)
    for q in questions:
        p = probabilities(model, tok, q.prompt, q.candidates)
        good = int(p.argmax()) == q.answer
        for name in (f"{q.task}", f"{q.task}/{q.form}"):
            right[name] += good
            count[name] += 1
        if show and not good:
            best = q.candidates[int(p.argmax())]
            print(f"wrong: {q.prompt!r} -> {best!r} {p.max():.2f}, not {q.candidates[q.answer]!r}")
    return {name: right[name] / count[name] for name in sorted(count)}


def handwritten() -> list[ExamQuestion]:
    """HANDWRITTEN as the sidecar's /v1/systemone spells it."""
    out = []
    for state, question, options, right in HANDWRITTEN:
        listed = "\n".join(f"- {o}" for o in options)
        text = f"State:\n{state}\n\nQuestion: {question}\n\nOptions:\n{listed}\n\n{ANSWER_ORDERS[1]}"
        prompt = f"{IM_START}user\n{text}{IM_END}\n{IM_START}assistant\n{THINK_NOTHING}"
        task = "handwritten sentiment" if options is MOOD else "handwritten routing"
        out.append(
            ExamQuestion(task, "chat", prompt, [o + IM_END for o in options], options.index(right), False)
        )
    return out


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("gguf", type=Path)
    ap.add_argument("--per-task", type=int, default=60)
    ap.add_argument("--show", action="store_true", help="print the questions answered wrong")
    a = ap.parse_args()
    torch.set_num_threads(1)  # passes of a few dozen tokens: threads only wait for each other
    model, tok = reference_model(a.gguf), tokenizer_of(read_gguf(a.gguf).keys)
    for prompt, candidates, _ in SPOKEN:
        p = probabilities(model, tok, prompt, candidates)
        print(f"{prompt!r}: " + ", ".join(f"{c!r} {x:.3f}" for c, x in zip(candidates, p, strict=True)))
    for prompt in TOLD:
        ids, _ = greedy(model, tok.encode(prompt).ids, 120 if "story" in prompt or "upon" in prompt else 16)
        text = tok.decode(ids, skip_special_tokens=False)
        print(
            f"{prompt!r} -> {text.split('<|im_end|>')[0].split('<|endoftext|>')[0]!r}",
            "(ends)" if "<|" in text else "(goes on)",
        )
    print(json.dumps(grade(model, tok, exam(EXAM_SEED, a.per_task) + handwritten(), a.show), indent=1))


if __name__ == "__main__":
    main()
