"""Work grows with the text and not with its square: counted, since a clock can't be trusted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from . import corpus, oracle
from .conftest import Vocabulary

SMALL, FACTOR = 4_000, 8
# Eight times the text may cost this many times the work.
ALLOWED = FACTOR * 1.15
# And no more operations a byte than this, whatever the text.
MAX_PER_BYTE = 45

R = random.Random(3)
CJK = "".join(chr(R.randrange(0x4E00, 0x9FA6)) for _ in range(SMALL * FACTOR))
LETTERS = "".join(R.choices("abcdefghijklmnopqrstuvwxyz", k=SMALL * FACTOR))
UNITS = {
    "one letter": "a",
    "spaces": " ",
    "newlines": "\n",
    "carriage returns": "\r",
    "tabs and no-break spaces": "\t\u00a0",
    "ideographic spaces": "\u3000",
    "spaces before ideographs": " \u3000 中",
    "newlines among spaces": "   \n",
    "random CJK": CJK,
    "one emoji": "\U0001f600",
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d",
    "digits": "7",
    "apostrophes": "'",
    "punctuation": "!?-",
    "marks": "\u0301",
    "letters with marks": "a\u0301",
    "random letters": LETTERS,
    "controls": "\x01",
    "unassigned": "\u0378",
    "almost control tokens": "<|im_end|",
    "beginnings of control tokens": "<",
    "control tokens": "<a>b<a>c",
    "mixed": corpus.mixed(3 * SMALL * FACTOR, seed=31),
}


def work(tokenizer: Any, text: str) -> int:
    before = tokenizer.work()
    tokenizer.encode(text.encode())
    return tokenizer.work() - before


def assert_linear(tokenizer: Any, unit: str) -> None:
    large = (unit * (SMALL * FACTOR // len(unit) + 1))[: SMALL * FACTOR]
    small = large[:SMALL]
    before, after = work(tokenizer, small), work(tokenizer, large)
    assert before > 0
    assert after <= ALLOWED * before * len(large.encode()) / (FACTOR * len(small.encode()))
    assert after <= MAX_PER_BYTE * len(large.encode())


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("pre", oracle.STAGES)
def test_bpe(testing, bpe, pre, unit):
    assert_linear(testing.Tokenizer(bpe.gguf(pre)), UNITS[unit])


@pytest.mark.parametrize("unit", UNITS)
def test_spm(testing, spm, unit):
    assert_linear(testing.Tokenizer(spm.gguf()), UNITS[unit])


def test_spm_without_word_borders(testing, spm):
    """A token that reaches past a space makes the whole text one word."""
    joined = Vocabulary("llama", [*spm.tokens, "a▁b"], [*spm.types, 1], scores=[*spm.scores, 0.0])
    tokenizer = testing.Tokenizer(joined.gguf())
    for unit in ("a b ", " ", "a", LETTERS):
        assert_linear(tokenizer, unit)


def test_long_control_tokens(testing, bpe):
    """Spellings that overlap themselves: looking for each from each place would be quadratic."""
    spellings = ["a" * 2000, "a" * 1999 + "b", "ab" * 500, "a" * 1000 + "c"]
    tokens, types = [*bpe.tokens, *spellings], [*bpe.types, *([3] * len(spellings))]
    tokenizer = testing.Tokenizer(Vocabulary("gpt2", tokens, types, bpe.merges).gguf("qwen2"))
    for unit in ("a", "a" * 1500 + "d", "ab" * 499 + "aa", "a" * 999 + "d"):
        text = (unit * 40_000)[:40_000]
        assert work(tokenizer, text) <= MAX_PER_BYTE * len(text)
