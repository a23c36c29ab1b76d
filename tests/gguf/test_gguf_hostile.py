"""Files made to break a parser: a typed error that says where, and never a crash."""

from __future__ import annotations

import re
import resource

import pytest

from . import hostile
from .writer import ARRAY, STRING, Gguf, sample, u32, u64


@pytest.mark.parametrize("name", hostile.CASES)
def test_hostile_file_is_refused(name, testing, refused, tmp_path):
    data, words = hostile.CASES[name]
    message = refused(lambda: testing.gguf_parse(data, "bad.gguf"), "gguf", *words)
    assert message.startswith("bad.gguf: ")
    assert re.search(r"offset \d+", message)
    assert message.isprintable()
    # The same from a file, where the pages end with the file.
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    refused(lambda: testing.gguf_open(str(path)), "gguf", *words)


@pytest.mark.parametrize("name", hostile.good())
def test_good_seed_parses(name, testing):
    testing.gguf_parse(hostile.good()[name])


def test_truncation_at_every_byte_of_the_header(testing, refused, tmp_path):
    g = sample()
    data, n = g.bytes(), len(g.header())
    path = tmp_path / "cut.gguf"
    for length in range(n):
        path.write_bytes(data[:length])
        refused(lambda: testing.gguf_open(str(path)), "gguf", "cut.gguf: ", "offset ")


def test_claims_buy_no_memory(testing, refused):
    """Counts that a small file cannot hold must not be allocated for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in (2**16, 2**20, 2**32, 2**48, 2**63, 2**64 - 1):
        g = Gguf().raw("k", u32(ARRAY) + u32(STRING) + u64(n) + bytes(4096))
        refused(lambda g=g: testing.gguf_parse(g.bytes()), "gguf", "key 'k'")
        g = sample()
        g.n_tensors = n
        refused(lambda g=g: testing.gguf_parse(g.bytes()), "gguf")
        g.n_tensors, g.n_entries = None, n
        refused(lambda g=g: testing.gguf_parse(g.bytes()), "gguf")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 8 << 10  # KiB


def test_header_limit_stops_an_endless_walk(testing, refused, tmp_path):
    """A sparse file of terabytes of empty strings costs its header limit, not its size."""
    path = tmp_path / "long.gguf"
    # Zeros read as empty strings: 2^37 of them "fit" into the file of 2^40 bytes.
    g = Gguf().raw("k", u32(ARRAY) + u32(STRING) + u64(2**37 - 64))
    with path.open("wb") as f:
        f.write(g.bytes())
        f.truncate(2**40)
    refused(lambda: testing.gguf_open(str(path)), "gguf", "key 'k'", "cannot fit")
    # One string that ends beyond the limit although the file goes on.
    g = Gguf().raw("k", u32(STRING) + u64(300 << 20))
    with path.open("wb") as f:
        f.write(g.bytes())
        f.truncate(2**40)
    refused(lambda: testing.gguf_open(str(path)), "gguf", "key 'k'", "at most 268435456 bytes")
    g = Gguf().raw("k", u32(STRING) + u64(256 << 20))
    with path.open("wb") as f:
        f.write(g.bytes())
        f.truncate(2**40)
    refused(lambda: testing.gguf_open(str(path)), "gguf", "key 'k'", "does not end within its limit")
