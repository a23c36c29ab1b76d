"""What a file must hold, architecture by architecture: each tensor that is missing, of a wrong shape or of a
wrong type is named with what was expected, by loading and by `reflex info` alike, before any weight is read.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import pytest

from reflex_worker._native import Engine, ReflexError, gguf_info

from .references import fixture_path

# One file of each architecture; both spellings of latent attention, with and without a low-rank query.
FILES = (
    "llama3",
    "qwen2-untied",
    "qwen3-untied",
    "qwen2moe",
    "qwen3moe",
    "deepseek",
    "deepseek2-lite",
    "deepseek2-unsplit",
    "deepseek2-v3",
    "qwen35",
    "qwen35moe",
    "qwen3next",
)
# Without these a file means something else and runs: a tied head, no scaling, a router without a bias.
MAY_BE_ABSENT = re.compile(r"output\.weight|rope_freqs\.weight|blk\.\d+\.exp_probs_b\.bias")
F16, I32 = 1, 26  # ggml type ids; I32 has the size of F32


@dataclass(frozen=True)
class Entry:
    """A tensor's place in the directory of a file's bytes."""

    name: str
    at: int  # of the name's first byte
    shape: list[int]

    @property
    def dims_at(self) -> int:
        return self.at + len(self.name) + 4

    @property
    def type_at(self) -> int:
        return self.dims_at + 8 * len(self.shape)


@cache
def directory(name: str) -> tuple[bytes, list[Entry]]:
    """A fixture's bytes and its tensors of the first and last layer and of none."""
    data = fixture_path(name).read_bytes()
    tensors = gguf.GGUFReader(fixture_path(name)).tensors
    layers = {t.name.split(".")[1] for t in tensors if t.name.startswith("blk.")}
    kept = (f"blk.{min(layers, key=int)}.", f"blk.{max(layers, key=int)}.")
    entries = []
    for t in tensors:
        if t.name.startswith("blk.") and not t.name.startswith(kept):
            continue
        marked = struct.pack("<Q", len(t.name)) + t.name.encode() + struct.pack("<I", len(t.shape))
        assert data.count(marked) == 1
        entries.append(Entry(t.name, data.index(marked) + 8, [int(n) for n in t.shape]))
    return data, entries


def written(path: Path, data: bytes, at: int, patch: bytes) -> str:
    path.write_bytes(data[:at] + patch + data[at + len(patch) :])
    return str(path)


def refusal(path: str) -> tuple[str, str]:
    """Kind and message of what loading raises; info must say the same."""
    with pytest.raises(ReflexError) as e:
        Engine(path, device="cpu", threads=1)
    report = gguf_info(path)
    assert (report["runs"], report["error_kind"], report["error"]) == (False, e.value.kind, str(e.value))
    return e.value.kind, str(e.value)


def text_of(shape: list[int]) -> str:
    if len(shape) == 2 and shape[1] == 1:  # one row and a vector are told alike
        shape = shape[:1]
    return re.escape("[" + ", ".join(map(str, shape)) + "]")


@pytest.mark.parametrize("name", FILES)
def test_each_missing_tensor_is_named_with_its_shape(tmp_path, name):
    data, entries = directory(name)
    path = tmp_path / "changed.gguf"
    for e in entries:
        changed = written(path, data, e.at + len(e.name) - 1, b"?")
        if MAY_BE_ABSENT.fullmatch(e.name):
            assert gguf_info(changed)["runs"], e.name
            continue
        kind, message = refusal(changed)
        assert kind == "gguf"
        if e.name == "token_embd.weight":
            assert "tensor 'token_embd.weight' is missing" in message
        else:
            want = rf"tensor '{re.escape(e.name)}' is missing \(expected shape {text_of(e.shape)}\)"
            assert re.search(want, message), message


@pytest.mark.parametrize("name", FILES)
def test_each_wrong_shape_is_named_with_both(tmp_path, name):
    data, entries = directory(name)
    path = tmp_path / "changed.gguf"
    for e in entries:
        found = [*e.shape[1::-1], *e.shape[2:]]  # the two dimensions the other way round: as many bytes
        if found == e.shape:
            found = [e.shape[0] - 1, *e.shape[1:]]
        patch = struct.pack(f"<{len(found)}Q", *found)
        kind, message = refusal(written(path, data, e.dims_at, patch))
        assert kind == "gguf"
        if e.name == "token_embd.weight":  # its rows are the vocabulary: what is wrong is their length
            assert re.search(r"'token_embd\.weight': expected shape \[\d+, \d+\]", message), message
        else:
            want = rf"tensor '{re.escape(e.name)}': expected shape {text_of(e.shape)}, found {text_of(found)}"
            assert re.search(want, message), message


@pytest.mark.parametrize("name", FILES)
def test_each_wrong_type_is_named(tmp_path, name):
    data, entries = directory(name)
    path = tmp_path / "changed.gguf"
    for e in entries:
        kind, message = refusal(written(path, data, e.type_at, struct.pack("<I", I32)))
        assert kind == "unsupported"
        assert f"'{e.name}'" in message and "I32" in message, message
        if len(e.shape) == 1:
            kind, message = refusal(written(path, data, e.type_at, struct.pack("<I", F16)))
            assert kind == "unsupported"
            assert f"tensor '{e.name}': expected type F32, found F16" in message


@pytest.mark.parametrize("name", FILES)
def test_an_unknown_architecture_is_named_among_those_known(tmp_path, name):
    data, _ = directory(name)
    arch = gguf_info(str(fixture_path(name)))["architecture"]
    at = data.index(arch.encode(), data.index(b"general.architecture") + len("general.architecture"))
    unknown = "x" + arch[1:]
    kind, message = refusal(written(tmp_path / "changed.gguf", data, at, unknown.encode()))
    assert kind == "unsupported_architecture"
    assert f"'{unknown}' is not supported (known: " in message
    assert re.search(rf"\b{arch}\b", message.partition("known: ")[2])


@pytest.mark.parametrize("name", FILES)
def test_info_says_that_the_file_itself_runs(name):
    report = gguf_info(str(fixture_path(name)))
    assert report["runs"] and report["error"] == "" and report["tokenizer_known"], report
