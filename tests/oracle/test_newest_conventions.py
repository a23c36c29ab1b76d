"""The conventions of the newest families (qwen4exp, deepseek32, deepseek4), line by line: what broke each in
the reference, by how much logits moved, and that no line and no fixture was left out.

The engine with a line read wrongly gives the logits that make.py's broken reference gave: so it fails
test_logits.py or test_sparse.py as far as they lie beyond the gate. Changed files, at which the engine itself
must move, are in test_streams.py and test_sparse.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest

from .references import EXACT_MAX_DIFF, FIXTURES, NAMES, SPARSE, fixture_path

SENSITIVITY = json.loads((FIXTURES / "sensitivity.json").read_text())

# (family, how its line begins): what make.py broke of it.
LINES: dict[tuple[str, str], tuple[str, ...]] = {
    ("qwen4exp", "Residual"): ("norm over all streams", "streams within, hc_attn_norm", "norm eps"),
    ("qwen4exp", "Each of the two mixers"): (
        "mixing not divided",
        "mixing without silu",
        "mixing without sigmoid",
        "mixing of the streams as they are",
        "sum of the streams",
        "injection not divided",
        "injection not doubled",
        "injection into the normed streams",
        "1 added to the streams' norm once more",
        *(f"streams within, hc_{m}_{part}" for m in ("attn", "ffn") for part in ("norm", "down", "inject")),
    ),
    ("qwen4exp", "`output_hc_norm"): ("1 added to the last norm once more",),
    ("qwen4exp", "Linear layers"): (
        "silu of z",
        "-exp once more",
        "dt bias",
        "taps backwards",
        "eps of the l2 norm",
        "1 added to the gated norm",
        *(f"value heads grouped, attn_{part}" for part in ("qkv", "gate")),
        *(f"value heads grouped, ssm_{part}" for part in ("alpha", "beta", "a", "dt", "conv1d", "out")),
    ),
    ("qwen4exp", "Full layers"): (
        "attention's gate",
        "gates after all queries",
        "q norm",
        "k norm",
        "rope pairs",
        "rope base",
        "rope over the whole head",
        "queries of the index not normed",
        "queries of the index not rotated",
        "1 added to the index's q norm once more",
        "1 added to the index's k norm once more",
        "keys normed before their mean",
        "keys rotated before their mean",
        "a block's last position",
        "a block's number for its position",
        "scores without relu",
        "one block too few",
        "top_k in blocks",
        "a block complete one token late",
        "the unfinished block unseen",
    ),
    ("qwen4exp", "`attention.compress_ratios`"): ("no blocks are chosen",),
    ("qwen4exp", "PLE"): (
        "longer n-grams first",
        "other multipliers",
        "other sizes",
        "other offsets",
        "no token is 0",
        "an eos cuts nothing",
        "an eos cuts its own n-gram",
        "query not normed",
        "gate not divided",
        "gate without a root",
        "gate without a sign",
        "convolution not normed",
        "convolution without dilation",
        "convolution without silu",
        "n-grams' taps backwards",
        "norm of the n-grams' keys",
        "norm of the n-grams' queries",
        "norm of the n-grams' convolution",
    ),
    ("qwen4exp", "`ple.eos_token_id`"): ("eos of the tokenizer",),
    ("qwen4exp", "MoE"): (
        "router weights renormalised or not",
        "shared expert",
        "gate of the shared expert",
    ),
    ("deepseek32", "Everything of deepseek2-v3"): (
        "eps of the latents' norms is the model's",
        "norm of the latent",
        "norm of the query's latent",
        "bias of the choice",
        "groups ignored",
        "other groups",
        "weights renormalised or not",
        "weights' scale",
        "yarn's softmax scale",
        "weight of the index key's norm",
        "bias of the index key",
        "no mean subtracted",
        "eps of the index key's norm",
    ),
    ("deepseek32", "Index query"): (
        "index query from the latent before its norm",
        "index key before attn_norm",
        "head weights before attn_norm",
        "index rope pairs",
        "index rope last",
        "rope pairs",
        "index cos and sin scaled",
    ),
    ("deepseek32", "score(t, s)"): (
        "no relu",
        "head weights positive",
        "one slot fewer",
        "own key privileged",
        "dense layers not sparse",
    ),
    ("deepseek4", "hc (always 4)"): (
        "streams not normed",
        "pre and post",
        "comb from and to",
        "scales of the streams",
        "one iteration fewer",
        "epsilon of the streams",
        "base of the last mix",
        "scale of the last mix",
    ),
    ("deepseek4", "Attention"): (
        "norm of the query's latent",
        "query norm",
        "norm of the key",
        "rope pairs",
        "rope first",
        "results not turned back",
        "results turned on",
        "sinks",
    ),
    ("deepseek4", "`attention.compress_ratios`"): (
        "rope base",
        "base of compressing layers",
        "compressing layers turned as the others",
        "other layers turned as the compressing",
        "no scaling",
        "cos and sin times yarn's factor",
    ),
    ("deepseek4", "Every layer sees"): ("window",),
    ("deepseek4", "Ratio 128"): (
        "entries of ratio 128",
        "softmax not per channel",
        "positions in a block",
        "norm of the entries",
        "entries at their block's end",
    ),
    ("deepseek4", "Ratio 4"): (
        "entries of ratio 4",
        "halves of the compressor",
        "entries at their block's end",
    ),
    ("deepseek4", "Entry i is visible"): (
        "one entry fewer",
        "top_k counts tokens",
        "halves of the index's compressor",
        "positions in the index's block",
        "norm of the index's entries",
        "index rope first",
        "index rope pairs",
        "index's head weights",
    ),
    ("deepseek4", "Output"): ("groups of the output",),
    ("deepseek4", "MoE"): (
        "scores by sigmoid",
        "scores by softplus",
        "bias of the choice",
        "weights not over their sum",
        "weights' scale",
        "experts by token",
        "no experts by token",
        "experts not clamped",
        "gate clamped from below",
        "shared expert not clamped",
        "shared expert",
    ),
}
# Of what another engine does to its low-precision caches, with no effect on a logit.
NOTHING_TO_BREAK = {("deepseek32", "llama.cpp multiplies")}


@pytest.mark.parametrize(("family", "line"), LINES)
def test_each_part_of_a_line_moves_logits_when_it_is_broken(family: str, line: str) -> None:
    for what in LINES[family, line]:
        assert SENSITIVITY[family][what] > 2 * EXACT_MAX_DIFF, f"{line}: {what}"


def test_no_fixture_is_without_what_it_is_there_to_catch() -> None:
    """Those of the newest families once were: their figures had been lost, and nothing noticed."""
    assert set(SENSITIVITY) == {*NAMES, *SPARSE} - {"demo"}  # demo is trained, not made


@pytest.mark.parametrize("family", ["qwen4exp", "deepseek32", "deepseek4"])
def test_nothing_that_was_broken_is_left_out_of_the_lines(family: str) -> None:
    named = {what for (f, _), parts in LINES.items() if f == family for what in parts}
    common = {"one expert too few", "scaling factor", "original context", "yarn taken for linear"}
    common |= {"norm eps", "rope base", "shared expert", "no scaling"}  # of conventions.md
    assert set(SENSITIVITY[family]) - named <= common


def test_every_line_of_the_newest_conventions_is_in_the_table(shared: Path) -> None:
    text = (shared / "conventions-newest.md").read_text()
    for section in text.split("\n## ")[1:]:
        family = section.split()[0]
        known = [line for f, line in (*LINES, *NOTHING_TO_BREAK) if f == family]
        lines = re.findall(r"^- (.*)$", section, re.MULTILINE)
        assert lines and len(lines) == len(known), family
        for line in lines:
            assert any(line.startswith(k) for k in known), f"{family}: {line[:60]}"


def test_sizes_that_would_hide_a_mistake_are_not_those_of_the_fixtures() -> None:
    """An index's head that is no multiple of 64; n-grams' end that is not the text's; a full layer that sees
    everything beside one that chooses."""

    def value(name: str, key: str) -> object:
        return gguf.GGUFReader(fixture_path(name)).fields[f"{name}.{key}"].contents()

    assert value("deepseek32", "attention.indexer.key_length") % 64  # type: ignore[operator]
    reader = gguf.GGUFReader(fixture_path("qwen4exp"))
    end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    assert value("qwen4exp", "ple.eos_token_id") != end
    assert value("qwen4exp", "attention.compress_ratios") == [0, 0, 5]
    assert value("qwen4exp", "attention.recurrent_layers") == [False, True, False]
