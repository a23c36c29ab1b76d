"""`reflex bench GGUF`: warm latency by prompt length and decode speed in this process, or, with
`--cold N`, N fresh processes with p50 and p95 of every phase."""

from __future__ import annotations

from .cli_args import Option, UsageError, int32, parse
from .cli_args import usage as usage_text
from .cli_model import MODEL_OPTIONS, open_engine, take_model
from .cli_output import result_line, value_text

OPTIONS = [
    *MODEL_OPTIONS,
    Option("--lengths", str, "1,8,32,128,512", "N,N,...", help="prompt lengths in tokens"),
    Option("--decode", int32, 64, "N", help="tokens to decode"),
    Option("--repeat", int32, 5, "N", help="runs of each, the median counts"),
    Option("--cold", int32, 0, "N", help="instead: N fresh processes to one token"),
    Option("--prompt", str, "Once upon a time", "TEXT", help="the cold runs' prompt"),
    Option(
        "--pause", float, 0.3, "S", help="between cold runs, so that one's teardown does not slow the next"
    ),
    Option("--plot", str, None, "FILE", help="draw the cold start's timeline (needs matplotlib)"),
    Option("--json", help="one JSON object per line"),
]

PHASES = ["launch_ms", "gguf_open_ms", "cuda_init_ms", "model_load_ms", "tokenize_ms", "prompt_eval_ms"]


def usage(name):
    return usage_text(name, "GGUF | --demo", OPTIONS)


def enough(_name):
    return False


def main(name, argv):
    from .cli import write

    values, positional = parse(argv, OPTIONS, 1)
    path = take_model(values, positional, name)
    if values["cold"] < 0 or values["repeat"] < 1 or values["decode"] < 1:
        raise UsageError(f"{name}: --cold, --repeat and --decode expect positive numbers")
    for line in cold(path, values) if values["cold"] else warm(path, values):
        write(1, line)
    return 0


def percentile(samples, p):
    """The sample at p (0..1) of the sorted list, nearest rank."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def warm(path, values):
    from ._native import now_ms

    try:
        lengths = [int(n) for n in values["lengths"].split(",")]
    except ValueError:
        raise UsageError(f"--lengths: expected numbers with commas, found '{values['lengths']}'") from None
    engine = open_engine(path, values)
    engine.warm_up()
    n_vocab, n_ctx = engine.info["n_vocab"], engine.info["n_ctx"]
    for n in lengths:
        if n < 1 or n >= n_ctx:
            raise UsageError(f"--lengths: expected 1 to {n_ctx - 1}, found {n}")
        times = []
        for k in range(values["repeat"]):
            ids = [(7919 * (i + k) + 13) % n_vocab for i in range(n)]
            begin = now_ms()
            generation = engine.generate(prompt_token_ids=ids, max_tokens=1, ignore_eos=True)
            while generation.step().kind != "done":
                pass
            times.append(now_ms() - begin)
        p50 = percentile(times, 0.5)
        fields = {
            "prompt_tokens": n,
            "first_token_ms_p50": p50,
            "first_token_ms_p95": percentile(times, 0.95),
        }
        fields["prefill_tokens_per_s"] = n / p50 * 1e3
        yield result_line("REFLEX_BENCH_PREFILL_OK", fields, values["json"])
    yield decode_line(engine, values)


def decode_line(engine, values):
    speeds = []
    n = min(values["decode"], engine.info["n_ctx"] - 5)
    for _ in range(values["repeat"]):
        generation = engine.generate(prompt_token_ids=[1, 2, 3, 4], max_tokens=n + 1, ignore_eos=True)
        while generation.step().kind != "done":
            pass
        # The first token comes out of the prompt's logits: n passes made the other n.
        speeds.append(n / generation.timings["decode"] * 1e3)
    p50 = percentile(speeds, 0.5)
    # Every token reads every weight once, but for a tied or untied embedding's other rows.
    gb = engine.info["file_bytes"] * p50 / 1e9
    fields = {"tokens": n, "tokens_per_s_p50": p50, "file_gb_per_s": gb, "device": engine.info["device"]}
    return result_line("REFLEX_BENCH_DECODE_OK", fields, values["json"])


def cold_command(path, values):
    """The command that one cold run executes: the installed launcher where there is one."""
    import os
    import sys

    launcher = os.environ.get("REFLEX_LAUNCHER") or os.path.join(os.path.dirname(sys.executable), "reflex")
    head = [launcher] if os.access(launcher, os.X_OK) else [sys.executable, "-m", "reflex_worker"]
    options = [
        "--max-tokens",
        "1",
        "--json",
        "--device",
        values["device"],
        "--threads",
        str(values["threads"]),
    ]
    if values["ctx"]:
        options += ["--ctx", str(values["ctx"])]
    if values["isa"]:
        options += ["--isa", values["isa"]]
    if values["exact"]:
        options.append("--exact")
    return [*head, "generate", path, values["prompt"], *options]


def cold(path, values):
    import json
    import os
    import subprocess
    import time

    command = cold_command(path, values)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or "site-packages" not in v}
    samples = {}
    for k in range(values["cold"] + 1):
        time.sleep(values["pause"])
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        assert process.stdout is not None
        line = process.stdout.readline()
        first = (time.perf_counter() - begin) * 1e3
        status = process.wait()
        total = (time.perf_counter() - begin) * 1e3
        if status != 0:
            raise OSError(f"a cold run ended with status {status}: {' '.join(command)}")
        if k == 0:
            continue  # brings the file into the page cache
        run = json.loads(line)
        row = {"spawn_to_first_token_ms": first, "spawn_to_exit_ms": total}
        row |= {phase: run[phase] for phase in PHASES}
        for key, value in row.items():
            samples.setdefault(key, []).append(value)
    stats = {
        k: {"p50": percentile(v, 0.5), "p95": percentile(v, 0.95), "min": min(v)} for k, v in samples.items()
    }
    floor = read_floor_ms(path)
    ratio = stats["spawn_to_first_token_ms"]["p50"] / floor
    for key, s in stats.items():
        yield result_line("REFLEX_BENCH_COLD_PHASE_OK", {"phase": key, **s}, values["json"])
    final = {"runs": values["cold"], "read_file_once_ms": floor, "ratio_to_read": ratio}
    yield result_line("REFLEX_BENCH_COLD_OK", final, values["json"])
    if values["plot"]:
        plot(stats, floor, values["plot"], os.path.basename(path))
        yield f"wrote {value_text(values['plot'])}\n"


def read_floor_ms(path):
    """Milliseconds to read the file once out of the page cache with one thread: what no start on
    a CPU that touches every weight can go far below (threads share it)."""
    import os
    import time

    buffer = bytearray(4 << 20)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        while os.readv(fd, [buffer]) > 0:
            pass
        os.close(fd)
        best = min(best, (time.perf_counter() - begin) * 1e3)
    return best


def plot(stats, floor, out, title):
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]

        matplotlib.use("svg" if out.endswith(".svg") else "agg")
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError(
            "--plot: expected matplotlib (pip install 'reflex-worker[plot]'), found none"
        ) from None
    figure, axes = pyplot.subplots(figsize=(9, 2.6))
    left = 0.0
    for phase in PHASES:
        width = stats[phase]["p50"]
        if width <= 0:
            continue
        axes.barh(0, width, left=left, label=f"{phase.removesuffix('_ms')} {width:.1f}")
        left += width
    first = stats["spawn_to_first_token_ms"]
    axes.axvline(first["p50"], color="black", label=f"first token {first['p50']:.1f}")
    axes.axvline(floor, color="gray", linestyle=":", label=f"file read once {floor:.1f}")
    axes.set_yticks([])
    axes.set_xlabel("ms since spawn (medians)")
    axes.set_title(f"Cold start to one token: {title}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=4, fontsize=8, frameon=False)
    figure.savefig(out, bbox_inches="tight")
    pyplot.close(figure)
