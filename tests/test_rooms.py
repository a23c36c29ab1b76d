"""The table of docs/architecture.md, enforced: which room may include or import which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"

# Room -> prefixes (below native/) that its files may include with quotes.
MAY_INCLUDE = {
    "base": ["base/"],
    "boot": ["base/", "boot/"],
    "quant": ["base/", "quant/"],
    "gguf": ["base/", "gguf/", "quant/types."],
    "tokenizer": ["base/", "gguf/", "tokenizer/"],
    "backend": ["base/", "quant/", "backend/backend.h"],
    "backend/cpu": ["base/", "quant/", "backend/backend.h", "backend/cpu/"],
    # The CUDA backend adopts the driver that boot started.
    "backend/cuda": ["base/", "quant/", "backend/backend.h", "backend/cuda/", "boot/boot.h"],
    "models": ["base/", "gguf/", "backend/backend.h", "models/"],
    "engine": ["base/", "gguf/", "models/", "tokenizer/", "backend/backend.h", "engine/"],
    "c_api": ["base/error.h", "engine/engine.h", "c_api/"],
    "bindings": ["base/error.h", "base/clock.h", "engine/engine.h", "boot/boot.h", "bindings/"],
    "launcher": [],
}
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".def", ".inc", ".c"}


def room_of(path: Path) -> str:
    parts = path.relative_to(NATIVE).parts
    return "/".join(parts[:2]) if parts[0] == "backend" and len(parts) > 2 else parts[0]


def native_files() -> list[Path]:
    return sorted(p for p in NATIVE.rglob("*") if p.suffix in SOURCES)


def test_every_native_folder_is_a_known_room():
    assert {room_of(p) for p in native_files()} <= set(MAY_INCLUDE)


@pytest.mark.parametrize("path", native_files(), ids=lambda p: str(p.relative_to(NATIVE)))
def test_includes_stay_in_their_rooms(path: Path):
    room = room_of(path)
    for line in path.read_text().splitlines():
        m = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not m:
            continue
        target = m.group(1)
        if not (NATIVE / target).exists():
            # A file beside this one, or (kernels compiled per instruction set) below its room.
            assert (path.parent / target).exists(), f"{target} does not exist below native/"
            target = str((path.parent / target).resolve().relative_to(NATIVE))
        assert any(target.startswith(p) for p in MAY_INCLUDE[room]), f"{room} may not include {target}"


def test_models_know_no_device():
    for path in NATIVE.glob("models/*"):
        text = path.read_text()
        assert not re.search(r"^\s*#\s*if(def|ndef)?\b", text, re.M), f"{path.name}: conditional compilation"
        assert "cuda" not in text.lower(), f"{path.name}: names a device"


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def top_levels(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path)}


def test_protocol_does_no_io_outside_its_client():
    forbidden = {
        "asyncio",
        "socket",
        "os",
        "subprocess",
        "select",
        "threading",
        "reflex_worker",
        "reflex_sidecar",
    }
    for path in (ROOT / "protocol/reflex_protocol").rglob("*.py"):
        names = top_levels(path)
        if path.name == "client.py" or "client" in path.relative_to(ROOT / "protocol/reflex_protocol").parts:
            assert not names & {"reflex_worker", "reflex_sidecar"}, path
        else:
            assert not names & forbidden, f"{path.name} imports {names & forbidden}"


def test_worker_and_sidecar_do_not_know_each_other():
    for path in (ROOT / "reflex_worker").rglob("*.py"):
        assert "reflex_sidecar" not in top_levels(path), path
    for path in (ROOT / "sidecar/reflex_sidecar").rglob("*.py"):
        assert "reflex_worker" not in top_levels(path), path
