"""Every weight type in every family: dense matrices, expert stacks, the matrices per head of latent attention
and those of the recurrent layers.

A file in the type is held against the same file in F32, whose weights the gguf package decoded. The F32 path
is what test_logits.py holds against transformers. Weights are random, the files are made in the test.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from reflex_worker._native import Engine, gguf_info

from .conftest import rows
from .references import EXACT_MAX_DIFF, FIXTURES, fixture_path, load, mean_kl
from .rewrite import Key, Tensors, rewrite

sys.path.insert(0, str(FIXTURES.parents[1] / "tools"))
from blocks import encode

# All that pack values into blocks, and the half floats. (Q8_1 and Q8_K hold activations; Q1_0 and Q2_0
# the package does not decode: tests/quant.)
TYPES = sorted(
    (t for t in gguf.GGML_QUANT_SIZES if t.name.startswith(("Q", "IQ", "TQ", "MXFP", "NVFP", "F16", "BF16"))
     and t.name not in ("Q8_1", "Q8_K", "Q1_0", "Q2_0")),
    key=lambda t: t.name,
)  # fmt: skip
SOME_TYPES = ("BF16", "Q8_0", "Q5_1", "Q4_K", "Q6_K", "IQ2_XS", "IQ4_NL", "MXFP4", "NVFP4", "TQ2_0")
D, V = 256, 269  # width, and the vocabulary of the fixtures
E, FF = 3, 256  # experts, and their width
N_TOKENS, FEW = 36, 4
LOGIT_STD = 3.0
# At std 3: what llama.cpp's own 8-bit activations cost (design.md). The median row, since one expert that is
# chosen otherwise moves its row by far more.
FAST_MEDIAN_RMS = 0.18


@dataclass(frozen=True)
class Family:
    """A file of an architecture at a width that every type divides."""

    fixture: str  # lends its keys and vocabulary
    keys: dict[str, Key]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # a layer's matrices and vectors


def attention(gate: int = 1) -> dict[str, tuple[int, ...]]:
    """4 query and 2 key/value heads of 64."""
    return {
        "attn_norm": (D,),
        "attn_q": (gate * 256, D),
        "attn_k": (128, D),
        "attn_v": (128, D),
        "attn_output": (D, 256),
    }


QK_NORM: dict[str, tuple[int, ...]] = {"attn_q_norm": (64,), "attn_k_norm": (64,)}
FFN: dict[str, tuple[int, ...]] = {"ffn_gate": (FF, D), "ffn_up": (FF, D), "ffn_down": (D, FF)}
EXPERTS: dict[str, tuple[int, ...]] = {
    "ffn_gate_inp": (E, D),
    "ffn_gate_exps": (E, FF, D),
    "ffn_up_exps": (E, FF, D),
    "ffn_down_exps": (E, D, FF),
}
SHARED = {f"{n}_shexp": shape for n, shape in FFN.items()}
LATENT: dict[str, tuple[int, ...]] = {  # 2 heads of 256 + 64, values of 128
    "attn_norm": (D,),
    "attn_q_a": (256, D),
    "attn_q_a_norm": (256,),
    "attn_q_b": (2 * 320, 256),
    "attn_kv_a_mqa": (256 + 64, D),
    "attn_kv_a_norm": (256,),
    "attn_output": (D, 256),
}
DELTA: dict[str, tuple[int, ...]] = {  # 2 key heads of 64, 4 value heads of 64
    "attn_norm": (D,),
    "attn_qkv": (512, D),
    "attn_gate": (256, D),
    "ssm_conv1d": (512, 4),
    "ssm_norm": (64,),
    "ssm_out": (D, 256),
    "ssm_a": (4,),
    "ssm_dt.bias": (4,),
}
HEADS: dict[str, Key] = {
    "embedding_length": D,
    "feed_forward_length": FF,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
}
MOE_KEYS: dict[str, Key] = {"expert_count": E, "expert_used_count": 2, "expert_feed_forward_length": FF}
SHARED_KEYS: dict[str, Key] = {"expert_shared_feed_forward_length": FF}
LATENT_KEYS: dict[str, Key] = {
    "embedding_length": D,
    "feed_forward_length": FF,
    "attention.head_count": 2,
    "attention.q_lora_rank": 256,
    "attention.kv_lora_rank": 256,
    "attention.key_length": 320,
    "attention.value_length": 256,
    "attention.key_length_mla": 320,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
    "leading_dense_block_count": 0,
    "expert_shared_count": 1,
    "expert_group_count": None,
    "expert_group_used_count": None,
}
DELTA_KEYS: dict[str, Key] = {
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.state_size": 64,
    "ssm.inner_size": 256,
    "rope.dimension_count": 32,
    "rope.dimension_sections": None,
}


def layers(*each: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"blk.{i}.{n}": shape for i, layer in enumerate(each) for n, shape in layer.items()}


def shapes(*each: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    ends = {"token_embd": (V, D), "output": (V, D), "output_norm": (D,)}
    return ends | layers(*each)


NORM: dict[str, tuple[int, ...]] = {"ffn_norm": (D,)}
POST_NORM: dict[str, tuple[int, ...]] = {"post_attention_norm": (D,)}
GATE_SHEXP: dict[str, tuple[int, ...]] = {"ffn_gate_inp_shexp": (D,)}
BIASES: dict[str, tuple[int, ...]] = {"attn_q.bias": (256,), "attn_k.bias": (128,), "attn_v.bias": (128,)}
SPLIT: dict[str, tuple[int, ...]] = {"attn_k_b": (2, 256, 256), "attn_v_b": (2, 128, 256)}
INDEX: dict[str, tuple[int, ...]] = {  # 4 heads of 64
    "indexer.attn_q_b": (256, 256),
    "indexer.attn_k": (64, D),
    "indexer.k_norm": (64,),
    "indexer.k_norm.bias": (64,),
    "indexer.proj": (4, D),
}
# More than most rows see: the choice is made, and few rows hang on how a type rounds it.
INDEX_KEYS: dict[str, Key] = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 32,
}
S, RANK, ROW = 2, 256, 256  # qwen4exp: streams, their mixes' rank, the width of an n-gram's row
STREAMS: dict[str, tuple[int, ...]] = {
    f"hc_{mixer}_{part}": shape
    for mixer in ("attn", "ffn")
    for part, shape in (
        ("norm", (S * D,)),
        ("down", (RANK, S * D)),
        ("up", (S * D, RANK)),
        ("inject", (S, S * D)),
    )
}
NGRAMS: dict[str, tuple[int, ...]] = {
    "ple_key": (S * D, 3 * ROW),
    "ple_value": (D, 3 * ROW),
    "ple_conv1d": (S * D, 3),
    **{f"ple_norm_{part}": (S * D,) for part in ("key", "query", "conv")},
}
BLOCK_INDEX: dict[str, tuple[int, ...]] = {
    "indexer.q_proj": (256, D),
    "indexer.k_proj": (64, D),
    "indexer.q_norm": (64,),
    "indexer.k_norm": (64,),
}
V4: dict[str, tuple[int, ...]] = {  # 8 heads of 64 in 2 groups, 4 streams
    "attn_norm": (D,),
    "ffn_norm": (D,),
    "attn_q_a": (256, D),
    "attn_q_a_norm": (256,),
    "attn_q_b": (512, 256),
    "attn_kv": (64, D),
    "attn_kv_a_norm": (64,),
    "attn_sinks": (8,),
    "attn_output_a": (256, 256),
    "attn_output_b": (D, 256),
    **{f"hc_{m}_{p}": s for m in ("attn", "ffn")
       for p, s in (("fn", (24, 4 * D)), ("base", (24,)), ("scale", (3,)))},
}  # fmt: skip
V4_ENTRIES: dict[str, tuple[int, ...]] = {  # of 4 tokens each
    f"{prefix}_compressor_{part}": shape
    for prefix in ("attn", "indexer")
    for part, shape in (("kv", (128, D)), ("gate", (128, D)), ("ape", (4, 128)), ("norm", (64,)))
}
HYBRID_FFN = POST_NORM | EXPERTS | SHARED | GATE_SHEXP
FULL = attention(gate=2) | QK_NORM

FAMILIES = {
    "qwen3": Family("qwen3-untied", HEADS | {"block_count": 1}, shapes(attention() | QK_NORM | NORM | FFN)),
    "qwen2moe": Family(
        "qwen2moe",
        HEADS | MOE_KEYS | SHARED_KEYS | {"block_count": 1},
        shapes(attention() | BIASES | NORM | EXPERTS | SHARED | GATE_SHEXP),
    ),
    "qwen3moe": Family(
        "qwen3moe", HEADS | MOE_KEYS | {"block_count": 1}, shapes(attention() | QK_NORM | NORM | EXPERTS)
    ),
    "deepseek": Family(
        "deepseek",
        HEADS
        | MOE_KEYS
        | {"block_count": 1, "leading_dense_block_count": 0, "expert_shared_count": 1}
        | {"rope.dimension_count": 64},
        shapes(attention() | NORM | EXPERTS | SHARED),
    ),
    "deepseek2": Family(
        "deepseek2-v3",
        LATENT_KEYS | MOE_KEYS | {"block_count": 1},
        shapes(LATENT | SPLIT | NORM | EXPERTS | SHARED | {"exp_probs_b.bias": (E,)}),
    ),
    "deepseek2-unsplit": Family(
        "deepseek2-v3",
        LATENT_KEYS | MOE_KEYS | {"block_count": 1},
        shapes(LATENT | {"attn_kv_b": (2 * 384, 256)} | NORM | EXPERTS | SHARED),
    ),
    "qwen35": Family(
        "qwen35",
        HEADS | DELTA_KEYS | {"block_count": 2, "attention.recurrent_layers": [True, False]},
        shapes(DELTA | {"ssm_beta": (4, D), "ssm_alpha": (4, D)} | POST_NORM | FFN, FULL | POST_NORM | FFN),
    ),
    "qwen35moe": Family(
        "qwen35moe",
        HEADS
        | DELTA_KEYS
        | MOE_KEYS
        | SHARED_KEYS
        | {"block_count": 2, "attention.recurrent_layers": [True, False]},
        shapes(DELTA | {"ssm_beta": (4, D), "ssm_alpha": (4, D)} | HYBRID_FFN, FULL | HYBRID_FFN),
    ),
    "qwen3next": Family(
        "qwen3next",
        HEADS
        | DELTA_KEYS
        | MOE_KEYS
        | SHARED_KEYS
        | {"block_count": 2, "attention.recurrent_layers": [True, False]},
        shapes(DELTA | {"ssm_ba": (8, D)} | HYBRID_FFN, FULL | HYBRID_FFN),
    ),
    "deepseek32": Family(
        "deepseek32",
        LATENT_KEYS | MOE_KEYS | INDEX_KEYS | {"block_count": 1},
        shapes(LATENT | SPLIT | INDEX | NORM | EXPERTS | SHARED | {"exp_probs_b.bias": (E,)}),
    ),
    "qwen4exp": Family(
        "qwen4exp-q8_0",
        HEADS
        | DELTA_KEYS
        | MOE_KEYS
        | SHARED_KEYS
        | INDEX_KEYS
        | {"feed_forward_length": None, "hyper_connection.count": S, "hyper_connection.low_rank": RANK}
        | {"embedding_length_per_layer_input": ROW, "block_count": 2},
        {
            **{
                n: s
                for n, s in shapes(FULL | BLOCK_INDEX | STREAMS, DELTA | STREAMS | NGRAMS).items()
                if not n.endswith(("attn_norm", "output_norm")) or "hc_" in n
            },
            **layers(*2 * [EXPERTS | SHARED | GATE_SHEXP]),
            **layers({}, {"ssm_beta": (4, D), "ssm_alpha": (4, D)}),
            "per_layer_token_embd": (176, ROW),
            "output_hc_norm": (S * D,),
            "output_hc_down": (RANK, S * D),
            "output_hc_up": (S * D, RANK),
        },
    ),
    "deepseek4": Family(
        "deepseek4-q8_0",
        MOE_KEYS
        | INDEX_KEYS
        | {"embedding_length": D, "block_count": 2, "hash_layer_count": 0, "attention.indexer.top_k": 8}
        | {"attention.head_count": 8, "attention.key_length": 64, "attention.value_length": 64}
        | {"attention.q_lora_rank": 256, "attention.output_lora_rank": 128}
        | {"attention.output_group_count": 2},
        shapes(
            V4 | EXPERTS | SHARED | {"exp_probs_b.bias": (E,)},
            V4
            | V4_ENTRIES
            | {"indexer.attn_q_b": (256, 256), "indexer.proj": (4, D)}
            | EXPERTS
            | SHARED
            | {"exp_probs_b.bias": (E,)},
        )
        | {"output_hc_fn": (4, 4 * D), "output_hc_base": (4,), "output_hc_scale": (1,)},
    ),
}
# What no converter quantises: vectors, routers, convolutions, places in a block.
ALWAYS_F32 = ("ffn_gate_inp", "conv1d", "_norm", "bias", "ssm_a", "_ape")


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("ssm_a"):
        return -rng.uniform(0.05, 1.0, shape)
    if "norm" in name:
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith("bias"):
        return rng.normal(0, 0.3, shape)
    if "ffn_gate_inp." in name:
        return rng.normal(0, 3 / np.sqrt(D), shape)  # decided routers
    return rng.normal(0, 1 / np.sqrt(shape[-1]), shape)


@cache
def matrix(kind: Type, shape: tuple[int, ...], number: int) -> tuple[np.ndarray, np.ndarray]:
    """The number-th matrix of that shape, in the type and decoded: families share them."""
    rng = np.random.default_rng(number)
    data = encode(rng.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32), kind, rng)
    return data, np.ascontiguousarray(gguf.dequantize(data, kind), np.float32).reshape(shape)


def make(family: Family, kind: Type, folder: Path) -> tuple[Path, Path]:
    """The file with its matrices in the type, and the same in F32."""
    rng = np.random.default_rng(5)
    packed, plain = Tensors(), Tensors()
    numbers: dict[tuple[int, ...], int] = {}
    for short, shape in family.shapes.items():
        name = short if short.endswith(("bias", "ssm_a")) else f"{short}.weight"
        if len(shape) == 1 or any(part in name for part in ALWAYS_F32):
            packed[name] = plain[name] = values(name, shape, rng).astype(np.float32)
            continue
        numbers[shape] = numbers.get(shape, 0) + 1
        packed[name], plain[name] = matrix(kind, shape, numbers[shape])
        if packed[name].dtype == np.uint8:
            packed.kinds[name] = kind

    def use(tensors: Tensors):
        def remake(t: Tensors) -> None:
            t.clear()
            t.update(tensors)
            t.kinds = tensors.kinds

        return remake

    source = fixture_path(family.fixture)
    return (
        rewrite(source, folder / "packed.gguf", keys=family.keys, remake=use(packed)),
        rewrite(source, folder / "plain.gguf", keys=family.keys, remake=use(plain)),
    )


# Every type where the kinds of matrices differ; of the families besides, one type of each kind of block.
CASES = [
    (name, kind)
    for kind in TYPES  # outside, so that the matrices of a type are shared
    for name in FAMILIES
    if name in ("qwen3moe", "deepseek2", "deepseek2-unsplit", "qwen35") or kind.name in SOME_TYPES
]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda x: getattr(x, "name", x))
def test_a_type_gives_what_its_decoded_weights_give(tmp_path, name, kind):
    """Prefill and single tokens, exact and fast."""
    packed, plain = make(FAMILIES[name], kind, tmp_path)
    report = gguf_info(str(packed))
    assert report["runs"], report["error"]
    assert report["tensor_types"][kind.name] == sum(
        len(s) > 1 and not any(part in n for part in ALWAYS_F32) for n, s in FAMILIES[name].shapes.items()
    )
    ids = load("qwen3-tied").ids[:N_TOKENS]
    every = list(range(N_TOKENS))
    want = rows(Engine(str(plain), device="cpu", exact=True, threads=2), ids, every)
    scale = float(want.std()) / LOGIT_STD
    exact = Engine(str(packed), device="cpu", exact=True, threads=2)
    for found, row_ids in (
        (rows(exact, ids, every), every),
        (rows(exact, ids[:FEW], every[:FEW], 1), every[:FEW]),
    ):
        assert float(np.abs(found - want[row_ids]).max()) <= EXACT_MAX_DIFF * scale
    fast = Engine(str(packed), device="cpu", threads=2)
    for found in (rows(fast, ids, every), rows(fast, ids, every, 1)):
        rms = float(np.median(np.sqrt(((found - want) ** 2).mean(-1)))) / scale
        print(f"{name} {kind.name}: median rms {rms:.3f}, KL {mean_kl(want / scale, found / scale):.1e}")
        assert rms <= FAST_MEDIAN_RMS
