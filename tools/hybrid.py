"""Gated DeltaNet hybrids (qwen35, qwen35moe, qwen3next, qwen4exp) between transformers and GGUF, both ways.

Owns: their key and tensor names and what the converter does to the values (llama.cpp, convert_hf_to_gguf.py:
norms stored with their 1 added, -exp(A_log), value heads tiled over the key heads in qwen35*, the fused
projection of qwen3next parted). Refuses: what they share with other families (reference.py, convert_tiny.py),
what qwen4exp has besides (qwen4.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import qwen4
import torch
import transformers

if TYPE_CHECKING:
    import gguf
    from reference import Checkpoint

FAMILIES = {
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "qwen3next": "qwen3_next",
    "qwen4exp": "qwen4_exp",
}
CLASSES = {"qwen35": "Qwen3_5", "qwen35moe": "Qwen3_5Moe", "qwen3next": "Qwen3Next"}
L2_EPS = 1e-6
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MTP_NORMS = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")


def block_names(arch: str, shared: dict[str, str]) -> dict[str, str]:
    names = {k: v for k, v in shared.items() if k != "ffn_norm"} | NAMES
    if arch == qwen4.ARCH:
        return {k: v for k, v in names.items() if k not in qwen4.ABSENT} | qwen4.NAMES
    return names


def l2norm(eps: float) -> Any:
    def norm(x: torch.Tensor, dim: int = -1, **_: Any) -> torch.Tensor:
        return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)

    return norm


def make_model(arch: str, shape: dict[str, Any], l2_eps: float = L2_EPS) -> transformers.PreTrainedModel:
    """A model in float32, its weights not yet set."""
    if arch == qwen4.ARCH:
        qwen4.modeling.l2norm = l2norm(l2_eps)
        return qwen4.make_model(shape)
    family, text = FAMILIES[arch], "" if arch == "qwen3next" else "Text"
    config = getattr(transformers, f"{CLASSES[arch]}{text}Config")(**shape)
    module = getattr(transformers.models, family)
    modeling = getattr(module, f"modeling_{family}")
    modeling.l2norm = l2norm(l2_eps)
    return getattr(modeling, f"{CLASSES[arch]}ForCausalLM")(config).float().eval()


def centred(name: str) -> bool:
    """Whether a norm's weight, by either name, lies around 0 in transformers and around 1 in the file."""
    plain = name.endswith(("linear_attn.norm.weight", "ssm_norm.weight"))
    return (name.endswith("norm.weight") and not plain) or qwen4.centred(name)


# ---- value heads ---------------------------------------------------------------------------


def tile(x: np.ndarray, n_key: int, n_value: int, axis: int = 0) -> np.ndarray:
    """Value heads grouped by key head -> tiled over the key heads, along an axis of whole heads."""
    x = np.moveaxis(x, axis, 0)
    heads = x.reshape(n_key, n_value // n_key, -1, *x.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(x.shape), 0, axis)


def untile(x: np.ndarray, n_key: int, n_value: int, axis: int = 0) -> np.ndarray:
    """The inverse of tile."""
    return tile(x, n_value // n_key, n_value, axis)


def turn_heads(x: np.ndarray, name: str, n_key: int, n_value: int, keys: int, turn: Any) -> np.ndarray:
    """tile or untile a tensor by its GGUF name; `keys`: channels of q and k before the values'."""
    part = name.split(".")[2]
    if part in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate([x[:keys], turn(x[keys:], n_key, n_value)])
    if part in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        return turn(x, n_key, n_value)
    return turn(x, n_key, n_value, axis=1) if part == "ssm_out" else x


def part_qkvz(x: np.ndarray, n_key: int, key_dim: int, values: int) -> tuple[np.ndarray, np.ndarray]:
    """qwen3next's [q k v z] per key head -> ([q.. k.. v..], z); `values`: of v per key head."""
    heads = x.reshape(n_key, -1, x.shape[-1])
    q, k, v, z = np.split(heads, [key_dim, 2 * key_dim, 2 * key_dim + values], axis=1)
    flat = [p.reshape(-1, x.shape[-1]) for p in (q, k, v, z)]
    return np.concatenate(flat[:3]), flat[3]


def join_qkvz(qkv: np.ndarray, z: np.ndarray, n_key: int, key_dim: int) -> np.ndarray:
    """The inverse of part_qkvz."""
    parts = [*np.split(qkv, [n_key * key_dim, 2 * n_key * key_dim]), z]
    return np.concatenate([p.reshape(n_key, -1, z.shape[-1]) for p in parts], axis=1).reshape(-1, z.shape[-1])


# ---- transformers -> GGUF ------------------------------------------------------------------


def add_keys(w: gguf.GGUFWriter, arch: str, c: transformers.PretrainedConfig, older: bool, mtp: bool) -> None:
    """older: as files were before attention.recurrent_layers."""
    w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    w.add_ssm_state_size(c.linear_key_head_dim)
    w.add_ssm_group_count(c.linear_num_key_heads)
    w.add_ssm_time_step_rank(c.linear_num_value_heads)
    w.add_ssm_inner_size(c.linear_value_head_dim * c.linear_num_value_heads)
    n_rot = int(c.head_dim * c.rope_parameters["partial_rotary_factor"])
    w.add_rope_dimension_count(n_rot)
    recurrent = [t == "linear_attention" for t in c.layer_types]
    if older:
        w.add_full_attention_interval(recurrent.index(False) + 1)
    else:
        w.add_array(f"{arch}.attention.recurrent_layers", recurrent + [False] * mtp)
    if arch != "qwen3next":
        # Every third of the n_rot / 2 frequencies each, as real files have 11, 11 and 10 of 32.
        w.add_rope_dimension_sections([*(-(-(n_rot // 2 - i) // 3) for i in range(3)), 0])
    if mtp:
        w.add_nextn_predict_layers(1)
    if arch != "qwen35":
        w.add_expert_count(c.num_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
        w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if arch == qwen4.ARCH:
        qwen4.add_keys(w, c)


def convert_state(
    arch: str, c: transformers.PretrainedConfig, state: dict[str, np.ndarray]
) -> dict[str, Any]:
    """transformers' state with the converter's changes of value, still under transformers' names."""
    out = {}
    n_key, n_value, key_dim = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim
    for name, x in state.items():
        if name.endswith("in_proj_qkvz.weight"):
            qkv, z = part_qkvz(x, n_key, key_dim, n_value // n_key * c.linear_value_head_dim)
            out[name.replace("qkvz", "qkv")], out[name.replace("qkvz", "z")] = qkv, z
        elif "conv1d" in name:
            out[name] = x[:, 0]
        elif centred(name):
            out[name] = x + 1
        else:
            out[name] = x
    return out


def finish_block(
    arch: str, c: transformers.PretrainedConfig, i: int, state: dict[str, Any], out: dict[str, Any]
) -> None:
    """The tensors of a layer that end in neither weight nor bias, and the order of value heads in all."""
    layer = f"model.layers.{i}.linear_attn"
    if f"{layer}.A_log" in state:
        out[f"blk.{i}.ssm_a"] = -np.exp(state[f"{layer}.A_log"])
        out[f"blk.{i}.ssm_dt.bias"] = state[f"{layer}.dt_bias"]
    if arch == "qwen3next":
        return
    keys = 2 * c.linear_num_key_heads * c.linear_key_head_dim
    for name in [n for n in out if n.startswith(f"blk.{i}.")]:
        out[name] = turn_heads(out[name], name, c.linear_num_key_heads, c.linear_num_value_heads, keys, tile)


def mtp_block(i: int, out: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A block that predicts the token after the next: a full-attention layer and what joins its inputs."""
    full = next(n.split(".")[1] for n in out if n.endswith("attn_q.weight"))
    d = len(out["output_norm.weight"])
    same = {n.replace(f"blk.{full}.", f"blk.{i}."): x for n, x in out.items() if n.startswith(f"blk.{full}.")}
    norms = {f"blk.{i}.{n}.weight": rng.uniform(0.5, 1.5, d) for n in MTP_NORMS}
    return same | norms | {f"blk.{i}.nextn.eh_proj.weight": rng.normal(0, d**-0.5, (d, 2 * d))}


# ---- GGUF -> transformers ------------------------------------------------------------------


def without_mtp(c: Checkpoint) -> int:
    """Takes the blocks that predict further tokens out of c.tensors; returns how many layers are left."""
    n = c.get("block_count") - c.get("nextn_predict_layers", 0)
    for name in [*c.tensors]:
        if name.startswith("blk.") and int(name.split(".")[1]) >= n:
            del c.tensors[name]
    return n


def shape(c: Checkpoint) -> dict[str, Any]:
    """What these layers add to the configuration."""
    n_layers = c.get("block_count") - c.get("nextn_predict_layers", 0)
    interval = c.get("full_attention_interval", 4)
    recurrent = c.get("attention.recurrent_layers", [(i + 1) % interval != 0 for i in range(n_layers)])
    n_value = c.get("ssm.time_step_rank")
    own = qwen4.shape(c) if c.arch == qwen4.ARCH else {}
    return own | {
        "num_hidden_layers": n_layers,
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent[:n_layers]],
        "linear_conv_kernel_dim": c.get("ssm.conv_kernel"),
        "linear_key_head_dim": c.get("ssm.state_size"),
        "linear_num_key_heads": c.get("ssm.group_count"),
        "linear_num_value_heads": n_value,
        "linear_value_head_dim": c.get("ssm.inner_size") // n_value,
    }


def rope_parameters(c: Checkpoint) -> dict[str, Any]:
    return {"partial_rotary_factor": c.get("rope.dimension_count") / c.get("attention.key_length")}


def state_of(c: Checkpoint, name: str) -> tuple[str | None, np.ndarray]:
    """A tensor's value as transformers has it, and its name where that follows no rule."""
    x, parts = c.tensors[name], name.split(".")
    n_key, n_value = c.get("ssm.group_count"), c.get("ssm.time_step_rank")
    if c.arch != "qwen3next" and parts[0] == "blk":
        x = turn_heads(x, name, n_key, n_value, 2 * n_key * c.get("ssm.state_size"), untile)
    if centred(name):
        x = x - 1
    if name.endswith("conv1d.weight"):
        x = x[:, None]
    if c.arch == qwen4.ARCH and (own := qwen4.state_name(c, name)):
        return own, x
    if name.endswith("ssm_a"):
        return f"model.layers.{parts[1]}.linear_attn.A_log", np.log(-x)
    if name.endswith("ssm_dt.bias"):
        return f"model.layers.{parts[1]}.linear_attn.dt_bias", x
    return None, x


def join_projections(c: Checkpoint) -> dict[str, np.ndarray]:
    """Takes what transformers has in one tensor (qwen3next's attn_qkv and attn_gate, qwen4exp's indexer) out
    of c.tensors; returns it as transformers has it."""
    if c.arch == qwen4.ARCH:
        return qwen4.join_projections(c)
    out = {}
    for i in range(c.get("block_count")):
        if c.arch != "qwen3next" or f"blk.{i}.attn_qkv.weight" not in c.tensors:
            continue
        qkv, z = (c.tensors.pop(f"blk.{i}.attn_{part}.weight") for part in ("qkv", "gate"))
        joined = join_qkvz(qkv, z, c.get("ssm.group_count"), c.get("ssm.state_size"))
        out[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"] = joined
    return out
