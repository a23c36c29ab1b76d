"""What good files say, against our own writer, the `gguf` package's and real vocabularies."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .writer import F32, Gguf, sample

FLOATS = st.floats(width=32, allow_nan=False)


def values(file) -> dict:
    return {v["key"]: v["value"] for v in file.metadata()}


def test_every_value_type_reads_back(testing):
    file = testing.gguf_parse(sample().bytes())
    got = values(file)
    for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "bool"):
        assert got[f"scalar.{kind}"] == 1
        assert got[f"array.{kind}"] == [0, 1, 1]
    assert got["tokenizer.ggml.tokens"] == [b"a", b"b", b"", "Ġthe".encode(), "日本".encode()]
    assert got["nested"] is None  # opaque
    assert all(v["found"] for v in file.metadata())
    assert all(t["found"] for t in file.tensors())
    assert not file.has_key("scalar") and not file.has_tensor("token_embd")


def test_order_is_the_files(testing):
    g = Gguf()
    names = [f"k{i * 7 % 50}" for i in range(50)]
    for name in names:
        g.add(name, "u8", 1).tensor(name, [8], F32, bytes(32))
    file = testing.gguf_parse(g.bytes())
    assert [v["key"] for v in file.metadata()] == names
    assert [t["name"] for t in file.tensors()] == names


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment_places_the_data(testing, alignment):
    g = Gguf(alignment=alignment).add("general.alignment", "u32", alignment)
    g.tensor("a", [3], F32, b"aaaabbbbcccc").tensor("b", [1], F32, b"dddd")
    tensors = testing.gguf_parse(g.bytes()).tensors()
    assert [t["data"] for t in tensors] == [b"aaaabbbbcccc", b"dddd"]
    assert all(t["offset"] % alignment == 0 for t in tensors)


def test_trailing_bytes_and_gaps_between_tensors_are_allowed(testing):
    g = Gguf().entry("b", [1], F32, 96).entry("a", [1], F32, 0)
    g.data = bytes(96) + b"dddd" + bytes(1000)
    assert [t["data"] for t in testing.gguf_parse(g.bytes()).tensors()] == [b"dddd", bytes(4)]


def test_a_file_may_end_with_its_header(testing):
    """Vocabulary files have no tensors and no padding."""
    g = Gguf().add("general.architecture", "string", "qwen2")
    assert testing.gguf_parse(g.header()).require_string("general.architecture") == b"qwen2"


def test_reads_what_the_gguf_package_writes(testing, tmp_path):
    path = tmp_path / "written.gguf"
    w = gguf.GGUFWriter(path, "qwen3")
    w.add_name("tiny")
    w.add_block_count(2)
    w.add_rope_freq_base(1e6)
    w.add_bool("flag", True)
    w.add_int64("negative", -(2**40))
    w.add_float64("double", 1e-300)
    w.add_token_list(["<unk>", "é", "日本"])
    w.add_token_scores([-1.0, 0.5, 2.0])
    w.add_array("bools", [True, False])
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": (rng.standard_normal((3, 64)).astype(np.float32), gguf.GGMLQuantizationType.F32),
        "blk.0.attn_q.weight": (
            rng.standard_normal((8, 64)).astype(np.float32),
            gguf.GGMLQuantizationType.Q8_0,
        ),
        "blk.0.ffn_up_exps.weight": (
            rng.standard_normal((2, 3, 64)).astype(np.float32),
            gguf.GGMLQuantizationType.Q4_0,
        ),
        "output_norm.weight": (rng.standard_normal(64).astype(np.float16), gguf.GGMLQuantizationType.F16),
    }
    for name, (a, kind) in tensors.items():
        data = (
            a
            if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
            else gguf.quantize(a, kind)
        )
        w.add_tensor(name, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()

    file = testing.gguf_open(str(path))
    assert file.require_string("general.architecture") == b"qwen3"
    assert file.require_uint("qwen3.block_count") == 2
    assert file.require_float("qwen3.rope.freq_base") == 1e6
    assert file.get_bool("flag") is True
    assert values(file)["negative"] == -(2**40)
    assert file.require_float("double") == 1e-300
    assert file.strings("tokenizer.ggml.tokens") == [b"<unk>", "é".encode(), "日本".encode()]
    assert file.require_array("tokenizer.ggml.scores") == [-1.0, 0.5, 2.0]
    assert file.require_array("bools") == [1, 0]
    reader = gguf.GGUFReader(path)
    assert [t["name"] for t in file.tensors()] == [t.name for t in reader.tensors]
    for ours, theirs in zip(file.tensors(), reader.tensors, strict=True):
        assert ours["type"] == theirs.tensor_type.name
        assert ours["shape"] == list(theirs.shape)
        assert (ours["offset"], ours["nbytes"]) == (theirs.data_offset, theirs.n_bytes)
        assert ours["data"] == theirs.data.tobytes()


KINDS = {
    "u8": st.integers(0, 2**8 - 1),
    "i8": st.integers(-(2**7), 2**7 - 1),
    "u16": st.integers(0, 2**16 - 1),
    "i16": st.integers(-(2**15), 2**15 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "u64": st.integers(0, 2**64 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f32": FLOATS,
    "f64": st.floats(allow_nan=False),
    "bool": st.integers(0, 1),
    "string": st.text().map(str.encode),
}
ENTRIES = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: (
        st.tuples(st.just(kind), KINDS[kind]) | st.tuples(st.just(f"[{kind}]"), st.lists(KINDS[kind]))
    )
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(entries=st.dictionaries(st.text(min_size=1), ENTRIES, max_size=20))
def test_any_metadata_reads_back(testing, entries):
    g = Gguf()
    for key, (kind, value) in entries.items():
        g.add(key, kind, value)
    file = testing.gguf_parse(g.bytes())
    assert values(file) == {key: value for key, (_, value) in entries.items()}
    for key, (kind, value) in entries.items():
        if kind[0] in "ui":
            if value >= 0:
                assert file.require_uint(key) == value
            else:
                with pytest.raises(testing.Error):
                    file.require_uint(key)


@pytest.mark.parametrize("model, n_tokens", [("qwen2", 151936), ("deepseek-llm", 102400)])
def test_real_vocabulary(testing, shared: Path, model, n_tokens):
    file = testing.gguf_open(str(shared / f"vocab/ggml-vocab-{model}.gguf"))
    assert file.require_string("tokenizer.ggml.model") == b"gpt2"
    tokens = file.strings("tokenizer.ggml.tokens")
    assert len(tokens) == len(file.require_array("tokenizer.ggml.token_type")) == n_tokens
    # Merges join two tokens into a third.
    known = set(tokens)
    assert all(m.replace(b" ", b"") in known for m in file.strings("tokenizer.ggml.merges")[:1000])
