"""The corpus of hostile files: each with the words its error must hold.

`python hostile.py DIR` writes them (and a few good files) below DIR, as seeds for the fuzzer.
Deterministic: the same files every time.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

if __package__:
    from .writer import ARRAY, F32, Q4_0, Q8_0, STRING, Gguf, sample, text, u32, u64
else:  # run as a script
    from writer import ARRAY, F32, Q4_0, Q8_0, STRING, Gguf, sample, text, u32, u64

MAX64 = 2**64 - 1
U8, BOOL = 0, 7

# name -> (bytes, parts of the message). Every message must also hold an offset.
CASES: dict[str, tuple[bytes, tuple[str, ...]]] = {}


def case(*words: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def add(make: Callable[[], bytes]) -> Callable[[], bytes]:
        CASES[make.__name__] = (make(), words)
        return make

    return add


def with_key(type_and_value: bytes, key: str | bytes = "k") -> bytes:
    return Gguf().raw(key, type_and_value).bytes()


def with_tensor(dims: list[int], kind: int = F32, offset: int = 0, n_dims: int | None = None) -> bytes:
    g = Gguf().entry("t", dims, kind, offset, n_dims)
    g.data = bytes(256)
    return g.bytes()


def nested(depth: int) -> bytes:
    return u32(ARRAY) + (u32(ARRAY) + u64(1)) * depth + u32(U8) + u64(0)


def with_alignment(kind: str, n: float) -> bytes:
    g = Gguf().add("general.alignment", kind, n).entry("t", [8], F32, 0)
    g.data = bytes(256)
    return g.bytes()


# The head of the file.


@case("magic", "the file of 0 bytes")
def empty() -> bytes:
    return b""


@case("not a GGUF file", "found 'PK\\x03\\x04'")
def a_zip_file() -> bytes:
    return b"PK\x03\x04" + bytes(60)


@case("GGUF version 1 is not supported", "convert")
def version_1() -> bytes:
    return b"GGUF" + u32(1) + u32(0) + u32(0)


@case("big-endian", "(version 3)")
def big_endian() -> bytes:
    return b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + bytes(64)


@case("expected 2 or 3, found 4")
def version_of_the_future() -> bytes:
    return Gguf(version=4).bytes()


@case("expected 2 or 3, found 0")
def version_0() -> bytes:
    return Gguf(version=0).bytes()


def claims(n_entries: int, n_tensors: int) -> bytes:
    g = sample()
    g.n_entries, g.n_tensors = n_entries, n_tensors
    return g.bytes()


@case("metadata entries", "found 18446744073709551615")
def entry_count_2_64() -> bytes:
    return claims(MAX64, 0)


@case("60000 metadata entries cannot fit")
def entry_count_beyond_the_file() -> bytes:
    return claims(60000, 0)


@case("tensors, found 18446744073709551615")
def tensor_count_2_64() -> bytes:
    return claims(len(sample().entries), MAX64)


@case("1000000 tensors cannot fit")
def tensor_count_beyond_the_file() -> bytes:
    return claims(len(sample().entries), 1000000)


# Keys.


@case("key: expected at most 65535 bytes, found a length of 65536")
def key_over_64_kib() -> bytes:
    return with_key(u32(U8) + b"\0", "k" * 65536)


@case("found a length of 9223372036854775808")
def key_of_2_63_bytes() -> bytes:
    return Gguf().bytes()[:16] + u64(1) + u64(2**63) + bytes(64)


@case("an empty key")
def empty_key() -> bytes:
    return with_key(u32(U8) + b"\0", "")


@case("key 'a\\xff' is not UTF-8")
def key_not_utf8() -> bytes:
    return with_key(u32(U8) + b"\0", b"a\xff")


@case("key 'k'", "duplicate", "first value is at offset 37")
def duplicate_key() -> bytes:
    return Gguf().add("k", "u8", 1).add("other", "u8", 1).add("k", "u8", 1).bytes()


# Values.


@case("key 'k', offset 33: value type: expected 0 to 12, found 13")
def unknown_value_type() -> bytes:
    return with_key(u32(13) + bytes(8))


@case("key 'k'", "value type", "found 4294967295")
def value_type_2_32() -> bytes:
    return with_key(u32(2**32 - 1) + bytes(8))


@case("key 'k', offset 37: expected a bool of 0 or 1, found 2")
def bad_bool() -> bytes:
    return with_key(u32(BOOL) + b"\2")


@case("key 'k', offset 51: expected a bool of 0 or 1, found 255")
def bad_bool_in_array() -> bytes:
    return with_key(u32(ARRAY) + u32(BOOL) + u64(3) + b"\0\1\xff")


@case("key 'k'", "found a length of 9223372036854775808")
def string_of_2_63_bytes() -> bytes:
    return with_key(u32(STRING) + u64(2**63) + bytes(64))


@case("key 'k'", "only")
def string_past_the_end() -> bytes:
    return with_key(u32(STRING) + u64(1000) + bytes(64))


@case("key 'k'", "element 1 of 3", "9223372036854775807 bytes runs past the end")
def string_in_array_of_2_63_bytes() -> bytes:
    return with_key(u32(ARRAY) + u32(STRING) + u64(3) + text("a") + u64(2**63 - 1) + bytes(64))


@case("key 'k'", "element 0 of 1", "18446744073709551608 bytes runs past the end")
def string_in_array_whose_end_wraps() -> bytes:
    return with_key(u32(ARRAY) + u32(STRING) + u64(1) + u64(MAX64 - 7) + bytes(64))


@case("key 'k'", "18446744073709551615 strings cannot fit")
def string_array_of_2_64() -> bytes:
    return with_key(u32(ARRAY) + u32(STRING) + u64(MAX64) + bytes(64))


@case("key 'k'", "4611686018427387904 array elements cannot fit")
def array_whose_byte_count_wraps() -> bytes:
    return with_key(u32(ARRAY) + u32(4) + u64(2**62) + bytes(64))  # 2^62 x 4 bytes = 0 mod 2^64


@case("key 'k'", "array element type", "found 99")
def unknown_element_type() -> bytes:
    return with_key(u32(ARRAY) + u32(99) + u64(0))


@case("key 'k'", "nested deeper than 4")
def arrays_10000_deep() -> bytes:
    return with_key(nested(10000))


@case("key 'k'", "nested deeper than 4")
def arrays_5_deep() -> bytes:
    return with_key(nested(4))


@case("key 'k'", "2305843009213693952 arrays cannot fit")
def array_of_2_61_arrays() -> bytes:
    return with_key(u32(ARRAY) + u32(ARRAY) + u64(2**61) + bytes(64))


# Alignment.


@case("key 'general.alignment'", "power of two", "found 0")
def alignment_0() -> bytes:
    return with_alignment("u32", 0)


@case("key 'general.alignment'", "power of two", "found 48")
def alignment_48() -> bytes:
    return with_alignment("u32", 48)


@case("key 'general.alignment'", "from 8", "found 4")
def alignment_4() -> bytes:
    return with_alignment("u32", 4)


@case("key 'general.alignment'", "found 2147483648")
def alignment_2_31() -> bytes:
    return with_alignment("u32", 2**31)


@case("key 'general.alignment'", "found 9223372036854775808")
def alignment_2_63() -> bytes:
    return with_alignment("u64", 2**63)


@case("key 'general.alignment'", "non-negative integer, found i32 -32")
def alignment_negative() -> bytes:
    return with_alignment("i32", -32)


@case("key 'general.alignment'", "non-negative integer, found f32 32")
def alignment_float() -> bytes:
    return with_alignment("f32", 32.0)


# Tensors.


@case("tensor 't'", "expected 1 to 4 dimensions, found 0")
def no_dimensions() -> bytes:
    return with_tensor([])


@case("tensor 't'", "expected 1 to 4 dimensions, found 5")
def five_dimensions() -> bytes:
    return with_tensor([1, 1, 1, 1, 1])


@case("tensor 't'", "found 4294967295")
def dimensions_2_32() -> bytes:
    return with_tensor([8], n_dims=2**32 - 1)


@case("tensor 't'", "dimension 1 is 0")
def zero_dimension() -> bytes:
    return with_tensor([8, 0])


@case("tensor 't'", "dimension 0 is 0")
def zero_row() -> bytes:
    return with_tensor([0], Q8_0)


@case("tensor 't'", "exceeds 2^63")
def product_wraps_to_0() -> bytes:
    return with_tensor([2**32, 2**32])


@case("tensor 't'", "exceeds 2^63")
def product_wraps_to_8() -> bytes:
    return with_tensor([8, 2**61 + 1, 1, 1])  # 8 values mod 2^64, 32 bytes


@case("tensor 't'", "exceeds 2^63")
def product_fits_but_its_bytes_wrap() -> bytes:
    return with_tensor([2**62])


@case("tensor 't'", "exceeds 2^63")
def bytes_fit_but_the_product_wraps() -> bytes:
    return with_tensor([2**34, 2**30], Q4_0)  # 2^64 values, 0.56 x 2^64 bytes


@case("tensor 't'", "17179869184 bytes", "do not lie within the file of 320 bytes")
def dimension_2_32() -> bytes:
    return with_tensor([2**32])


@case("tensor 't'", "unknown tensor type 4")
def removed_type() -> bytes:
    return with_tensor([32], 4)


@case("tensor 't'", "unknown tensor type 4294967295")
def type_2_32() -> bytes:
    return with_tensor([32], 2**32 - 1)


@case("tensor 't'", "a row of 33 values", "32-value blocks of type Q8_0")
def row_no_multiple_of_the_block() -> bytes:
    return with_tensor([33], Q8_0)


@case("tensor 't'", "no multiple of the alignment")
def offset_unaligned() -> bytes:
    return with_tensor([8], offset=4)


@case("tensor 't'", "do not lie within the file")
def offset_past_the_end() -> bytes:
    return with_tensor([8], offset=2**40)


@case("tensor 't'", "do not lie within the file")
def offset_that_wraps() -> bytes:
    return with_tensor([8], offset=MAX64 - 31)


@case("tensor 't'", "do not lie within the file")
def data_one_byte_short() -> bytes:
    return with_tensor([8], offset=224)[:-1]


@case("tensor 'b'", "overlaps that of 'a'")
def tensors_overlap() -> bytes:
    g = Gguf().entry("a", [9], F32, 32).entry("b", [8], F32, 64)
    g.data = bytes(256)
    return g.bytes()


@case("tensor 'a'", "overlaps that of 'b'")
def tensors_overlap_out_of_order() -> bytes:
    g = Gguf().entry("a", [8], F32, 64).entry("c", [8], F32, 128).entry("b", [64], F32, 0)
    g.data = bytes(256)
    return g.bytes()


@case("overlaps")
def tensors_at_one_offset() -> bytes:
    g = Gguf().entry("a", [8], F32, 0).entry("b", [8], F32, 0)
    g.data = bytes(256)
    return g.bytes()


@case("tensor 'a'", "duplicate name", "data at offset 96")
def duplicate_tensor() -> bytes:
    return Gguf().tensor("a", [8], F32, bytes(32)).tensor("a", [8], F32, bytes(32)).bytes()


@case("an empty tensor name")
def empty_tensor_name() -> bytes:
    return Gguf().tensor("", [8], F32, bytes(32)).bytes()


@case("tensor name '\\xc0\\x80' is not UTF-8")
def tensor_name_not_utf8() -> bytes:
    return Gguf().tensor(b"\xc0\x80", [8], F32, bytes(32)).bytes()


@case("tensor name: expected at most 1024 bytes, found a length of 1025")
def tensor_name_long() -> bytes:
    return Gguf().tensor("t" * 1025, [8], F32, bytes(32)).bytes()


@case("tensor 'blk.0", "no multiple of")
def a_name_that_would_forge_a_log_line() -> bytes:
    return Gguf().tensor("blk.0\n\x1b[2Jreflex: all is well", [33], Q8_0, bytes(68)).bytes()


def good() -> dict[str, bytes]:
    """Files that parse, to seed the fuzzer with."""
    two = sample()
    two.version = 2
    return {
        "sample": sample().bytes(),
        "sample_v2": two.bytes(),
        "no_tensors": Gguf().add("general.architecture", "string", "llama").bytes(),
        "nothing": Gguf().bytes(),
        "nested": with_key(nested(3)),
        "part": Gguf().add("split.no", "u16", 0).add("split.count", "u16", 2).bytes(),
    }


def main(folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, data in good().items():
        (out / f"{name}.gguf").write_bytes(data)
    for name, (data, _) in CASES.items():
        (out / f"{name}.gguf").write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
