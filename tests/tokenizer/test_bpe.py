"""Byte-level BPE: the same ids as `tokenizers` builds from the same vocabulary."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from . import corpus, oracle
from .conftest import Vocabulary, load, property_test, texts

VOCABULARY = Vocabulary("gpt2", **load("bpe"))
CASE_SEPARATOR = "\n__ggml_vocab_test__\n"
MIXED_BYTES = 250_000
BIG_BYTES = 1_100_000


@cache
def theirs(pre: str, marked: bool = True) -> Tokenizer:
    types = VOCABULARY.types if marked else ()
    return oracle.build(pre, VOCABULARY.tokens, VOCABULARY.merges, types)


@pytest.fixture(scope="module")
def ours(testing):
    """ours(pre): the native tokenizer over the fixture."""

    @cache
    def build(pre: str) -> Any:
        return testing.Tokenizer(VOCABULARY.gguf(pre))

    return build


def decode(tokenizer: Any, ids: list[int]) -> bytes:
    return b"".join(tokenizer.bytes(i) for i in ids)


@pytest.mark.parametrize("pre", [*oracle.STAGES, *oracle.ALIASES])
def test_mixed_text(ours, without_drift, pre):
    text = without_drift(corpus.mixed(MIXED_BYTES, seed=21))
    ids = ours(pre).encode(text.encode())
    assert ids == theirs(pre).encode(text).ids
    assert decode(ours(pre), ids) == text.encode()


@pytest.mark.parametrize("pre", oracle.STAGES)
@property_test
@given(text=texts(), parse_special=st.booleans())
def test_random_unicode(ours, without_drift, pre, text, parse_special):
    text = without_drift(text)
    ids = ours(pre).encode(text.encode(), parse_special)
    assert ids == theirs(pre, parse_special).encode(text).ids
    assert decode(ours(pre), ids) == text.encode()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 100, 5000])
@pytest.mark.parametrize("letters", ["a", "th", "the", "or", "中", "é", "0123456789", "xyzqk"])
def test_words_of_every_length(ours, letters, length):
    """Short words are scanned, long ones go over a heap: the same merges in the same order."""
    word = (letters * length)[:length]
    for pre in ("gpt-2", "qwen2"):
        assert ours(pre).encode(word.encode(), False) == theirs(pre, False).encode(word).ids


def test_a_word_that_is_a_token_is_taken_whole_where_merges_are_ignored(ours):
    """ " Paris" is a token that no merge makes; Llama 3 takes it, the others can't reach it."""
    id_ = VOCABULARY.tokens.index("ĠParis")
    for pre in (*oracle.STAGES, *oracle.ALIASES):
        ids = ours(pre).encode(b"In Paris")
        assert ids == theirs(pre).encode("In Paris").ids
        assert (id_ in ids) == (pre in oracle.IGNORE_MERGES)


def test_control_words_are_not_taken_whole_from_plain_text(testing):
    """Llama 3 takes whole words; a control token spelled like one must not slip in that way."""
    vocabulary = Vocabulary("gpt2", [*VOCABULARY.tokens, "zqy"], [*VOCABULARY.types, 3], VOCABULARY.merges)
    tokenizer = testing.Tokenizer(vocabulary.gguf("llama-bpe"))
    control = len(VOCABULARY.tokens)
    assert tokenizer.encode(b"zqy") == [control]
    assert control not in tokenizer.encode(b"zqy", False)
    assert control not in tokenizer.encode(b"zqy", True, [(0, 3)])


def test_merges_never_make_a_control_token(testing):
    """The control-ness of a token was decided by parse_special; a merge can't overrule it."""
    tokens, types = [*VOCABULARY.tokens], [*VOCABULARY.types]
    types[tokens.index("th")] = 3
    tokenizer = testing.Tokenizer(Vocabulary("gpt2", tokens, types, VOCABULARY.merges).gguf("gpt-2"))
    assert tokenizer.encode(b"th") == [tokens.index("th")]
    assert tokenizer.encode(b"th", False) == [tokens.index("t"), tokens.index("h")]


def test_of_equal_merges_the_last_counts(testing):
    """As in `tokenizers`, where they land in one dictionary one after the other."""
    tokens = [*VOCABULARY.tokens[:256], "ab", "bc"]
    merges = ["a b", "b c", "a b"]
    ids = testing.Tokenizer(Vocabulary("gpt2", tokens, [1] * 258, merges).gguf("gpt-2")).encode(b"abc")
    assert ids == oracle.build("gpt-2", tokens, merges).encode("abc").ids == [tokens.index("a"), 257]


def test_merge_order_that_is_not_token_order(testing):
    """Merge k need not make token 256 + k: the index from spelling to id is used then."""
    merges = list(reversed([m for m in VOCABULARY.merges if all(len(p) == 1 for p in m.split(" "))]))
    shuffled = Vocabulary("gpt2", VOCABULARY.tokens, VOCABULARY.types, merges)
    text = corpus.mixed(20_000, seed=22)
    got = testing.Tokenizer(shuffled.gguf("qwen2")).encode(text.encode(), False)
    assert got == oracle.build("qwen2", shuffled.tokens, merges).encode(text).ids


# --- Control tokens and literal spans -----------------------------------------------------------

MARKED = [t for t, kind in zip(VOCABULARY.tokens, VOCABULARY.types, strict=True) if kind in (3, 4)]


def by_hand(pre: str, text: str, literal: list[tuple[int, int]]) -> list[int]:
    """The rule as it is told: leftmost first, longest at each place, none that overlaps a span;
    what lies between them is encoded as text of its own."""
    plain, ids, at, from_ = theirs(pre, False), [], 0, 0
    while at < len(text):
        fits = [
            t
            for t in MARKED
            if text.startswith(t, at) and not any(b < at + len(t) and at < e and b < e for b, e in literal)
        ]
        if not fits:
            at += 1
            continue
        best = max(fits, key=lambda t: len(t.encode()))
        ids += plain.encode(text[from_:at]).ids
        ids.append(VOCABULARY.tokens.index(best))
        at = from_ = at + len(best)
    return ids + plain.encode(text[from_:]).ids


marked_text = st.lists(
    st.one_of(st.sampled_from(MARKED), st.sampled_from([*"<a>bc|é \n"]), st.sampled_from(corpus.ENGLISH)),
    max_size=25,
).map("".join)


@property_test
@given(text=marked_text, data=st.data())
def test_literal_spans(ours, text, data):
    position = st.integers(0, len(text))
    spans = data.draw(st.lists(st.tuples(position, position).map(lambda p: (min(p), max(p))), max_size=4))
    for pre in ("qwen2", "llama-bpe"):
        ids = ours(pre).encode(text.encode(), True, spans)
        assert ids == by_hand(pre, text, spans)
        assert decode(ours(pre), ids) == text.encode()
        assert ours(pre).encode(text.encode(), False, spans) == theirs(pre, False).encode(text).ids


@property_test
@given(text=marked_text)
def test_overlapping_control_tokens_as_tokenizers_does(ours, text):
    assert ours("qwen2").encode(text.encode()) == theirs("qwen2").encode(text).ids


def test_a_literal_span_splits_nothing_else(ours):
    """A span inside plain text changes no id: merges run across its borders."""
    text = "the capital of France is Paris"
    for begin in range(len(text)):
        assert ours("qwen2").encode(text.encode(), True, [(begin, begin + 1)]) == ours("qwen2").encode(
            text.encode()
        )


def test_literal_spans_count_code_points(ours):
    text = "é中\U0001f600<|im_end|>"
    control = VOCABULARY.tokens.index("<|im_end|>")
    assert control in ours("qwen2").encode(text.encode(), True, [(0, 3)])
    assert control not in ours("qwen2").encode(text.encode(), True, [(0, 4)])
    assert control not in ours("qwen2").encode(text.encode(), True, [(12, 13)])


# --- Decoding, special ids ----------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-v3"])
def test_bytes_of_every_token(ours, pre):
    """A normal token's characters stand for bytes; a marked one's spelling is meant as it is."""
    tokenizer = ours(pre)
    plain = theirs(pre, False)
    for id_, (token, kind) in enumerate(zip(VOCABULARY.tokens, VOCABULARY.types, strict=True)):
        if kind != 1:
            assert tokenizer.bytes(id_) == token.encode()
        else:
            assert tokenizer.bytes(id_).decode("utf-8", "replace") == plain.decode([id_])
        assert tokenizer.bytes(id_) == tokenizer.bytes(id_)
        assert tokenizer.type(id_) == kind
        assert tokenizer.is_control(id_) == (kind == 3)
        assert VOCABULARY.tokens[tokenizer.find(token.encode())] == token
    assert tokenizer.find(b"no such token") == tokenizer.find(b"") == -1


def test_bytes_of_odd_tokens(testing):
    """Byte tokens, spellings outside the alphabet, unused and undefined types."""
    tokens = ["a", "Ġa", "<0x0A>", "<0xZZ>", "a b", "日", "Ġé", "<unk>", "Ġ"]
    types = [1, 1, 6, 6, 1, 1, 5, 2, 0]
    tokenizer = testing.Tokenizer(Vocabulary("gpt2", tokens, types).gguf("gpt-2"))
    assert [tokenizer.bytes(i) for i in range(len(tokens))] == [
        b"a", b" a", b"\n", b"<0xZZ>", b"a b", "日".encode(), b" \xe9", b"<unk>", b" ",
    ]  # fmt: skip


def test_special_ids_and_the_end_set(testing):
    tokens = VOCABULARY.tokens
    at = tokens.index
    tokenizer = testing.Tokenizer(
        VOCABULARY.gguf(
            "qwen2",
            bos_token_id=("u32", at("<|im_start|>")),
            eos_token_id=("u32", at("<|im_end|>")),
            eot_token_id=("i32", at("<a>")),
            eom_token_id=("u64", at("th")),
            unknown_token_id=("u32", 5),
            padding_token_id=("u16", 6),
        )
    )
    assert (tokenizer.bos, tokenizer.eos) == (at("<|im_start|>"), at("<|im_end|>"))
    assert (tokenizer.eot, tokenizer.eom, tokenizer.unk, tokenizer.pad) == (at("<a>"), at("th"), 5, 6)
    named = ["<|endoftext|>", "<|im_end|>", "<｜end▁of▁sentence｜>"]
    assert tokenizer.end_ids == sorted(map(at, [*named, "<a>", "th"]))
    assert all(tokenizer.is_end(i) == (i in tokenizer.end_ids) for i in range(len(tokens)))
    assert (tokenizer.size, tokenizer.model, tokenizer.pre) == (len(tokens), "gpt2", "qwen2")


def test_only_control_tokens_end_a_generation_by_name(testing):
    """ "</s>" is an HTML tag in many vocabularies."""
    tokens = [*VOCABULARY.tokens, "</s>", "<|eot_id|>"]
    end_ids = testing.Tokenizer(Vocabulary("gpt2", tokens, [*VOCABULARY.types, 1, 3]).gguf("gpt-2")).end_ids
    assert len(tokens) - 2 not in end_ids and len(tokens) - 1 in end_ids


def test_absent_ids_are_minus_one(testing):
    tokenizer = testing.Tokenizer(VOCABULARY.gguf("qwen2"))
    assert {tokenizer.bos, tokenizer.eos, tokenizer.eot, tokenizer.eom, tokenizer.unk, tokenizer.pad} == {-1}


@pytest.mark.parametrize(
    ("pre", "key", "bos", "expected"),
    [
        ("qwen2", None, 0, False),
        ("qwen2", True, 0, True),
        ("llama-bpe", None, 0, True),
        ("llama-bpe", False, 0, False),
        ("deepseek-v3", None, 0, False),
        ("unheard-of", None, 0, False),
        ("qwen2", True, None, False),
    ],
)
def test_whether_a_bos_is_added(testing, pre, key, bos, expected):
    more: dict[str, Any] = {}
    if key is not None:
        more["add_bos_token"] = ("bool", key)
    if bos is not None:
        more["bos_token_id"] = ("u32", bos)
    assert testing.Tokenizer(VOCABULARY.gguf(pre, **more)).add_bos == expected


def test_an_unknown_pre_tokenizer_is_told_and_not_guessed(testing):
    tokenizer = testing.Tokenizer(VOCABULARY.gguf("unheard-of"))
    assert not tokenizer.pre_known and tokenizer.pre == "unheard-of"
    with pytest.raises(testing.Error, match="unheard-of") as e:
        tokenizer.encode(b"a")
    assert e.value.kind == "tokenizer"
    assert testing.Tokenizer(VOCABULARY.gguf()).pre_known  # none named: llama.cpp's default


# --- Real vocabularies --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2", "deepseek-llm"])
def real(request, shared, testing):
    """(pre, path, native tokenizer, tokenizers' tokenizer)."""
    path = shared / f"vocab/ggml-vocab-{request.param}.gguf"
    file = testing.gguf_open(str(path))
    get = {e["key"].removeprefix("tokenizer.ggml."): e["value"] for e in file.metadata()}
    tokens = [t.decode() for t in get["tokens"]]
    merges = [m.decode() for m in get["merges"]]
    return (
        request.param,
        path,
        testing.Tokenizer.open(str(path)),
        oracle.build(request.param, tokens, merges, get["token_type"]),
    )


@pytest.mark.slow
def test_a_megabyte_through_a_real_vocabulary(real, without_drift):
    pre, _, native, theirs_ = real
    text = without_drift(corpus.mixed(BIG_BYTES, seed=23))
    ids = native.encode(text.encode())
    assert ids == theirs_.encode(text).ids, pre
    assert decode(native, ids) == text.encode()


def test_the_pairs_beside_a_real_vocabulary(real):
    _, path, native, _ = real
    cases = Path(f"{path}.inp").read_bytes().decode().split(CASE_SEPARATOR)
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(cases) > 40
    for case, line in zip(cases, lines, strict=False):
        assert native.encode(case.encode()) == [int(i) for i in line.split()], case
