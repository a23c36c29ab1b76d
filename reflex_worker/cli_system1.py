"""`reflex system1 GGUF PROMPT --candidate ...`: the cold path to a decision."""

from __future__ import annotations

from .cli_args import FLOAT64_MAX, Number, Option, UsageError
from .cli_args import usage as usage_text
from .cli_model import (
    ENERGY_OPTION,
    MODEL_OPTIONS,
    Progress,
    begin,
    checked_text,
    open_metered,
    with_tokenizer,
)
from .cli_output import phase_fields, result_line

OPTIONS = [
    *MODEL_OPTIONS,
    Option("--candidate", str, None, "TEXT", repeat=True, help="a continuation to score (repeatable)"),
    Option("--score", str, "auto", "KIND", help="auto, logit_sum, logprob_sum or logprob_mean"),
    Option(
        "--temperature",
        Number(0, FLOAT64_MAX, above=True),
        1.0,
        "T",
        help="of the softmax over the candidates' scores",
    ),
    Option("--no-special", help="do not read control tokens in the prompt"),
    ENERGY_OPTION,
    Option("--json", help="one JSON object per line instead of result lines"),
]


def usage(name):
    return usage_text(
        name,
        "GGUF PROMPT --candidate TEXT [--candidate TEXT ...] | --demo PROMPT --candidate ...",
        OPTIONS,
        "PROMPT '-' reads stdin.",
    )


def enough(_name):
    return False


def main(name, argv):
    values, path, prompt = begin(name, argv, OPTIONS)
    from .cli import write

    if not values["candidate"]:
        raise UsageError(f"{name}: expected at least one --candidate")
    candidates = [checked_text(c, "--candidate") for c in values["candidate"]]
    engine, meter = open_metered(path, values)
    progress = Progress(engine)
    scoring = with_tokenizer(
        engine,
        path,
        lambda e: e.score(
            prompt,
            candidates,
            parse_special=not values["no_special"],
            score=values["score"],
            temperature=values["temperature"],
        ),
    )
    while scoring.step().kind != "done":
        pass
    progress.clear()
    timings = scoring.timings
    lines = []
    for i, (text, token_ids, score, probability) in enumerate(scoring.candidates):
        fields = {"idx": i, "text": text, "token_ids": token_ids, "score": score, "probability": probability}
        lines.append(result_line("REFLEX_SYSTEM1_CANDIDATE_OK", fields, values["json"]))
    best = scoring.best_index
    final = {
        "process_start_to_result_ms": timings["first_token_at"],
        "num_candidates": len(candidates),
        "best_idx": best,
        "best_text": candidates[best],
        "entropy": scoring.entropy,
        "score": scoring.score_kind,
        "prompt_tokens": scoring.usage["prompt_tokens"],
        **phase_fields(engine, timings),
        "total_ms": timings["total"],
    }
    if meter:
        meter.mark("prompt_eval")
        final["energy_j"] = meter.joules()
    lines.append(result_line("REFLEX_SYSTEM1_OK", final, values["json"]))
    write(1, "".join(lines))
    return 0
