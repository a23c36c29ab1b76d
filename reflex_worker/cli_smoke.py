"""`reflex smoke`: the whole pipeline once, from file to tokens and a decision, on the bundled model."""

from __future__ import annotations

from .cli_args import Option, parse
from .cli_args import usage as usage_text
from .cli_model import MODEL_OPTIONS, boot_driver, open_engine, take_model
from .cli_output import phase_fields, result_line

OPTIONS = [*MODEL_OPTIONS, Option("--json", help="one JSON object")]


def usage(name):
    return usage_text(name, "[GGUF]", OPTIONS, "Without a file: the bundled model.")


def enough(_name):
    return True


def main(name, argv):
    from .cli import write

    boot_driver(argv)
    values, positional = parse(argv, OPTIONS, 1)
    if not positional:
        values["demo"] = True
    engine = open_engine(take_model(values, positional, name), values)
    generation = engine.generate("The", max_tokens=2, ignore_eos=True)
    while generation.step().kind != "done":
        pass
    scoring = engine.score("The", [" a", " b"])
    while scoring.step().kind != "done":
        pass
    fields = {
        "device": engine.info["device"],
        "token_ids": generation.token_ids,
        "best_idx": scoring.best_index,
        "process_start_to_first_token_ms": generation.timings["first_token_at"],
        **phase_fields(engine, generation.timings),
        "total_ms": generation.timings["total"] + scoring.timings["total"],
    }
    write(1, result_line("REFLEX_SMOKE_OK", fields, values["json"]))
    return 0
