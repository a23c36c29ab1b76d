#!/usr/bin/env python3
"""Write a GGUF with the tensor shapes of a real model of a family and random weights: for timing alone.

    tests/bench/synth_families.py VOCAB.gguf OUT.gguf --shape deepseek2-lite [--type Q8_0] [--layers 4]

Needs the gguf package. Blocks are drawn, not quantised, so a file is written at the disk's speed. Only what
`--shape` lists; nothing here is a claim about a checkpoint. deepseek32 has widths of V3.2, few of its layers
and experts; deepseek4 and qwen4exp have the structure of their families at widths of the same order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from blocks import random_blocks

Shape = tuple[int, ...]
# architecture, layers, width, keys, the layer numbered i
Family = tuple[str, int, int, dict[str, Any], Callable[[int], dict[str, Shape]]]


class U64(list[int]):
    """An array of a key that is stored in 64 bits."""


KEPT = ("tokenizer.",)  # keys taken from the vocabulary's file
F32_PARTS = ("norm", "ffn_gate_inp", "ssm_conv1d", "ple_conv1d", "ssm_a", "ssm_dt", "ape")
PLAIN = {Type.Q8_0: (0, 74.0), Type.Q4_0: (0, 4.6)}  # where a block's scale is, and the std of what it scales


def ffn(d: int, ff: int, suffix: str = "") -> dict[str, Shape]:
    return {f"ffn_gate{suffix}": (ff, d), f"ffn_up{suffix}": (ff, d), f"ffn_down{suffix}": (d, ff)}


def experts(d: int, n: int, ff: int) -> dict[str, Shape]:
    stacks = {f"{name}_exps": (n, *shape) for name, shape in ffn(d, ff).items()}
    return {"ffn_gate_inp": (n, d), **stacks}


def attention(d: int, heads: int, kv: int, hd: int, gate: int = 1) -> dict[str, Shape]:
    return {
        "attn_q": (gate * heads * hd, d),
        "attn_k": (kv * hd, d),
        "attn_v": (kv * hd, d),
        "attn_output": (d, heads * hd),
        "attn_q_norm": (hd,),
        "attn_k_norm": (hd,),
    }


def delta(d: int, keys: int, values: int, n: int, fused: bool) -> dict[str, Shape]:
    channels = 2 * keys * n + values * n
    gates: dict[str, Shape] = (
        {"ssm_ba": (2 * values, d)} if fused else {"ssm_beta": (values, d), "ssm_alpha": (values, d)}
    )
    return {
        "attn_qkv": (channels, d),
        "attn_gate": (values * n, d),
        "ssm_conv1d": (channels, 4),
        "ssm_norm": (n,),
        "ssm_out": (d, values * n),
        "ssm_a": (values,),
        "ssm_dt.bias": (values,),
        **gates,
    }


def latent(d: int, heads: int, kv: int, nope: int, rope: int, v: int) -> dict[str, Shape]:
    return {
        "attn_q": (heads * (nope + rope), d),
        "attn_kv_a_mqa": (kv + rope, d),
        "attn_kv_a_norm": (kv,),
        "attn_k_b": (heads, kv, nope),
        "attn_v_b": (heads, v, kv),
        "attn_output": (d, heads * v),
    }


def heads(n: int, kv: int, size: int) -> dict[str, int]:
    return {
        "attention.head_count": n,
        "attention.head_count_kv": kv,
        "attention.key_length": size,
        "attention.value_length": size,
    }


def ssm(keys: int, values: int, n: int) -> dict[str, int]:
    return {
        "ssm.group_count": keys,
        "ssm.time_step_rank": values,
        "ssm.state_size": n,
        "ssm.inner_size": values * n,
        "ssm.conv_kernel": 4,
        "full_attention_interval": 4,
        "rope.dimension_count": 64,
    }


def moe(n: int, used: int, ff: int) -> dict[str, int]:
    return {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": ff}


def norms(d: int, second: str = "ffn_norm") -> dict[str, Shape]:
    return {"attn_norm": (d,), second: (d,)}


def indexer(q: int, d: int, n: int, size: int) -> dict[str, Shape]:
    return {"indexer.attn_q_b": (n * size, q), "indexer.proj": (n, d)}


def index_keys(n: int, size: int, top_k: int) -> dict[str, int]:
    name = "attention.indexer"
    return {f"{name}.head_count": n, f"{name}.key_length": size, f"{name}.top_k": top_k}


def deepseek32() -> Family:
    """V3.2's widths; 3 of its 61 layers, 16 of its 256 experts."""
    d, q, kv, n = 7168, 1536, 512, 128
    attend = latent(d, n, kv, 128, 64, 128) | {
        "attn_q_a": (q, d),
        "attn_q_a_norm": (q,),
        "attn_q_b": (n * 192, q),
        "indexer.attn_k": (128, d),
        "indexer.k_norm": (128,),
        "indexer.k_norm.bias": (128,),
    }
    del attend["attn_q"]
    attend |= norms(d) | indexer(q, d, 64, 128)
    mixture = experts(d, 16, 2048) | ffn(d, 2048, "_shexp") | {"exp_probs_b.bias": (16,)}
    keys = heads(n, 1, kv + 64) | moe(16, 8, 2048) | index_keys(64, 128, 2048)
    keys |= {
        "attention.value_length": kv,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.kv_lora_rank": kv,
        "attention.q_lora_rank": q,
        "rope.dimension_count": 64,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
        "feed_forward_length": 18432,
    }
    return "deepseek32", 3, d, keys, lambda i: attend | (mixture if i else ffn(d, 18432))


def deepseek4() -> Family:
    """Every kind of layer (window alone, entries of 4 and of 128 tokens) twice."""
    d, q, n, head, lora, groups, streams = 4096, 1024, 64, 512, 1024, 8, 4
    ratios = [0, 4, 128, 4, 128, 0]
    mixing = {f"hc_{part}_fn": (6 * streams, streams * d) for part in ("attn", "ffn")}
    mixing |= {f"hc_{part}_base": (6 * streams,) for part in ("attn", "ffn")}
    mixing |= {f"hc_{part}_scale": (3,) for part in ("attn", "ffn")}
    every = norms(d) | mixing | experts(d, 16, 2048) | ffn(d, 2048, "_shexp")
    every |= {
        "attn_q_a": (q, d),
        "attn_q_a_norm": (q,),
        "attn_q_b": (n * head, q),
        "attn_kv": (head, d),
        "attn_kv_a_norm": (head,),
        "attn_sinks": (n,),
        "attn_output_a": (groups * lora, n * head // groups),
        "attn_output_b": (d, groups * lora),
    }

    def compressor(name: str, size: int, ratio: int) -> dict[str, Shape]:
        width = size * (2 if ratio == 4 else 1)
        return {
            f"{name}_compressor_kv": (width, d),
            f"{name}_compressor_gate": (width, d),
            f"{name}_compressor_norm": (size,),
            f"{name}_compressor_ape": (ratio, width),
        }

    def layer(i: int) -> dict[str, Shape]:
        own = dict(every)
        ratio = ratios[i % len(ratios)]
        own["ffn_gate_tid2eid" if i == 0 else "exp_probs_b.bias"] = (0, 6) if i == 0 else (16,)
        if ratio:
            own |= compressor("attn", head, ratio)
        if ratio == 4:
            own |= compressor("indexer", 128, 4) | indexer(q, d, 64, 128)
        return own

    keys = heads(n, 1, head) | moe(16, 6, 2048) | index_keys(64, 128, 512)
    keys |= {
        "rope.dimension_count": 64,
        "attention.q_lora_rank": q,
        "attention.output_lora_rank": lora,
        "attention.output_group_count": groups,
        "attention.sliding_window": 128,
        "attention.compress_ratios": ratios,
        "attention.compress_rope_freq_base": 160000.0,
        "hyper_connection.count": streams,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [10.0] * len(ratios),
        "swiglu_clamp_shexp": [10.0] * len(ratios),
        "rope.freq_base": 10000.0,
    }
    return "deepseek4", len(ratios), d, keys, layer


def qwen4exp() -> Family:
    """qwen3next's widths in two streams, one layer of four full, blocks of 4 tokens, one table of n-grams."""
    d, streams, rank, row, n_grams, per_gram = 2048, 2, 256, 512, 3, 2
    recurrent_layers = [i % 4 != 3 for i in range(8)]
    vocab_sizes = [100003, 100019, 100043, 100049]  # a prime for each head
    mixing: dict[str, Shape] = {}
    for part in ("attn", "ffn"):
        mixing |= {
            f"hc_{part}_norm": (streams * d,),
            f"hc_{part}_down": (rank, streams * d),
            f"hc_{part}_up": (streams * d, rank),
            f"hc_{part}_inject": (streams, streams * d),
        }
    every = mixing | experts(d, 64, 512) | ffn(d, 512, "_shexp") | {"ffn_gate_inp_shexp": (1, d)}
    full = every | attention(d, 16, 2, 256, gate=2)
    full |= {
        "indexer.q_proj": (16 * 128, d),
        "indexer.k_proj": (128, d),
        "indexer.q_norm": (128,),
        "indexer.k_norm": (128,),
    }
    recurrent = every | delta(d, 16, 32, 128, False)
    width = row * (n_grams - 1) * per_gram
    grams = {
        "ple_key": (streams * d, width),
        "ple_value": (d, width),
        "ple_norm_key": (streams * d,),
        "ple_norm_query": (streams * d,),
        "ple_norm_conv": (streams * d,),
        "ple_conv1d": (streams * d, 4),
    }
    keys = heads(16, 2, 256) | ssm(16, 32, 128) | moe(64, 10, 512) | index_keys(16, 128, 2048)
    del keys["full_attention_interval"]
    offsets = [sum(vocab_sizes[:i]) for i in range(len(vocab_sizes))]
    keys |= {
        "expert_shared_feed_forward_length": 512,
        "attention.recurrent_layers": recurrent_layers,
        "attention.compress_ratios": [0 if r else 4 for r in recurrent_layers],
        "rope.dimension_sections": [11, 11, 10, 0],
        "hyper_connection.count": streams,
        "hyper_connection.low_rank": rank,
        "embedding_length_per_layer_input": row,
        "ple.layers": [1],
        "ple.layer_multipliers": U64([32555665101663481, 16971441978345125, 15669043164179543]),
        "ple.head_vocab_sizes": U64(vocab_sizes),
        "ple.head_offsets": U64(offsets),
        "ple.ngram_size": n_grams,
        "ple.heads_per_ngram": per_gram,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 151645,
    }
    return "qwen4exp", 8, d, keys, lambda i: (recurrent | (grams if i == 1 else {})) if i % 4 != 3 else full


def family(name: str) -> Family:
    if name in ("deepseek32", "deepseek4", "qwen4exp"):
        return {"deepseek32": deepseek32, "deepseek4": deepseek4, "qwen4exp": qwen4exp}[name]()
    if name == "deepseek2-lite":  # DeepSeek-V2-Lite, all layers mixtures
        d = 2048
        layer = norms(d) | latent(d, 16, 512, 128, 64, 128) | experts(d, 64, 1408) | ffn(d, 2816, "_shexp")
        keys = heads(16, 1, 576) | moe(64, 6, 1408) | {
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "attention.kv_lora_rank": 512,
            "rope.dimension_count": 64,
            "expert_shared_count": 2,
        }  # fmt: skip
        return "deepseek2", 26, d, keys, lambda _: layer
    if name == "qwen35-4b":  # the widths of Qwen3.5-4B
        d, ff = 2560, 9216
        recurrent = norms(d, "post_attention_norm") | delta(d, 16, 32, 128, False) | ffn(d, ff)
        full = norms(d, "post_attention_norm") | attention(d, 16, 4, 256, gate=2) | ffn(d, ff)
        keys = heads(16, 4, 256) | ssm(16, 32, 128) | {"feed_forward_length": ff}
        return "qwen35", 32, d, keys, lambda i: full if i % 4 == 3 else recurrent
    if name == "qwen3next-80b-a3b":
        d = 2048
        mixture = experts(d, 512, 512) | ffn(d, 512, "_shexp") | {"ffn_gate_inp_shexp": (d,)}
        recurrent = norms(d, "post_attention_norm") | delta(d, 16, 32, 128, True) | mixture
        full = norms(d, "post_attention_norm") | attention(d, 16, 2, 256, gate=2) | mixture
        keys = heads(16, 2, 256) | ssm(16, 32, 128) | moe(512, 10, 512)
        keys |= {"expert_shared_feed_forward_length": 512}
        return "qwen3next", 48, d, keys, lambda i: full if i % 4 == 3 else recurrent
    raise SystemExit(f"unknown shape {name}")


def drawn(kind: Type, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a matrix or stack, values of about std 1/sqrt(row length)."""
    n_rows, width = int(np.prod(shape[:-1])), shape[-1]
    if kind not in PLAIN:
        return random_blocks(kind, n_rows, width, width**-0.5, rng).reshape(*shape[:-1], -1)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    at, spread = PLAIN[kind]
    raw = rng.integers(0, 256, (n_rows * width // per_block, size), dtype=np.uint8)
    scales = (rng.uniform(0.8, 1.2, len(raw)) * width**-0.5 / spread).astype(np.float16)
    raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw.reshape(*shape[:-1], -1)


def add_keys(w: gguf.GGUFWriter, arch: str, keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        name = f"{arch}.{key}"
        if isinstance(value, U64):
            w.add_key_value(name, list(value), gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT64)
        elif isinstance(value, list):
            w.add_array(name, value)
        elif isinstance(value, bool):
            w.add_bool(name, value)
        elif isinstance(value, float):
            w.add_float32(name, value)
        else:
            w.add_uint32(name, value)


def rest_of(arch: str, n_vocab: int, d: int, keys: dict[str, Any]) -> dict[str, Shape]:
    """What belongs to no layer."""
    shapes: dict[str, Shape] = {"token_embd": (n_vocab, d), "output": (n_vocab, d), "output_norm": (d,)}
    streams = keys.get("hyper_connection.count", 0)
    if arch == "deepseek4":
        shapes |= {
            "output_hc_fn": (streams, streams * d),
            "output_hc_base": (streams,),
            "output_hc_scale": (1,),
        }
    if arch == "qwen4exp":
        rank = keys["hyper_connection.low_rank"]
        del shapes["output_norm"]
        shapes |= {
            "output_hc_norm": (streams * d,),
            "output_hc_down": (rank, streams * d),
            "output_hc_up": (streams * d, rank),
            "per_layer_token_embd": (
                sum(keys["ple.head_vocab_sizes"]),
                keys["embedding_length_per_layer_input"],
            ),
        }
    return shapes


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("vocab", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--shape", required=True)
    ap.add_argument("--type", default="Q8_0")
    ap.add_argument("--layers", type=int, default=0, help="fewer than the model has, to fit memory")
    a = ap.parse_args()
    arch, n_layers, d, keys, layer = family(a.shape)
    n_layers, kind = a.layers or n_layers, Type[a.type]
    w = gguf.GGUFWriter(a.out, arch)
    vocabulary = gguf.GGUFReader(a.vocab)
    for name, f in vocabulary.fields.items():
        if name.startswith(KEPT):
            sub = f.types[-1] if f.types[0] == gguf.GGUFValueType.ARRAY else None
            w.add_key_value(name, f.contents(), f.types[0], sub_type=sub)
    n_vocab = len(vocabulary.fields["tokenizer.ggml.tokens"].contents())
    keys |= {"block_count": n_layers, "embedding_length": d, "context_length": 32768}
    if arch == "qwen35":
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    add_keys(w, arch, keys | {"attention.layer_norm_rms_epsilon": 1e-6})
    shapes = rest_of(arch, n_vocab, d, keys)
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{n}": s for n, s in layer(i).items()}
    rng = np.random.default_rng(0)
    for short, shape in shapes.items():
        width = shape[-1]
        name = short if short.endswith(("ssm_a", "bias")) else f"{short}.weight"
        if short.endswith("ffn_gate_tid2eid"):  # experts by token, whatever the shape says of tokens
            chosen = rng.integers(0, keys["expert_count"], (n_vocab, width)).astype(np.int32)
            w.add_tensor(name, chosen)
        elif len(shape) > 1 and not any(part in name for part in F32_PARTS):
            w.add_tensor(name, drawn(kind, shape, rng), raw_dtype=kind)
        elif short.endswith("ssm_a"):
            w.add_tensor(name, -rng.uniform(0.02, 1, shape).astype(np.float32))
        elif "norm" in name:
            w.add_tensor(name, rng.uniform(0.9, 1.1, shape).astype(np.float32))
        else:
            w.add_tensor(name, rng.normal(0, width**-0.5, shape).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
