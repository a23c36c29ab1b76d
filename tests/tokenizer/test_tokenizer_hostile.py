"""Metadata that lies, and input that is no text: a typed error that says where, or what
`tokenizers` and llama.cpp make of it; never a crash, never a hang."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .conftest import Vocabulary, load, property_test

BPE = Vocabulary("gpt2", **load("bpe"))
SPM = Vocabulary("llama", **load("spm"))
N = len(BPE.tokens)


def refused(testing: Any, run: Any, kind: str, *words: str) -> None:
    with pytest.raises(testing.Error) as e:
        run()
    assert e.value.kind == kind, str(e.value)
    for word in words:
        assert word in str(e.value)


Keys = dict[str, Any]
REFUSED: list[tuple[str, Vocabulary, Keys, tuple[str, ...]]] = [
    ("no model", BPE, {"model": None}, ("tokenizer.ggml.model",)),
    ("a model of another kind", BPE, {"model": ("string", "bert")}, ("tokenizer.ggml.model", "bert")),
    ("no tokens", BPE, {"tokens": None}, ("tokenizer.ggml.tokens",)),
    ("an empty list of tokens", BPE, {"tokens": ("[string]", []), "token_type": None}, ("tokens", "none")),
    ("tokens that are numbers", BPE, {"tokens": ("[i32]", [1, 2])}, ("tokens", "i32")),
    ("no merges", BPE, {"merges": None}, ("tokenizer.ggml.merges",)),
    ("merges that are numbers", BPE, {"merges": ("[f32]", [1.0])}, ("merges", "f32")),
    ("fewer types than tokens", BPE, {"token_type": ("[i32]", BPE.types[:-1])}, ("token_type", str(N - 1))),
    ("more types than tokens", BPE, {"token_type": ("[i32]", [*BPE.types, 1])}, ("token_type", str(N + 1))),
    ("no scores", SPM, {"scores": None}, ("tokenizer.ggml.scores",)),
    ("fewer scores than tokens", SPM, {"scores": ("[f32]", SPM.scores[:-1])}, ("scores",)),
    (
        "a score that is no number",
        SPM,
        {"scores": ("[f32]", [*SPM.scores[:-1], float("nan")])},
        ("scores", "NaN"),
    ),
]


@pytest.mark.parametrize(
    ("vocabulary", "keys", "words"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_inconsistent_metadata_is_refused(testing, vocabulary, keys, words):
    refused(testing, lambda: testing.Tokenizer(vocabulary.gguf("qwen2", **keys)), "tokenizer", *words)


@pytest.mark.parametrize(
    "keys",
    [
        {"model": ("u32", 1)},
        {"tokens": ("string", "a")},
        {"token_type": ("string", "a")},
        {"token_type": ("[string]", ["a"] * N)},
        {"merges": ("u32", 1)},
        {"add_space_prefix": ("u32", 1), "model": ("string", "llama"), "scores": ("[f32]", [0.0] * N)},
        {"eos_token_id": ("string", "1")},
        {"eos_token_id": ("i32", -1)},
        {"add_bos_token": ("string", "true")},
    ],
    ids=str,
)
def test_values_of_another_type_are_refused_by_their_key(testing, keys):
    refused(testing, lambda: testing.Tokenizer(BPE.gguf(**keys)), "gguf", next(iter(keys)))


def test_special_ids_that_no_token_has_count_as_absent(testing):
    """As in llama.cpp: converters wrote such files."""
    for value in (("u32", N), ("u32", 2**32 - 1), ("u64", 2**63)):
        tokenizer = testing.Tokenizer(
            BPE.gguf("qwen2", eos_token_id=value, bos_token_id=value, add_bos_token=("bool", True))
        )
        assert (tokenizer.eos, tokenizer.bos, tokenizer.add_bos) == (-1, -1, False)
        assert N not in tokenizer.end_ids


def test_a_merge_that_makes_no_token_is_named_when_text_meets_it(testing):
    """`tokenizers` refuses such a file; here the rest of it keeps working."""
    tokenizer = testing.Tokenizer(BPE.gguf("gpt-2", merges=("[string]", ["q x", "t h"])))
    assert tokenizer.encode(b"th") == [BPE.tokens.index("th")]
    refused(testing, lambda: tokenizer.encode(b"qx"), "tokenizer", "merges[0]", "'qx'")


def test_merges_of_nonsense_never_apply(testing):
    merges = ["", " ", "t", "t ", " h", "t  h", "t h o", "\u0120", "nothing of_this", "t h"]
    tokenizer = testing.Tokenizer(BPE.gguf("gpt-2", merges=("[string]", merges)))
    assert tokenizer.encode(b"tho") == [BPE.tokens.index("th"), BPE.tokens.index("o")]


def test_no_merges_at_all(testing):
    tokenizer = testing.Tokenizer(BPE.gguf("gpt-2", merges=("[string]", [])))
    assert tokenizer.encode(b"th") == [BPE.tokens.index("t"), BPE.tokens.index("h")]


def test_empty_and_equal_tokens(testing):
    """An empty spelling is never found in text; of equal ones the last is meant."""
    tokens = [*BPE.tokens[:256], "", "th", "<x>", "th", "<x>", ""]
    types = [*[1] * 257, 1, 3, 1, 3, 3]
    tokenizer = testing.Tokenizer(Vocabulary("gpt2", tokens, types, ["t h"]).gguf("gpt-2"))
    assert tokenizer.encode(b"th<x>") == [259, 260]
    assert tokenizer.find(b"<x>") == 260
    assert tokenizer.bytes(256) == tokenizer.bytes(261) == b""
    assert tokenizer.encode(b"") == []


def test_a_byte_without_a_token_is_unknown_or_named(testing):
    """Nothing is dropped silently, as `tokenizers` and llama.cpp would."""
    keep = [i for i, t in enumerate(BPE.tokens) if t != "q"]
    cut = Vocabulary("gpt2", [BPE.tokens[i] for i in keep], [BPE.types[i] for i in keep], [])
    refused(testing, lambda: testing.Tokenizer(cut.gguf("gpt-2")).encode(b"aq"), "tokenizer", "0x71")
    with_unknown = testing.Tokenizer(cut.gguf("gpt-2", unknown_token_id=("u32", 3)))
    assert with_unknown.encode(b"aq") == [cut.tokens.index("a"), 3]


def test_types_out_of_range_are_undefined(testing):
    types = [*BPE.types[:-3], 77, -1, 2**31 - 1]
    tokenizer = testing.Tokenizer(BPE.gguf("gpt-2", token_type=("[i32]", types)))
    assert [tokenizer.type(N - k) for k in (3, 2, 1)] == [0, 0, 0]
    for kind in ("i8", "u64", "u16"):
        other = testing.Tokenizer(BPE.gguf("gpt-2", token_type=(f"[{kind}]", BPE.types)))
        assert [other.type(i) for i in range(N)] == BPE.types


def test_without_types_every_token_is_normal(testing):
    tokenizer = testing.Tokenizer(BPE.gguf("gpt-2", token_type=None))
    assert {tokenizer.type(i) for i in range(N)} == {1}
    assert BPE.tokens.index("<|im_end|>") not in tokenizer.encode(b"<|im_end|>")


def test_strings_made_to_collide_give_an_error_and_no_hang(testing):
    """A vocabulary whose strings share a hash would make every lookup a search of them all. Their
    first word cancels the mixing constant, so that nothing of the second remains."""
    # The constant that string_hash() xors the first eight bytes with (string_list.cpp): not
    # UTF-8, so the strings are bytes.
    constant = struct.pack("<Q", 0x9E3779B97F4A7C15)
    tokens = [constant + b"%08d" % i + b"-same tail of all" for i in range(20_000)]
    file = BPE.gguf("gpt-2", tokens=("[string]", tokens), token_type=None, merges=("[string]", tokens))
    tokenizer = testing.Tokenizer(file)
    refused(testing, lambda: tokenizer.find(constant + b"99999999-same tail of all"), "tokenizer", "hash")


def test_control_spellings_past_the_bound_are_refused(testing):
    tokens = [*BPE.tokens[:256], *("x" * (1 << 20) for _ in range(17))]
    vocabulary = Vocabulary("gpt2", tokens, [1] * 256 + [3] * 17, [])
    refused(testing, lambda: testing.Tokenizer(vocabulary.gguf("gpt-2")), "tokenizer", "control tokens")


@property_test
@given(data=st.binary(max_size=30))
def test_text_that_is_not_utf8_is_refused_with_its_place(testing, data):
    tokenizer = testing.Tokenizer(SMALL)
    try:
        data.decode()
    except UnicodeDecodeError as e:
        refused(testing, lambda: tokenizer.encode(data), "invalid_input", f"byte {e.start} ")
    else:
        ids = tokenizer.encode(data)
        assert b"".join(map(tokenizer.bytes, ids)) == data


SMALL = Vocabulary("gpt2", BPE.tokens[:256], [1] * 256, []).gguf("qwen2")


def test_nul_is_a_character_like_others(testing):
    tokenizer = testing.Tokenizer(BPE.gguf("qwen2"))
    ids = tokenizer.encode(b"a\0b\0\0<|im_end|>\0")
    assert b"".join(map(tokenizer.bytes, ids)) == b"a\0b\0\0<|im_end|>\0"


@pytest.mark.parametrize("span", [(2, 1), (0, 6), (5, 7), (0, 2**63), (2**64 - 1, 2**64 - 1), (9, 9)])
def test_spans_outside_the_text_are_refused(testing, span):
    tokenizer = testing.Tokenizer(BPE.gguf("qwen2"))
    if span[0] == span[1]:  # holds nothing, wherever it lies
        assert tokenizer.encode("aé中bc".encode(), True, [span]) == tokenizer.encode("aé中bc".encode())
        return
    refused(
        testing, lambda: tokenizer.encode("aé中bc".encode(), True, [span]), "invalid_input", "literal_spans"
    )


def test_spans_in_any_order_overlapping_and_repeated(testing):
    tokenizer = testing.Tokenizer(BPE.gguf("qwen2"))
    text = "<a><a><a><a>"
    control = BPE.tokens.index("<a>")
    for spans in ([(3, 6), (0, 1)], [(0, 1), (3, 6)], [(3, 5), (4, 6), (0, 1), (3, 6)], [(4, 5), (0, 3)]):
        assert tokenizer.encode(text.encode(), True, spans).count(control) == 2


def test_random_metadata(testing):
    """Files that parse and make no sense: an error or a tokenizer that answers."""
    r = random.Random(51)
    pieces = ["", " ", "a", "b", "ab", "a b", "Ġ", "▁", "▁a", "<0x41>", "<s>", "é", "\0", "a" * 300]
    built = 0
    for _ in range(600):
        n = r.randrange(1, 9)
        keys: Keys = {
            "tokens": ("[string]", r.choices(pieces, k=n)),
            "token_type": r.choice([None, ("[i32]", [r.randrange(-1, 8) for _ in range(n)])]),
            "merges": ("[string]", r.choices(pieces, k=r.randrange(6))),
            "scores": ("[f32]", [r.choice([0, -1, 1, float("inf"), -float("inf")]) for _ in range(n)]),
            "unknown_token_id": r.choice([None, ("u32", r.randrange(10))]),
        }
        vocabulary = r.choice([BPE, SPM])
        try:
            tokenizer = testing.Tokenizer(
                vocabulary.gguf(r.choice(["qwen2", "llama-bpe", "", "deepseek-llm"]), **keys)
            )
            built += 1
            for text in ("ab a  b<s>", "é", "a" * 400, "\0 \n"):
                for id_ in tokenizer.encode(text.encode()):
                    assert 0 <= id_ < n
                    tokenizer.bytes(id_)
        except testing.Error as e:
            assert e.kind == "tokenizer"
            assert str(e)
    assert built > 300
