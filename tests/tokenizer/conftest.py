"""Vocabularies, files made of them, and the text that tests compare on."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ..gguf.writer import Gguf
from . import corpus

HERE = Path(__file__).parent
TABLES = HERE.parents[1] / "native/tokenizer"

# For property tests of this room; no global profile, which would reach those of the others.
property_test = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="session")
def testing() -> ModuleType:
    """The native testing module; `make test` always builds it."""
    return importlib.import_module("reflex_worker._testing")


@dataclass
class Vocabulary:
    """What a GGUF says of its tokenizer, and more keys as (type, value)."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def gguf(self, pre: str | None = None, **more: tuple[str, Any]) -> bytes:
        """File bytes. A key given as keyword replaces the vocabulary's own; None leaves it out."""
        keys: dict[str, tuple[str, Any] | None] = {
            "model": ("string", self.model),
            "tokens": ("[string]", self.tokens),
            "token_type": ("[i32]", self.types),
        }
        if pre is not None:
            keys["pre"] = ("string", pre)
        if self.model == "gpt2":
            keys["merges"] = ("[string]", self.merges)
        else:
            keys["scores"] = ("[f32]", self.scores)
        keys.update(more)
        file = Gguf()
        for key, entry in keys.items():
            if entry is not None:
                file.add(f"tokenizer.ggml.{key}", *entry)
        return file.bytes()


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"fixtures/{name}.json").read_text(encoding="ascii"))


@pytest.fixture(scope="session")
def bpe() -> Vocabulary:
    return Vocabulary("gpt2", **load("bpe"))


@pytest.fixture(scope="session")
def spm() -> Vocabulary:
    return Vocabulary("llama", **load("spm"))


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_unicode_tables", TABLES / "make_unicode_tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_drift(testing: ModuleType) -> set[int]:
    """Code points that this `tokenizers` puts in another class than the committed tables: those
    that its Unicode version knows and theirs does not, or the other way round."""
    if f"tokenizers {tokenizers.__version__} " in (TABLES / "unicode_tables.inc").read_text().split("\n")[0]:
        return set()  # made with this very version; test_unicode.py holds them to it
    table = load_generator().classify()
    return {c for c in range(0x110000) if table[c] != testing.char_class(c)}


@pytest.fixture(scope="session")
def drift(testing: ModuleType) -> set[int]:
    return find_drift(testing)


@pytest.fixture(scope="session")
def without_drift(drift: set[int]):
    """Drops the characters on which versions of Unicode disagree."""
    return lambda text: "".join(c for c in text if ord(c) not in drift) if drift else text


def texts(max_size: int = 60) -> st.SearchStrategy[str]:
    """Random Unicode, thick with what pre-tokenizers care about."""
    special = [
        *corpus.WHITESPACE,
        *"'sStTrRvVlLdDmMeE\u017f\u212a",
        *"0123456789",
        *"!-/:~$+<>^`|_",
        *corpus.COMBINING,
    ]
    special += [
        "中",
        "ア",
        "・",
        "゠",
        "한",
        "ñ",
        "é",
        "₂",
        "Ⅷ",
        "٣",
        "。",
        "\u3000",
        "\u200d",
        "<a>",
        "<|im_end|>",
        "<tool>",
    ]
    scalar = st.characters(exclude_categories=["Cs"])
    piece = st.one_of(st.sampled_from(special), scalar, st.sampled_from(corpus.ENGLISH))
    return st.lists(piece, max_size=max_size).map("".join)
