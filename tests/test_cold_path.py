"""What a cold start may import: the list is short, and this holds it short."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Modules of ours, and what the interpreter itself brings under -I -S -X utf8. Nothing else.
OURS = {
    "reflex_worker",
    "reflex_worker.cli",
    "reflex_worker.cli_args",
    "reflex_worker.cli_model",
    "reflex_worker.cli_output",
    "reflex_worker._native",
    "reflex_worker._boot",
    "_json",
    "__future__",
    "atexit",  # builtin; nanobind registers its leak check there
}

PROBE = """
import sys
base = set(sys.modules)
sys.path[:0] = {path!r}
import reflex_worker.cli as cli
loaded = []
def leave(status):
    import posix
    cli.write(2, "\\n".join(sorted(set(sys.modules) - base)) + "\\n")
    posix._exit(status)
cli.leave = leave
cli.main({argv!r})
"""


def imported(argv: list[str]) -> set[str]:
    import reflex_worker

    site = str(reflex_worker.__path__[0]).rpartition("/")[0]
    code = PROBE.format(path=[site], argv=argv)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "utf8", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert "_OK" in done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("cli_generate", ["generate", "--demo", "Once", "--max-tokens", "1"]),
        ("cli_system1", ["system1", "--demo", "Yes or no?", "--candidate", " yes", "--candidate", " no"]),
    ],
)
def test_cold_path_imports_nothing_beyond_its_list(command: str, argv: list[str]):
    extra = imported(argv) - OURS - {f"reflex_worker.{command}"}
    assert not extra, f"the cold path of {argv[0]} imports {sorted(extra)}"


def test_importing_the_package_loads_no_native_code():
    code = "import sys, reflex_worker; print('reflex_worker._native' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout.strip() == "False"


def test_importing_the_api_sets_no_environment():
    code = (
        "import os; before = dict(os.environ); from reflex_worker import Engine; "
        "print(before == dict(os.environ))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout.strip() == "True", done.stderr
