"""`reflex bench GGUF`: warm latency by prompt length and decode speed in this process, or, with
`--cold N`, N fresh processes with p50 and p95 of every phase."""

from __future__ import annotations

from .cli_args import DAY_S, Number, Option, UsageError, Whole, parse
from .cli_args import usage as usage_text
from .cli_model import MODEL_OPTIONS, command_head, open_engine, take_model
from .cli_output import result_line, value_text

OPTIONS = [
    *MODEL_OPTIONS,
    Option(
        "--lengths", str, "", "N,N,...", help="prompt lengths in tokens; 1,8,32,128,512 as far as they fit"
    ),
    Option("--decode", Whole(1), 64, "N", help="tokens to decode"),
    Option("--repeat", Whole(1), 5, "N", help="runs of each, the median counts"),
    Option("--cold", Whole(1), None, "N", help="instead: N fresh processes to one token"),
    Option("--prompt", str, "Once upon a time", "TEXT", help="the cold runs' prompt"),
    Option(
        "--pause",
        Number(0, DAY_S),
        0.3,
        "S",
        help="between cold runs, so that one's teardown does not slow the next",
    ),
    Option(
        "--plot",
        str,
        None,
        "FILE",
        help="draw the cold start's timeline: .svg, .png or .pdf (needs matplotlib)",
    ),
    Option("--floor", help="instead, once: a GPU's floor, all bytes of the file on the card and no more"),
    Option("--json", help="one JSON object per line"),
]

LENGTHS = (1, 8, 32, 128, 512)
DECODE_PROMPT = [1, 2, 3, 4]
# As the result line has them; those with `_at_` are moments since the process began, 0 on a CPU.
PHASES = [
    "launch_ms",
    "gguf_open_ms",
    "cuda_init_ms",
    "model_load_ms",
    "tokenizer_ms",
    "tokenize_ms",
    "first_kernel_at_ms",
    "weights_loaded_at_ms",
    "prompt_eval_ms",
    "total_ms",
]


def usage(name):
    return usage_text(name, "GGUF | --demo", OPTIONS)


def enough(_name):
    return False


def main(name, argv):
    from .cli import write

    values, positional = parse(argv, OPTIONS, 1)
    path = take_model(values, positional, name)
    if values["plot"] is not None and (values["cold"] is None or values["floor"]):
        raise UsageError("--plot: expected --cold N, whose timeline it draws, found none")
    if values["floor"]:
        write(1, gpu_floor(path, values))
        return 0
    for line in warm(path, values) if values["cold"] is None else cold(path, values):
        write(1, line)
    return 0


def percentile(samples, p):
    """The sample at p (0..1) of the sorted list, nearest rank."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def parse_lengths(text):
    """Whole numbers with commas between; None where there is no text."""
    try:
        return [int(n) for n in text.split(",")] if text else None
    except ValueError:
        raise UsageError(f"--lengths: expected numbers with commas, found '{text}'") from None


def warm(path, values):
    from ._native import now_ms

    lengths = parse_lengths(values["lengths"])
    engine = open_engine(path, values)
    n_vocab, n_ctx = engine.info["n_vocab"], engine.info["n_ctx"]
    for n in lengths or []:
        if n < 1 or n >= n_ctx:
            raise UsageError(f"--lengths: expected 1 to {n_ctx - 1}, found {n}")
    if n_ctx < len(DECODE_PROMPT) + 2:
        raise UsageError(f"--ctx: expected {len(DECODE_PROMPT) + 2} or more to decode in, found {n_ctx}")
    engine.warm_up()
    for n in lengths or [n for n in LENGTHS if n < n_ctx]:
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
    n = min(values["decode"], engine.info["n_ctx"] - len(DECODE_PROMPT) - 1)
    energy = Joules(engine, values)
    for _ in range(values["repeat"]):
        generation = engine.generate(prompt_token_ids=DECODE_PROMPT, max_tokens=n + 1, ignore_eos=True)
        while generation.step().kind != "done":
            pass
        # The first token comes out of the prompt's logits: n passes made the other n.
        speeds.append(n / generation.timings["decode"] * 1e3)
    p50 = percentile(speeds, 0.5)
    # Every token reads every weight once, but for a tied or untied embedding's other rows.
    gb = engine.info["file_bytes"] * p50 / 1e9
    fields = {"tokens": n, "tokens_per_s_p50": p50, "file_gb_per_s": gb, "device": engine.info["device"]}
    fields |= energy.per(n * values["repeat"])
    return result_line("REFLEX_BENCH_DECODE_OK", fields, values["json"])


class Joules:
    """Gross joules by every counter there is, from now on; none where the time is too short for them."""

    def __init__(self, engine, values):
        import time

        from .energy import find_meters
        from .serve import gpu_of

        on_gpu = engine.info["device"].startswith("CUDA")
        self.meters = find_meters(gpu_of(values["device"]) if on_gpu else None)
        self.begin, self.counts = time.monotonic(), {m: read() for m, read in self.meters.items()}

    def per(self, tokens):
        import time

        from .energy import REFRESH_S

        if time.monotonic() - self.begin < 10 * REFRESH_S["gpu"]:
            return {}
        return {f"{m}_j_per_token": (read() - self.counts[m]) / tokens for m, read in self.meters.items()}


def cold_command(path, values):
    """The command that one cold run executes."""
    options = [
        "--max-tokens",
        "1",
        "--json",
        "--device",
        values["device"],
        "--threads",
        str(values["threads"]),
    ]
    for option in ("ctx", "isa", "load_mode", "experts"):
        if values[option]:
            options += ["--" + option.replace("_", "-"), str(values[option])]
    if values["exact"]:
        options.append("--exact")
    return [*command_head(), "generate", path, values["prompt"], *options]


def run_cold(command):
    """(milliseconds from spawn to the first line, to exit, the line as an object) of a fresh process."""
    import json
    import subprocess
    import time

    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    first = (time.perf_counter() - begin) * 1e3
    status = process.wait()
    total = (time.perf_counter() - begin) * 1e3
    if status != 0:
        raise OSError(f"a cold run ended with status {status}: {' '.join(command)}")
    return first, total, json.loads(line)


def cold(path, values):
    import os
    import time

    if values["plot"] is not None:
        from .cli_plot import pyplot_for

        pyplot_for(values["plot"])  # what is missing is told before the runs, not after them
    runs, floors, floor_command = [], [], None
    for k in range(values["cold"] + 1):
        time.sleep(values["pause"])
        first, total, run = run_cold(cold_command(path, values))
        if k == 0:  # brings the file into the page cache
            if run["device"].startswith("CUDA"):
                floor_command = [*command_head(), "bench", path, "--floor", "--json"]
            continue
        runs.append({"spawn_to_first_token_ms": first, "spawn_to_exit_ms": total, **run})
        if floor_command:  # in turn with the runs: what the card gives changes with the minutes
            time.sleep(values["pause"])
            floors.append(run_cold(floor_command)[2]["bytes_ms"])
    keys = ["spawn_to_first_token_ms", "spawn_to_exit_ms", *PHASES]
    stats = {key: summary([run[key] for run in runs]) for key in keys}
    for key, s in stats.items():
        yield result_line("REFLEX_BENCH_COLD_PHASE_OK", {"phase": key, **s}, values["json"])
    floor = summary(floors or [read_floor_ms(path) for _ in range(3)])
    first = stats["spawn_to_first_token_ms"]
    final = {
        "runs": values["cold"],
        "device": runs[0]["device"],
        "floor": FLOOR_GPU if floors else FLOOR_CPU,
        "floor_ms_p50": floor["p50"],
        "floor_ms_p95": floor["p95"],
        "ratio_to_floor": first["p50"] / floor["p50"],
    }
    yield result_line("REFLEX_BENCH_COLD_OK", final, values["json"])
    if values["plot"] is not None:
        from .cli_plot import plot

        middle = min(runs, key=lambda run: abs(run["spawn_to_first_token_ms"] - first["p50"]))
        plot(middle, first, floor, final["floor"], values["plot"], os.path.basename(path))
        yield f"wrote {value_text(values['plot'])}\n"


def summary(samples):
    return {"p50": percentile(samples, 0.5), "p95": percentile(samples, 0.95), "min": min(samples)}


FLOOR_CPU = "the file read once from the page cache by one thread"
FLOOR_GPU = "driver, context and every byte of the file on the card, no interpreter"
FLOOR_THREADS = 8


def gpu_floor(path, values):
    """In a process of its own: the line of one floor."""
    import os

    from . import _boot

    try:
        facts = _boot.floor(path, min(FLOOR_THREADS, len(os.sched_getaffinity(0))))
    except RuntimeError as e:
        raise FloorError(str(e)) from None
    return result_line("REFLEX_BENCH_FLOOR_OK", facts, values["json"])


class FloorError(Exception):
    """The driver would not start, or the copy failed."""

    kind = "cuda"


def read_floor_ms(path):
    """Milliseconds to read the file once out of the page cache with one thread: what no start on
    a CPU that touches every weight can go far below (threads share it)."""
    import os
    import time

    buffer = bytearray(4 << 20)
    begin = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    while os.readv(fd, [buffer]) > 0:
        pass
    os.close(fd)
    return (time.perf_counter() - begin) * 1e3
