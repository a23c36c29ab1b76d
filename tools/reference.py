"""GGUF -> transformers in float32 on the dequantised weights: what the engine is held against.

Owns: reading a GGUF's metadata back into a transformers configuration, undoing what the converter did
to names and rows, the one architecture that transformers has no class for (DeepSeek-MoE), and the raw
logits and greedy tokens of the result. Refuses: writing GGUF (convert_tiny.py), and any architecture not in
ARCHITECTURES.

It reads only what the file says, not the configuration the file was made from, so that a lost
or misspelt key shows as wrong logits when make.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepseek4
import gguf
import hybrid
import numpy as np
import qwen4
import torch
import transformers

ARCHITECTURES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "qwen2moe": "Qwen2Moe",
    "qwen3moe": "Qwen3Moe",
    "deepseek": "Llama",  # with DeepseekMoe for a feed-forward part
    "deepseek2": "DeepseekV2",  # or DeepseekV3, see family()
    "deepseek32": "DeepseekV32",
    "deepseek4": "DeepseekV4",
}
LATENT = ("deepseek2", "deepseek32")  # attention over one compressed state a token
GATING_SOFTMAX, GATING_SIGMOID = 1, 2  # expert_gating_func
DEEPSEEK_MOE_OPTIONS = (
    "moe_intermediate_size",
    "first_k_dense_replace",
    "routed_scaling_factor",
    "norm_topk_prob",
)
INDEXER_KEYS = {"n_heads": "head_count", "head_dim": "key_length", "topk": "top_k"}
LATENT_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says

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
# What the DeepSeek families name otherwise or have besides.
DEEPSEEK_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
# transformers keeps an expert stack in two parameters: gate and up together (E, 2 F, D), and down (E, D, F).
EXPERT_GATE_UP, EXPERT_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def block_names(arch: str) -> dict[str, str]:
    if arch in hybrid.FAMILIES:
        return hybrid.block_names(arch, BLOCK_NAMES)
    return BLOCK_NAMES | DEEPSEEK_NAMES if arch.startswith("deepseek") else BLOCK_NAMES


def hf_name(name: str, arch: str = "") -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if name.endswith("exp_probs_b.bias"):
        return f"model.layers.{parts[1]}.mlp.gate.e_score_correction_bias"
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{block_names(arch)['.'.join(parts[2:-1])]}.{parts[-1]}"
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
    # What to do to the model in the end: for conventions that neither a key nor a tensor holds.
    changes: list[Callable[[transformers.PreTrainedModel], None]] = field(default_factory=list)

    @property
    def arch(self) -> str:
        return self.keys["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.arch}.{key}", default)


def read_gguf(path: Path) -> Checkpoint:
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: values(t) for t in reader.tensors}
    return Checkpoint(keys, tensors)


def values(t: gguf.ReaderTensor) -> np.ndarray:
    if t.tensor_type == gguf.GGMLQuantizationType.I32:
        return np.array(t.data)
    return gguf.dequantize(t.data, t.tensor_type).astype(np.float32)


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
        if c.arch in LATENT:  # equal, so that cos and sin are not scaled
            mscale = 10 * c.get("rope.scaling.yarn_log_multiplier", 0.0)
            rope |= {"mscale": mscale, "mscale_all_dim": mscale, "attention_factor": 1.0}
    return rope | (hybrid.rope_parameters(c) if c.arch in hybrid.FAMILIES else {})


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

    No key says whether the chosen experts' weights are renormalised: qwen2moe does not, the others do.
    """
    if c.get("expert_count") is None:
        return {}
    if c.arch == deepseek4.ARCH:
        return deepseek4.shape(c)
    if c.arch.startswith("deepseek"):
        return deepseek_shape(c)
    return {
        "num_experts": c.get("expert_count"),
        "num_experts_per_tok": c.get("expert_used_count"),
        "moe_intermediate_size": c.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": c.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": c.get("expert_weights_norm", c.arch != "qwen2moe"),
    }


def deepseek_shape(c: Checkpoint) -> dict[str, Any]:
    """The same for the DeepSeek families, with the sizes of latent attention where there is one."""
    out = {
        "n_routed_experts": c.get("expert_count"),
        "num_experts_per_tok": c.get("expert_used_count"),
        "n_shared_experts": c.get("expert_shared_count"),
        "moe_intermediate_size": c.get("expert_feed_forward_length"),
        "first_k_dense_replace": c.get("leading_dense_block_count", 0),
        "routed_scaling_factor": c.get("expert_weights_scale", 1.0),
        "norm_topk_prob": c.get("expert_weights_norm", False),
    }
    if c.arch == "deepseek":
        return out
    if c.arch == "deepseek32":
        out |= {f"index_{k}": c.get(f"attention.indexer.{v}") for k, v in INDEXER_KEYS.items()}
    groups = c.get("expert_group_count", 1)
    head_dim = c.get("attention.key_length_mla", c.get("attention.key_length"))
    rope_dim = c.get("rope.dimension_count")
    return out | {
        "n_group": groups,
        "topk_group": c.get("expert_group_used_count", groups),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "q_lora_rank": c.get("attention.q_lora_rank"),
        "kv_lora_rank": c.get("attention.kv_lora_rank"),
        "qk_nope_head_dim": head_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": c.get("attention.value_length_mla", c.get("attention.value_length")),
    }


class DeepseekMoe(torch.nn.Module):
    """DeepSeek-MoE's feed-forward part, from the paper (Dai et al. 2024, arXiv 2401.06066, eq. 9 to 11).

    h = sum_shared FFN_i(u) + sum_i g_i FFN_i(u), g_i = s_i where s_i is among the K largest, else 0;
    s = softmax(u W): not renormalised over the K.
    """

    def __init__(self, c: transformers.PretrainedConfig) -> None:
        super().__init__()
        n, d, width = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        self.n_used, self.scale, self.renormalise = (
            c.num_experts_per_tok,
            c.routed_scaling_factor,
            c.norm_topk_prob,
        )
        self.gate = torch.nn.Linear(d, n, bias=False)
        self.experts = torch.nn.ParameterDict(
            {"gate_up_proj": torch.empty(n, 2 * width, d), "down_proj": torch.empty(n, d, width)}
        )
        self.shared_experts = torch.nn.ModuleDict(
            {
                "gate_proj": torch.nn.Linear(d, width * c.n_shared_experts, bias=False),
                "up_proj": torch.nn.Linear(d, width * c.n_shared_experts, bias=False),
                "down_proj": torch.nn.Linear(width * c.n_shared_experts, d, bias=False),
            }
        )

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        silu, shared = torch.nn.functional.silu, self.shared_experts
        out = shared["down_proj"](silu(shared["gate_proj"](u)) * shared["up_proj"](u))
        s = self.gate(u).softmax(-1)
        kept = torch.zeros_like(s).scatter(-1, s.topk(self.n_used, dim=-1).indices, 1.0) * s
        if self.renormalise:
            kept = kept / kept.sum(-1, keepdim=True)
        for i in range(s.shape[-1]):
            gate, up = (u @ self.experts["gate_up_proj"][i].T).chunk(2, dim=-1)
            out = out + self.scale * kept[..., i : i + 1] * (
                (silu(gate) * up) @ self.experts["down_proj"][i].T
            )
        return out


def family(arch: str, gating: int) -> str:
    """The prefix of the transformers classes."""
    return "DeepseekV3" if arch == "deepseek2" and gating == GATING_SIGMOID else ARCHITECTURES[arch]


def make_model(
    arch: str,
    gating: int,
    shape: dict[str, Any],
    latent_eps: float = LATENT_EPS,
    l2_eps: float = hybrid.L2_EPS,
) -> transformers.PreTrainedModel:
    """A model of the architecture in float32, its weights not yet set."""
    if arch in hybrid.FAMILIES:
        return hybrid.make_model(arch, shape, l2_eps)
    name = family(arch, gating)
    if arch == "deepseek":
        extra = {k: shape.pop(k) for k in [*shape] if "expert" in k or k in DEEPSEEK_MOE_OPTIONS}
        config = transformers.LlamaConfig(**shape)
        for key, value in extra.items():
            setattr(config, key, value)
    else:
        config = getattr(transformers, f"{name}Config")(**shape)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for i, layer in enumerate(model.model.layers):
        if arch == "deepseek" and i >= config.first_k_dense_replace:
            layer.mlp = DeepseekMoe(config)
        for part in ("q_a_layernorm", "kv_a_layernorm"):
            if getattr(layer.self_attn, part, None) is not None:
                getattr(layer.self_attn, part).variance_epsilon = latent_eps
    return model.float().eval()


def join_kv_b(c: Checkpoint) -> None:
    """attn_k_b (head, latent, nope) and attn_v_b (head, v, latent) -> attn_kv_b, a head's keys first."""
    for i in range(c.get("block_count")):
        k, v = (c.tensors.pop(f"blk.{i}.attn_{p}_b.weight", None) for p in "kv")
        if k is not None and v is not None:
            joined = np.concatenate([k.swapaxes(1, 2), v], axis=1)
            c.tensors[f"blk.{i}.attn_kv_b.weight"] = joined.reshape(-1, joined.shape[-1])


def reference_model(path: Path) -> transformers.PreTrainedModel:
    """The transformers model that the file describes, in float32, ready to run."""
    c = read_gguf(path)
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
    if c.arch in LATENT:  # every head has a key of its own, of which the rotated part is shared
        shape |= {"num_key_value_heads": n_heads, "head_dim": c.get("rope.dimension_count")}
    if c.arch in hybrid.FAMILIES:
        hybrid.without_mtp(c)
        shape |= hybrid.shape(c)
    if c.arch == deepseek4.ARCH:  # the other name of moe_intermediate_size
        del shape["intermediate_size"]
    gating = c.get("expert_gating_func", GATING_SOFTMAX)
    eps = c.get("latent_eps", LATENT_EPS), c.get("l2_eps", hybrid.L2_EPS)
    model = make_model(c.arch, gating, shape | expert_shape(c), *eps)
    if c.arch == qwen4.ARCH:
        qwen4.set_hash(c, model)
    join_kv_b(c)
    joined = join_expert_stacks(c) | hybrid.join_projections(c)
    state = {n: torch.from_numpy(np.ascontiguousarray(t)) for n, t in joined.items()}
    divisors = c.tensors.pop("rope_freqs.weight", None)
    for name, data in c.tensors.items():
        if c.arch in ("llama", "deepseek") and name.split(".")[-2] in ("attn_q", "attn_k"):
            data = unpermute_rows(data, n_heads if "attn_q" in name else n_kv_heads)
        own = deepseek4.hf_name(name) if c.arch == deepseek4.ARCH else None
        if c.arch in hybrid.FAMILIES:
            own, data = hybrid.state_of(c, name)
        state[own or hf_name(name, c.arch)] = torch.from_numpy(np.ascontiguousarray(data))
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"{path}: tensors missing {missing}, not expected {unexpected}")
    model.tie_weights()
    if divisors is not None:  # llama 3 scaling: in no key, only in this tensor
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / torch.from_numpy(divisors)
    for change in c.changes:
        change(model)
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
