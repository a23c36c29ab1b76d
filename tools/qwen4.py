"""Qwen4-Exp (qwen4exp: Qwen3.8-Flash-Next) between transformers and GGUF, both ways, on top of hybrid.py.

Owns: the names and keys of its streams, n-gram embeddings and index of blocks (llama.cpp,
src/llama-arch.cpp: norms with their 1 added, layers counted from 0, hash constants as u64 arrays), and layers
whose attention is dense, which transformers has no word for. Refuses: what it shares with qwen35moe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
import transformers
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

if TYPE_CHECKING:
    from reference import Checkpoint

ARCH = "qwen4exp"
MIXER_PARTS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
NAMES = {
    **{f"hc_attn_{k}": f"attn_hyper_connection.{v}" for k, v in MIXER_PARTS.items()},
    **{f"hc_ffn_{k}": f"mlp_hyper_connection.{v}" for k, v in MIXER_PARTS.items()},
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    "ple_norm_key": "ple.norm_key",
    "ple_norm_query": "ple.norm_query",
    "ple_norm_conv": "ple.norm_conv",
    "ple_conv1d": "ple.conv1d",
}
ABSENT = ("attn_norm", "post_attention_norm")  # of qwen35's names
OUTPUT_MIXER = {
    f"output_hc_{k}.weight": f"model.hyper_connection_mixer.{v}.weight"
    for k, v in MIXER_PARTS.items()
    if k != "inject"
}
TABLE = "per_layer_token_embd.weight"
HASH = {
    "ple.layer_multipliers": "layer_multipliers",
    "ple.head_vocab_sizes": "ngram_heads_vocab_sizes",
    "ple.head_offsets": "ngram_heads_offsets",
}


def centred(name: str) -> bool:
    """Whether a norm's weight, by either name, lies around 0 in transformers and around 1 in the file."""
    own = name.endswith(("ple.norm_key.weight", "ple.norm_query.weight", "ple.norm_conv.weight"))
    return own or ".ple_norm_" in name


# ---- models --------------------------------------------------------------------------------


class DenseIndexer(torch.nn.Module):
    """In the indexer's place where a full layer has no compression: everything is seen."""

    def forward(self, hidden: torch.Tensor, _: Any, mask: torch.Tensor, __: Any) -> torch.Tensor:
        return torch.ones(hidden.shape[0], 1, *mask.shape[-2:], dtype=torch.bool)


def make_model(shape: dict[str, Any]) -> transformers.PreTrainedModel:
    """shape: of the configuration, with `compress_ratios` besides: one per layer, 0 for dense attention."""
    own = {k: v for k, v in shape.items() if k != "compress_ratios"}
    config = transformers.Qwen4ExpTextConfig(**own, output_gate_type="sigmoid")
    config.compress_ratios, config.hash_constants = shape["compress_ratios"], {}
    model = modeling.Qwen4ExpForCausalLM(config).float().eval()
    for layer, ratio in zip(model.model.layers, config.compress_ratios, strict=True):
        if layer.layer_type != "linear_attention" and ratio == 0:
            layer.self_attn.indexer = DenseIndexer()
        if layer.ple is not None:
            config.hash_constants = {
                key: getattr(layer.ple.ple_embedding, name).tolist() for key, name in HASH.items()
            }
    return model


# ---- transformers -> GGUF ------------------------------------------------------------------


def add_keys(w: gguf.GGUFWriter, c: transformers.PretrainedConfig) -> None:
    def array(key: str, values: list[int], kind: gguf.GGUFValueType) -> None:
        w.add_key_value(f"{ARCH}.{key}", values, gguf.GGUFValueType.ARRAY, sub_type=kind)

    numbers = {
        "hyper_connection.count": c.hc_count,
        "hyper_connection.low_rank": c.hc_lowrank,
        "attention.indexer.head_count": c.indexer_n_heads,
        "attention.indexer.key_length": c.indexer_head_dim,
        "attention.indexer.top_k": c.indexer_budget,
    }
    array("attention.compress_ratios", c.compress_ratios, gguf.GGUFValueType.INT32)
    if c.ple_layer_ids:
        heads = (c.ngram_size - 1) * c.heads_per_ngram
        numbers |= {
            "ple.ngram_size": c.ngram_size,
            "ple.heads_per_ngram": c.heads_per_ngram,
            "ple.conv_kernel": c.ple_conv_kernel_size,
            "ple.eos_token_id": c.eos_token_id,
            "embedding_length_per_layer_input": c.ple_embed_dim // heads,
        }
        array("ple.layers", [i - 1 for i in c.ple_layer_ids], gguf.GGUFValueType.UINT32)
        for key, values in c.hash_constants.items():
            array(key, values, gguf.GGUFValueType.UINT64)
    for key, number in numbers.items():
        w.add_uint32(f"{ARCH}.{key}", number)


def tensors(c: transformers.PretrainedConfig, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those that no rule renames, from a state with the norms' 1 added already."""
    out = {name: state[own] for name, own in OUTPUT_MIXER.items()}
    for i in range(c.num_hidden_layers):
        qk = state.get(f"model.layers.{i}.self_attn.indexer.index_qk_proj.weight")
        if qk is not None:
            q, k = np.split(qk, [c.indexer_n_heads * c.indexer_head_dim])
            out |= {f"blk.{i}.indexer.q_proj.weight": q, f"blk.{i}.indexer.k_proj.weight": k}
    for i in c.ple_layer_ids:
        out[TABLE] = state[f"model.layers.{i - 1}.ple.ple_embedding.ngram_embedding.weight"]
    return out


# ---- GGUF -> transformers ------------------------------------------------------------------


def shape(c: Checkpoint) -> dict[str, Any]:
    ratios = list(c.get("attention.compress_ratios"))
    out = {
        "hc_count": c.get("hyper_connection.count"),
        "hc_lowrank": c.get("hyper_connection.low_rank"),
        "indexer_n_heads": c.get("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": c.get("attention.indexer.key_length"),
        "indexer_budget": c.get("attention.indexer.top_k"),
        "indexer_compress_ratio": max(ratios),
        "compress_ratios": ratios,
    }
    layers = c.get("ple.layers", [])
    if len(layers) == 0:
        return out
    return out | {
        "ple_layer_ids": [int(i) + 1 for i in layers],
        "ple_embed_dim": c.tensors[f"blk.{layers[0]}.ple_value.weight"].shape[1],
        "ple_conv_kernel_size": c.get("ple.conv_kernel"),
        "ngram_size": c.get("ple.ngram_size"),
        "heads_per_ngram": c.get("ple.heads_per_ngram"),
        "ngram_vocab_size_base": 2,  # the hash and the table's size come from the file
        "eos_token_id": c.get("ple.eos_token_id"),
    }


def state_name(c: Checkpoint, name: str) -> str | None:
    """transformers' name of a tensor that no rule renames."""
    if name == TABLE:
        return f"model.layers.{c.get('ple.layers')[0]}.ple.ple_embedding.ngram_embedding.weight"
    return OUTPUT_MIXER.get(name)


def join_projections(c: Checkpoint) -> dict[str, np.ndarray]:
    """Takes the indexers' q_proj and k_proj out of c.tensors; returns them as transformers has them."""
    out = {}
    for i in range(c.get("block_count")):
        parts = [c.tensors.pop(f"blk.{i}.indexer.{p}_proj.weight", None) for p in "qk"]
        if parts[0] is not None and parts[1] is not None:
            out[f"model.layers.{i}.self_attn.indexer.index_qk_proj.weight"] = np.concatenate(parts)
    return out


def set_hash(c: Checkpoint, model: transformers.PreTrainedModel) -> None:
    """The file's hash constants, and a table of its size, in the place of those transformers worked out."""
    for i in c.get("ple.layers", []):
        embedding = model.model.layers[i].ple.ple_embedding
        for key, name in HASH.items():
            values = np.array(c.get(key), np.uint64).astype(np.int64)
            setattr(embedding, name, torch.nn.Buffer(torch.from_numpy(values), persistent=False))
        embedding.ngram_embedding = torch.nn.Embedding(*c.tensors[TABLE].shape)
