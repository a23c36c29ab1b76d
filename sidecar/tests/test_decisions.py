"""/v1/classify and /v1/systemone in front of the fake worker, whose scores depend on every token."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from reflex_sidecar.judge import entropy_bits, softmax
from reflex_sidecar.routes.systemone import choice_confidence, score_confidence
from servers import Server, error_of

QUESTIONS: dict[str, Any] = {
    "route": {"type": "choice", "instructions": "Which team?", "criteria": {"sales": "buying", "it": None}},
    "urgency": {"type": "score", "instructions": {"ask": "How urgent?"}, "criteria": ["low", "mid", "high"]},
    "angry": {"type": "noul", "instructions": "Is the writer angry?", "criteria": {"true": "shouts"}},
}


def scored(server: Server) -> list[dict[str, Any]]:
    """The system1 requests that the worker has read, oldest first."""
    lines = [json.loads(x) for x in server.worker_log.read_text().splitlines()]  # type: ignore[attr-defined]
    return [r for r in lines if "candidate_token_ids" in r or "candidates" in r]


def text(ids: list[int]) -> str:
    special = {257: "<|im_start|>", 258: "<|im_end|>", 259: "<think>", 260: "</think>"}
    return "".join(special.get(i) or chr(i) for i in ids)


def test_questions_share_the_state_in_one_request(server: Server):
    before = len(scored(server))
    r = server.post("/v1/systemone", state={"text": "I want a refund!"}, questions=QUESTIONS)
    assert r.status_code == 200
    (request,) = scored(server)[before:]
    shared = text(request["prompt_token_ids"])
    assert shared == '<|im_start|>user\nState:\n{"text": "I want a refund!"}\n\nQuestion: '
    candidates = [text(c) for c in request["candidate_token_ids"]]
    assert len(candidates) == 2 + 3 + 2
    assert candidates[0] == (
        "Which team?\n\nOptions:\n- it\n- sales: buying\n\nAnswer with exactly one of the options."
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nit<|im_end|>"
    )
    assert candidates[2].startswith('{"ask": "How urgent?"}\n\nOptions:\n- 0: low\n- 1: mid\n- 2: high\n')
    assert candidates[5].endswith("</think>\n\ntrue<|im_end|>")
    assert request["score"] == "logprob_sum"


def test_no_logits_are_asked_for_a_questions_own_tokens(server: Server):
    """The full head was computed at every token of every question."""
    server.post("/v1/systemone", state="s", questions=QUESTIONS)
    sent = scored(server)[-1]
    assert len(sent["score_from"]) == len(sent["candidate_token_ids"])
    options = [
        text(ids[start:]) for ids, start in zip(sent["candidate_token_ids"], sent["score_from"], strict=True)
    ]
    assert {o.removesuffix("<|im_end|>") for o in options} >= {"true", "false", "0", "1"}
    assert all(o.endswith("<|im_end|>") and len(o) < 30 for o in options)


def test_answers_have_the_shapes_of_system_one(server: Server):
    body = server.post("/v1/systemone", state="x", questions=QUESTIONS, model="any").json()
    assert list(body) == ["model", "answers", "usage"] and list(body["answers"]) == list(QUESTIONS)
    route, urgency, angry = body["answers"].values()
    assert list(route) == ["type", "choice", "probabilities", "confidence"]
    assert list(route["probabilities"]) == ["sales", "it"]  # in the request's order
    assert math.isclose(sum(route["probabilities"].values()), 1)
    assert route["choice"] == max(route["probabilities"], key=route["probabilities"].get)
    assert urgency["legend"] == {"0": "low", "1": "mid", "2": "high"}
    p = urgency["probabilities"]
    assert list(p) == ["0", "1", "2"] and math.isclose(urgency["score"], p["1"] + 2 * p["2"])
    assert list(angry) == ["type", "noul"] and 0 <= angry["noul"] <= 1
    assert body["usage"]["output_tokens"] == 0
    assert body["usage"]["input_tokens"] == body["usage"]["total_tokens"] > 0


def test_a_question_is_answered_the_same_alone_and_in_company(server: Server):
    """What the options of one question share cancels out of their scores."""
    together = server.post("/v1/systemone", state="s", questions=QUESTIONS).json()["answers"]
    for name, question in QUESTIONS.items():
        alone = server.post("/v1/systemone", state="s", questions={name: question}).json()["answers"][name]
        assert alone["type"] == together[name]["type"]
        # The fake's scores depend on where the prompt ends, a model's do not: only the shape is equal here.
        assert set(alone) == set(together[name])


def test_the_order_of_options_changes_nothing(server: Server):
    options = {"b": "second", "a": "first", "c": None}
    orders = [options, dict(sorted(options.items())), dict(sorted(options.items(), reverse=True))]
    answers = []
    for criteria in orders:
        question = {"type": "choice", "instructions": "?", "criteria": criteria}
        answers.append(
            server.post("/v1/systemone", state="s", questions={"q": question}).json()["answers"]["q"]
        )
    assert answers[0]["choice"] == answers[1]["choice"] == answers[2]["choice"]
    assert answers[0]["probabilities"] == answers[1]["probabilities"] == answers[2]["probabilities"]


def test_a_single_option_is_certain(server: Server):
    question = {"type": "choice", "instructions": "?", "criteria": {"only": None}}
    answer = server.post("/v1/systemone", state="s", questions={"q": question}).json()["answers"]["q"]
    assert answer == {"type": "choice", "choice": "only", "probabilities": {"only": 1.0}, "confidence": 1.0}


def test_options_that_spell_control_tokens_stay_text(server: Server):
    before = len(scored(server))
    criteria = {"<|im_end|>": None, "ok": "<|im_start|>"}
    question = {"type": "choice", "instructions": "<|im_end|>", "criteria": criteria}
    assert server.post("/v1/systemone", state="<|im_end|>", questions={"q": question}).status_code == 200
    (request,) = scored(server)[before:]
    ids = request["prompt_token_ids"]
    assert ids.count(258) == 1 and ids.count(257) == 2  # the template's own, none of the content's
    assert [c.count(258) for c in request["candidate_token_ids"]] == [1, 1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"questions": {}}, "state: expected a value, found none"),
        ({"state": 3, "questions": {}}, "state: expected"),
        ({"state": "x", "questions": {}}, '"questions" must be a non-empty object'),
        ({"state": "x", "questions": {"q": 1}}, "questions.q: must be an object"),
        (
            {"state": "x", "questions": {"q": {"type": "choice"}}},
            'questions.q: "instructions" must be a non-empty',
        ),
        (
            {"state": "x", "questions": {"q": {"type": "x", "instructions": "?"}}},
            'questions.q: "type" must be',
        ),
        (
            {"state": "x", "questions": {"q": {"type": "choice", "instructions": "?", "criteria": {}}}},
            'questions.q: "criteria" must be a non-empty object',
        ),
        (
            {"state": "x", "questions": {"q": {"type": "choice", "instructions": "?", "criteria": {"a": 1}}}},
            'questions.q: "criteria.a" must be a string or null',
        ),
        (
            {"state": "x", "questions": {"q": {"type": "score", "instructions": "?", "criteria": ["a"]}}},
            'questions.q: "criteria" must be an array of 2 to 10',
        ),
        (
            {
                "state": "x",
                "questions": {"q": {"type": "score", "instructions": "?", "criteria": ["a"] * 11}},
            },
            'questions.q: "criteria" must be an array of 2 to 10',
        ),
        (
            {
                "state": "x",
                "questions": {"q": {"type": "noul", "instructions": "?", "criteria": {"maybe": "x"}}},
            },
            'questions.q: "criteria" may hold "true" and "false"',
        ),
    ],
)
def test_a_wrong_question_is_a_400_with_its_path(server: Server, body: dict[str, Any], message: str):
    r = server.post("/v1/systemone", **body)
    assert r.status_code == 400 and error_of(r)["message"].startswith(message)


def test_confidence_is_as_published():
    assert choice_confidence([1.0, 0.0]) == 1.0
    assert choice_confidence([0.5, 0.5]) == 0.0
    assert math.isclose(choice_confidence([0.7, 0.2, 0.1]), (0.7 - 1 / 3) / (2 / 3))
    assert choice_confidence([1.0]) == 1.0
    assert score_confidence([0.0, 1.0, 0.0]) == 1.0
    # d = 0.25 + 0.25, u = (1 + 0 + 1) / 3
    assert math.isclose(score_confidence([0.25, 0.5, 0.25]), 1 - 0.5 / (2 / 3))
    assert score_confidence([0.5, 0.0, 0.5]) == 0.0


def test_entropy_is_in_bits():
    assert entropy_bits([0.5, 0.5]) == 1.0 and entropy_bits([1.0, 0.0]) == 0.0
    assert math.isclose(sum(softmax([-1000.0, -1001.0])), 1.0)


# ---- classify ------------------------------------------------------------------------------------


def test_classify_a_prompt(server: Server):
    before = len(scored(server))
    body = server.post(
        "/v1/classify", prompt="The capital is", labels=["Paris", " Rome", "\nx"], temperature=2
    ).json()
    (request,) = scored(server)[before:]
    assert request["candidates"] == [" Paris", " Rome", "\nx"] and request["temperature"] == 2
    assert body["label"] == max(body["probabilities"], key=body["probabilities"].get)
    assert list(body["probabilities"]) == ["Paris", " Rome", "\nx"]
    assert math.isclose(sum(body["probabilities"].values()), 1)
    assert math.isclose(body["entropy"], entropy_bits(list(body["probabilities"].values())))


def test_classify_messages_scores_whole_answers(server: Server):
    before = len(scored(server))
    messages = [{"role": "user", "content": "Good or bad?"}]
    body = server.post("/v1/classify", messages=messages, labels=["good", "bad"]).json()
    (request,) = scored(server)[before:]
    assert text(request["prompt_token_ids"]).endswith("</think>\n\n")
    assert [text(c) for c in request["candidate_token_ids"]] == ["good<|im_end|>", "bad<|im_end|>"]
    assert body["label"] in ("good", "bad") and body["usage"]["prompt_tokens"] > 0


def test_temperature_makes_a_decision_flatter(server: Server):
    def best(temperature: float) -> float:
        fields = {"messages": [{"role": "user", "content": "q"}], "labels": ["a", "b"]}
        return max(
            server.post("/v1/classify", temperature=temperature, **fields).json()["probabilities"].values()
        )

    assert best(0.5) > best(1) > best(10)


@pytest.mark.parametrize(
    "body",
    [
        {"labels": ["a"]},
        {"prompt": "x", "messages": [], "labels": ["a"]},
        {"prompt": "x", "labels": []},
        {"prompt": "x", "labels": ["a", "a"]},
        {"prompt": "x", "labels": [""]},
        {"prompt": "x", "labels": ["a"], "temperature": 0},
        {"prompt": "x", "labels": "a"},
        {"messages": [{"role": "user", "content": "x"}], "labels": ["a"], "score": "logit_sum"},
    ],
)
def test_a_wrong_classification_is_a_400(server: Server, body: dict[str, Any]):
    assert server.post("/v1/classify", **body).status_code == 400
