"""`reflex energy -- COMMAND ...`: joules of a whole command, measured from outside, idle subtracted.

The GPU's counter (NVML, mJ) refreshes every 100 ms, so a single start is too short to read: n runs
are made back to back and divided. The CPU's (RAPL) is read where the kernel lets us.
"""

from __future__ import annotations

from .cli_args import DAY_S, Number, Option, UsageError, Whole
from .cli_args import parse as parse_options
from .cli_args import usage as usage_text
from .cli_output import result_line
from .energy import REFRESH_S, find_meters

OPTIONS = [
    Option("--runs", Whole(1), 10, "N", help="runs, back to back"),
    Option("--pause", Number(0, DAY_S), 0.3, "S", help="between runs"),
    Option("--idle", Number(0, DAY_S, above=True), 2.0, "S", help="how long the idle draw is measured first"),
    Option("--gpu", Whole(), 0, "N", help="which of the GPUs that CUDA_VISIBLE_DEVICES lists, else NVML's"),
    Option("--json", help="one JSON object"),
]


def usage(name):
    return usage_text(
        name,
        "[options] -- COMMAND ...",
        OPTIONS,
        "net: above the idle draw; gross: net plus the idle draw over the command's own wall time.",
    )


def enough(_name):
    return False


def main(name, argv):
    import subprocess
    import time

    from .cli import write

    if "--" not in argv or not argv[argv.index("--") + 1 :]:
        raise UsageError(f"{name}: expected -- and a command")
    cut = argv.index("--")
    values, _ = parse_options(argv[:cut], OPTIONS, 0)
    command = argv[cut + 1 :]
    meters = find_meters(values["gpu"])
    if not meters:
        raise MeterError("no energy counter here: neither NVML nor a readable RAPL")
    begin, counts = time.monotonic(), {m: read() for m, read in meters.items()}
    time.sleep(values["idle"])
    spent = time.monotonic() - begin
    idle = {m: (read() - counts[m]) / spent for m, read in meters.items()}
    walls = []
    begin, counts = time.monotonic(), {m: read() for m, read in meters.items()}
    for _ in range(values["runs"]):
        time.sleep(values["pause"])
        t = time.monotonic()
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if status != 0:
            raise OSError(f"the command ended with status {status}")
        walls.append(time.monotonic() - t)
    time.sleep(1.5 * REFRESH_S["gpu"])
    spent = time.monotonic() - begin
    wall = sorted(walls)[len(walls) // 2]
    fields = {"runs": values["runs"], "wall_ms_p50": wall * 1e3}
    for m, read in meters.items():
        net = (read() - counts[m] - idle[m] * spent) / values["runs"]
        fields |= {f"{m}_idle_w": idle[m], f"{m}_net_j": net, f"{m}_gross_j": net + idle[m] * wall}
    write(1, result_line("REFLEX_ENERGY_OK", fields, values["json"]))
    return 0


class MeterError(Exception):
    """There is nothing to measure with."""

    kind = "unsupported"
