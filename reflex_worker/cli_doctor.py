"""`reflex doctor`: what this machine offers, and what would make a start slow."""

from __future__ import annotations

from .cli_args import Option, parse
from .cli_args import usage as usage_text
from .cli_model import demo_path
from .cli_output import result_line

OPTIONS = [Option("--json", help="one JSON object")]


def usage(name):
    return usage_text(name, "", OPTIONS)


def enough(_name):
    return True


def main(name, argv):
    from .cli import write

    values, _ = parse(argv, OPTIONS, 0)
    facts, warnings = collect()
    if values["json"]:
        write(1, result_line("REFLEX_DOCTOR_OK", {**facts, "warnings": warnings}, True))
        return 0
    write(1, "".join(f"{k:18} {v}\n" for k, v in facts.items()))
    write(1, "".join(f"slow: {w}\n" for w in warnings) or "nothing here makes a start slow\n")
    return 0


def collect():
    import os
    import platform
    import sys

    from . import __version__
    from ._native import Engine

    warnings = []
    facts = {
        "reflex": __version__,
        "python": f"{platform.python_version()} at {sys.executable}",
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_features": " ".join(f for f in FEATURES if f in cpu_flags()) or "none of those used",
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "engine": Engine(demo_path(), device="cpu").info["device"],
        "governor": read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not told",
        "transparent_huge": read("/sys/kernel/mm/transparent_hugepage/enabled") or "not told",
        "gpu_driver": gpu_driver(),
        "rapl": rapl(),
    }
    if facts["governor"] == "powersave":
        warnings.append("the CPU frequency governor is 'powersave'")
    if not sys.flags.no_site:
        warnings.append(
            "started through `python -m reflex_worker`: the installed `reflex` command skips site"
        )
    if "/shims/" in (os.environ.get("_") or ""):
        warnings.append("the command came through a version manager's shim, about 100 ms: call the real one")
    if not any(f in cpu_flags() for f in ("avx2", "asimd")):
        warnings.append("no AVX2 here: the portable path is several times slower")
    startup = interpreter_ms()
    facts["interpreter_ms"] = round(startup, 1)
    if startup > 30:
        warnings.append(f"the interpreter alone takes {startup:.0f} ms to start, 10 are usual")
    return facts, warnings


FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "asimd",
    "asimddp",
    "i8mm",
)


def read(path):
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return None


def cpu_flags():
    for line in (read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def cpu_model():
    for line in (read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "not told"


def gpu_driver():
    version = read("/proc/driver/nvidia/version")
    return version.splitlines()[0] if version else "none found"


def rapl():
    import os

    path = "/sys/class/powercap/intel-rapl:0/energy_uj"
    if not os.path.exists(path):
        return "none"
    return "readable" if os.access(path, os.R_OK) else "not readable (needs root)"


def interpreter_ms():
    """Best of three starts of this interpreter, isolated and without site."""
    import subprocess
    import sys
    import time

    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        best = min(best, (time.perf_counter() - begin) * 1e3)
    return best
