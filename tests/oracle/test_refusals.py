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
import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError, gguf_info

from .references import fixture_path
from .rewrite import Key, read_tensors, rewrite

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
    "qwen4exp",
    "deepseek32",
    "deepseek4",
)
# Without these a file means something else and runs (test_conventions.py): a tied head, no scaling, a router
# without a bias.
MAY_BE_ABSENT = re.compile(r"output\.weight|rope_freqs\.weight|blk\.\d+\.exp_probs_b\.bias")
MANY_KINDS = ("qwen4exp", "deepseek4")  # of layers
F32, F16, I32 = 0, 1, 26  # ggml type ids; I32 has the size of F32
OF_IDS = "ffn_gate_tid2eid"  # the one kind of tensor that holds integers
TABLE_ROWS = 138  # of the n-grams' table that qwen4exp's keys reach; the file's has a few more


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
    """A fixture's bytes and its tensors: of the first and last layer and of none, and of every layer where
    those are of many kinds."""
    data = fixture_path(name).read_bytes()
    tensors = gguf.GGUFReader(fixture_path(name)).tensors
    layers = {t.name.split(".")[1] for t in tensors if t.name.startswith("blk.")}
    ends = {min(layers, key=int), max(layers, key=int)}
    kept = tuple(f"blk.{i}." for i in (layers if name in MANY_KINDS else ends))
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


def expected(e: Entry) -> list[int]:
    """The shape that a message asks for."""
    return [e.shape[0], TABLE_ROWS] if e.name == "per_layer_token_embd.weight" else e.shape


@pytest.mark.parametrize("name", FILES)
def test_each_missing_tensor_is_named_with_its_shape(tmp_path, name):
    data, entries = directory(name)
    path = tmp_path / "changed.gguf"
    for e in entries:
        changed = written(path, data, e.at + len(e.name) - 1, b"?")
        kind, message = refusal(changed)
        if MAY_BE_ABSENT.fullmatch(e.name):  # it is there by another name, which nobody knows
            assert kind == "unsupported_architecture" and f"'{e.name[:-1]}?'" in message, message
            continue
        assert kind == "gguf"
        if e.name == "token_embd.weight":
            assert "tensor 'token_embd.weight' is missing" in message
        else:
            of = "I32 of shape" if OF_IDS in e.name else "shape"
            want = rf"tensor '{re.escape(e.name)}' is missing \(expected {of} {text_of(expected(e))}\)"
            assert re.search(want, message), message


@pytest.mark.parametrize("name", FILES)
def test_each_wrong_shape_is_named_with_both(tmp_path, name):
    data, entries = directory(name)
    path = tmp_path / "changed.gguf"
    for e in entries:
        found = [*e.shape[1::-1], *e.shape[2:]]  # the two dimensions the other way round: as many bytes
        if found == e.shape:
            found = [e.shape[0] - 1 or 2, *e.shape[1:]]
        patch = struct.pack(f"<{len(found)}Q", *found)
        kind, message = refusal(written(path, data, e.dims_at, patch))
        assert kind == "gguf"
        if e.name == "token_embd.weight":  # its rows are the vocabulary: what is wrong is their length
            assert re.search(r"'token_embd\.weight': expected shape \[\d+, \d+\]", message), message
        else:
            of, but = ("I32 of shape", "I32 of shape ") if OF_IDS in e.name else ("shape", "")
            said = rf"expected {of} {text_of(expected(e))}, found {but}{text_of(found)}"
            want = rf"tensor '{re.escape(e.name)}': {said}"
            assert re.search(want, message), message


@pytest.mark.parametrize("name", FILES)
def test_each_wrong_type_is_named(tmp_path, name):
    data, entries = directory(name)
    path = tmp_path / "changed.gguf"
    for e in entries:
        if OF_IDS in e.name:
            kind, message = refusal(written(path, data, e.type_at, struct.pack("<I", F32)))
            assert kind == "gguf"
            assert f"tensor '{e.name}': expected I32 of shape" in message and "found F32" in message, message
            continue
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


# ---- what a file has beyond what is computed -----------------------------------------------


@pytest.mark.parametrize("extra", ["blk.0.attn_sub_norm.weight", "blk.1.ffn_up.bias", "cls.output.weight"])
@pytest.mark.parametrize("name", FILES)
def test_a_tensor_that_no_step_reads_is_named(tmp_path, name, extra):
    """It used to be passed over, and the logits were another model's."""
    ones = np.ones(8, np.float32)
    path = rewrite(fixture_path(name), tmp_path / "changed.gguf", remake=lambda t: t.__setitem__(extra, ones))
    kind, message = refusal(str(path))
    assert kind == "unsupported_architecture"
    assert message.startswith(f"tensor '{extra}': not one that ")


def test_what_a_block_behind_the_last_layer_holds_is_nobodys_business(tmp_path):
    extra = "blk.3.nextn.shared_head_norm.weight"
    path = rewrite(
        fixture_path("qwen35-mtp"),
        tmp_path / "changed.gguf",
        remake=lambda t: t.__setitem__(extra, np.ones(40, np.float32)),
    )
    assert gguf_info(str(path))["runs"]


def test_a_latent_layer_may_hold_both_spellings(tmp_path):
    """attn_kv_b whole and split: the whole one is read."""
    split = {n: t for n, t in read_tensors(fixture_path("deepseek2-lite")).items() if "_b." in n}
    assert len(split) == 4
    path = rewrite(
        fixture_path("deepseek2-unsplit"), tmp_path / "both.gguf", remake=lambda t: t.update(split)
    )
    ids = list(range(9))
    engines = [Engine(str(p), device="cpu", threads=1) for p in (path, fixture_path("deepseek2-unsplit"))]
    assert engines[0].logits(ids, [8]) == engines[1].logits(ids, [8])


NOT_COMPUTED: list[tuple[str, str, Key]] = [
    ("qwen2-tied", "attention.causal", False),
    ("llama3", "attn_logit_softcapping", 50.0),
    ("llama3", "final_logit_softcapping", 30.0),
    ("llama3", "logit_scale", 0.5),
    ("llama3", "embedding_scale", 12.0),
    ("llama3", "residual_scale", 0.22),
    ("llama3", "attention.clamp_kqv", 8.0),
    ("llama3", "attention.max_alibi_bias", 8.0),
    ("deepseek2-v3", "attention.temperature_scale", 0.1),
    ("qwen3moe", "expert_gating_func", 2),
    ("qwen3moe", "expert_group_count", 2),
    ("deepseek", "expert_gating_func", 2),
]


@pytest.mark.parametrize(("name", "key", "value"), NOT_COMPUTED)
def test_a_key_that_asks_for_what_is_not_computed_is_named(tmp_path, name, key, value):
    path = rewrite(fixture_path(name), tmp_path / "changed.gguf", keys={key: value})
    kind, message = refusal(str(path))
    assert kind == "unsupported_architecture"
    assert f".{key}': expected " in message and "found " in message, message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", True),
        ("attn_logit_softcapping", 0.0),
        ("logit_scale", 1.0),
        ("residual_scale", 0.0),
        ("pooling_type", 3),  # how a sequence's embedding is made: no logit's business
    ],
)
def test_the_same_keys_may_say_nothing(tmp_path, key, value):
    path = rewrite(fixture_path("llama3"), tmp_path / "changed.gguf", keys={key: value})
    ids = list(range(9))
    engines = [Engine(str(p), device="cpu", threads=1) for p in (path, fixture_path("llama3"))]
    assert engines[0].logits(ids, [8]) == engines[1].logits(ids, [8])


def test_an_adapter_is_no_model(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "adapter.gguf", "qwen3")
    w.add_type("adapter")
    w.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 8), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    kind, message = refusal(str(tmp_path / "adapter.gguf"))
    assert kind == "gguf"
    assert "'general.type': expected 'model', found 'adapter'" in message
