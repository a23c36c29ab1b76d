"""Sparse attention, exact mode: against transformers, and what only a choice of slots can get wrong.

The choice may depend neither on how rows were cut into passes, nor on the request before, nor on the
candidates beside. tests/fixtures/make.py sees to it that no choice of the fixtures is a near tie.
"""

from __future__ import annotations

import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError, gguf_info

from .conftest import rows
from .references import (
    EXACT_MAX_DIFF,
    FIRST_CHOICE,
    SPARSE,
    SPARSE_FAST_RMS,
    assert_exact,
    assert_greedy,
    fixture_path,
    load,
    mean_kl,
)
from .rewrite import Change, Key, rewrite
from .test_logits import GREEDY_EXACT_TOLERANCE, ISAS, continuation
from .test_mixtures import exact_logits
from .test_system1 import KINDS, check, mixed_candidates, run

LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 70, 130, 257)
LONG_CANDIDATES = (12, 40, 70)  # tokens


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SPARSE)
def test_exact_logits_at_every_length(engine, name, length):
    ref = load(name)
    wanted = ref.rows_below(length)
    for chunk in (0, 1, 7):
        found = rows(engine(name), ref.ids[:length], wanted, chunk)
        assert_exact(found, ref.at(wanted), f"{name} length {length} chunk {chunk or 'whole'}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SPARSE)
def test_exact_logits_on_every_instruction_set(engine, name, isa):
    ref = load(name)
    assert_exact(rows(engine(name, isa=isa), ref.ids, ref.rows), ref.logits, f"{name} {isa}")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SPARSE)
def test_last_row_alone_is_that_of_all_rows(engine, name, length):
    ref = load(name)
    found = rows(engine(name), ref.ids[:length], [length - 1])
    assert_exact(found, ref.at([length - 1]), f"{name} last row of {length}")


@pytest.mark.parametrize("name", SPARSE)
def test_pieces_of_every_size_choose_the_same(engine, name):
    ref, e = load(name), engine(name)
    ids, wanted = ref.ids[:70], list(range(70))
    single = rows(e, ids, wanted, 1)
    for chunk in range(2, 71):
        found = rows(e, ids, wanted, chunk)
        assert float(np.abs(found - single).max()) <= EXACT_MAX_DIFF, f"{name}: pieces of {chunk}"


@pytest.mark.parametrize("name", SPARSE)
def test_greedy_continuation(engine, name):
    ref = load(name)
    for length, tokens, margins in zip(ref.greedy_prompts, ref.greedy, ref.margins, strict=True):
        found = continuation(engine(name), ref.ids[:length], len(tokens))
        assert_greedy(found, tokens, margins, GREEDY_EXACT_TOLERANCE, f"{name} from {length} tokens")


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_request_after_a_long_one_gives_the_bits_of_a_fresh_engine(engine, name, exact):
    ref = load(name)
    used = engine(name, exact=exact)
    used.logits(ref.ids, [256])
    run(used, ref.ids[:40], mixed_candidates(ref.logits.shape[1], 20, seed=1))
    fresh = Engine(str(fixture_path(name)), device="cpu", exact=exact, threads=2)
    assert used.logits(ref.ids[9:90], [0, 20, 80]) == fresh.logits(ref.ids[9:90], [0, 20, 80])


@pytest.mark.parametrize("chunk", [512, 33, 8])
@pytest.mark.parametrize("prompt_length", [1, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPARSE)
def test_packed_pass_equals_one_pass_per_candidate(engine, name, kind, prompt_length, chunk):
    """A candidate's rows choose among the prompt and their own branch, never their neighbours'."""
    ref, e = load(name), engine(name, chunk=chunk)
    vocab = ref.logits.shape[1]
    rng = np.random.default_rng(prompt_length)
    long_ones = [rng.integers(0, vocab, n).tolist() for n in LONG_CANDIDATES]
    candidates = mixed_candidates(vocab, 24, seed=prompt_length) + long_ones
    prompt = ref.ids[:prompt_length]
    check(run(e, prompt, candidates, score=kind), engine(name), prompt, candidates, kind, EXACT_MAX_DIFF)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", SPARSE)
def test_order_of_candidates_changes_no_bit_of_a_score(engine, name, exact):
    ref, e = load(name), engine(name, exact=exact)
    candidates = mixed_candidates(ref.logits.shape[1], 50, seed=8)
    first = {tuple(c[1]): c[2] for c in run(e, ref.ids[:30], candidates).candidates}
    again = {tuple(c[1]): c[2] for c in run(e, ref.ids[:30], candidates[::-1]).candidates}
    assert first == again


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("name", SPARSE)
def test_fast_logits_stay_within_the_bound_of_their_type(engine, name, chunk, isa):
    ref = load(name)
    found = rows(engine(name, exact=False, isa=isa), ref.ids, ref.rows, chunk)
    error, free = found - ref.logits, np.array(ref.rows) < FIRST_CHOICE[name]
    kl = mean_kl(ref.logits, found)
    for what, part, bound in zip(
        ("all", "chosen"), (error[free], error[~free]), SPARSE_FAST_RMS[name], strict=True
    ):
        rms = float(np.sqrt((part**2).mean()))
        print(f"{name} {isa} chunk {chunk or 'whole'}, rows that read {what}: rms {rms:.4f} (KL {kl:.1e})")
        assert rms <= bound


# ---- each convention, one by one -----------------------------------------------------------


def zero(w: np.ndarray) -> np.ndarray:
    return np.zeros_like(w)


def one(w: np.ndarray) -> np.ndarray:
    return np.ones_like(w)


def negated(w: np.ndarray) -> np.ndarray:
    return -w


def backwards(w: np.ndarray) -> np.ndarray:
    return w[::-1]


HYPER = ("fn", "base", "scale")
COUNTING: list[tuple[str, dict[str, Key], dict[str, Change]]] = [
    ("deepseek32", {"attention.indexer.top_k": 11}, {}),
    ("deepseek32", {"attention.indexer.top_k": 1000}, {}),
    ("deepseek32", {}, {"blk.0.indexer.attn_q_b": backwards}),  # the dense layer chooses too
    ("deepseek32", {}, {"blk.1.indexer.attn_q_b": backwards}),
    ("deepseek32", {}, {"indexer.attn_k": backwards}),
    ("deepseek32", {}, {"indexer.k_norm.weight": one}),
    ("deepseek32", {}, {"indexer.k_norm.bias": zero}),
    ("deepseek32", {}, {"indexer.proj": negated}),
    ("deepseek32", {"rope.scaling.type": "none"}, {}),
    ("deepseek32", {"rope.scaling.yarn_log_multiplier": 0.0}, {}),
    ("deepseek32", {"expert_weights_norm": False}, {}),
    ("deepseek32", {"expert_group_used_count": 2}, {}),
    ("deepseek32", {}, {"exp_probs_b": zero}),
    ("deepseek4", {"attention.sliding_window": 12}, {}),
    ("deepseek4", {"attention.sliding_window": 500}, {}),
    ("deepseek4", {"attention.indexer.top_k": 4}, {}),
    ("deepseek4", {"attention.compress_rope_freq_base": 10000.0}, {}),
    ("deepseek4", {"rope.freq_base": 20000.0}, {}),
    ("deepseek4", {"rope.scaling.type": "none"}, {}),
    ("deepseek4", {"rope.scaling.factor": 2.0}, {}),
    ("deepseek4", {"hyper_connection.sinkhorn_iterations": 2}, {}),
    ("deepseek4", {"hyper_connection.epsilon": 1e-6}, {}),
    ("deepseek4", {"hash_layer_count": 1}, {}),
    ("deepseek4", {"expert_weights_norm": False}, {}),
    ("deepseek4", {"expert_weights_scale": 1.0}, {}),
    ("deepseek4", {"swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.0]}, {}),  # no limit
    ("deepseek4", {"swiglu_clamp_exp": [1.25, 1.25, 1.25, 0.5]}, {}),  # the last layer's
    ("deepseek4", {"swiglu_clamp_shexp": [1.25, 1.25, 0.5, 1.25]}, {}),
    ("deepseek4", {"attention.layer_norm_rms_epsilon": 1e-6}, {}),
    ("deepseek4", {}, {"attn_sinks": zero}),
    ("deepseek4", {}, {"ffn_gate_tid2eid": backwards}),
    ("deepseek4", {}, {"exp_probs_b": zero}),
    ("deepseek4", {}, {"attn_kv_a_norm": one}),
    ("deepseek4", {}, {"attn_output_a": backwards}),
    ("deepseek4", {}, {"attn_compressor_ape": backwards}),
    ("deepseek4", {}, {"blk.2.attn_compressor_gate": zero}),  # the layer of ratio 128
    ("deepseek4", {}, {"attn_compressor_norm": one}),
    ("deepseek4", {}, {"indexer_compressor_ape": backwards}),
    ("deepseek4", {}, {"indexer_compressor_kv": backwards}),
    ("deepseek4", {}, {"indexer.proj": negated}),
    *(("deepseek4", {}, {f"hc_{part}_{what}": backwards}) for part in ("attn", "ffn") for what in HYPER),
    *(("deepseek4", {}, {f"output_hc_{what}": backwards}) for what in ("fn", "base")),
    ("deepseek4", {}, {"output_hc_scale": zero}),
]


@pytest.mark.parametrize(("name", "keys", "change"), COUNTING)
def test_each_key_and_tensor_counts(tmp_path, name, keys, change):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", keys=keys, change=change)
    moved = float(np.abs(exact_logits(changed, name) - load(name).logits).max())
    print(f"{name} {keys} {[*change]}: logits move by {moved:.1e}")
    assert moved > EXACT_MAX_DIFF


@pytest.mark.parametrize("name", ["deepseek32", "deepseek4"])
def test_only_the_order_of_scores_counts(tmp_path, name):
    """A positive factor on the index's queries or weights moves nothing: no scale of theirs is read."""
    changed = rewrite(
        fixture_path(name),
        tmp_path / "changed.gguf",
        change={"indexer.attn_q_b": lambda w: w * 4, "indexer.proj": lambda w: w / 2},
    )
    assert (exact_logits(changed, name) == exact_logits(fixture_path(name), name)).all()


@pytest.mark.parametrize("name", ["deepseek32", "deepseek4"])
def test_a_score_that_is_no_number_breaks_nothing(tmp_path, name):
    changed = rewrite(
        fixture_path(name),
        tmp_path / "changed.gguf",
        change={"indexer.proj": lambda w: np.full_like(w, np.nan)},
    )
    assert np.isfinite(exact_logits(changed, name)).all()


@pytest.mark.parametrize(
    "keys",
    [
        {"nextn_predict_layers": 1},  # a file whose block_count leaves the further block out
        {"expert_group_count": 0, "expert_group_used_count": 0},
        {"swiglu_clamp_exp": 1.25, "swiglu_clamp_shexp": None},  # one limit for all
        {"attention.compress_ratios": [4, 0, 128, 4]},  # no value behind the last layer
        {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
        {"expert_gating_func": None, "expert_weights_norm": None},
    ],
)
def test_other_spellings_of_deepseek4_mean_the_same(tmp_path, keys):
    changed = rewrite(fixture_path("deepseek4"), tmp_path / "changed.gguf", keys=keys)
    assert (exact_logits(changed, "deepseek4") == exact_logits(fixture_path("deepseek4"), "deepseek4")).all()


REFUSED: list[tuple[str, dict[str, Key], str, str]] = [
    ("deepseek32", {"attention.indexer.head_count": None}, "attention.indexer.head_count", "gguf"),
    ("deepseek32", {"attention.indexer.top_k": 0}, "attention.indexer.top_k.*1 to", "gguf"),
    ("deepseek32", {"attention.indexer.key_length": 10}, "attention.indexer.key_length.*16.*10", "gguf"),
    (
        "deepseek32",
        {"attention.indexer.key_length": 20},
        r"indexer.attn_q_b.*\[24, 260\].*\[24, 234\]",
        "gguf",
    ),
    ("deepseek32", {"attention.q_lora_rank": None}, "attention.q_lora_rank", "gguf"),
    ("deepseek4", {"attention.compress_ratios": [4, 0, 128]}, "compress_ratios.*4 layers.*3", "gguf"),
    ("deepseek4", {"attention.compress_ratios": None}, "compress_ratios", "gguf"),
    (
        "deepseek4",
        {"attention.compress_ratios": [4, 0, 8, 4]},
        "compress_ratios.*8",
        "unsupported_architecture",
    ),
    ("deepseek4", {"attention.output_group_count": 3}, "output_group_count.*4 heads.*3", "gguf"),
    ("deepseek4", {"attention.indexer.key_length": 4}, "attention.indexer.key_length.*6.*4", "gguf"),
    ("deepseek4", {"attention.sliding_window": None}, "sliding_window", "gguf"),
    ("deepseek4", {"hyper_connection.count": 2}, r"hc_attn_fn.*\[56, 8\].*\[112, 24\]", "gguf"),
    ("deepseek4", {"expert_gating_func": 2}, "expert_gating_func.*4.*2", "unsupported_architecture"),
    ("deepseek4", {"expert_group_count": 2}, "expert_group_count", "unsupported_architecture"),
    ("deepseek4", {"swiglu_clamp_exp": [1.0, -1.0, 1.0, 1.0]}, "swiglu_clamp_exp.*-1", "gguf"),
    ("deepseek4", {"expert_count": 7}, r"ffn_gate_inp.*\[28, 7\].*\[28, 8\]", "gguf"),
]


@pytest.mark.parametrize(("name", "keys", "message", "kind"), REFUSED)
def test_impossible_keys_are_refused_by_name(tmp_path, name, keys, message, kind):
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", keys=keys)
    with pytest.raises(ReflexError, match=message) as error:
        Engine(str(changed), device="cpu")
    assert error.value.kind == kind


@pytest.mark.parametrize("id", [-1, 8])
def test_an_expert_that_is_not_there_is_refused_with_its_token(tmp_path, id):
    def spoil(table: np.ndarray) -> np.ndarray:
        table = table.copy()
        table[77, 1] = id
        return table

    changed = rewrite(
        fixture_path("deepseek4"), tmp_path / "changed.gguf", change={"blk.1.ffn_gate_tid2eid": spoil}
    )
    with pytest.raises(
        ReflexError, match=rf"blk.1.ffn_gate_tid2eid.weight.*below 8, found {id} for token 77"
    ):
        Engine(str(changed), device="cpu")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(
            ("deepseek32", f"indexer.{t}")
            for t in ("attn_q_b.weight", "attn_k.weight", "proj.weight", "k_norm.bias")
        ),
        *(("deepseek4", f"{t}.weight") for t in ("attn_sinks", "attn_compressor_ape", "ffn_gate_tid2eid")),
        *(("deepseek4", f"{t}.weight") for t in ("hc_ffn_base", "indexer_compressor_norm", "attn_output_a")),
    ],
)
def test_a_missing_tensor_is_named_with_its_shape(tmp_path, name, tensor):
    layer = 0 if name == "deepseek4" else 1
    changed = rewrite(fixture_path(name), tmp_path / "changed.gguf", drop=[f"blk.{layer}.{tensor}"])
    report = gguf_info(str(changed))
    assert not report["runs"]
    assert f"'blk.{layer}.{tensor}' is missing (expected " in report["error"]


@pytest.mark.parametrize("name", SPARSE)
def test_info_says_that_it_runs(name):
    report = gguf_info(str(fixture_path(name)))
    assert report["runs"], report["error"]
