"""The conventions of the files, line by line: for each a way to break it, that must show, or a change that a
file may have and that must not.

test_logits.py holds what is right against transformers. Here a fixture's file is changed and the engine must
move beyond the gate of exact mode ("moves"), give the same bits ("same") or refuse the file ("refused").
Constants that no file holds (the eps of an inner norm) are broken in the reference instead: make.py did, and
wrote to sensitivity.json how far the fixture's logits went, so that the engine with the wrong constant fails
test_logits.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError

from .conftest import rows
from .references import EXACT_MAX_DIFF, FIXTURES, assert_exact, fixture_path, load
from .rewrite import Change, Key, Tensors, rewrite

SENSITIVITY = json.loads((FIXTURES / "sensitivity.json").read_text())
Remake = Callable[[Tensors], None]


@dataclass(frozen=True)
class Case:
    """One line of the conventions, one file, one change."""

    line: str
    what: str
    name: str  # of the fixture
    effect: str = "moves"
    keys: dict[str, Key] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    change: dict[str, Change] = field(default_factory=dict)
    remake: Remake | None = None

    @property
    def id(self) -> str:
        return f"{self.line}-{self.name}-{self.what}".replace(" ", "_")


# ---- ways to change a tensor ---------------------------------------------------------------


def zero(x: np.ndarray) -> np.ndarray:
    return np.zeros_like(x)


def one(x: np.ndarray) -> np.ndarray:
    return np.ones_like(x)


def plus_one(x: np.ndarray) -> np.ndarray:
    return x + np.float32(1)


def each(ending: str, f: Change) -> Remake:
    """f on the tensors whose name ends so (and not merely holds it, as ssm_alpha does ssm_a)."""

    def remake(t: Tensors) -> None:
        for name in [n for n in t if n.endswith(ending)]:
            t[name] = np.ascontiguousarray(f(t[name]))

    return remake


def turn_heads(n_outer: int, n_inner: int, axis: int = 0, skip: int = 0) -> Change:
    """Whole heads along an axis, (outer, inner) -> (inner, outer), the first `skip` entries left alone."""

    def turn(x: np.ndarray) -> np.ndarray:
        x = np.moveaxis(x, axis, 0)
        head, tail = x[:skip], x[skip:]
        heads = tail.reshape(n_outer, n_inner, -1, *tail.shape[1:])
        turned = heads.swapaxes(0, 1).reshape(tail.shape)
        return np.moveaxis(np.concatenate([head, turned]), 0, axis)

    return turn


def pairs(n_heads: int, first: int = 0, count: int | None = None) -> Change:
    """Rows of each head from half-split to adjacent pairs: `count` rows (all) from the `first`."""

    def turn(x: np.ndarray) -> np.ndarray:
        heads = x.reshape(n_heads, -1, x.shape[-1]).copy()
        n = heads.shape[1] - first if count is None else count
        part = heads[:, first : first + n].reshape(n_heads, 2, n // 2, -1)
        heads[:, first : first + n] = part.swapaxes(1, 2).reshape(n_heads, n, -1)
        return heads.reshape(x.shape)

    return turn


def halves(x: np.ndarray) -> np.ndarray:
    """A norm's weights, the two of each rotated pair exchanged."""
    return np.roll(x, len(x) // 2)


def no_gate(n_heads: int) -> Change:
    def f(x: np.ndarray) -> np.ndarray:
        y = x.reshape(n_heads, 2, -1, x.shape[-1]).copy()
        y[:, 1] = 0
        return y.reshape(x.shape)

    return f


def renamed(before: str, after: str) -> Remake:
    def remake(t: Tensors) -> None:
        t[after] = t.pop(before)

    return remake


# ---- the lines -----------------------------------------------------------------------------

ZERO_CENTRED = ("attn_norm", "post_attention_norm", "output_norm", "attn_q_norm", "attn_k_norm")
NORMS = [
    *(
        Case("Norms", f"1 added to {norm} once more", name, change={f"{norm}.weight": plus_one})
        for name in ("qwen3next", "qwen35", "qwen35moe")
        for norm in ZERO_CENTRED
    ),
    *(
        Case("Norms", "1 added to the gated norm", name, change={"ssm_norm": plus_one})
        for name in ("qwen3next", "qwen35", "qwen35moe")
    ),
]

DELTA_RULE = [
    case
    for name in ("qwen35", "qwen35moe", "qwen3next")
    for case in (
        Case("Delta rule", "-exp once more", name, remake=each(".ssm_a", lambda x: -np.exp(x))),
        Case("Delta rule", "no decay", name, remake=each(".ssm_a", zero)),
        Case(
            "Delta rule",
            "ssm_a with a suffix",
            name,
            "refused",
            remake=renamed("blk.0.ssm_a", "blk.0.ssm_a.weight"),
        ),
        Case("Delta rule", "dt bias left out", name, change={"ssm_dt": zero}),
        Case("Delta rule", "taps backwards", name, change={"ssm_conv1d": lambda x: x[:, ::-1]}),
        Case(
            "Delta rule",
            "kernel as [kernel, channels]",
            name,
            change={"ssm_conv1d": lambda x: x.T.reshape(x.shape)},
        ),
        Case("Delta rule", "eps of the gated norm", name, keys={"attention.layer_norm_rms_epsilon": 1e-5}),
    )
]

# (fixture, key heads, value heads, channels of q and k): tiled, and what turns them to grouped.
TILED = (("qwen35", 2, 6, 2 * 2 * 8), ("qwen35moe", 2, 4, 2 * 2 * 8))
VALUE_HEADS = [
    case
    for name, n_key, n_value, keys in TILED
    for part, change in (
        ("attn_qkv.weight", turn_heads(n_value // n_key, n_key, skip=keys)),
        ("attn_gate.weight", turn_heads(n_value // n_key, n_key)),
        ("ssm_alpha.weight", turn_heads(n_value // n_key, n_key)),
        ("ssm_beta.weight", turn_heads(n_value // n_key, n_key)),
        ("ssm_a", turn_heads(n_value // n_key, n_key)),
        ("ssm_dt.bias", turn_heads(n_value // n_key, n_key)),
        ("ssm_conv1d.weight", turn_heads(n_value // n_key, n_key, skip=keys)),
        ("ssm_out.weight", turn_heads(n_value // n_key, n_key, axis=1)),
    )
    for case in [Case("Value heads", f"grouped in {part}", name, remake=each(f".{part}", change))]
]
VALUE_HEADS += [
    *(
        Case("Value heads", f"tiled in {part}", "qwen3next", remake=each(f".{part}", change))
        for part, change in (
            ("attn_qkv.weight", turn_heads(2, 3, skip=2 * 2 * 8)),
            ("attn_gate.weight", turn_heads(2, 3)),
            ("ssm_a", turn_heads(2, 3)),
            ("ssm_dt.bias", turn_heads(2, 3)),
            ("ssm_out.weight", turn_heads(2, 3, axis=1)),
        )
    ),
    # ssm_ba is [b x 3, a x 3] for each of two key heads.
    Case(
        "Value heads",
        "a before b",
        "qwen3next",
        change={
            "ssm_ba": lambda x: np.concatenate(
                [x.reshape(2, 2, 3, -1)[:, 1:], x.reshape(2, 2, 3, -1)[:, :1]], axis=1
            ).reshape(x.shape)
        },
    ),
    Case("Value heads", "all b before all a", "qwen3next", change={"ssm_ba": turn_heads(2, 2)}),
]

# (fixture, heads): query and gate interleaved per head.
GATED_ATTENTION = [
    case
    for name, n_heads in (("qwen35", 3), ("qwen35moe", 4), ("qwen3next", 4))
    for case in (
        Case(
            "Gated attention",
            "gates after all queries",
            name,
            change={"attn_q.weight": turn_heads(n_heads, 2)},
        ),
        Case("Gated attention", "no gate", name, change={"attn_q.weight": no_gate(n_heads)}),
        Case("Gated attention", "q norm after rope", name, change={"attn_q_norm": halves}),
        Case("Gated attention", "k norm after rope", name, change={"attn_k_norm": halves}),
    )
]

WHICH_LAYERS = [
    Case(
        "Which layers",
        "another pattern",
        "qwen35",
        "refused",
        keys={"attention.recurrent_layers": [True] * 4},
    ),
    Case("Which layers", "another interval", "qwen35-mtp", "refused", keys={"full_attention_interval": 2}),
    Case(
        "Which layers",
        "the array says what the interval says",
        "qwen35-mtp",
        "same",
        keys={"attention.recurrent_layers": [True, True, False, False], "full_attention_interval": None},
    ),
]


def further_block(n_layers: int) -> Remake:
    """One more block, as the last layer is, with what a block has that predicts a further token."""

    def remake(t: Tensors) -> None:
        last, more = f"blk.{n_layers - 1}.", f"blk.{n_layers}."
        for name in [n for n in t if n.startswith(last)]:
            t[name.replace(last, more)] = t[name]
        norm = t[
            f"{more}attn_norm.weight" if f"{more}attn_norm.weight" in t else f"{more}hc_attn_norm.weight"
        ]
        t[f"{more}nextn.enorm.weight"] = t[f"{more}nextn.hnorm.weight"] = np.ascontiguousarray(norm)

    return remake


MTP = [
    *(
        Case(
            "MTP",
            "with a further block",
            name,
            "same",
            keys={"block_count": n + 1, "nextn_predict_layers": 1},
            remake=further_block(n),
        )
        for name, n in (
            ("qwen35", 4),
            ("qwen35moe", 3),
            ("qwen3next", 3),
            ("deepseek2-v3", 2),
            ("deepseek32", 2),
            ("deepseek4", 4),
            ("qwen4exp", 3),
        )
    ),
    Case(
        "MTP",
        "without the block",
        "qwen35-mtp",
        "same",
        drop=("blk.3.",),
        keys={"block_count": 3, "nextn_predict_layers": None},
    ),
    Case("MTP", "another block", "qwen35-mtp", "same", change={"blk.3.": zero}),
    Case("MTP", "the block taken for a layer", "qwen35-mtp", "refused", keys={"nextn_predict_layers": None}),
]

# (fixture, heads, first row of a head that turns, how many): what its rope makes of rows in another order.
PAIRED = (
    ("llama3", 3, 0, None),
    ("deepseek", 3, 0, None),
    ("deepseek2-lite", 3, 10, 12),
    ("qwen2-tied", 5, 0, None),
    ("qwen3-tied", 4, 0, None),
    ("qwen2moe", 4, 0, None),
    ("qwen3moe", 4, 0, None),
)
ROPE = [
    *(
        Case("Rope", "another pairing", name, change={"attn_q.weight": pairs(n, first, count)})
        for name, n, first, count in PAIRED
    ),
    *(Case("Rope", "another base", name, keys={"rope.freq_base": 30000.0}) for name, *_ in PAIRED),
    Case("Rope", "over the whole head", "qwen35", keys={"rope.dimension_count": 16}),
    Case("Rope", "over the whole head", "qwen3next", keys={"rope.dimension_count": 12}),
    Case("Rope", "other sections", "qwen35", "same", keys={"rope.dimension_sections": [1, 2, 1, 0]}),
    Case("Rope", "no sections", "qwen35moe", "same", keys={"rope.dimension_sections": None}),
]

LLAMA3 = [
    Case("Llama 3 scaling", "divisors of one", "llama3", change={"rope_freqs": one}),
    Case("Llama 3 scaling", "no divisors", "llama3", drop=("rope_freqs",)),
]

YARN = [
    case
    for name in ("qwen3-yarn", "llama-yarn")
    for case in (
        Case(
            "YaRN, plain",
            "magnitude of 1",
            name,
            keys={"rope.scaling.attn_factor": 1 / (0.1 * math.log(4) + 1)},
        ),
        Case(
            "YaRN, plain",
            "betas written out",
            name,
            "same",
            keys={"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        ),
        Case("YaRN, plain", "another fast beta", name, keys={"rope.scaling.yarn_beta_fast": 4.0}),
        Case("YaRN, plain", "another slow beta", name, keys={"rope.scaling.yarn_beta_slow": 8.0}),
        Case("YaRN, plain", "another factor", name, keys={"rope.scaling.factor": 2.0}),
        Case(
            "YaRN, plain", "another original context", name, keys={"rope.scaling.original_context_length": 16}
        ),
        Case("YaRN, plain", "no scaling", name, keys={"rope.scaling.type": "none"}),
    )
] + [
    case
    for name in ("deepseek2-lite", "deepseek2-v2", "deepseek2-v3")
    for case in (
        Case("YaRN, DeepSeek", "no multiplier", name, keys={"rope.scaling.yarn_log_multiplier": None}),
        Case(
            "YaRN, DeepSeek",
            "multiplier ten times as large",
            name,
            keys={"rope.scaling.yarn_log_multiplier": 1.0},
        ),
        Case("YaRN, DeepSeek", "cos and sin scaled", name, "same", keys={"rope.scaling.attn_factor": 2.0}),
    )
]

MLA = [
    case
    for name, n_heads, n_latent, nope in (("deepseek2-lite", 3, 20, 10), ("deepseek2-v3", 4, 18, 12))
    for case in (
        Case(
            "MLA",
            "other sizes of the absorbed form",
            name,
            "same",
            keys={"attention.key_length": 48, "attention.value_length": 40},
        ),
        Case("MLA", "another key length", name, "refused", keys={"attention.key_length_mla": nope + 8}),
        Case("MLA", "another value length", name, "refused", keys={"attention.value_length_mla": 8}),
        Case(
            "MLA",
            "attn_k_b not transposed",
            name,
            change={"attn_k_b": lambda x, h=n_heads, c=n_latent, n=nope: x.reshape(h, n, c).swapaxes(1, 2)},
        ),
        Case("MLA", "heads of attn_v_b", name, change={"attn_v_b": lambda x: x[::-1]}),
        Case("MLA", "norm of the latent", name, change={"attn_kv_a_norm": one}),
    )
] + [
    Case("MLA", "no q_lora, and its key", "deepseek2-lite", "refused", keys={"attention.q_lora_rank": 24}),
    Case("MLA", "q_lora without its key", "deepseek2-v3", "refused", keys={"attention.q_lora_rank": None}),
    Case("MLA", "norm of the query's latent", "deepseek2-v2", change={"attn_q_a_norm": one}),
]

RENORMALISED = ("qwen3moe", "qwen3next", "qwen35moe")
ROUTERS = [
    *(Case("Routers", "not renormalised", n, keys={"expert_weights_norm": False}) for n in RENORMALISED),
    *(
        Case("Routers", "renormalised, said", n, "same", keys={"expert_weights_norm": True})
        for n in RENORMALISED
    ),
    *(
        Case("Routers", "renormalised", n, keys={"expert_weights_norm": True})
        for n in ("qwen2moe", "deepseek", "deepseek2-lite", "deepseek2-v2")
    ),
    *(
        Case("Routers", "not renormalised, said", n, "same", keys={"expert_weights_norm": False})
        for n in ("qwen2moe", "deepseek")
    ),
    *(
        Case("Routers", "gate of the shared expert", n, change={"ffn_gate_inp_shexp": zero})
        for n in ("qwen2moe", "qwen3next", "qwen35moe")
    ),
    *(
        Case("Routers", "no shared expert", n, change={"ffn_down_shexp": zero})
        for n in ("qwen2moe", "qwen3next", "qwen35moe", "deepseek", "deepseek2-lite", "deepseek2-v3")
    ),
    *(
        Case("Routers", "one expert fewer", n, keys={"expert_used_count": 1})
        for n in (
            "qwen2moe",
            "qwen3moe",
            "qwen3next",
            "qwen35moe",
            "deepseek",
            "deepseek2-lite",
            "deepseek2-v3",
        )
    ),
    Case(
        "Routers", "softmax is absent's meaning", "deepseek2-lite", "same", keys={"expert_gating_func": None}
    ),
    Case("Routers", "false is absent's meaning", "deepseek2-v2", "same", keys={"expert_weights_norm": None}),
    Case("Routers", "sigmoid for softmax", "deepseek2-v2", keys={"expert_gating_func": 2}),
    Case("Routers", "softmax for sigmoid", "deepseek2-v3", keys={"expert_gating_func": 1}),
    Case("Routers", "not renormalised", "deepseek2-v3", keys={"expert_weights_norm": False}),
    Case("Routers", "no scale", "deepseek2-v2", keys={"expert_weights_scale": None}),
    Case("Routers", "no scale", "deepseek2-v3", keys={"expert_weights_scale": None}),
    Case("Routers", "no bias of the choice", "deepseek2-v3", drop=("exp_probs_b",)),
    *(
        Case(
            "Routers", "groups ignored", n, keys={"expert_group_count": None, "expert_group_used_count": None}
        )
        for n in ("deepseek2-v2", "deepseek2-v3")
    ),
]

ABSENT_KEYS = [
    Case("Absent keys", "key_length said", "qwen2-tied", "same", keys={"attention.key_length": 8}),
    Case("Absent keys", "dimension_count said", "qwen2-tied", "same", keys={"rope.dimension_count": 8}),
    Case("Absent keys", "key_length said", "qwen2moe", "same", keys={"attention.key_length": 8}),
    Case("Absent keys", "dimension_count said", "qwen2moe", "same", keys={"rope.dimension_count": 8}),
    Case("Absent keys", "dimension_count said", "qwen3-tied", "same", keys={"rope.dimension_count": 12}),
    Case("Absent keys", "dimension_count said", "qwen3moe", "same", keys={"rope.dimension_count": 12}),
    *(
        Case("Absent keys", "the tied head said", n, "same",
             remake=lambda t: t.__setitem__("output.weight", t["token_embd.weight"]))
        for n in ("qwen2-tied", "qwen3-tied", "llama3")
    ),
    *(
        Case("Absent keys", "softmax said", n, "same", keys={"expert_gating_func": 1})
        for n in ("qwen2moe", "qwen3moe", "qwen3next")
    ),
    Case("Absent keys", "value_length absent", "qwen3-tied", "same", keys={"attention.value_length": None}),
    Case("Absent keys", "base of 10000", "qwen3-tied", "same", keys={"rope.freq_base": None}),
    Case("Absent keys", "scale of 1", "deepseek", "same", keys={"expert_weights_scale": None}),
    Case("Absent keys", "key/value heads as many as heads", "llama-spm", "same",
         keys={"attention.head_count_kv": None}),
]  # fmt: skip

CASES = [
    *NORMS,
    *DELTA_RULE,
    *VALUE_HEADS,
    *GATED_ATTENTION,
    *WHICH_LAYERS,
    *MTP,
    *ROPE,
    *LLAMA3,
    *YARN,
    *MLA,
    *ROUTERS,
    *ABSENT_KEYS,
]

# Constants and rules that no file holds: (line, fixture, what make.py did to the reference).
CONSTANTS = [
    *(("Delta rule", n, "eps of the l2 norm") for n in ("qwen35", "qwen35-mtp", "qwen35moe", "qwen3next")),
    *(
        ("MLA", n, "eps of the latents' norms is the model's")
        for n in ("deepseek2-lite", "deepseek2-unsplit", "deepseek2-v2", "deepseek2-v3")
    ),
    ("Routers", "deepseek2-v2", "groups by their two best"),
]
# Lines whose tests are elsewhere, or below by themselves.
ELSEWHERE = {
    # No adapter is loaded: a `load` line that names one is refused (tests/worker/test_core.py), and so is an
    # adapter's file in a model's place (test_refusals.py).
    "LoRA": "test_an_adapter_is_no_model",
    "Tokenizer": "test_what_composes_and_what_does_not_have_different_ids",
    "Quantised files": "test_default_mixes_of_types_are_those_of_the_fixtures; tests/quant",
}


def exact(path: Path, name: str) -> np.ndarray:
    ref = load(name)
    return rows(Engine(str(path), device="cpu", exact=True, threads=2), ref.ids, ref.rows)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_broken_convention_shows(tmp_path, case):
    changed = rewrite(
        fixture_path(case.name), tmp_path / "changed.gguf", case.keys, case.drop, case.change, case.remake
    )
    if case.effect == "refused":
        with pytest.raises(ReflexError) as e:
            exact(changed, case.name)
        assert e.value.kind == "gguf"
        return
    found, ref = exact(changed, case.name), load(case.name)
    if case.effect == "same":
        assert (found == exact(fixture_path(case.name), case.name)).all()
        return
    moved = float(np.abs(found - ref.logits).max())
    print(f"{case.id}: logits move by {moved:.1e}")
    assert moved > 2 * EXACT_MAX_DIFF


@pytest.mark.parametrize(("line", "name", "what"), CONSTANTS)
def test_a_wrong_constant_would_show(line, name, what):
    assert SENSITIVITY[name][what] > EXACT_MAX_DIFF, f"{line}: {name}"


def test_every_fixture_is_there_to_catch_something():
    for name, gaps in SENSITIVITY.items():
        assert gaps and min(gaps.values()) > EXACT_MAX_DIFF, name


def test_every_line_of_the_conventions_is_in_the_table(shared):
    text = (shared / "conventions.md").read_text()
    lines = [p.split("**")[1].rstrip(".") for p in text.split("\n- ")[1:]]
    lines += ["YaRN, DeepSeek"]  # the second half of its line
    tested = {c.line for c in CASES} | set(ELSEWHERE)
    assert set(lines) <= tested, sorted(set(lines) - tested)


# ---- older spellings -----------------------------------------------------------------------


def join_kv_b(n_heads: int) -> Remake:
    """attn_k_b and attn_v_b as the one attn_kv_b of older files."""

    def remake(t: Tensors) -> None:
        for name in [n for n in t if n.endswith("attn_k_b.weight")]:
            k, v = t.pop(name), t.pop(name.replace("_k_b", "_v_b"))
            heads = np.concatenate([k.swapaxes(1, 2), v], axis=1)
            assert len(heads) == n_heads
            t[name.replace("_k_b", "_kv_b")] = np.ascontiguousarray(heads.reshape(-1, heads.shape[-1]))

    return remake


@pytest.mark.parametrize(
    ("name", "n_heads", "key", "value"),
    [("deepseek2-lite", 3, 22, 14), ("deepseek2-v2", 4, 28, 10), ("deepseek2-v3", 4, 28, 10)],
)
def test_attn_kv_b_unsplit_with_the_keys_of_older_files(tmp_path, name, n_heads, key, value):
    """They describe the heads, not the absorbed form, and have no key for the gating where it is softmax."""
    keys: dict[str, Key] = {
        "attention.head_count_kv": n_heads,
        "attention.key_length": key,
        "attention.value_length": value,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    if name != "deepseek2-v3":
        keys |= {"expert_gating_func": None, "expert_weights_norm": None}
    path = rewrite(fixture_path(name), tmp_path / "older.gguf", keys=keys, remake=join_kv_b(n_heads))
    assert_exact(exact(path, name), load(name).logits, f"{name} unsplit")


def join_ssm_in(t: Tensors) -> None:
    """attn_qkv and attn_gate as the one ssm_in of the first qwen3next files: [q ; k ; v.. ; z..] a key head.
    Whole rows move, so this holds for any type."""
    for name in [n for n in t if n.endswith("attn_qkv.weight")]:
        gate = name.replace("attn_qkv", "attn_gate")
        qkv, z = t.pop(name), t.pop(gate)
        n_key = 2
        keys = len(qkv) - len(z)
        parts = [*np.split(qkv, [keys // 2, keys]), z]
        joined = np.concatenate([p.reshape(n_key, -1, z.shape[-1]) for p in parts], axis=1)
        older = name.replace("attn_qkv", "ssm_in")
        t[older] = np.ascontiguousarray(joined.reshape(-1, z.shape[-1]))
        if name in t.kinds:
            t.kinds[older] = t.kinds[name]


@pytest.mark.parametrize("name", ["qwen3next", "qwen3next-q4_0"])
def test_ssm_in_of_the_first_qwen3next_files(tmp_path, name):
    path = rewrite(fixture_path(name), tmp_path / "older.gguf", remake=join_ssm_in)
    ref = load(name)
    for chunk in (0, 1, 7):
        e = Engine(str(path), device="cpu", exact=True, threads=2)
        assert_exact(rows(e, ref.ids, ref.rows, chunk), ref.logits, f"{name} ssm_in, chunk {chunk}")
    wrong = rewrite(path, tmp_path / "wrong.gguf", change={"ssm_in": lambda x: x[::-1]})
    assert np.abs(exact(wrong, name) - ref.logits).max() > EXACT_MAX_DIFF


def four_layers(t: Tensors) -> None:
    """qwen3next's three layers (recurrent, full, recurrent) as recurrent, recurrent, recurrent, full."""
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name in [n for n in t if n.startswith("blk.")]:
        _, i, rest = name.split(".", 2)
        layers.setdefault(int(i), {})[rest] = t.pop(name)
    for i, source in enumerate((0, 2, 0, 1)):
        t.update({f"blk.{i}.{rest}": x for rest, x in layers[source].items()})


def test_which_layers_are_full_by_array_by_interval_and_by_neither(tmp_path):
    """Older files have the interval alone, the first ones not even that: it was 4."""
    spellings: list[dict[str, Key]] = [
        {"attention.recurrent_layers": [True, True, True, False]},
        {"attention.recurrent_layers": None, "full_attention_interval": 4},
        {"attention.recurrent_layers": None},
    ]
    found = []
    for i, keys in enumerate(spellings):
        path = tmp_path / f"{i}.gguf"
        rewrite(fixture_path("qwen3next"), path, keys={"block_count": 4, **keys}, remake=four_layers)
        found.append(exact(path, "qwen3next"))
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    assert np.abs(found[0] - load("qwen3next").logits).max() > 1  # another model than the three layers


# ---- lines by themselves -------------------------------------------------------------------


def test_what_composes_and_what_does_not_have_different_ids(engine):
    """A GGUF carries no normaliser: "e" and U+0301 are not U+00E9."""
    e = engine("qwen3-tied")
    composed, decomposed = e.tokenize("caf\u00e9"), e.tokenize("cafe\u0301")
    assert composed != decomposed
    assert e.detokenize(composed) == "caf\u00e9" and e.detokenize(decomposed) == "cafe\u0301"


def test_default_mixes_of_types_are_those_of_the_fixtures():
    """A tied embedding in Q6_K, rows of no multiple of 256 in 32-blocks, 1-D tensors and routers in F32."""
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(fixture_path("qwen3moe-q4_k")).tensors}
    shapes = {t.name: t.shape for t in gguf.GGUFReader(fixture_path("qwen3moe-q4_k")).tensors}
    assert types["token_embd.weight"] == "Q6_K" and "output.weight" not in types
    assert types["blk.0.ffn_gate_exps.weight"] == "Q4_K" and types["blk.0.ffn_gate_inp.weight"] == "F32"
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0" and shapes["blk.0.ffn_down_exps.weight"][0] % 256
    assert all(types[n] == "F32" for n, shape in shapes.items() if len(shape) == 1)


# Of these a file says no size of heads: it is the width by the heads.
NO_HEAD_SIZE = ("qwen2", "qwen2moe")


def test_each_architecture_has_a_file_of_odd_sizes():
    """What an even size would hide: heads that are not the width by their number, more value heads than key
    heads, 8 experts of which 2 are taken, groups, a bias of the choice."""
    seen: dict[str, set[str]] = {}
    for path in FIXTURES.glob("*.gguf"):
        reader = gguf.GGUFReader(path)
        arch = str(reader.fields["general.architecture"].contents())

        def key(name: str, fields=reader.fields, arch=arch):
            field = fields.get(f"{arch}.{name}")
            return field.contents() if field else None

        found = seen.setdefault(arch, set())
        size = key("attention.key_length_mla") or key("attention.key_length")
        if size and size * key("attention.head_count") != key("embedding_length"):
            found.add("heads")
        if key("ssm.time_step_rank") and key("ssm.time_step_rank") > key("ssm.group_count"):
            found.add("value heads")
        if (key("expert_count"), key("expert_used_count")) == (8, 2):
            found.add("8 experts")
        if (key("expert_group_count") or 1) > (key("expert_group_used_count") or 1):
            found.add("groups")
        if any("exp_probs_b" in t.name and np.abs(t.data).min() > 0 for t in reader.tensors):
            found.add("bias")
    assert len(seen) == 13
    for arch, found in seen.items():
        want = {"heads"} - ({"heads"} if arch in NO_HEAD_SIZE else set())
        want |= {"value heads"} if arch in ("qwen35", "qwen35moe", "qwen3next", "qwen4exp") else set()
        want |= {"8 experts"} if "moe" in arch or arch in ("qwen3next", "qwen4exp") else set()
        want |= {"8 experts"} if arch.startswith("deepseek") else set()
        want |= {"groups", "bias"} if arch in ("deepseek2", "deepseek32") else set()
        want |= {"bias"} if arch == "deepseek4" else set()
        assert want <= found, f"{arch}: {sorted(want - found)}"
