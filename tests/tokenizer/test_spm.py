"""SentencePiece: the ids that the library itself gave (fixtures/spm.json), and on random text a
reference that does what the algorithm says and no more."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import corpus
from .conftest import Vocabulary, load, property_test, texts

VOCABULARY = Vocabulary("llama", **load("spm"))
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
AT = {t: i for i, t in enumerate(VOCABULARY.tokens)}


@pytest.fixture(scope="module")
def ours(testing) -> Any:
    return testing.Tokenizer(VOCABULARY.gguf())


def reference(text: str, vocabulary: Vocabulary, prefix: bool = True) -> list[int]:
    """Best score first, leftmost on a tie, until nothing merges; the rest as bytes."""
    if not text:
        return []
    at = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.types[i] == NORMAL}
    symbols = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    while True:
        scores = [
            (-vocabulary.scores[at[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in at
        ]
        if not scores:
            break
        i = min(scores)[1]
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
    return [
        id_
        for s in symbols
        for id_ in ([at[s]] if s in at else [vocabulary.tokens.index(f"<0x{b:02X}>") for b in s.encode()])
    ]


@pytest.mark.parametrize("case", range(len(VOCABULARY.texts)))
def test_ids_of_the_library(ours, case):
    text = VOCABULARY.texts[case]
    ids = ours.encode(text.encode(), False)
    assert ids == VOCABULARY.ids[case]
    decoded = b"".join(map(ours.bytes, ids)).decode()
    assert decoded == (" " + text.replace("▁", " ") if text else "")


@property_test
@given(text=texts(30))
def test_random_unicode(ours, text):
    assert ours.encode(text.encode(), False) == reference(text, VOCABULARY)


@property_test
@given(text=st.text("ab \u2581", max_size=60))
def test_tokens_that_reach_past_a_space(testing, text):
    """Words are cut apart only where no token goes on past a word's beginning."""
    tokens = [*VOCABULARY.tokens, "a▁", "a▁b", "b▁▁a", "aa▁"]
    joined = Vocabulary(
        "llama", tokens, [*VOCABULARY.types, *[NORMAL] * 4], scores=[*VOCABULARY.scores, 5, 9, -1, 7]
    )
    for prefix in (True, False):
        tokenizer = testing.Tokenizer(joined.gguf(add_space_prefix=("bool", prefix)))
        assert tokenizer.encode(text.encode()) == reference(text, joined, prefix)


@pytest.mark.parametrize("length", [1, 2, 30, 31, 32, 33, 34, 90])
def test_words_of_every_length(ours, length):
    for letters in ("a", "the", "SELECT", "x=", "\t"):
        word = (letters * length)[:length]
        assert ours.encode(word.encode()) == reference(word, VOCABULARY)


def test_mixed_text_comes_back(ours):
    text = corpus.mixed(200_000, seed=41)
    data = b"".join(map(ours.bytes, ours.encode(text.encode(), False)))
    assert data.decode() == " " + text.replace("▁", " ")


def test_every_text_begins_with_a_space_and_so_does_text_after_control_tokens(ours):
    """As in llama.cpp."""
    assert ours.encode(b"Hello") == [AT["▁Hello"]]
    assert ours.encode(b"<s>Hello</s>Hello") == [AT["<s>"], AT["▁Hello"], AT["</s>"], AT["▁Hello"]]


def test_no_space_is_added_where_the_file_says_so(testing):
    tokenizer = testing.Tokenizer(VOCABULARY.gguf(add_space_prefix=("bool", False)))
    assert tokenizer.encode(b"Hello") == [AT["Hello"]]
    assert tokenizer.encode(b"<s>Hello") == [AT["<s>"], AT["Hello"]]


def test_text_never_becomes_a_control_byte_or_unknown_token_by_its_letters(testing):
    """Not even where every merge that spells it is there."""
    tokens = ["<unk>", "<s>", "<0x41>", "<", "s", ">", "<s", "u", "<t>", "t", "<t"]
    tokens += [f"<0x{b:02X}>" for b in range(256) if b != 0x41]
    types = [2, CONTROL, BYTE, 1, 1, 1, 1, 1, USER_DEFINED, 1, 1, *[BYTE] * 255]
    scores = [0.0] * len(tokens)
    small = Vocabulary("llama", tokens, types, scores=scores)
    tokenizer = testing.Tokenizer(small.gguf(add_space_prefix=("bool", False)))
    assert tokenizer.encode(b"<s><t>", False) == [6, 5, 10, 5]
    assert tokenizer.encode(b"<s><t>") == [1, 8]
    assert tokenizer.encode(b"A") == [2]
    assert 2 not in tokenizer.encode(b"<0x41>")
    assert 0 not in tokenizer.encode(b"<unk>")


def test_without_byte_tokens_a_character_is_unknown(testing):
    small = Vocabulary("llama", ["<unk>", "a", "▁a"], [2, 1, 1], scores=[0, -1, -2])
    tokenizer = testing.Tokenizer(small.gguf())
    assert tokenizer.unk == 0  # by its type: no key names it
    assert tokenizer.encode("a中a".encode()) == [2, 0, 1]


def test_without_byte_and_unknown_tokens_the_byte_is_named(testing):
    small = Vocabulary("llama", ["a"], [1], scores=[0])
    with pytest.raises(testing.Error, match="0xE2") as e:  # the first byte of the space put before
        testing.Tokenizer(small.gguf()).encode(b"a")
    assert e.value.kind == "tokenizer"


def test_scores_of_every_size_order_as_numbers(testing):
    """Merges run by score: infinities, zeros of both signs (a tie: leftmost) and negatives."""
    inf = float("inf")
    for low, high in [(-inf, -3e38), (-1.5, -1.25), (-1e-40, 0.0), (0.0, 1e-40), (2.0, inf), (-inf, inf)]:
        for first, second, expected in [(low, high, ["a", "bc"]), (high, low, ["ab", "c"])]:
            small = Vocabulary("llama", ["a", "b", "c", "ab", "bc"], [1] * 5, scores=[0, 0, 0, first, second])
            tokenizer = testing.Tokenizer(small.gguf(add_space_prefix=("bool", False)))
            assert [small.tokens[i] for i in tokenizer.encode(b"abc")] == expected
    for first, second in [(0.0, -0.0), (-0.0, 0.0), (inf, inf)]:
        small = Vocabulary("llama", ["a", "b", "c", "ab", "bc"], [1] * 5, scores=[0, 0, 0, first, second])
        tokenizer = testing.Tokenizer(small.gguf(add_space_prefix=("bool", False)))
        assert [small.tokens[i] for i in tokenizer.encode(b"abc")] == ["ab", "c"]


def test_bytes_of_tokens(testing, ours):
    assert ours.bytes(AT["▁the"]) == b" the"
    assert ours.bytes(AT["<0x0A>"]) == b"\n"
    assert ours.bytes(AT["<s>"]) == b"<s>"
    assert ours.bytes(AT["<unk>"]) == b"<unk>"
    small = Vocabulary("llama", ["▁x▁", "▁y▁"], [1, USER_DEFINED], scores=[0, 0])
    tokenizer = testing.Tokenizer(small.gguf())
    assert [tokenizer.bytes(0), tokenizer.bytes(1)] == [b" x ", "▁y▁".encode()]


def test_facts_of_the_file(testing, ours):
    assert (ours.model, ours.pre, ours.pre_known, ours.size) == ("llama", "", True, len(VOCABULARY.tokens))
    assert not ours.add_bos  # no bos id to add
    with_bos = testing.Tokenizer(
        VOCABULARY.gguf(bos_token_id=("u32", AT["<s>"]), eos_token_id=("u32", AT["</s>"]))
    )
    assert with_bos.add_bos and with_bos.bos == AT["<s>"]
    assert with_bos.end_ids == [AT["</s>"]]
    without = VOCABULARY.gguf(bos_token_id=("u32", AT["<s>"]), add_bos_token=("bool", False))
    assert not testing.Tokenizer(without).add_bos
    assert ours.end_ids == [AT["</s>"]]  # by its name
