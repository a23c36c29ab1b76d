"""The timeline of a cold start as a picture (`reflex bench --cold N --plot FILE`)."""

from __future__ import annotations

from .cli_args import UsageError

# Lanes from top to bottom; what runs beside something else has a lane of its own.
LANES = ("process", "tokenizer", "driver", "weights", "prompt")
ENDINGS = (".svg", ".png", ".pdf")
COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#e45756",
    "#72b7b2",
    "#9d755d",
    "#eeca3b",
    "#ff9da6",
    "#bab0ac",
)


def spans(run):
    """[(lane, what, begin, end)] in milliseconds since the process started, of one run's result line."""
    launch = run["launch_ms"]
    opened = launch + run["gguf_open_ms"]
    first = run["process_start_to_first_token_ms"]
    out = [("process", "interpreter", 0.0, launch), ("process", "open file", launch, opened)]
    stages = run["device_stages_ms"]
    plan_end = opened + run["model_load_ms"]
    if stages:
        before = stages.get("start", 0.0)
        for name in ("driver", "init", "context", "ring"):
            if name in stages:
                out.append(("driver", name, before, stages[name]))
                before = stages[name]
        if run["weights_loaded_at_ms"]:
            out.append(("weights", "upload", stages.get("context", 0.0), run["weights_loaded_at_ms"]))
        begin = run["first_kernel_at_ms"] or first - run["prompt_eval_ms"]
    else:
        out.append(("process", "plan", opened, plan_end))
        begin = first - run["prompt_eval_ms"]
    out.append(("tokenizer", "build", opened, opened + run["tokenizer_ms"]))
    out.append(("prompt", "prompt and head", begin, first))
    return out


def pyplot_for(out):
    """matplotlib, set to write such a file. UsageError where it cannot; OSError: no such place."""
    if not out.endswith(ENDINGS):
        raise UsageError(f"--plot: expected a name that ends in {', '.join(ENDINGS)}, found '{out}'")
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]

        matplotlib.use("svg" if out.endswith(".svg") else "agg")
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError(
            "--plot: expected matplotlib (pip install 'reflex-worker[plot]'), found none"
        ) from None
    open(out, "ab").close()
    return pyplot


def plot(run, first, floor, floor_is, out, title):
    """run: the median run's line; first, floor: {"p50", "p95"} in ms. UsageError without matplotlib."""
    pyplot = pyplot_for(out)
    drawn = spans(run)
    lanes = [lane for lane in LANES if any(s[0] == lane for s in drawn)]
    figure, axes = pyplot.subplots(figsize=(9, 1.1 + 0.45 * len(lanes)))
    for i, (lane, what, begin, end) in enumerate(drawn):
        width = max(end - begin, 0.0)
        axes.barh(
            lanes.index(lane), width, left=begin, color=COLOURS[i % len(COLOURS)], label=f"{what} {width:.1f}"
        )
    axes.axvline(first["p50"], color="black", label=f"first token, spawn to line, p50 {first['p50']:.1f}")
    axes.axvline(floor["p50"], color="gray", linestyle=":", label=f"floor {floor['p50']:.1f}")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"ms since the process started; floor: {floor_is}")
    axes.set_title(f"Cold start to one token: {title} on {run['device'].split(',')[0]}", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    figure.savefig(out, bbox_inches="tight")
    pyplot.close(figure)
