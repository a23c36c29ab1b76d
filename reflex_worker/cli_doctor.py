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
        "rapl": rapl(),
        **gpu_facts(warnings),
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


def gpu_facts(warnings):
    """Driver, card, kernels and what a start costs; adds to warnings what makes it slow."""
    import os

    from ._native import build_facts

    built = build_facts()
    facts = {
        "nvcc_at_build": built["nvcc"] or "none: built for the CPU only",
        "kernels_for": built["cuda_archs"] or "none",
    }
    if not any(
        os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
    ):
        return {**facts, "gpu": "none: no NVIDIA driver here"}
    facts["cuda_visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES", "not set: all")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
        if os.environ.get(name, "1") != "1":
            warnings.append(
                f"{name}={os.environ[name]}: every connection costs the context some ms, 1 is enough"
            )
    cards = nvml_cards(facts)
    for card in cards:
        if card.persistence == "off":
            warnings.append(
                f"persistence mode is off on GPU {card.index}: the driver unloads it between processes"
            )
        image = kernel_image(built["cuda_archs"], card.capability)
        facts[f"gpu_{card.index}"] = (
            f"{card.name}, {round(card.memory_bytes / (1 << 30))} GiB, "
            f"compute capability {card.capability / 10:.1f}, persistence {card.persistence}, "
            f"kernels: {image}"
        )
        if image.startswith(("PTX", "none")):
            warnings.append(f"GPU {card.index}: no machine code for it in this build ({image})")
    facts["uvm_held_by"] = ", ".join(holders()) or "nobody"
    start_costs(facts, warnings)
    return facts


def nvml_cards(facts):
    """NVML's cards; adds its versions and whether it counts energy."""
    from . import nvml

    system = nvml.system()
    if system is None:
        facts["nvml"] = f"none ({nvml.LIBRARY})"
        facts["energy"] = "none without NVML"
        return []
    facts["gpu_driver"] = system.driver
    facts["nvml"] = system.version
    facts["energy"] = (
        "NVML's counter in mJ, refreshed every 100 ms: `reflex energy` measures over many runs"
        if any(card.counts_energy for card in system.cards)
        else "none on this card"
    )
    return system.cards


def kernel_image(archs, capability):
    """Which of a build's images (e.g. "75 80 90a") a card of this capability (e.g. 86) runs: machine code of
    its own major and no newer minor; an architecture with a letter on its own card only; else the last's
    PTX, compiled by the driver at the first start, where the card is no older."""
    own = [
        a
        for a in archs.split()
        if (int(a[:-1]) == capability if a[-1].isalpha() else a[:-1] == str(capability)[:-1])
        and int(a.rstrip("af")) <= capability
    ]
    if own:
        return f"machine code for {own[-1]}"
    newest = archs.split()[-1:] or [""]
    if newest[0].isdecimal() and int(newest[0]) <= capability:
        return f"PTX of {newest[0]}, compiled by the driver at the first start"
    return f"none (built for {archs or 'no GPU'})"


def holders():
    """Who keeps the GPU registered for unified memory: any process that has called cuInit does."""
    import os

    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
        except OSError:
            continue
        program = os.path.basename(words[0])
        if program == b"nvidia-persistenced" and b"--uvm-persistence-mode" in words:
            found.append("nvidia-persistenced --uvm-persistence-mode")
        elif b"hold" in words and any(b"reflex" in os.path.basename(w) for w in words):
            found.append("reflex hold")
        elif program == b"nvidia-cuda-mps-server":
            found.append("an MPS server")
    return sorted(set(found))


def start_costs(facts, warnings):
    """cuInit in a fresh process, as things are and with the driver held."""
    import subprocess

    from .cli_model import command_head

    def once():
        best = None
        for _ in range(2):
            done = subprocess.run([*command_head(), "hold", "--once"], capture_output=True, text=True)
            if done.returncode != 0:
                return None, done.stderr.strip()
            took = float(done.stdout.split("cu_init_ms=")[1].split()[0])
            best = took if best is None else min(best, took)
        return best, ""

    bare, why = once()
    if bare is None:
        facts["cu_init_ms"] = why
        warnings.append("the CUDA driver does not start: every command with --device auto runs on the CPU")
        return
    facts["cu_init_ms"] = round(bare, 1)
    holder = subprocess.Popen([*command_head(), "hold"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # it is ready
        held, _ = once()
    finally:
        holder.terminate()
        holder.wait()
    if held is None:
        return
    facts["cu_init_held_ms"] = round(held, 1)
    if bare - held > HOLD_WORTH_MS:
        warnings.append(
            f"nobody holds the driver: `reflex hold` would take {bare - held:.0f} ms off every start"
        )


HOLD_WORTH_MS = 20


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
