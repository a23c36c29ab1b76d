"""DeepSeek-V4 between transformers and GGUF, both ways.

Owns: its key and tensor names (llama.cpp, convert_hf_to_gguf.py) and the configuration that a file's keys
describe. Refuses: what it shares with other families (reference.py, convert_tiny.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import gguf
    import transformers
    from reference import Checkpoint

ARCH = "deepseek4"
GATING_SQRT_SOFTPLUS = 4
RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
KINDS = {ratio: kind for kind, ratio in RATIOS.items()}
DEFAULT_ROPE = {"rope_type": "default"}

# GGUF name inside a block, ".weight" left out -> transformers name inside a layer, whole.
COMPRESSOR = {
    "kv": "kv_proj.weight",
    "gate": "gate_proj.weight",
    "norm": "kv_norm.weight",
    "ape": "position_bias",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn_q_a": "self_attn.q_a_proj.weight",
    "attn_q_a_norm": "self_attn.q_a_norm.weight",
    "attn_q_b": "self_attn.q_b_proj.weight",
    "attn_kv": "self_attn.kv_proj.weight",
    "attn_kv_a_norm": "self_attn.kv_norm.weight",
    "attn_sinks": "self_attn.sinks",
    "attn_output_a": "self_attn.o_a_proj.weight",
    "attn_output_b": "self_attn.o_b_proj.weight",
    **{f"attn_compressor_{k}": f"self_attn.compressor.{v}" for k, v in COMPRESSOR.items()},
    **{f"indexer_compressor_{k}": f"self_attn.compressor.indexer.{v}" for k, v in COMPRESSOR.items()},
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    **{f"hc_{part}_{k}": f"{part}_hc.{k}" for part in ("attn", "ffn") for k in ("fn", "base", "scale")},
    "ffn_gate_inp": "mlp.gate.weight",
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
    **{f"ffn_{k}_shexp": f"mlp.shared_experts.{k}_proj.weight" for k in ("gate", "up", "down")},
}
GLOBAL_NAMES = {f"output_hc_{k}": f"model.hc_head.hc_{k}" for k in ("fn", "base", "scale")}


def hf_name(name: str) -> str | None:
    """`blk.3.attn_kv.weight` -> `model.layers.3.self_attn.kv_proj.weight`; None: as in other families."""
    short = name.removesuffix(".weight")
    if short in GLOBAL_NAMES:
        return GLOBAL_NAMES[short]
    parts = short.split(".", 2)
    if parts[0] != "blk" or parts[2] not in BLOCK_NAMES:
        return None
    return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}"


def tensors(n_layers: int, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What only this family has, under GGUF names. Expert ids stay integers."""
    out = {f"{k}.weight": state[v] for k, v in GLOBAL_NAMES.items()}
    for i in range(n_layers):
        for short, long in BLOCK_NAMES.items():
            if (data := state.get(f"model.layers.{i}.{long}")) is not None:
                out[f"blk.{i}.{short}.weight"] = data.astype(np.int32) if "tid2eid" in short else data
    return out


def add_keys(w: gguf.GGUFWriter, c: transformers.PretrainedConfig) -> None:
    def u32(key: str, value: int) -> None:
        w.add_uint32(f"{ARCH}.{key}", value)

    n = c.num_hidden_layers
    compress = c.rope_parameters["compress"]
    w.add_vocab_size(c.vocab_size)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_dimension_count(c.qk_rope_head_dim)
    w.add_q_lora_rank(c.q_lora_rank)
    u32("attention.output_lora_rank", c.o_lora_rank)
    u32("attention.output_group_count", c.o_groups)
    u32("attention.sliding_window", c.sliding_window)
    # One value more than there are layers, as files with an MTP block have it.
    w.add_array(f"{ARCH}.attention.compress_ratios", [*(RATIOS[k] for k in c.layer_types), 0])
    w.add_float32(f"{ARCH}.attention.compress_rope_freq_base", compress["rope_theta"])
    u32("attention.indexer.head_count", c.index_n_heads)
    u32("attention.indexer.key_length", c.index_head_dim)
    u32("attention.indexer.top_k", c.index_topk)
    u32("hyper_connection.count", c.hc_mult)
    u32("hyper_connection.sinkhorn_iterations", c.hc_sinkhorn_iters)
    w.add_float32(f"{ARCH}.hyper_connection.epsilon", c.hc_eps)
    u32("hash_layer_count", c.mlp_layer_types.count("hash_moe"))
    w.add_expert_count(c.n_routed_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_weights_scale(c.routed_scaling_factor)
    w.add_expert_weights_norm(True)
    u32("expert_gating_func", GATING_SQRT_SOFTPLUS)
    for part in ("exp", "shexp"):
        w.add_array(f"{ARCH}.swiglu_clamp_{part}", [float(c.swiglu_limit)] * n)


def rope_parameters(c: Checkpoint, yarn: dict[str, Any], n_rot: int, head_dim: int) -> dict[str, Any]:
    """Both tables; yarn: what the scaling keys say, empty without scaling."""
    part = {"partial_rotary_factor": n_rot / head_dim}
    main = DEFAULT_ROPE | part | {"rope_theta": c.get("rope.freq_base")}
    compress = {"rope_theta": c.get("attention.compress_rope_freq_base")}
    if yarn:
        yarn = yarn | {"attention_factor": c.get("compress_attention_factor", 1.0)}
    return {"main": main, "compress": DEFAULT_ROPE | part | yarn | compress}


def shape(c: Checkpoint) -> dict[str, Any]:
    """The configuration besides what reference.py reads for every family."""
    n = c.get("block_count")
    rope, head_dim = c.get("rope.dimension_count"), c.get("attention.key_length")
    yarn: dict[str, Any] = {}
    if c.get("rope.scaling.type") == "yarn":
        yarn = {
            "rope_type": "yarn",
            "factor": c.get("rope.scaling.factor"),
            "original_max_position_embeddings": c.get("rope.scaling.original_context_length"),
        }
    hashed = c.get("hash_layer_count")
    return {
        "rope_parameters": rope_parameters(c, yarn, rope, head_dim),
        "rope_theta": c.get("rope.freq_base"),
        "compress_rope_theta": c.get("attention.compress_rope_freq_base"),
        "partial_rotary_factor": rope / head_dim,
        "head_dim": head_dim,
        "q_lora_rank": c.get("attention.q_lora_rank"),
        "o_lora_rank": c.get("attention.output_lora_rank"),
        "o_groups": c.get("attention.output_group_count"),
        "sliding_window": c.get("attention.sliding_window"),
        "layer_types": [KINDS[r] for r in c.get("attention.compress_ratios")[:n]],
        "index_n_heads": c.get("attention.indexer.head_count"),
        "index_head_dim": c.get("attention.indexer.key_length"),
        "index_topk": c.get("attention.indexer.top_k"),
        "hc_mult": c.get("hyper_connection.count"),
        "hc_sinkhorn_iters": c.get("hyper_connection.sinkhorn_iterations"),
        "hc_eps": c.get("hyper_connection.epsilon"),
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (n - hashed),
        "n_routed_experts": c.get("expert_count"),
        "num_experts_per_tok": c.get("expert_used_count"),
        "n_shared_experts": c.get("expert_shared_count"),
        "moe_intermediate_size": c.get("expert_feed_forward_length"),
        "routed_scaling_factor": c.get("expert_weights_scale"),
        "swiglu_limit": c.get("swiglu_clamp_exp")[0],
    }
