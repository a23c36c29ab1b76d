"""A real worker process around the fake engine: fake_worker.py stdio|uds JSON_OPTIONS [SOCKET].

JSON_OPTIONS: those of ServeOptions (model: null for none) and under "engine" those of FakeEngine.
"""

from __future__ import annotations

import json
import os
import sys

from fake_engine import FakeEngine


def main() -> int:
    from reflex_worker.cli import EXIT_STATUS, report
    from reflex_worker.serve import ServeOptions, run_stdio, run_uds

    given = json.loads(sys.argv[2])
    engine = given.pop("engine", {})

    def make_engine(path: str, _experts: str | None) -> FakeEngine:
        return FakeEngine(path, {**engine, "modules_at_load": sorted(sys.modules)})

    options = ServeOptions(**{"model": "fake.gguf", **given}, make_engine=make_engine)
    try:
        return run_stdio(options) if sys.argv[1] == "stdio" else run_uds(sys.argv[3], options)
    except Exception as e:
        kind = getattr(e, "kind", "other")
        report(kind, e)
        return EXIT_STATUS.get(kind, 1)


if __name__ == "__main__":
    os._exit(main())
