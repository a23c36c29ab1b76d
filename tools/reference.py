"""GGUF -> transformers in float32 on the dequantised weights: what the engine is held against.

Owns: reading a GGUF's metadata back into a transformers configuration, undoing what the converter did
to names and rows, and the raw logits and greedy tokens of the result. Refuses: writing GGUF
(convert_tiny.py), and any architecture not in ARCHITECTURES.

It reads only what the file says, not the configuration the file was made from, so that a lost
or misspelt key shows as wrong logits when make.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

ARCHITECTURES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "qwen2moe": "Qwen2Moe",
    "qwen3moe": "Qwen3Moe",
}

# GGUF name inside a block -> transformers name inside a layer.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# transformers keeps an expert stack in two parameters: gate and up together (E, 2 F, D), and down (E, D, F).
EXPERT_GATE_UP, EXPERT_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES['.'.join(parts[2:-1])]}.{parts[-1]}"
    return f"{GLOBAL_NAMES[parts[0]]}.{parts[1]}"


def permute_rows(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Half-split rows of each head (transformers) -> adjacent pairs (llama files)."""
    half = w.shape[0] // n_heads // 2
    return w.reshape(n_heads, 2, half, -1).swapaxes(1, 2).reshape(w.shape)


def unpermute_rows(w: np.ndarray, n_heads: int) -> np.ndarray:
    """The inverse of permute_rows."""
    half = w.shape[0] // n_heads // 2
    return w.reshape(n_heads, half, 2, -1).swapaxes(1, 2).reshape(w.shape)


@dataclass
class Checkpoint:
    """A GGUF file's metadata and its tensors, dequantised to float32 (rows, row length)."""

    keys: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def arch(self) -> str:
        return self.keys["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.arch}.{key}", default)


def read_gguf(path: Path) -> Checkpoint:
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    return Checkpoint(keys, tensors)


def rope_parameters(c: Checkpoint) -> dict[str, Any]:
    kind = c.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_theta": c.get("rope.freq_base", 10000.0), "rope_type": "default"}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": c.get("rope.scaling.factor")}
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": c.get("rope.scaling.factor"),
            "original_max_position_embeddings": c.get("rope.scaling.original_context_length"),
        }
    return rope


def join_expert_stacks(c: Checkpoint) -> dict[str, np.ndarray]:
    """Takes the expert stacks out of c.tensors; returns them under transformers' names."""
    out = {}
    for i in range(c.get("block_count")):
        stacks = [c.tensors.pop(f"blk.{i}.ffn_{part}_exps.weight", None) for part in ("gate", "up", "down")]
        gate, up, down = stacks
        if gate is not None and up is not None and down is not None:
            out[f"model.layers.{i}.{EXPERT_GATE_UP}"] = np.concatenate([gate, up], axis=1)
            out[f"model.layers.{i}.{EXPERT_DOWN}"] = down
    return out


def expert_shape(c: Checkpoint) -> dict[str, Any]:
    """What a mixture of experts adds to the configuration.

    No key says whether the chosen experts' weights are renormalised: qwen3moe does, qwen2moe does not.
    """
    if c.get("expert_count") is None:
        return {}
    return {
        "num_experts": c.get("expert_count"),
        "num_experts_per_tok": c.get("expert_used_count"),
        "moe_intermediate_size": c.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": c.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": c.get("expert_weights_norm", c.arch == "qwen3moe"),
    }


def reference_model(path: Path) -> transformers.PreTrainedModel:
    """The transformers model that the file describes, in float32, ready to run."""
    c = read_gguf(path)
    family = ARCHITECTURES[c.arch]
    n_heads, n_embd = c.get("attention.head_count"), c.get("embedding_length")
    n_kv_heads, head_dim = c.get("attention.head_count_kv"), c.get("attention.key_length", n_embd // n_heads)
    shape: dict[str, Any] = {
        "vocab_size": c.tensors["token_embd.weight"].shape[0],
        "hidden_size": n_embd,
        "head_dim": head_dim,
        "num_hidden_layers": c.get("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "intermediate_size": c.get("feed_forward_length"),
        "max_position_embeddings": c.get("context_length"),
        "rms_norm_eps": c.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(c),
        "tie_word_embeddings": "output.weight" not in c.tensors,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**shape, **expert_shape(c))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    state = {n: torch.from_numpy(np.ascontiguousarray(t)) for n, t in join_expert_stacks(c).items()}
    divisors = c.tensors.pop("rope_freqs.weight", None)
    for name, data in c.tensors.items():
        if c.arch == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            data = unpermute_rows(data, n_heads if "attn_q" in name else n_kv_heads)
        state[hf_name(name)] = torch.from_numpy(np.ascontiguousarray(data))
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"{path}: tensors missing {missing}, not expected {unexpected}")
    model.tie_weights()
    if divisors is not None:  # llama 3 scaling: in no key, only in this tensor
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / torch.from_numpy(divisors)
    return model


def logits(model: transformers.PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Raw logits (T, V) of every row of a prompt of T tokens."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def greedy(model: transformers.PreTrainedModel, ids: list[int], n: int) -> tuple[list[int], list[float]]:
    """n greedy tokens after ids, by whole passes, and the margin of each over the runner-up."""
    out, margins, context = [], [], list(ids)
    for _ in range(n):
        row = logits(model, context)[-1]
        second, first = np.sort(row)[-2:]
        out.append(int(row.argmax()))
        margins.append(float(first - second))
        context.append(out[-1])
    return out, margins
