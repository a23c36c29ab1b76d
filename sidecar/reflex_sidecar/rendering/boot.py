"""Starting the render process. Apart from renderer.py so that it can happen before asyncio is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from .. import child

_BOOT: Final = (
    "import sys; sys.path += sys.argv[2:]; "
    "from reflex_sidecar.rendering.child import main; main(int(sys.argv[1]))"
)


def start(memory_mib: int) -> subprocess.Popen[bytes]:
    """Start a render process. It sees no environment, so no secrets in it, and needs no site."""
    packages = ["jinja2", "markupsafe"]
    origins = [spec.origin for name in packages if (spec := importlib.util.find_spec(name)) and spec.origin]
    paths = dict.fromkeys([*(str(Path(p).parents[1]) for p in origins), str(Path(__file__).parents[2])])
    env = {"LC_ALL": "C.UTF-8", **{k: os.environ[k] for k in ("TZ",) if k in os.environ}}
    return child.spawn([sys.executable, "-I", "-S", "-c", _BOOT, str(memory_mib), *paths], env=env)
