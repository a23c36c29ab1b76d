"""transformers checkpoint -> GGUF, for the tiny models of the fixtures.

Owns: names, key names, the row permutation of llama's q and k, llama 3's rope_freqs tensor, tiny
vocabularies, and blocks of every quant type. Refuses: anything of real size (llama.cpp's
convert_hf_to_gguf.py does that); key names and what it leaves out are that script's
(llama.cpp, convert_hf_to_gguf.py and gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek4
import gguf
import hybrid
import numpy as np
import qwen4
import transformers
from blocks import encode
from gguf import GGMLQuantizationType as Type
from reference import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATING_SIGMOID,
    GATING_SOFTMAX,
    GLOBAL_NAMES,
    INDEXER_KEYS,
    LATENT,
    block_names,
    permute_rows,
)

TypePlan = Callable[[str, tuple[int, ...]], Type]
FILE_TYPES = {
    Type.F32: gguf.LlamaFileType.ALL_F32,
    Type.F16: gguf.LlamaFileType.MOSTLY_F16,
    Type.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Type.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    Type.Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M,
    Type.Q5_K: gguf.LlamaFileType.MOSTLY_Q5_K_M,
    Type.Q6_K: gguf.LlamaFileType.MOSTLY_Q6_K,
    Type.IQ4_XS: gguf.LlamaFileType.MOSTLY_IQ4_XS,
}

# ---- vocabularies --------------------------------------------------------------------------

MERGES = ["t h", "Ġ t", "Ġt h", "i n", "e r", "a n", "Ġ a", "o n", "Ġth e", "r e"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECES = ["▁", "▁t", "▁th", "▁the", "he", "in", "er", "an", "▁a", "on", "re", "e", "t", "a", "o", "h", "n"]


def byte_letters() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


def add_bpe_vocabulary(w: gguf.GGUFWriter, pre: str) -> None:
    tokens = [*byte_letters(), *("".join(m.split(" ")) for m in MERGES), *CONTROL]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL)) + [gguf.TokenType.CONTROL] * len(CONTROL)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges(MERGES)
    w.add_eos_token_id(tokens.index("<|im_end|>"))
    w.add_add_bos_token(False)


def add_spm_vocabulary(w: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(PIECES)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(PIECES))])
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_space_prefix(True)


BPE_VOCABULARY_SIZE = 256 + len(MERGES) + len(CONTROL)
SPM_VOCABULARY_SIZE = 259 + len(PIECES)

# ---- keys ----------------------------------------------------------------------------------


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """rope_freqs.weight (head_dim / 2): by what llama 3 divides each frequency.

    Llama 3.1's frequency scaling (transformers, modeling_rope_utils, "llama3"): short waves are
    kept, long ones divided by the factor, those between blended.
    """
    inv = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * inv / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def add_deepseek_keys(w: gguf.GGUFWriter, arch: str, c: transformers.PretrainedConfig, unsplit: bool) -> None:
    """unsplit: as files before April 2025 spell it, that describe the heads and not the absorbed form."""
    w.add_vocab_size(c.vocab_size)
    w.add_leading_dense_block_count(c.first_k_dense_replace)
    w.add_expert_count(c.n_routed_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_weights_scale(c.routed_scaling_factor)
    if arch == "deepseek":
        w.add_rope_dimension_count(c.head_dim)
        return
    nope, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
    w.add_rope_dimension_count(rope)
    w.add_kv_lora_rank(c.kv_lora_rank)
    if c.q_lora_rank is not None:
        w.add_q_lora_rank(c.q_lora_rank)
    if unsplit:
        w.add_key_length(nope + rope)
        w.add_value_length(c.v_head_dim)
    else:
        w.add_key_length(c.kv_lora_rank + rope)
        w.add_value_length(c.kv_lora_rank)
        w.add_key_length_mla(nope + rope)
        w.add_value_length_mla(c.v_head_dim)
        w.add_expert_gating_func(
            gguf.ExpertGatingFuncType(GATING_SOFTMAX if c.model_type == "deepseek_v2" else GATING_SIGMOID)
        )
        w.add_expert_weights_norm(c.norm_topk_prob)
    if arch == "deepseek32":
        for ours, theirs in INDEXER_KEYS.items():
            w.add_uint32(f"{arch}.attention.indexer.{theirs}", getattr(c, f"index_{ours}"))
    if (c.n_group or 1) > 1:
        w.add_expert_group_count(c.n_group)
        w.add_expert_group_used_count(c.topk_group)
    if c.rope_parameters["rope_type"] == "yarn":
        w.add_rope_scaling_yarn_log_mul(0.1 * c.rope_parameters["mscale_all_dim"])


def add_keys(
    w: gguf.GGUFWriter,
    arch: str,
    c: transformers.PretrainedConfig,
    name: str,
    older: bool,
    mtp: bool = False,
) -> None:
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if arch == deepseek4.ARCH:
        deepseek4.add_keys(w, c)
    elif arch.startswith("deepseek"):
        add_deepseek_keys(w, arch, c, older)
    if arch in hybrid.FAMILIES:
        hybrid.add_keys(w, arch, c, older, mtp)
    own_size = head_dim != c.hidden_size // c.num_attention_heads or arch in ("qwen3", "qwen3moe")
    explicit_head = own_size and arch not in (*LATENT, deepseek4.ARCH)
    rope = c.rope_parameters
    rope = rope.get("compress", rope) | {"rope_theta": rope.get("main", rope)["rope_theta"]}
    w.add_name(name)
    w.add_context_length(c.max_position_embeddings)
    w.add_block_count(c.num_hidden_layers + mtp)
    w.add_embedding_length(c.hidden_size)
    if (n_ff := getattr(c, "intermediate_size", None)) is not None and arch != deepseek4.ARCH:
        w.add_feed_forward_length(n_ff)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(1 if arch in LATENT and not older else c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(rope["rope_theta"])
    if explicit_head:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if arch in ("qwen2moe", "qwen3moe"):
        w.add_expert_count(c.num_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if arch == "qwen2moe":
        w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if arch == "llama":
        w.add_vocab_size(c.vocab_size)
        w.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


# ---- the file ------------------------------------------------------------------------------


def split_kv_b(c: transformers.PretrainedConfig, name: str, kv_b: np.ndarray) -> dict[str, np.ndarray]:
    """attn_kv_b (heads * (nope + v), latent) -> attn_k_b (head, latent, nope), attn_v_b (head, v, latent)."""
    heads = kv_b.reshape(c.num_attention_heads, -1, kv_b.shape[-1])
    k, v = np.split(heads, [c.qk_nope_head_dim], axis=1)
    return {name.replace("_kv_b", "_k_b"): k.swapaxes(1, 2), name.replace("_kv_b", "_v_b"): v}


def gguf_tensors(
    arch: str, model: transformers.PreTrainedModel, unsplit: bool = False, mtp: bool = False
) -> dict[str, np.ndarray]:
    """GGUF names -> float32 arrays, in the order and with the rows of llama.cpp's converter."""
    c, out = model.config, dict[str, np.ndarray]()
    state = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    if c.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    if c.rope_parameters.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_divisors(c.rope_parameters, c.head_dim)
    if arch in hybrid.FAMILIES:
        state = hybrid.convert_state(arch, c, state)
    for short, long in GLOBAL_NAMES.items():
        if f"{long}.weight" in state:
            out[f"{short}.weight"] = state[f"{long}.weight"]
    if arch == deepseek4.ARCH:
        out |= deepseek4.tensors(c.num_hidden_layers, state)
    for i in range(c.num_hidden_layers):
        for short, long in ({} if arch == deepseek4.ARCH else block_names(arch)).items():
            for part in ("weight", "bias"):
                data = state.get(f"model.layers.{i}.{long}.{part}")
                if data is None:
                    continue
                if arch in ("llama", "deepseek") and short in ("attn_q", "attn_k"):
                    heads = c.num_attention_heads if short == "attn_q" else c.num_key_value_heads
                    data = permute_rows(data, heads)
                if short == "attn_kv_b" and not unsplit:
                    out |= split_kv_b(c, f"blk.{i}.{short}.{part}", data)
                    continue
                out[f"blk.{i}.{short}.{part}"] = data
        if arch in hybrid.FAMILIES:
            hybrid.finish_block(arch, c, i, state, out)
        if (bias := state.get(f"model.layers.{i}.mlp.gate.e_score_correction_bias")) is not None:
            out[f"blk.{i}.exp_probs_b.bias"] = bias
        if (gate_up := state.get(f"model.layers.{i}.{EXPERT_GATE_UP}")) is not None:
            gate, up = np.split(gate_up, 2, axis=1)
            down = state[f"model.layers.{i}.{EXPERT_DOWN}"]
            out |= {
                f"blk.{i}.ffn_{n}_exps.weight": w for n, w in (("gate", gate), ("up", up), ("down", down))
            }
    if arch == qwen4.ARCH:
        out |= qwen4.tensors(c, state)
    if mtp:
        out |= hybrid.mtp_block(c.num_hidden_layers, out, np.random.default_rng(0))
    return {
        n: np.ascontiguousarray(d, np.int32 if d.dtype == np.int32 else np.float32) for n, d in out.items()
    }


def encode_tensors(
    tensors: dict[str, np.ndarray], plan: TypePlan, seed: int
) -> dict[str, tuple[np.ndarray, Type]]:
    """Bytes and type of each tensor; vectors and routers stay F32 as every converter keeps them."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, data in tensors.items():
        small = data.ndim == 1 or "ffn_gate_inp" in name or "conv1d" in name
        kind = Type.F32 if small or data.dtype == np.int32 else plan(name, data.shape)
        out[name] = (encode(data, kind, rng), kind)
    return out


def write_gguf(
    path: Path,
    arch: str,
    config: transformers.PretrainedConfig,
    vocabulary: str,
    encoded: dict[str, tuple[np.ndarray, Type]],
    older: bool = False,
    mtp: bool = False,
) -> None:
    """Write the file. vocabulary: "spm", or the name of a BPE pre-tokenizer."""
    w = gguf.GGUFWriter(path, arch)
    add_keys(w, arch, config, path.stem, older, mtp)
    # The query's type names the file; a layer without one (recurrent, low-rank query) has an output.
    kinds = {name: kind for name, (_, kind) in encoded.items()}
    kind = kinds.get("blk.0.attn_q.weight") or next(
        k for n, k in kinds.items() if n.endswith(("attn_output.weight", "attn_output_b.weight"))
    )
    w.add_file_type(FILE_TYPES.get(kind, gguf.LlamaFileType.GUESSED))
    if vocabulary == "spm":
        add_spm_vocabulary(w)
    else:
        add_bpe_vocabulary(w, vocabulary)
    for name, (data, kind) in encoded.items():
        w.add_tensor(name, data, raw_dtype=None if kind == Type.F32 else kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
