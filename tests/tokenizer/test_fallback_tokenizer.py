"""The fallback for unknown pre-tokenizers: under GPT-2's name it must do what the core does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflex_worker import ReflexError, fallback_tokenizer
from reflex_worker.fallback_tokenizer import FallbackTokenizer

from . import corpus
from .conftest import Vocabulary, load, property_test, texts

VOCABULARY = Vocabulary("gpt2", **load("bpe"))
AT = {t: i for i, t in enumerate(VOCABULARY.tokens)}


def make(
    pre: str = "unheard-of", *, arrays: dict[str, Any] | None = None, **scalars: str
) -> FallbackTokenizer:
    """Over the fixture; arrays and scalars replace its own."""
    found = {
        "tokens": [t.encode() for t in VOCABULARY.tokens],
        "merges": [m.encode() for m in VOCABULARY.merges],
        "token_type": VOCABULARY.types,
        **(arrays or {}),
    }
    values = {"pre": pre, "model": "gpt2", **scalars}
    return FallbackTokenizer(
        "no file",
        lambda key: found.get(key.removeprefix("tokenizer.ggml.")),
        {f"tokenizer.ggml.{k}": v for k, v in values.items()},
    )


@pytest.fixture(scope="module")
def fallback() -> FallbackTokenizer:
    return make()


@pytest.fixture(scope="module")
def native(testing) -> Any:
    return testing.Tokenizer(VOCABULARY.gguf("gpt-2"))


def test_mixed_text_as_the_core(fallback, native, without_drift):
    text = without_drift(corpus.mixed(100_000, seed=61))
    for parse_special in (True, False):
        assert fallback.tokenize(text, parse_special=parse_special) == native.encode(
            text.encode(), parse_special
        )


@property_test
@given(text=texts(), data=st.data())
def test_control_tokens_and_spans_as_the_core(fallback, native, without_drift, text, data):
    text = without_drift(text)
    position = st.integers(0, len(text))
    spans = data.draw(st.lists(st.tuples(position, position).map(lambda p: (min(p), max(p))), max_size=4))
    parse = data.draw(st.booleans())
    ids = fallback.tokenize(text, parse_special=parse, literal_spans=spans)
    assert ids == native.encode(text.encode(), parse, spans)


def test_bos_is_added_as_asked_and_never_doubled():
    bos = AT["<|im_start|>"]
    tokenizer = make(bos_token_id=str(bos))
    assert tokenizer.tokenize("a") == [AT["a"]]
    assert tokenizer.tokenize("a", add_bos=True) == [bos, AT["a"]]
    assert tokenizer.tokenize("<|im_start|>a", add_bos=True) == [bos, AT["a"]]
    by_itself = make(bos_token_id=str(bos), add_bos_token="true")
    assert by_itself.tokenize("a") == [bos, AT["a"]]
    assert by_itself.tokenize("a", add_bos=False) == [AT["a"]]
    assert make(bos_token_id="4294967295", add_bos_token="true").tokenize("a") == [AT["a"]]


def test_it_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(fallback_tokenizer, "_told", set())
    make("first")
    make("first")
    make("second")
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("reflex: tokenizer.ggml.pre ") and "not known" in line for line in lines] == [
        True,
        True,
    ]
    assert "'first'" in lines[0] and "'second'" in lines[1]


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ReflexError, match=r"reflex-worker\[tokenizers\]") as e:
        make()
    assert e.value.kind == "tokenizer"


@pytest.mark.parametrize(
    ("arrays", "scalars", "words"),
    [
        ({}, {"model": "llama"}, "tokenizer.ggml.model"),
        ({"tokens": None}, {}, "tokenizer.ggml.tokens"),
        ({"tokens": []}, {}, "tokenizer.ggml.tokens"),
        ({"tokens": [b"a", b"\xff"], "token_type": [1, 1]}, {}, r"tokens\[1\]"),
        ({"tokens": [1, 2]}, {}, r"tokens\[0\]"),
        ({"merges": None}, {}, "tokenizer.ggml.merges"),
        ({"merges": [b"t h", b"zz zz"]}, {}, r"merges\[1\]"),
        ({"merges": [b"nospace"]}, {}, r"merges\[0\]"),
        ({"token_type": [1]}, {}, "token_type"),
    ],
)
def test_a_vocabulary_without_sense_is_refused(arrays, scalars, words):
    with pytest.raises(ReflexError, match=words) as e:
        make(arrays=arrays, **scalars)
    assert e.value.kind == "tokenizer"


@pytest.mark.parametrize("span", [(2, 1), (0, 4), (-1, 2)])
def test_spans_outside_the_text_are_refused(fallback, span):
    with pytest.raises(ReflexError, match="literal_spans") as e:
        fallback.tokenize("abc", literal_spans=[span])
    assert e.value.kind == "invalid_input"


def test_a_lone_surrogate_is_refused(fallback):
    with pytest.raises(ReflexError, match="code point 1") as e:
        fallback.tokenize("a\ud800")
    assert e.value.kind == "invalid_input"


def test_a_byte_without_a_token_is_named_and_not_dropped():
    keep = [i for i, t in enumerate(VOCABULARY.tokens[:256]) if t != "q"]
    tokens = [VOCABULARY.tokens[i].encode() for i in keep]
    tokenizer = make(arrays={"tokens": tokens, "merges": [], "token_type": [1] * len(tokens)})
    assert len(tokenizer.tokenize("a")) == 1
    with pytest.raises(ReflexError, match="0x71") as e:
        tokenizer.tokenize("aq")
    assert e.value.kind == "tokenizer"


def test_a_file_is_read_through_the_core(tmp_path, native):
    """The arrays and scalars come from _native, as the engine wrapper has it."""
    path = tmp_path / "unknown.gguf"
    path.write_bytes(VOCABULARY.gguf("never-seen", bos_token_id=("u32", 3), add_bos_token=("bool", True)))
    text = "It's <a>b the 1234 中文 <|im_end|>"
    assert FallbackTokenizer(str(path)).tokenize(text) == [3, *native.encode(text.encode())]


def test_the_package_is_imported_on_first_use_only():
    code = "import sys; import reflex_worker.fallback_tokenizer; print('tokenizers' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd="/"
    )
    assert out.stdout.strip() == "False"
