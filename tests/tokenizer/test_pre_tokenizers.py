"""Where words end: every hand-written matcher against the regexes that `tokenizers` runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from tokenizers.pre_tokenizers import ByteLevel

from . import corpus, oracle
from .conftest import property_test, texts

NAMES = [*oracle.STAGES, *oracle.ALIASES]
WORDS = {name: oracle.words(name) for name in oracle.STAGES}
MIXED_BYTES = 300_000


def ours(testing, name: str, text: str) -> list[str]:
    data = text.encode()
    return [data[begin:end].decode() for begin, end in testing.pre_tokenize(name, data)]


def theirs(name: str, text: str) -> list[str]:
    return [word for word, _ in WORDS[oracle.ALIASES.get(name, name)].pre_tokenize_str(text)]


def assert_same(got: list[str], want: list[str]) -> None:
    """Names the first word that differs, with its neighbours."""
    if got != want:
        i = next(
            (i for i, (g, w) in enumerate(zip(got, want, strict=False)) if g != w), min(len(got), len(want))
        )
        raise AssertionError(
            f"word {i}: {got[max(0, i - 2) : i + 2]}, expected {want[max(0, i - 2) : i + 2]}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_mixed_text(testing, without_drift, name):
    text = without_drift(corpus.mixed(MIXED_BYTES, seed=1))
    assert_same(ours(testing, name, text), theirs(name, text))


@pytest.mark.parametrize("name", oracle.STAGES)
@property_test
@given(text=texts())
def test_random_unicode(testing, without_drift, name, text):
    text = without_drift(text)
    assert_same(ours(testing, name, text), theirs(name, text))


# A character's neighbours decide what it may join; the letter and the newline come last so that
# whatever is in front of them can be taken with them.
CONTEXTS = [
    "{}",
    " {}",
    "{}a",
    "a{}",
    "1{}2",
    ".{}\n",
    "{0}{0}",
    "'{}",
    "  {}",
    "\u0301{}",
    "中{}中",
    "{}\u0301 ",
    "'{}a",
    "'{}e",
    "'r{}a",
    "'{}la",
]


RANGE_ENDS = {int(c, 16) for r in oracle.RANGES for c in r.replace("-", " ").split()}


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.STAGES)
def test_every_character_in_context(testing, drift, name):
    """Every code point below U+3100 and those at the borders of ranges that regexes spell out;
    above, the first of every run of one class and of every stretch of 1024: the rest of those
    behave as their first."""
    borders = {c for end in RANGE_ENDS for c in (end - 1, end, end + 1)}
    chars, last = [], None
    for c in [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE0200), 0x10FFFF]:
        kind = testing.char_class(c)
        if (kind != last or c % 1024 == 0 or c < 0x3100 or c in borders) and c not in drift:
            chars.append(chr(c))
        last = kind
    text = "\n\n".join(context.format(c) for c in chars for context in CONTEXTS)
    assert_same(ours(testing, name, text), theirs(name, text))


def test_gpt2_regex_is_the_one_of_byte_level():
    """The oracle's GPT-2 stage is written out; here it is held against the built-in one."""
    text = corpus.mixed(20_000, seed=2)
    ends = [end for _, (_, end) in ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    assert ends == [end for _, (_, end) in WORDS["gpt-2"].pre_tokenize_str(text)]


def test_unknown_names_are_not_known(testing):
    for name in ("bert-bge", "qwen", "QWEN2", "qwen2 ", "gpt2", "tekken"):
        assert not testing.pre_known(name)
    assert all(testing.pre_known(name) for name in NAMES)


def test_words_cover_the_text(testing):
    data = corpus.mixed(5_000, seed=3).encode()
    for name in NAMES:
        at = 0
        for begin, end in testing.pre_tokenize(name, data):
            assert begin == at < end
            at = end
        assert at == len(data)
        assert testing.pre_tokenize(name, b"") == []
