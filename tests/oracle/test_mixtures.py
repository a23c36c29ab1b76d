"""The conventions of experts and latent attention, one by one: each key and tensor counts, what a file leaves
out means what its converter meant, and what cannot be right is refused by name.

test_logits.py holds the values against transformers; here a file is changed and the engine must notice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError, gguf_info

from .conftest import rows
from .references import EXACT_MAX_DIFF, MIXTURES, fixture_path, load
from .rewrite import Change, Key, rewrite


def exact_logits(path: Path, name: str) -> np.ndarray:
    ref = load(name)
    return rows(Engine(str(path), device="cpu", exact=True, threads=2), ref.ids, ref.rows)


COUNTING_KEYS: list[tuple[str, str, Key]] = [
    ("qwen3moe", "expert_weights_norm", False),
    ("qwen3moe", "expert_used_count", 1),
    ("qwen2moe", "expert_weights_norm", True),
    ("deepseek", "expert_weights_norm", True),
    ("deepseek", "expert_weights_scale", 2.0),
    ("deepseek2-lite", "rope.scaling.yarn_log_multiplier", 0.0),
    ("deepseek2-lite", "rope.scaling.type", "linear"),
    ("deepseek2-lite", "rope.scaling.factor", 2.0),
    ("deepseek2-v2", "expert_weights_norm", True),
    ("deepseek2-v2", "expert_weights_scale", 1.0),
    ("deepseek2-v2", "expert_group_used_count", 4),
    ("deepseek2-v2", "expert_gating_func", 2),
    ("deepseek2-v3", "expert_weights_norm", False),
    ("deepseek2-v3", "expert_weights_scale", 1.0),
    ("deepseek2-v3", "expert_group_used_count", 2),
    ("deepseek2-v3", "expert_gating_func", 1),
]


@pytest.mark.parametrize(("name", "key", "value"), COUNTING_KEYS)
def test_each_key_of_a_mixture_counts(tmp_path, name, key, value):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", keys={key: value})
    moved = float(np.abs(exact_logits(changed, name) - load(name).logits).max())
    print(f"{name} {key} = {value}: logits move by {moved:.1e}")
    assert moved > EXACT_MAX_DIFF


def swap_first_experts(w: np.ndarray) -> np.ndarray:
    return w[[1, 0, *range(2, len(w))]]


def zero(w: np.ndarray) -> np.ndarray:
    return np.zeros_like(w)


def one(w: np.ndarray) -> np.ndarray:
    return np.ones_like(w)


COUNTING_TENSORS: list[tuple[str, str, Change]] = [
    *(("qwen3moe", f"ffn_{part}_exps", swap_first_experts) for part in ("gate", "up", "down")),
    ("qwen3moe", "ffn_gate_inp", swap_first_experts),
    ("qwen2moe", "ffn_gate_inp_shexp", zero),
    ("qwen2moe", "ffn_down_shexp", zero),
    ("deepseek", "ffn_down_shexp", zero),
    ("deepseek2-v2", "attn_q_a_norm", one),
    ("deepseek2-v2", "attn_kv_a_norm", one),
    ("deepseek2-v3", "exp_probs_b", zero),
    *(("deepseek2-v3", f"attn_{part}_b.weight", swap_first_experts) for part in "kv"),  # heads here
]


@pytest.mark.parametrize(("name", "tensor", "change"), COUNTING_TENSORS)
def test_each_tensor_of_a_mixture_counts(tmp_path, name, tensor, change):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", change={tensor: change})
    moved = float(np.abs(exact_logits(changed, name) - load(name).logits).max())
    print(f"{name} {tensor}: logits move by {moved:.1e}")
    assert moved > EXACT_MAX_DIFF


@pytest.mark.parametrize("shift", [0.5, -2.0])
@pytest.mark.parametrize("name", ["deepseek2-v3", "deepseek32"])
def test_the_bias_of_the_choice_does_not_weigh(tmp_path, name, shift):
    """exp_probs_b counts for the choice only: the same for every expert, it changes nothing but rounding. So
    it is where every biased score is below 0: groups that are not chosen are at -inf, and not at 0.
    """
    shifted = rewrite(
        fixture_path(name), tmp_path / "shifted.gguf", change={"exp_probs_b": lambda b: b + np.float32(shift)}
    )
    assert np.abs(exact_logits(shifted, name) - load(name).logits).max() <= EXACT_MAX_DIFF


ABSENT_KEYS: list[tuple[str, dict[str, Key]]] = [
    ("qwen3moe", {"expert_weights_norm": True}),  # written out, it says what its absence says
    ("qwen2moe", {"expert_weights_norm": False}),
    ("deepseek", {"expert_weights_scale": None}),  # 1
    ("deepseek2-lite", {"expert_gating_func": None, "expert_weights_norm": None}),  # softmax, false
    ("deepseek2-lite", {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}),
    ("deepseek2-lite", {"expert_group_count": 1, "expert_group_used_count": 1}),
]


@pytest.mark.parametrize(("name", "keys"), ABSENT_KEYS)
def test_an_absent_key_means_its_default(tmp_path, name, keys):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", keys=keys)
    assert (exact_logits(changed, name) == exact_logits(fixture_path(name), name)).all()


REFUSED_KEYS: list[tuple[str, dict[str, Key], str]] = [
    ("qwen3moe", {"expert_used_count": 9}, "expert_used_count.*8.*9"),
    ("qwen3moe", {"expert_used_count": 0}, "expert_used_count"),
    ("qwen3moe", {"expert_count": None}, "expert_count"),
    ("qwen3moe", {"expert_count": 7}, r"ffn_gate_inp.*\[32, 7\].*\[32, 8\]"),
    ("qwen3moe", {"expert_feed_forward_length": 16}, r"ffn_gate_exps.*\[32, 16, 8\].*\[32, 12, 8\]"),
    ("qwen2moe", {"expert_shared_feed_forward_length": None}, "expert_shared_feed_forward_length"),
    ("deepseek2-v3", {"expert_group_count": 3}, "expert_group_count.*8.*3"),
    ("deepseek2-v3", {"expert_group_used_count": 3}, "expert_group_used_count.*2.*3"),
    ("deepseek2-v2", {"expert_group_count": 8}, "expert_group_used_count.*2 experts"),
    ("deepseek2-v3", {"attention.kv_lora_rank": None}, "kv_lora_rank"),
    ("deepseek2-v3", {"attention.key_length_mla": 16}, "rope.dimension_count"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED_KEYS)
def test_impossible_numbers_of_experts_are_refused_by_name(tmp_path, name, keys, message):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", keys=keys)
    with pytest.raises(ReflexError, match=message) as error:
        Engine(str(changed), device="cpu")
    assert error.value.kind == "gguf"


@pytest.mark.parametrize("id", [0, 3, 4])
def test_an_unknown_gating_function_is_refused_by_number(tmp_path, id):
    changed = rewrite(
        fixture_path("deepseek2-v3"), tmp_path / "changed.gguf", keys={"expert_gating_func": id}
    )
    with pytest.raises(ReflexError, match=f"expert_gating_func.*{id}") as error:
        Engine(str(changed), device="cpu")
    assert error.value.kind == "unsupported_architecture"


REFUSED_TENSORS = [
    *(("qwen3moe", f"blk.1.ffn_{part}_exps.weight") for part in ("gate", "up", "down")),
    ("qwen3moe", "blk.0.ffn_gate_inp.weight"),
    ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight"),
    ("deepseek", "blk.1.ffn_up_shexp.weight"),
    ("deepseek", "blk.0.ffn_up.weight"),
    ("deepseek2-v3", "blk.0.attn_q_a_norm.weight"),
    ("deepseek2-v3", "blk.1.attn_v_b.weight"),
    ("deepseek2-lite", "blk.1.attn_q.weight"),
]


@pytest.mark.parametrize(("name", "tensor"), REFUSED_TENSORS)
def test_a_missing_tensor_is_named_with_its_shape(tmp_path, name, tensor):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", drop=[tensor])
    with pytest.raises(ReflexError, match=rf"'{tensor}' is missing \(expected shape \[") as error:
        Engine(str(changed), device="cpu")
    assert error.value.kind == "gguf"
    report = gguf_info(str(changed))
    assert not report["runs"]
    assert tensor in report["error"]


@pytest.mark.parametrize("name", MIXTURES)
def test_info_says_that_a_mixture_runs(name):
    report = gguf_info(str(fixture_path(name)))
    assert report["runs"], report["error"]
