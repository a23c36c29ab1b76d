"""Writes GGUF bytes by hand, sense or nonsense, from the specification (ggml's docs/gguf.md).

Independent of the `gguf` package on purpose: that one refuses to write most of what the parser
has to survive.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

# Value types by file id: struct format of one element.
SCALARS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<B"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}
STRING, ARRAY = 8, 9
F32, F16, Q4_0, Q8_0, Q4_K = 0, 1, 2, 8, 12


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def text(s: str | bytes) -> bytes:
    """A length-prefixed string."""
    raw = s.encode() if isinstance(s, str) else s
    return u64(len(raw)) + raw


def scalar(kind: str, value: float) -> bytes:
    return struct.pack(SCALARS[kind][1], value)


def value(kind: str, v: object) -> bytes:
    """Type id and value; kind is a scalar's, "string", or "[kind]" for an array."""
    if kind.startswith("["):
        return u32(ARRAY) + array(kind[1:-1], v)  # type: ignore[arg-type]
    if kind == "string":
        return u32(STRING) + text(v)  # type: ignore[arg-type]
    return u32(SCALARS[kind][0]) + scalar(kind, v)  # type: ignore[arg-type]


def array(kind: str, items: Sequence[object]) -> bytes:
    """Element type, count and elements."""
    if kind.startswith("["):
        return u32(ARRAY) + u64(len(items)) + b"".join(array(kind[1:-1], v) for v in items)  # type: ignore[arg-type]
    if kind == "string":
        return u32(STRING) + u64(len(items)) + b"".join(text(v) for v in items)  # type: ignore[arg-type]
    return u32(SCALARS[kind][0]) + u64(len(items)) + b"".join(scalar(kind, v) for v in items)  # type: ignore[arg-type]


class Gguf:
    """One file: entries and tensors in the order they are added.

    The counts in the header can be overruled, so that a file can lie about them.
    """

    def __init__(self, version: int = 3, alignment: int = 32) -> None:
        self.version = version
        self.alignment = alignment
        self.n_entries: int | None = None
        self.n_tensors: int | None = None
        self.entries: list[bytes] = []
        self.directory: list[bytes] = []
        self.data = b""

    def raw(self, key: str | bytes, type_and_value: bytes) -> Gguf:
        self.entries.append(text(key) + type_and_value)
        return self

    def add(self, key: str, kind: str, v: object) -> Gguf:
        return self.raw(key, value(kind, v))

    def entry(
        self, name: str | bytes, dims: Sequence[int], kind: int, offset: int, n_dims: int | None = None
    ) -> Gguf:
        """A directory entry alone; data stays as it is."""
        count = len(dims) if n_dims is None else n_dims
        self.directory.append(text(name) + u32(count) + b"".join(map(u64, dims)) + u32(kind) + u64(offset))
        return self

    def tensor(self, name: str | bytes, dims: Sequence[int], kind: int, data: bytes) -> Gguf:
        """A tensor with its data at the next aligned offset."""
        self.data += bytes(-len(self.data) % self.alignment)
        self.entry(name, dims, kind, len(self.data))
        self.data += data
        return self

    def header(self) -> bytes:
        n_tensors = len(self.directory) if self.n_tensors is None else self.n_tensors
        n_entries = len(self.entries) if self.n_entries is None else self.n_entries
        head = b"GGUF" + u32(self.version) + u64(n_tensors) + u64(n_entries)
        return head + b"".join(self.entries) + b"".join(self.directory)

    def bytes(self) -> bytes:
        head = self.header()
        return head + bytes(-len(head) % self.alignment) + self.data


def sample() -> Gguf:
    """A small file that parses, with every value type and a few tensors."""
    g = Gguf()
    g.add("general.architecture", "string", "qwen3")
    g.add("general.alignment", "u32", 32)
    for kind in SCALARS:
        g.add(f"scalar.{kind}", kind, 1)
        g.add(f"array.{kind}", f"[{kind}]", [0, 1, 1])
    g.add("tokenizer.ggml.tokens", "[string]", ["a", "b", "", "Ġthe", "日本"])
    g.add("nested", "[[u8]]", [[1, 2], [], [3]])
    g.tensor("token_embd.weight", [4, 2], F32, bytes(range(32)))
    g.tensor("blk.0.attn_q.weight", [32, 3], Q8_0, bytes(range(102)))
    g.tensor("blk.0.ffn_down.weight", [256, 1], Q4_K, bytes(144))
    g.tensor("output_norm.weight", [3], F32, bytes(12))
    return g
