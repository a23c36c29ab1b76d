"""`reflex generate GGUF [PROMPT]`: the cold path to a token."""

from __future__ import annotations

from .cli_args import FLOAT32_MAX, Number, Option, UsageError, Whole
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

# As of the protocol (reflex_protocol.validate, which would cost its import).
MAX_LOGPROBS = 1000

OPTIONS = [
    *MODEL_OPTIONS,
    Option("--max-tokens", Whole(), 32, "N", help="tokens at most"),
    Option("--temperature", Number(0, FLOAT32_MAX), 0.0, "T", help="0: greedy"),
    Option("--top-k", Whole(), 0, "N", help="keep the N likeliest, 0: all"),
    Option("--top-p", Number(0, 1, above=True), 1.0, "P", help="keep the likeliest up to this mass"),
    Option("--min-p", Number(0, 1), 0.0, "P", help="drop what is below this part of the likeliest"),
    Option("--seed", Whole(0, 2**64 - 1), None, "N", help="same seed, same text; drawn and told when absent"),
    Option(
        "--repetition-penalty",
        Number(0, FLOAT32_MAX, above=True),
        1.0,
        "X",
        help="divides logits of tokens seen",
    ),
    Option(
        "--frequency-penalty",
        Number(-FLOAT32_MAX, FLOAT32_MAX),
        0.0,
        "X",
        help="per occurrence in the output",
    ),
    Option(
        "--presence-penalty",
        Number(-FLOAT32_MAX, FLOAT32_MAX),
        0.0,
        "X",
        help="once for tokens in the output",
    ),
    Option("--stop", str, None, "TEXT", repeat=True, help="end before this text (repeatable)"),
    Option("--ignore-eos", help="go on past the model's end tokens"),
    Option(
        "--logprobs",
        Whole(0, MAX_LOGPROBS),
        None,
        "N",
        help="tell the log-probability of each token and the N best",
    ),
    Option("--no-special", help="do not read control tokens in the prompt"),
    Option("--stream", help="show the text live; with --json a JSON line per token"),
    ENERGY_OPTION,
    Option("--json", help="one JSON object instead of the result line"),
]


def usage(name):
    return usage_text(name, "GGUF [PROMPT] | --demo [PROMPT]", OPTIONS, "PROMPT '-' reads stdin.")


def enough(_name):
    return False


def main(name, argv):
    values, path, prompt = begin(name, argv, OPTIONS)
    from .cli import write

    stops = [checked_text(s, "--stop") for s in values["stop"]]
    if "" in stops:
        raise UsageError("--stop: expected text, found an empty string")
    engine, meter = open_metered(path, values)
    progress = Progress(engine)
    generation = with_tokenizer(
        engine,
        path,
        lambda e: e.generate(
            prompt,
            parse_special=not values["no_special"],
            max_tokens=values["max_tokens"],
            temperature=values["temperature"],
            top_k=values["top_k"],
            top_p=values["top_p"],
            min_p=values["min_p"],
            seed=values["seed"],
            repetition_penalty=values["repetition_penalty"],
            frequency_penalty=values["frequency_penalty"],
            presence_penalty=values["presence_penalty"],
            stop=stops,
            ignore_eos=values["ignore_eos"],
            logprobs=values["logprobs"],
        ),
    )
    show = show_line if values["json"] else show_text
    while True:
        event = generation.step()
        if event.kind != "progress":
            progress.clear()
            if meter and event.kind == "token" and len(generation.token_ids) == 1:
                meter.mark("prompt_eval")
        if values["stream"]:
            show(event, values)
        if event.kind == "done":
            break
    told = fields(engine, generation, values)
    if meter:
        meter.mark("decode" if generation.token_ids else "prompt_eval")
        told["energy_j"] = meter.joules()
    write(1, result_line("REFLEX_GENERATE_OK", told, values["json"]))
    return 0


def show_text(event, _values):
    """--stream: what an event adds to the text, and the newline that the result line stands behind."""
    from .cli import write

    text = event.text + ("\n" if event.kind == "done" else "")
    if text:
        write(1, text)


def show_line(event, values):
    """--stream --json: stdout carries JSON lines only. A token's is that of the protocol (docs/protocol.md);
    text that comes with none is told by the result alone, as there."""
    from .cli import write

    if event.kind != "token":
        return
    line = {"token_id": event.token_id, "text": event.text}
    if values["logprobs"] is not None:
        line["logprob"] = event.logprob
        line["top_logprobs"] = top_logprobs(event.top_logprobs)
    write(1, result_line("token", line, True))


def top_logprobs(pairs):
    return [{"token_id": i, "logprob": p} for i, p in pairs]


def fields(engine, generation, values):
    timings = generation.timings
    usage = generation.usage
    out = {
        # null where --max-tokens 0 asked for none
        "process_start_to_first_token_ms": timings["first_token_at"] or None,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish_reason": generation.finish_reason,
        "text": generation.text,
        "token_ids": generation.token_ids,
    }
    if generation.stop_match is not None:
        out["stop_match"] = generation.stop_match
    if values["temperature"] > 0:
        out["seed"] = generation.seed
    if values["logprobs"] is not None:
        out["logprobs"] = [
            {"token_id": i, "logprob": p, "top_logprobs": top_logprobs(top)}
            for i, p, top in generation.logprobs
        ]
    out.update(phase_fields(engine, timings))
    out["decode_ms"] = timings["decode"]
    out["total_ms"] = timings["total"]
    return out
