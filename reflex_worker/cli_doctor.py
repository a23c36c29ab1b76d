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
    write(1, "".join(f"{k:20} {v}\n" for k, v in facts.items()))
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


def has_driver():
    import os

    return any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))


def gpu_facts(warnings):
    """Driver, card, kernels and what a start costs; adds to warnings what makes it slow."""
    import os

    from ._native import build_facts

    built = build_facts()
    facts = {
        "nvcc_at_build": built["nvcc"] or "none: built for the CPU only",
        "kernels_for": built["cuda_archs"] or "none",
    }
    if not has_driver():
        return {**facts, "gpu": "none: no NVIDIA driver here"}
    facts["cuda_visible_devices"] = os.environ.get("CUDA_VISIBLE_DEVICES", "not set: all")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
        if os.environ.get(name, "1") != "1":
            warnings.append(
                f"{name}={os.environ[name]}: every connection costs the context some ms, 1 is enough"
            )
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if len(names) > 1:
        warnings.append(
            f"CUDA_VISIBLE_DEVICES lists {len(names)} GPUs: the driver starts them all, a worker uses one"
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
    programs = list(running())
    facts["nvidia_persistenced"] = persistenced(programs)
    facts["uvm_held_by"] = ", ".join(holders(programs)) or "nobody"
    device = start_costs(facts, warnings)
    if not cards and device:
        facts["gpu_0"] = f"{device}; kernels: {kernel_image(built['cuda_archs'], capability_of(device))}"
    return facts


def capability_of(device):
    """90 of "CUDA NVIDIA H200, compute capability 9.0, ...", as an engine describes its device."""
    return int(device.partition("compute capability ")[2].partition(",")[0].replace(".", ""))


def nvml_cards(facts):
    """NVML's cards; adds its versions and whether it counts energy."""
    from . import nvml

    system = nvml.system()
    if system is None:
        told = (read("/proc/driver/nvidia/version") or "").splitlines()
        facts["gpu_driver"] = told[0] if told else "not told (no NVML)"
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


def running():
    """Every process that can be seen from here: (its program's name, its command line's words)."""
    import os

    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
        except OSError:
            continue
        yield os.path.basename(words[0]), words


UVM_PERSISTENCE = b"--uvm-persistence-mode"


def persistenced(programs):
    """Whether nvidia-persistenced is at work, and whether it keeps GPUs registered."""
    for program, words in programs:
        if program == b"nvidia-persistenced":
            return f"running {'with' if UVM_PERSISTENCE in words else 'without'} {UVM_PERSISTENCE.decode()}"
    return "not seen from here"


def holders(programs):
    """Who keeps the GPU registered for unified memory: any process that has called cuInit does."""
    import os

    found = set()
    for program, words in programs:
        if program == b"nvidia-persistenced" and UVM_PERSISTENCE in words:
            found.add("nvidia-persistenced --uvm-persistence-mode")
        elif b"hold" in words and any(b"reflex" in os.path.basename(w) for w in words):
            found.add("reflex hold")
        elif program == b"nvidia-cuda-mps-server":
            found.add("an MPS server")
    return sorted(found)


def best_of_two(command, take):
    """The least of what `take` reads off two runs' output, and the last output; None and what it said on
    stderr where one fails."""
    import subprocess

    best, said = None, ""
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return None, done.stderr.strip()
        said = done.stdout
        best = take(said) if best is None else min(best, take(said))
    return best, said


def init_ms(line):
    return float(line.split("cu_init_ms=")[1].split()[0])


def first_token_ms(line):
    import json

    return json.loads(line)["process_start_to_first_token_ms"]


def start_costs(facts, warnings):
    """What a start costs in fresh processes, as things are and with the driver held: cuInit, and the bundled
    model's first token. The device as the engine describes it, None where none starts."""
    import json
    import subprocess

    from .cli_model import command_head

    init = [*command_head(), "hold", "--once"], init_ms
    start = [*command_head(), "smoke", "--device", "cuda", "--json"], first_token_ms
    bare, why = best_of_two(*init)
    if bare is None:
        facts["cu_init_ms"] = why
        warnings.append("the CUDA driver does not start: every command with --device auto runs on the CPU")
        return None
    facts["cu_init_ms"] = round(bare, 1)
    took, said = best_of_two(*start)
    if took is None:
        facts["start_ms"] = said
        warnings.append("the bundled model does not run on the GPU")
        return None
    facts["start_ms"] = round(took, 1)
    holder = subprocess.Popen([*command_head(), "hold"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()  # it is ready
        held, _ = best_of_two(*init)
        took, _ = best_of_two(*start)
    finally:
        holder.terminate()
        holder.wait()
    if held is not None and took is not None:
        facts["cu_init_held_ms"], facts["start_held_ms"] = round(held, 1), round(took, 1)
        judge_hold(facts, warnings, bare - held)
    return json.loads(said)["device"]


def judge_hold(facts, warnings, gain):
    """What `reflex hold` would gain here, in ms of cuInit."""
    if gain > HOLD_WORTH_MS:
        warnings.append(f"nobody holds the driver: `reflex hold` would take {gain:.0f} ms off every start")
        return
    facts["without_hold"] = "not measured: the GPU stays registered as things are"
    if facts["uvm_held_by"] == "nobody":
        facts["uvm_held_by"] = "nobody seen from here, but cuInit is as fast as with `reflex hold`"


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
