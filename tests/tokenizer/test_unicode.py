"""Character classes, UTF-8 checking and the stream decoder."""

from __future__ import annotations

import codecs
import unicodedata

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from .conftest import load_generator, property_test

CLASSES = {"L": 1, "N": 2, "P": 3, "S": 4, "M": 5}
SPACE, NUMBER_DIGITS = 6, 7


def test_classes_are_what_tokenizers_matches(testing):
    """The committed table against the installed regex engine: equal under the version that made
    it, else equal on every character that both Unicode versions know."""
    generator = load_generator()
    asked = generator.classify()
    differ = [c for c in range(0x110000) if asked[c] != testing.char_class(c)]
    made_with = generator.OUT.read_text().split("tokenizers ")[1].split(" ")[0]
    if made_with == tokenizers.__version__:
        assert differ == []
    assert all(asked[c] in (0, NUMBER_DIGITS) or testing.char_class(c) in (0, NUMBER_DIGITS) for c in differ)


def test_classes_are_those_of_the_unicode_database(testing):
    """Python's own database, older than the table, agrees wherever it knows a character."""
    for c in range(0x110000):
        category = unicodedata.category(chr(c))
        if category == "Cn" or c in range(0xD800, 0xE000):
            continue
        expected = CLASSES.get(category[0], 0)
        if category[0] == "Z" or chr(c) in "\t\n\v\f\r\x85":
            expected = SPACE
        assert testing.char_class(c) == expected, f"U+{c:04X}"
    assert testing.char_class(0x110000) == testing.char_class(0xFFFFFFFF) == 0


@property_test
@given(data=st.binary(max_size=40))
def test_invalid_utf8_is_found_where_python_finds_it(testing, data):
    try:
        data.decode()
        expected = -1
    except UnicodeDecodeError as e:
        expected = e.start
    assert testing.utf8_error(data) == expected


def test_every_two_and_three_byte_beginning_is_judged_like_python(testing):
    for lead in range(0x80, 0x100):
        for second in range(0x100):
            for tail in (b"", b"\x80", b"\x80\x80", b"a"):
                data = b"12345678" + bytes([lead, second]) + tail
                try:
                    data.decode()
                    expected = -1
                except UnicodeDecodeError as e:
                    expected = e.start
                assert testing.utf8_error(data) == expected, data


BROKEN = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(lambda s: s.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"\xf0\x9f\x98", b"\xe2\x82", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80"]
    ),
)


@property_test
@given(chunks=st.lists(BROKEN, max_size=12))
def test_stream_decodes_as_python_does_and_loses_nothing(testing, chunks):
    ours, theirs = testing.Utf8Stream(), codecs.getincrementaldecoder("utf-8")("replace")
    out = python = ""
    for chunk in chunks:
        out += ours.push(chunk)
        python += theirs.decode(chunk)
        # CPython waits for a third byte after half a surrogate (ED A0), which no byte can mend.
        assert out.startswith(python)
    out += ours.finish()
    assert out == b"".join(chunks).decode("utf-8", "replace")
    assert ours.finish() == ""


def test_half_a_surrogate_is_given_up_at_once_and_whole_characters_wait(testing):
    stream = testing.Utf8Stream()
    assert stream.push(b"\xed\xa0") == "\ufffd\ufffd"
    assert stream.push("é".encode()[:1]) == ""
    assert stream.push("é".encode()[1:]) == "é"


@property_test
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), cut=st.integers(1, 4))
def test_stream_never_emits_a_broken_character(testing, text, cut):
    data, stream, out = text.encode(), testing.Utf8Stream(), ""
    for at in range(0, len(data), cut):
        out += stream.push(data[at : at + cut])
        assert text.startswith(out)
    assert out == text
    assert stream.finish() == ""
