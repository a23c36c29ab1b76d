"""`reflex check GGUF [TEXT]`: how far fast arithmetic moves this file's logits from exact arithmetic."""

from __future__ import annotations

from .cli_args import Option, Whole, parse
from .cli_args import usage as usage_text
from .cli_model import MODEL_OPTIONS, open_engine, take_model, with_tokenizer
from .cli_output import result_line

OPTIONS = [
    *(o for o in MODEL_OPTIONS if o.name != "--exact"),  # it computes both ways
    Option("--tokens", Whole(1), 64, "N", help="rows of the text to compare at most"),
    Option("--json", help="one JSON object"),
]

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, people first walked on the Moon; "
    "def add(a, b): return a + b  # 你好, мир, नमस्ते"
)


def usage(name):
    return usage_text(
        name,
        "GGUF [TEXT] | --demo [TEXT]",
        OPTIONS,
        "Fast mode rounds activations to 8 bits and keeps KV in f16; --exact elsewhere turns that off.\n"
        "Reported: rms and largest logit difference, their std, mean KL(exact || fast) in nats, and\n"
        "how many rows agree on the likeliest token.",
    )


def enough(_name):
    return False


def main(name, argv):
    from .cli import write

    values, positional = parse(argv, OPTIONS, 2)
    path = take_model(values, positional, name)
    text = positional[0] if positional else TEXT
    fast = open_engine(path, {**values, "exact": False})
    exact = open_engine(path, {**values, "exact": True})
    ids = with_tokenizer(fast, path, lambda e: e.tokenize(text))[: values["tokens"]]
    rows = list(range(len(ids)))
    stats = compare(exact.logits(ids, rows), fast.logits(ids, rows))
    write(1, result_line("REFLEX_CHECK_OK", {"rows": len(rows), **stats}, values["json"]))
    return 0


class NotFiniteError(Exception):
    """The file's weights give no numbers."""

    kind = "gguf"


def compare(exact, fast):
    """Over all rows: rms and max |difference|, std of the exact logits, mean KL in nats, top-1 agreement."""
    import math

    if not all(math.isfinite(x) for row in exact + fast for x in row):
        raise NotFiniteError("the model's logits are not finite: its weights are broken")
    n = squares = largest = kl = same = total = total_sq = 0
    for e, f in zip(exact, fast, strict=True):
        squares += sum((a - b) ** 2 for a, b in zip(e, f, strict=True))
        largest = max(largest, max(abs(a - b) for a, b in zip(e, f, strict=True)))
        total += sum(e)
        total_sq += sum(a * a for a in e)
        n += len(e)
        le, lf = log_sum_exp(e), log_sum_exp(f)
        kl += sum(math.exp(a - le) * ((a - le) - (b - lf)) for a, b in zip(e, f, strict=True))
        same += e.index(max(e)) == f.index(max(f))
    mean = total / n
    return {
        "rms_diff": math.sqrt(squares / n),
        "max_diff": largest,
        "logit_std": math.sqrt(max(0.0, total_sq / n - mean * mean)),
        "mean_kl": kl / len(exact),
        "top1_agree": same / len(exact),
    }


def log_sum_exp(row):
    import math

    top = max(row)
    return top + math.log(sum(math.exp(x - top) for x in row))
