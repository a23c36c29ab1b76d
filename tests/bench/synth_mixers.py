"""Write a GGUF of a hybrid's or an MLA mixture's real shapes with random Q8_0 weights, for cuda_bench.

    python tests/bench/synth_mixers.py OUT.gguf [--shape qwen35-4b | deepseek2-lite] [--layers N]

Only for timing: the blocks repeat, there is no tokenizer, the text is noise. Needs gguf and numpy.
"""

from __future__ import annotations

import argparse

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

VOCAB = {"qwen35-4b": 151936, "deepseek2-lite": 102400}
LAYERS = {"qwen35-4b": 32, "deepseek2-lite": 27}
POOL_BLOCKS = 1 << 20
BLOCK_BYTES, BLOCK_VALUES = 34, 32
BYTE_STD = 74  # of a uniform int8


class Writer:
    """A GGUFWriter with random matrices cut from one pool of blocks."""

    def __init__(self, path: str, arch: str) -> None:
        self.w, self.arch = GGUFWriter(path, arch), arch
        self.rng = np.random.default_rng(0)
        self.pool = self.rng.integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)

    def keys(self, **values: object) -> None:
        for name, value in values.items():
            key = f"{self.arch}.{name.replace('__', '.')}"
            if isinstance(value, bool):
                self.w.add_bool(key, value)
            elif isinstance(value, int):
                self.w.add_uint32(key, value)
            else:
                self.w.add_float32(key, float(value))  # type: ignore[arg-type]

    def matrix(self, name: str, n_out: int, n_in: int, members: int = 0) -> None:
        """(n_out, n_in), or `members` of them; values of about 1 / sqrt(n_in)."""
        n = n_out * max(members, 1) * n_in // BLOCK_VALUES
        blocks = np.resize(self.pool, (n, BLOCK_BYTES))
        blocks[:, :2] = np.full((1,), n_in**-0.5 / BYTE_STD, np.float16).view(np.uint8)
        shape = (members, n_out, -1) if members else (n_out, -1)
        self.w.add_tensor(name, blocks.reshape(shape), raw_dtype=GGMLQuantizationType.Q8_0)

    def floats(self, name: str, shape: tuple[int, ...], center: float, std: float = 0.05) -> None:
        x = center + std * self.rng.standard_normal(shape, np.float32)
        self.w.add_tensor(name, x.astype(np.float32))

    def close(self) -> None:
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def common(w: Writer, layers: int, d: int, heads: int, kv: int, ff: int, vocab: int) -> None:
    w.keys(
        context_length=8192,
        block_count=layers,
        embedding_length=d,
        feed_forward_length=ff,
        attention__head_count=heads,
        attention__head_count_kv=kv,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1e6,
    )
    w.matrix("token_embd.weight", vocab, d)
    w.matrix("output.weight", vocab, d)
    w.floats("output_norm.weight", (d,), 1)


def dense_ffn(w: Writer, p: str, d: int, ff: int, suffix: str = "") -> None:
    w.matrix(f"{p}ffn_gate{suffix}.weight", ff, d)
    w.matrix(f"{p}ffn_up{suffix}.weight", ff, d)
    w.matrix(f"{p}ffn_down{suffix}.weight", d, ff)


def qwen35(path: str, layers: int, vocab: int) -> None:
    d, heads, kv, hd, ff = 2560, 16, 4, 256, 9216
    keys, values, dim, taps = 16, 32, 128, 4
    inner, channels = values * dim, (2 * keys + values) * dim
    w = Writer(path, "qwen35")
    common(w, layers, d, heads, kv, ff, vocab)
    w.keys(
        attention__key_length=hd,
        attention__value_length=hd,
        rope__dimension_count=64,
        full_attention_interval=4,
        ssm__conv_kernel=taps,
        ssm__state_size=dim,
        ssm__group_count=keys,
        ssm__time_step_rank=values,
        ssm__inner_size=inner,
    )
    for i in range(layers):
        p = f"blk.{i}."
        w.floats(p + "attn_norm.weight", (d,), 1)
        w.floats(p + "post_attention_norm.weight", (d,), 1)
        dense_ffn(w, p, d, ff)
        if (i + 1) % 4 == 0:
            w.matrix(p + "attn_q.weight", 2 * heads * hd, d)
            w.matrix(p + "attn_k.weight", kv * hd, d)
            w.matrix(p + "attn_v.weight", kv * hd, d)
            w.matrix(p + "attn_output.weight", d, heads * hd)
            w.floats(p + "attn_q_norm.weight", (hd,), 1)
            w.floats(p + "attn_k_norm.weight", (hd,), 1)
            continue
        w.matrix(p + "attn_qkv.weight", channels, d)
        w.matrix(p + "attn_gate.weight", inner, d)
        w.matrix(p + "ssm_beta.weight", values, d)
        w.matrix(p + "ssm_alpha.weight", values, d)
        w.matrix(p + "ssm_out.weight", d, inner)
        w.floats(p + "ssm_conv1d.weight", (channels, taps), 0.25)
        w.floats(p + "ssm_norm.weight", (dim,), 1)
        w.floats(p + "ssm_a", (values,), -0.3)
        w.floats(p + "ssm_dt.bias", (values,), 0)
    w.close()


def deepseek2_lite(path: str, layers: int, vocab: int) -> None:
    d, heads, ff, latent, nope, rope, v_dim = 2048, 16, 10944, 512, 128, 64, 128
    experts, used, shared, expert_ff = 64, 6, 2, 1408
    w = Writer(path, "deepseek2")
    common(w, layers, d, heads, 1, ff, vocab)
    w.keys(
        leading_dense_block_count=1,
        expert_count=experts,
        expert_used_count=used,
        expert_shared_count=shared,
        expert_feed_forward_length=expert_ff,
        expert_gating_func=1,
        rope__dimension_count=rope,
        attention__kv_lora_rank=latent,
        attention__key_length=latent + rope,
        attention__value_length=latent,
        attention__key_length_mla=nope + rope,
        attention__value_length_mla=v_dim,
    )
    for i in range(layers):
        p = f"blk.{i}."
        w.floats(p + "attn_norm.weight", (d,), 1)
        w.floats(p + "ffn_norm.weight", (d,), 1)
        w.matrix(p + "attn_q.weight", heads * (nope + rope), d)
        w.matrix(p + "attn_kv_a_mqa.weight", latent + rope, d)
        w.floats(p + "attn_kv_a_norm.weight", (latent,), 1)
        w.matrix(p + "attn_k_b.weight", latent, nope, heads)
        w.matrix(p + "attn_v_b.weight", v_dim, latent, heads)
        w.matrix(p + "attn_output.weight", d, heads * v_dim)
        if i == 0:
            dense_ffn(w, p, d, ff)
            continue
        w.floats(p + "ffn_gate_inp.weight", (experts, d), 0, d**-0.5)
        dense_ffn(w, p, d, shared * expert_ff, "_shexp")
        w.matrix(p + "ffn_gate_exps.weight", expert_ff, d, experts)
        w.matrix(p + "ffn_up_exps.weight", expert_ff, d, experts)
        w.matrix(p + "ffn_down_exps.weight", d, expert_ff, experts)
    w.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--shape", default="qwen35-4b", choices=LAYERS)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=0)
    a = parser.parse_args()
    write = qwen35 if a.shape == "qwen35-4b" else deepseek2_lite
    write(a.out, a.layers or LAYERS[a.shape], a.vocab or VOCAB[a.shape])


if __name__ == "__main__":
    main()
