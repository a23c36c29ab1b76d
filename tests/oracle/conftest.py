"""Engines on the fixtures' files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from reflex_worker._native import Engine, ReflexError

from .references import fixture_path


@pytest.fixture(scope="session")
def engine() -> Callable[..., Engine]:
    """engine(name, exact=..., isa=..., device=...): the fixture's file, loaded once per combination."""

    @cache
    def load(name: str, exact: bool = True, isa: str = "", chunk: int = 512, device: str = "cpu") -> Engine:
        try:
            return Engine(
                str(fixture_path(name)), device=device, exact=exact, isa=isa, chunk=chunk, threads=2
            )
        except ReflexError as e:
            if isa and e.kind == "invalid_input":  # this machine has no such instructions
                pytest.skip(str(e))
            raise

    return load


def rows(engine: Engine, ids: list[int], outputs: list[int], chunk: int = 0) -> np.ndarray:
    """Engine.logits as float64 (R, V)."""
    return np.array(engine.logits(ids, outputs, chunk=chunk), np.float64)
