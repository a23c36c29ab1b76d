"""qwen4exp's conventions one by one: each key and tensor counts, what a file leaves out means what it must,
what cannot be right is refused by name; and of the n-gram table only the rows that are looked up are read.

test_recurrent.py holds the values against transformers; here a file is changed and the engine must notice.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError, gguf_info

from .conftest import rows
from .references import EXACT_MAX_DIFF, fixture_path, load
from .rewrite import Change, Key, Tensors, rewrite
from .test_mixtures import exact_logits
from .test_system1 import KINDS, check, run

# Layers: dense attention; recurrent with n-grams; attention over 4 chosen blocks of 5 tokens.
NAME = "qwen4exp"
EOS, RATIO = 7, 5
TABLE_ROWS = 1 << 22  # of the large table: 128 MiB


def zero(w: np.ndarray) -> np.ndarray:
    return np.zeros_like(w)


def one(w: np.ndarray) -> np.ndarray:
    return np.ones_like(w)


def backwards(w: np.ndarray) -> np.ndarray:
    return w[::-1]


def columns_backwards(w: np.ndarray) -> np.ndarray:
    return w[..., ::-1]


def key(name: str) -> list[int]:
    reader = gguf.GGUFReader(fixture_path(NAME))
    return [int(v) for v in reader.fields[f"qwen4exp.{name}"].contents()]


COUNTING: list[tuple[dict[str, Key], dict[str, Change]]] = [
    ({"attention.compress_ratios": [0, 0, 0]}, {}),
    ({"attention.compress_ratios": [0, 0, 4]}, {}),
    ({"attention.indexer.top_k": 15}, {}),
    ({"ple.eos_token_id": 268}, {}),  # that of the tokenizer
    ({"ple.layer_multipliers": key("ple.layer_multipliers")[::-1]}, {}),
    ({"ple.layer_multipliers": [m % (1 << 32) for m in key("ple.layer_multipliers")]}, {}),
    ({"ple.head_vocab_sizes": key("ple.head_vocab_sizes")[::-1]}, {}),
    ({"ple.head_offsets": key("ple.head_offsets")[::-1]}, {}),
    ({"ple.layers": None}, {}),
    ({"expert_weights_norm": False}, {}),
    *(
        ({}, {f"hc_{m}_{p}": columns_backwards})
        for m in ("attn", "ffn")
        for p in ("norm", "down", "up", "inject")
    ),
    *(({}, {f"output_hc_{p}": columns_backwards}) for p in ("norm", "down", "up")),
    *(({}, {f"indexer.{p}_proj": backwards}) for p in "qk"),
    *(({}, {f"indexer.{p}_norm": one}) for p in "qk"),
    ({}, {"per_layer_token_embd": backwards}),
    *(({}, {f"ple_{p}": columns_backwards}) for p in ("key", "value", "conv1d")),
    *(({}, {f"ple_norm_{p}": one}) for p in ("key", "query", "conv")),
]


@pytest.mark.parametrize(("keys", "change"), COUNTING)
def test_each_key_and_tensor_counts(tmp_path, keys, change):
    changed = rewrite(fixture_path(NAME), tmp_path / "changed.gguf", keys=keys, change=change)
    moved = float(np.abs(exact_logits(changed, NAME) - load(NAME).logits).max())
    print(f"{keys} {[*change]}: logits move by {moved:.1e}")
    assert moved > EXACT_MAX_DIFF


SAME: list[tuple[dict[str, Key], dict[str, Key]]] = [
    # No ratios: all attention is dense. So is it where every block may be chosen.
    ({"attention.compress_ratios": None}, {"attention.compress_ratios": [0, 0, 0]}),
    ({"attention.compress_ratios": None}, {"attention.indexer.top_k": 1000}),
    # One more for a block that predicts further tokens, and one on a recurrent layer: nobody asks.
    ({"attention.compress_ratios": [0, 0, 5, 0]}, {}),
    ({"attention.compress_ratios": [0, 5, 5]}, {}),
    ({"attention.indexer.top_k": 24}, {}),  # whole blocks only
    ({"nextn_predict_layers": 1, "block_count": 4}, {}),  # of that block not even the tensors need be there
    ({"expert_weights_norm": True}, {}),  # written out, it says what its absence says
]


@pytest.mark.parametrize(("keys", "others"), SAME)
def test_keys_that_say_the_same(tmp_path, keys, others):
    paths = [
        rewrite(fixture_path(NAME), tmp_path / f"{i}.gguf", keys=k) for i, k in enumerate((keys, others))
    ]
    found = [exact_logits(p, NAME) for p in paths]
    assert np.abs(found[0] - found[1]).max() <= EXACT_MAX_DIFF / 10


def test_without_an_ngram_layer_nothing_is_added(tmp_path):
    """No ple.layers is as if every n-gram had the value 0."""
    without = rewrite(fixture_path(NAME), tmp_path / "without.gguf", keys={"ple.layers": None})
    zeros = rewrite(fixture_path(NAME), tmp_path / "zeros.gguf", change={"ple_value": zero})
    assert np.abs(exact_logits(without, NAME) - exact_logits(zeros, NAME)).max() <= EXACT_MAX_DIFF / 10


def test_without_output_weight_the_embedding_is_the_head(tmp_path):
    tied = rewrite(fixture_path(NAME), tmp_path / "tied.gguf", drop=["^output.weight"])
    embedding = next(t for t in gguf.GGUFReader(tied).tensors if t.name == "token_embd.weight").data
    untied = rewrite(
        fixture_path(NAME), tmp_path / "untied.gguf", change={"^output.weight": lambda _: embedding}
    )
    assert (exact_logits(tied, NAME) == exact_logits(untied, NAME)).all()


REFUSED: list[tuple[dict[str, Key], str]] = [
    ({"hyper_connection.count": None}, "hyper_connection.count"),
    ({"hyper_connection.count": 4}, r"hc_attn_norm.*\[128\].*\[96\]"),
    ({"hyper_connection.low_rank": 15}, r"hc_attn_down.*\[96, 15\].*\[96, 14\]"),
    ({"attention.compress_ratios": [0, 5]}, "compress_ratios.*3 layers.*2"),
    ({"attention.indexer.head_count": None}, "attention.indexer.head_count"),
    ({"attention.indexer.key_length": 4}, "attention.indexer.key_length.*6.*4"),
    ({"attention.indexer.top_k": 4}, "attention.indexer.top_k.*5.*4"),
    ({"ple.layers": [3]}, "ple.layers.*3.*3"),
    ({"ple.ngram_size": 1}, "ple.ngram_size.*2.*1"),
    ({"ple.heads_per_ngram": 3}, "ple.head_vocab_sizes.*6.*4"),
    ({"ple.conv_kernel": 1}, "ple.conv_kernel.*2.*1"),
    ({"ple.conv_kernel": 5}, r"ple_conv1d.*\[5, 96\].*\[4, 96\]"),
    ({"ple.eos_token_id": None}, "ple.eos_token_id"),
    ({"ple.layer_multipliers": [1, 3]}, "ple.layer_multipliers.*3.*2"),
    ({"embedding_length_per_layer_input": 9}, r"per_layer_token_embd.*\[9, "),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_impossible_keys_are_refused_by_name(tmp_path, keys, message):
    changed = rewrite(fixture_path(NAME), tmp_path / "changed.gguf", keys=keys)
    with pytest.raises(ReflexError, match=message) as error:
        Engine(str(changed), device="cpu")
    assert error.value.kind == "gguf"


def test_a_head_past_the_end_of_the_table_is_refused_before_any_row_is_read(tmp_path):
    offsets = key("ple.head_offsets")
    changed = rewrite(
        fixture_path(NAME), tmp_path / "changed.gguf", keys={"ple.head_offsets": [*offsets[:3], 1 << 40]}
    )
    with pytest.raises(ReflexError, match=r"NgramEmbed.*head 3.*per_layer_token_embd") as error:
        Engine(str(changed), device="cpu")
    assert error.value.kind == "unsupported"


def test_two_ngram_layers_are_refused_as_what_they_are(tmp_path):
    changed = rewrite(fixture_path(NAME), tmp_path / "changed.gguf", keys={"ple.layers": [0, 1]})
    report = gguf_info(str(changed))
    assert not report["runs"]
    assert report["error_kind"] == "unsupported_architecture"
    assert "ple.layers" in report["error"]


def test_fused_gate_and_up_experts_are_refused_as_what_they_are(tmp_path):
    def fuse(tensors: Tensors) -> None:
        for i in range(3):
            halves = [tensors.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)

    report = gguf_info(str(rewrite(fixture_path(NAME), tmp_path / "fused.gguf", remake=fuse)))
    assert not report["runs"]
    assert report["error_kind"] == "unsupported_architecture"
    assert "blk.0.ffn_gate_up_exps.weight" in report["error"]
    assert "blk.0.ffn_gate_exps.weight" in report["error"]


TENSORS = ("hc_attn_down", "hc_ffn_inject", "indexer.q_norm", "ple_value", "ple_norm_conv", "ssm_out")
GLOBAL = ("output_hc_up.weight", "per_layer_token_embd.weight")


@pytest.mark.parametrize(
    "tensor", [*(f"blk.{2 if 'indexer' in t else 1}.{t}.weight" for t in TENSORS), *GLOBAL]
)
def test_a_missing_tensor_is_named_with_its_shape(tmp_path, tensor):
    changed = rewrite(fixture_path(NAME), tmp_path / "changed.gguf", drop=[tensor])
    report = gguf_info(str(changed))
    assert not report["runs"]
    assert f"'{tensor}' is missing (expected shape [" in report["error"]


@pytest.mark.parametrize("name", ["qwen4exp", "qwen4exp-q8_0"])
def test_info_says_that_it_runs(name):
    report = gguf_info(str(fixture_path(name)))
    assert report["runs"], report["error"]


# ---- choices and histories -----------------------------------------------------------------


@pytest.mark.parametrize("length", [24, 25, 26, 29, 30, 31, 70, 130])
def test_last_row_alone_is_that_of_all_rows(engine, length):
    """The last layer chooses for output rows only."""
    ref, e = load(NAME), engine(NAME)
    whole = rows(e, ref.ids[:length], list(range(length)))
    assert np.abs(rows(e, ref.ids[:length], [length - 1]) - whole[-1:]).max() <= EXACT_MAX_DIFF / 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_length", [24, 25, 28, 29, 63])
def test_blocks_that_begin_in_the_prompt_end_on_each_branch(engine, prompt_length, kind):
    """Candidates that share all but their last tokens, around the ends of blocks, an eos among them."""
    ref, e = load(NAME), engine(NAME, chunk=33)
    rng = np.random.default_rng(prompt_length)
    stem = rng.integers(0, 250, 3 * RATIO).tolist()
    stem[4] = EOS
    candidates = [
        [*stem[:n], *rng.integers(0, 250, m).tolist()] for n in range(3 * RATIO) for m in (1, 2, RATIO)
    ]
    prompt = ref.ids[:prompt_length]
    check(run(e, prompt, candidates, score=kind), engine(NAME), prompt, candidates, kind, EXACT_MAX_DIFF)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["qwen4exp", "qwen4exp-q8_0"])
def test_a_long_request_after_a_longer_one_gives_the_bits_of_a_fresh_engine(engine, name, exact):
    """Long enough to choose blocks: the slots hold other rows' keys from before."""
    ref = load(name)
    used = engine(name, exact=exact)
    used.logits(ref.ids, [256])
    run(used, ref.ids[:61], [ref.ids[100:140], ref.ids[100:120], [3]])
    fresh = Engine(str(fixture_path(name)), device="cpu", exact=exact, threads=2)
    assert used.logits(ref.ids[9:99], [0, 30, 89]) == fresh.logits(ref.ids[9:99], [0, 30, 89])


# ---- the table -----------------------------------------------------------------------------


def with_large_table(path: Path) -> Path:
    """The fixture with a table of TABLE_ROWS rows, a hole in the file but for its first ones; its heads reach
    to its end."""
    sizes = [TABLE_ROWS // 4 - 1] * 4
    reader = gguf.GGUFReader(fixture_path(NAME))
    w = gguf.GGUFWriter(path, NAME)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        value = sizes if name.endswith("head_vocab_sizes") else value
        value = [i * (TABLE_ROWS // 4) for i in range(4)] if name.endswith("head_offsets") else value
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        w.add_key_value(name, value, kind, sub_type=sub)
    last = "per_layer_token_embd.weight"
    for t in [*(t for t in reader.tensors if t.name != last)]:
        w.add_tensor(t.name, t.data)
    w.add_tensor_info(last, (TABLE_ROWS, 8), np.dtype(np.float32), TABLE_ROWS * 32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    out = w.fout[0]
    w.write_padding(out, out.tell())
    for t in [*(t for t in reader.tensors if t.name != last)]:
        t.data.tofile(out)
        w.write_padding(out, t.data.nbytes)
    out.truncate(out.tell() + TABLE_ROWS * 32)
    w.close()
    return path


def resident_bytes(path: Path) -> int:
    """Of this process's mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_of_a_table_larger_than_all_else_only_the_rows_looked_up_are_read(tmp_path):
    path = with_large_table(tmp_path / "large.gguf")
    others = fixture_path(NAME).stat().st_size
    e = Engine(str(path), device="cpu", threads=2)
    ids = load(NAME).ids[:64]
    assert np.isfinite(rows(e, ids, [63])).all()
    touched, looked_up = resident_bytes(path), 4 * len(ids)
    print(f"{touched:,} bytes of {path.stat().st_size:,} are mapped in")
    assert others / 2 < touched <= others + 3 * looked_up * mmap.PAGESIZE
    assert os.stat(path).st_size > 100 * others
