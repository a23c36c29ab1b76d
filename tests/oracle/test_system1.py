"""system1's packed pass against the slow way: one full pass of prompt + candidate for each candidate.

The slow way uses Engine.logits alone, which test_logits.py holds against transformers; nothing of the
trie, the tree mask or the gathered head rows is shared with it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from reflex_worker._native import ReflexError

from .conftest import rows
from .references import EXACT_MAX_DIFF, load, log_softmax
from .test_logits import FAST_GREEDY_SIGMAS, fast_rms_bound

DENSE = ("qwen2-tied", "qwen3-untied", "qwen3-yarn", "llama3", "llama-spm", "qwen3-q4_k")
NAMES = (
    *DENSE,
    "qwen3moe",
    "qwen2moe-q4_0",
    "deepseek",
    "deepseek2-lite",
    "deepseek2-unsplit",
    "deepseek2-v3",
)
KINDS = ("logit_sum", "logprob_sum", "logprob_mean")
PROBABILITY_SUM_ERROR = 1e-9


def mixed_candidates(vocab: int, n: int, seed: int) -> list[list[int]]:
    """n id lists of 1 to 9 tokens: alone, with shared beginnings, beginnings of one another, repeated."""
    rng = np.random.default_rng(seed)
    out: list[list[int]] = []
    while len(out) < n:
        form = rng.integers(5) if out else 0
        fresh = rng.integers(0, vocab, rng.integers(1, 6)).tolist()
        other = out[int(rng.integers(len(out)))] if out else []
        if form in (0, 1):
            out.append(fresh)
        elif form == 2:  # grows out of another
            out.append((other + fresh)[:9])
        elif form == 3:  # the beginning of another, possibly all of it
            out.append(other[: int(rng.integers(1, len(other) + 1))])
        else:  # parts from another in its last token
            out.append([*other[:-1], int(rng.integers(vocab))])
    return out


def run(engine, prompt_ids: list[int], candidates: list[list[int]], **options):
    scoring = engine.score(prompt_token_ids=prompt_ids, candidate_token_ids=candidates, **options)
    while scoring.step().kind != "done":
        pass
    return scoring


def slow_scores(engine, prompt: list[int], candidates: list[list[int]], kind: str) -> np.ndarray:
    """One full pass per candidate."""
    out = []
    for ids in candidates:
        found = rows(engine, prompt + ids[:-1], list(range(len(prompt) - 1, len(prompt) + len(ids) - 1)))
        values = found if kind == "logit_sum" else log_softmax(found)
        total = sum(values[i, token] for i, token in enumerate(ids))
        out.append(total / len(ids) if kind == "logprob_mean" else total)
    return np.array(out)


def softmax(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    p = np.exp((scores - scores.max()) / temperature)
    return p / p.sum()


def entropy_bits(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


def check(scoring, engine, prompt, candidates, kind, tolerance, temperature=1.0):
    """Scores, probabilities, entropy and best index of a finished Scoring."""
    want = slow_scores(engine, prompt, candidates, kind)
    found = scoring.candidates
    assert [list(c[1]) for c in found] == candidates
    scores, p = np.array([c[2] for c in found]), np.array([c[3] for c in found])
    per_token = np.array([1 if kind == "logprob_mean" else len(ids) for ids in candidates])
    worst = float((np.abs(scores - want) / per_token).max())
    print(f"{len(candidates)} candidates, {kind}: worst score error {worst:.1e} a token")
    assert worst <= tolerance
    assert scoring.score_kind == kind
    assert abs(p.sum() - 1) < PROBABILITY_SUM_ERROR
    # What follows from the scores follows exactly, whatever noise the scores have.
    np.testing.assert_allclose(p, softmax(scores, temperature), atol=1e-12)
    assert scoring.entropy == pytest.approx(entropy_bits(p), abs=1e-9)
    assert scoring.best_index == int(scores.argmax())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_length", [1, 7, 33])
@pytest.mark.parametrize("name", NAMES)
def test_packed_pass_equals_one_pass_per_candidate(engine, name, prompt_length, kind):
    ref, e = load(name), engine(name)
    candidates = mixed_candidates(ref.logits.shape[1], 24, seed=prompt_length)
    prompt = ref.ids[:prompt_length]
    check(run(e, prompt, candidates, score=kind), e, prompt, candidates, kind, EXACT_MAX_DIFF)


@pytest.mark.parametrize("chunk", [512, 33, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3-untied", "qwen35", "deepseek2-lite"])
def test_tokens_before_score_from_are_context_only(engine, name, kind, chunk):
    """A candidate's counted tokens score as if those before them stood at the prompt's end."""
    ref, e = load(name), engine(name, chunk=chunk)
    candidates = mixed_candidates(ref.logits.shape[1], 40, seed=3)
    starts = [i * 7 % len(c) for i, c in enumerate(candidates)]
    prompt = ref.ids[:9]
    scoring = run(e, prompt, candidates, score=kind, score_from=starts)
    want = [slow_scores(e, prompt + c[:k], [c[k:]], kind)[0] for c, k in zip(candidates, starts, strict=True)]
    found = [c[2] for c in scoring.candidates]
    np.testing.assert_allclose(found, want, atol=EXACT_MAX_DIFF * max(map(len, candidates)), rtol=0)


def test_a_score_from_that_leaves_nothing_to_score_is_refused(engine):
    e = engine("qwen3-untied")
    for starts, words in (
        ([0], "one number per candidate"),
        ([0, 1], r"score_from\[1\]"),
        ([-1, 0], "found -1"),
    ):
        with pytest.raises(ReflexError, match=words) as refused:
            run(e, [1, 2], [[3, 4], [5]], score_from=starts)
        assert refused.value.kind == "invalid_input"
    # One counted token each: raw logits, as when they were the only ones.
    assert run(e, [1, 2], [[3, 4], [3, 5, 6]], score_from=[1, 2]).score_kind == "logit_sum"


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_packed_pass_on_other_instruction_sets(engine, isa):
    ref, e = load("qwen3-q8_0"), engine("qwen3-q8_0", isa=isa)
    candidates = mixed_candidates(ref.logits.shape[1], 40, seed=5)
    check(
        run(e, ref.ids[:20], candidates, score="logprob_sum"),
        e,
        ref.ids[:20],
        candidates,
        "logprob_sum",
        EXACT_MAX_DIFF,
    )


@pytest.mark.parametrize("chunk", [512, 33, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_300_candidates_of_mixed_lengths(engine, kind, chunk):
    """More rows than a chunk holds: the trie is cut into groups that share the prompt."""
    ref, e = load("qwen3-tied"), engine("qwen3-tied", chunk=chunk)
    candidates = mixed_candidates(ref.logits.shape[1], 300, seed=3)
    assert {len(c) for c in candidates} == set(range(1, 10))
    prompt = ref.ids[:40]
    check(
        run(e, prompt, candidates, score=kind), engine("qwen3-tied"), prompt, candidates, kind, EXACT_MAX_DIFF
    )


@pytest.mark.parametrize("name", ["qwen2-q8_0", "qwen3-q4_k", "qwen3-f16", "deepseek2-q8_0"])
def test_fast_mode_scores_stay_within_the_noise_of_their_type(engine, name):
    ref, exact, fast = load(name), engine(name), engine(name, exact=False)
    candidates = mixed_candidates(ref.logits.shape[1], 60, seed=4)
    prompt = ref.ids[:33]
    bound = FAST_GREEDY_SIGMAS * fast_rms_bound(name)
    check(run(fast, prompt, candidates, score="logprob_sum"), exact, prompt, candidates, "logprob_sum", bound)


def test_single_tokens_after_a_prompt_are_the_references_own_logits(engine):
    """logit_sum over the whole vocabulary is the committed last row, from transformers."""
    ref = load("qwen3-untied")
    vocab = ref.logits.shape[1]
    scoring = run(engine("qwen3-untied"), ref.ids[:33], [[i] for i in range(vocab)])
    assert scoring.score_kind == "logit_sum"  # what auto means when every candidate is one token
    found = np.array([c[2] for c in scoring.candidates])
    want = ref.at([32])[0]
    assert np.abs(found - want).max() <= EXACT_MAX_DIFF
    assert scoring.best_index == int(want.argmax())
    assert scoring.entropy == pytest.approx(entropy_bits(softmax(want)), abs=1e-3)


def test_auto_is_logprob_sum_when_any_candidate_has_two_tokens(engine):
    scoring = run(engine("qwen3-tied"), load("qwen3-tied").ids[:9], [[5], [6, 7]])
    assert scoring.score_kind == "logprob_sum"


@pytest.mark.parametrize("temperature", [0.25, 1.0, 7.5])
def test_temperature_divides_the_scores(engine, temperature):
    ref, e = load("llama3"), engine("llama3")
    candidates = mixed_candidates(ref.logits.shape[1], 12, seed=6)
    scoring = run(e, ref.ids[:12], candidates, score="logprob_mean", temperature=temperature)
    check(scoring, e, ref.ids[:12], candidates, "logprob_mean", EXACT_MAX_DIFF, temperature)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_equal_candidates_tie_to_the_first_and_have_log2_n_bits(engine, n, kind):
    scoring = run(engine("qwen2-tied"), load("qwen2-tied").ids[:10], [[3, 4, 5]] * n, score=kind)
    assert scoring.best_index == 0
    assert scoring.entropy == pytest.approx(math.log2(n), abs=1e-12)
    assert {c[3] for c in scoring.candidates} == {1 / n}
    assert len({c[2] for c in scoring.candidates}) == 1


def test_a_tie_behind_a_worse_candidate_goes_to_the_first_of_the_best(engine):
    ref, e = load("qwen2-tied"), engine("qwen2-tied")
    order = ref.at([6])[0].argsort()
    worst, best = int(order[0]), int(order[-1])
    scoring = run(e, ref.ids[:7], [[worst], [best], [worst], [best]])
    assert scoring.best_index == 1


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["qwen3-q8_0", "qwen3moe-q4_k", "deepseek2-q8_0"])
def test_order_of_candidates_changes_no_bit_of_a_score(engine, name, exact):
    ref, e = load(name), engine(name, exact=exact)
    candidates = mixed_candidates(ref.logits.shape[1], 50, seed=8)
    prompt = ref.ids[:30]
    first = {tuple(c[1]): c[2] for c in run(e, prompt, candidates, score="logprob_sum").candidates}
    again = {tuple(c[1]): c[2] for c in run(e, prompt, candidates[::-1], score="logprob_sum").candidates}
    assert first == again


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2moe", "deepseek2-v3"])
def test_scores_do_not_depend_on_the_request_before(engine, name):
    ref, e = load(name), engine(name)
    candidates = mixed_candidates(ref.logits.shape[1], 20, seed=9)
    first = [c[2] for c in run(e, ref.ids[:21], candidates).candidates]
    run(e, ref.ids[50:120], mixed_candidates(ref.logits.shape[1], 80, seed=10))
    assert [c[2] for c in run(e, ref.ids[:21], candidates).candidates] == first


def test_a_candidate_that_fills_the_context_to_the_last_token(engine):
    """512 tokens in all fit; one more is an error that names the candidate, before any work."""
    ref, e = load("qwen3-tied"), engine("qwen3-tied")
    prompt = ref.ids[:130]
    full = (ref.ids * 2)[:382]
    check(
        run(e, prompt, [full, [1]], score="logprob_sum"),
        e,
        prompt,
        [full, [1]],
        "logprob_sum",
        EXACT_MAX_DIFF,
    )
    with pytest.raises(ReflexError, match=r"candidates\[1\]") as error:
        e.score(prompt_token_ids=prompt, candidate_token_ids=[[1], [*full, 1]])
    assert error.value.kind == "context_overflow"


def test_a_candidate_that_merges_with_the_prompt_is_refused_by_name(engine):
    """ "t" + "h" is one token of the fixtures' vocabulary, so this border is not clean."""
    e = engine("qwen3-tied")
    with pytest.raises(ReflexError, match=r"candidates\[1\]") as error:
        e.score("at", [" x", "h"])
    assert error.value.kind == "invalid_input"
    scoring = e.score("at", [" x", "n"])
    while scoring.step().kind != "done":
        pass
    assert [c[0] for c in scoring.candidates] == [" x", "n"]
