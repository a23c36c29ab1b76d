#!/usr/bin/env python3
"""Write a GGUF with the tensor shapes of a real model of a family and random weights: for timing alone.

    tests/bench/synth_families.py VOCAB.gguf OUT.gguf --shape deepseek2-lite [--type Q8_0] [--layers 4]

Needs the gguf package. Blocks are drawn, not quantised, so a file is written at the disk's speed. Only what
`--shape` lists; nothing here is a claim about a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from blocks import random_blocks

Shape = tuple[int, ...]
KEPT = ("tokenizer.",)  # keys taken from the vocabulary's file
F32_PARTS = ("norm", "ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_dt")
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


# name -> (architecture, layers, keys, the layer numbered i)
def family(name: str):
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
    for key, value in keys.items():
        w.add_uint32(f"{arch}.{key}", value)
    w.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    if arch == "qwen35":
        w.add_array(f"{arch}.rope.dimension_sections", [11, 11, 10, 0])
    shapes: dict[str, Shape] = {"token_embd": (n_vocab, d), "output": (n_vocab, d), "output_norm": (d,)}
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{n}": s for n, s in layer(i).items()}
    rng = np.random.default_rng(0)
    for short, shape in shapes.items():
        name = short if short.endswith(("ssm_a", "bias")) else f"{short}.weight"
        if len(shape) > 1 and not any(part in name for part in F32_PARTS):
            w.add_tensor(name, drawn(kind, shape, rng), raw_dtype=kind)
        elif short.endswith("ssm_a"):
            w.add_tensor(name, -rng.uniform(0.02, 1, shape).astype(np.float32))
        elif "norm" in name:
            w.add_tensor(name, rng.uniform(0.9, 1.1, shape).astype(np.float32))
        else:
            w.add_tensor(name, rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
